"""Evaluation: every game of a sorted manifest exactly once. No oracle, no repeats, success is the environment's verdict.

A result depends neither on the number of environments nor on that of workers: the randomness of a reply is a function
of (game, step) alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from covsero_jax import rollout, workers
from covsero_jax.prompts import PromptBuilder
from covsero_jax.trajectory import Group, Policy, Trajectory


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """One pass over a manifest. Rates are in [0, 1]."""

    task_names: tuple[str, ...]  # the manifest, sorted
    task_types: tuple[str, ...]
    success: tuple[bool, ...]  # per game, in manifest order
    mean_steps: float  # per episode, failures included
    parsed_rate: float  # share of replies in the required format
    admissible_rate: float  # share of commands that were legal
    scores: tuple[float, ...] = ()  # per game, the environment's grade in [0, 1]; () where it gives none
    strata: tuple[str, ...] = ()  # per game, a second partition beside the task types, e.g. by plan length; () = none

    @property
    def num_games(self) -> int:
        return len(self.success)

    @property
    def success_rate(self) -> float:
        return sum(self.success) / len(self.success)

    @property
    def mean_score(self) -> float | None:
        """Mean grade, None where the environment gives none. Strict success is another thing: see `success_rate`."""
        return sum(self.scores) / len(self.scores) if self.scores else None

    @property
    def per_type(self) -> dict[str, tuple[int, int]]:
        """{type: (successes, games)}, sorted by type."""
        return _count(self.task_types, self.success)

    @property
    def per_stratum(self) -> dict[str, tuple[int, int]]:
        """{stratum: (successes, games)}, sorted by stratum; {} without strata."""
        return _count(self.strata, self.success) if self.strata else {}

    @property
    def manifest_hash(self) -> str:
        return manifest_hash(self.task_names)

    def to_dict(self) -> dict[str, object]:
        """The result as JSON values."""
        return {
            'num_games': self.num_games,
            'manifest_hash': self.manifest_hash,
            'success_rate': self.success_rate,
            'mean_score': self.mean_score,
            'mean_steps': self.mean_steps,
            'parsed_rate': self.parsed_rate,
            'admissible_rate': self.admissible_rate,
            'per_type': _with_rates(self.per_type),
            'per_stratum': _with_rates(self.per_stratum),
            'success': dict(zip(self.task_names, map(bool, self.success), strict=True)),
        }


def _count(labels: Sequence[str], success: Sequence[bool]) -> dict[str, tuple[int, int]]:
    counts = {label: (0, 0) for label in sorted(set(labels))}
    for label, succeeded in zip(labels, success, strict=True):
        successes, games = counts[label]
        counts[label] = (successes + succeeded, games + 1)
    return counts


def _with_rates(counts: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, float]]:
    return {
        label: {'successes': successes, 'games': games, 'success_rate': successes / games}
        for label, (successes, games) in counts.items()
    }


def manifest_hash(task_names: Sequence[str]) -> str:
    """SHA-256 over the sorted names, one per line: two results with equal hashes are about the same games."""
    return hashlib.sha256('\n'.join(sorted(task_names)).encode()).hexdigest()


def evaluate(
    pool: workers.WorkerPool,
    policy: Policy,
    prompts: PromptBuilder,
    task_names: Sequence[str],
    task_types: Sequence[str],
    *,
    max_steps: int,
    strata: Sequence[str] = (),
    task_ids: Sequence[int] | None = None,
    progress: Callable[[Trajectory], None] | None = None,
    collect: Callable[..., list[Group]] = rollout.collect_groups,
) -> EvalResult:
    """Play each game of the manifest once, `row_ids` being (position in the manifest, 0, step).

    task_names, task_types: the manifest, which must be the pool's (`pool.task_names`, `pool.task_types`).
    strata: a label for each game of the manifest, only reported (`EvalResult.per_stratum`).
    task_ids: play only these (each once, in manifest order), e.g. for a quick look during training.
    collect: what plays them; several hosts share the games (`hosts.collect_groups`).

    Raises ValueError if the manifest is empty, unsorted or not the pool's, if a task id is repeated, or if there are
    strata for another number of games.
    """
    names, types = tuple(task_names), tuple(task_types)
    if list(names) != sorted(set(names)):
        raise ValueError('the manifest must be sorted and without repetition')
    if (names, types) != (tuple(pool.task_names), tuple(pool.task_types)):
        raise ValueError('the manifest is not that of the pool: its environments were built from other games')
    if strata and len(strata) != len(names):
        raise ValueError(f'{len(strata)} strata for a manifest of {len(names)} games')
    played = sorted(range(len(names)) if task_ids is None else task_ids)
    if not played or len(set(played)) != len(played):
        raise ValueError(f'need at least one game and each at most once, got task ids {played}')
    groups = collect(
        pool, policy, prompts, played, group_size=1, max_steps=max_steps, group_ids=played, progress=progress
    )
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    scores = tuple(trajectory.score for trajectory in trajectories if trajectory.score is not None)
    return EvalResult(
        task_names=tuple(names[i] for i in played),
        task_types=tuple(types[i] for i in played),
        success=tuple(trajectory.success for trajectory in trajectories),
        mean_steps=len(steps) / len(trajectories),
        parsed_rate=float(np.mean([step.parsed for step in steps])),
        admissible_rate=float(np.mean([step.admissible_command for step in steps])),
        scores=scores if len(scores) == len(trajectories) else (),
        strata=tuple(strata[i] for i in played) if strata else (),
    )

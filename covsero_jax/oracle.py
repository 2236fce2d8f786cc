"""SERO's oracle branches: choose states that the policy visited, restore them, let the oracle finish, keep what it did.

Only training comes here. The oracle acts in the real environment, through the same interface and prompts as the policy,
from a state that the policy itself has reached; rollouts, and what is computed from them, never see a branch. Nothing
that goes wrong in a branch raises: the branch is invalid, counted with its reason, and never trained on. SERO, 4.2, C.1, D.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from covsero_jax import workers
from covsero_jax.envs import base
from covsero_jax.prompts import PromptBuilder
from covsero_jax.trajectory import Group, OracleBranch, OracleStep, Root

ROOT_SAMPLING = ('uniform', 'prioritised')
RESTORATION = ('copy', 'replay')
INVALID = (
    'not restored',  # the environment could not be brought back at all
    'mismatch',  # it was, but does not show what the policy saw
    'no plan',  # the oracle knows no way from here: a dead end
    'oracle failed',  # it raised, hung, or killed its worker
    'inadmissible',  # it chose a command that is not legal
    'too long',  # a command has more tokens than targets may have
    'budget',  # the remaining steps were too few
)


def sample_roots(
    groups: Sequence[Group],
    rng: np.random.Generator,
    *,
    max_steps: int,
    sampling: str = 'uniform',
    task_types: Sequence[str] = (),
    recent: Sequence[str] = (),
    needed: Sequence[int] = (),
) -> list[Root]:
    """One root for each group with a failure: a failed trajectory, then one of its decision points, both uniform.

    uniform: SERO, 4.2 and D.1. prioritised (named there as future work, G): as many roots, but their groups are drawn
    with replacement, with probability proportional to 1 / (1 + n), n = how often the group's task type is in `recent`;
    so rare failures get more roots. task_types: one per task.

    needed: steps within which the oracle solves each task from anywhere (`OracleEnv`); only decision points with so many
    left are drawn, so that no branch comes too late. () = all are.
    """
    if sampling not in ROOT_SAMPLING:
        raise ValueError(f'root_sampling={sampling!r}; there are {", ".join(ROOT_SAMPLING)}')
    failed = [
        (g, members)
        for g, group in enumerate(groups)
        if (members := [k for k, trajectory in enumerate(group.trajectories) if not trajectory.success])
    ]
    if not failed:
        return []
    chosen = range(len(failed))
    if sampling == 'prioritised':
        counts = collections.Counter(recent)
        weight = np.array([1.0 / (1 + counts[task_types[groups[g].task_id]]) for g, _ in failed])
        chosen = rng.choice(len(failed), len(failed), p=weight / weight.sum())
    roots = []
    for g, members in (failed[i] for i in chosen):
        member = members[rng.integers(len(members))]
        points = len(groups[g].trajectories[member].steps)
        if needed:
            points = min(points, max(1, max_steps - needed[groups[g].task_id] + 1))
        step = int(rng.integers(points))
        roots.append(make_root(groups, g, member, step, max_steps=max_steps))
    return roots


def make_root(groups: Sequence[Group], group: int, member: int, step: int, *, max_steps: int) -> Root:
    """The root record (C.1) of one decision point. max_steps: the horizon H of the episodes."""
    trajectory = groups[group].trajectories[member]
    before, here = trajectory.steps[:step], trajectory.steps[step]
    return Root(
        group=group,
        trajectory=member,
        step=step,
        task_id=trajectory.task_id,
        commands=tuple(s.command for s in before),
        history=tuple((s.observation, s.command) for s in before),
        observation=here.observation,
        admissible=here.admissible,
        prompt_tokens=here.prompt_tokens,
        steps_left=max_steps - step,
        policy_return=float(sum(s.reward for s in trajectory.steps[step:])),
        snapshot=here.snapshot,
    )


def collect_branches(
    pool: workers.WorkerPool,
    prompts: PromptBuilder,
    roots: Sequence[Root],
    *,
    restoration: str = 'copy',
    think: bool = True,
    max_target: int,
) -> list[OracleBranch]:
    """Restore every root in a slot of `pool`, check it, and let the oracle continue; one branch per root, in that order.

    The slots must be free: whatever episodes they hold are given up. A branch goes on until the environment is done, or
    the root's remaining steps are used up, which makes it invalid unless the task was solved. It has its own history:
    the root's, then the oracle's own commands and what they led to.

    restoration: 'copy' (the root's snapshot) or 'replay' (reset and the root's commands). think: the target reply has an
    empty think block. max_target: tokens of a reply, at most. Raises ValueError for 'copy' without snapshots,
    base.OracleForbidden for a pool without an oracle.
    """
    if restoration not in RESTORATION:
        raise ValueError(f'restoration={restoration!r}; there are {", ".join(RESTORATION)}')
    if restoration == 'copy' and any(root.snapshot is None for root in roots):
        raise ValueError("restoration='copy' needs roots with snapshots: collect the groups with keep_snapshots=True")
    branches: list[OracleBranch] = []
    for start in range(0, len(roots), pool.num_envs):
        played = _restore(pool, prompts, roots[start : start + pool.num_envs], restoration)
        while live := {slot: branch for slot, branch in enumerate(played) if branch.is_live}:
            _advance(pool, prompts, live, think, max_target)
        branches += [branch.finished() for branch in played]
    return branches


@dataclasses.dataclass
class _Branch:
    """A branch being played."""

    root: Root
    observation: base.Observation | None = None
    history: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    steps: list[OracleStep] = dataclasses.field(default_factory=list)
    invalid: str = ''
    detail: str = ''

    @property
    def is_live(self) -> bool:
        return not self.invalid and not self.observation.done

    def fail(self, reason: str, detail: str = '') -> None:
        self.invalid, self.detail = reason, detail

    def finished(self) -> OracleBranch:
        return OracleBranch(self.root, tuple(self.steps), self.invalid, self.detail)


def _restore(pool: workers.WorkerPool, prompts: PromptBuilder, roots: Sequence[Root], restoration: str) -> list[_Branch]:
    branches = []
    for root, restored in zip(roots, pool.restore(roots, by_copy=restoration == 'copy'), strict=True):
        branch = _Branch(root, history=list(root.history))
        if isinstance(restored, base.Refusal):
            branch.fail('not restored', restored.cause)
        else:
            branch.observation = restored
            difference = _difference(prompts, root, restored)
            if difference:
                branch.fail('mismatch', difference)
        branches.append(branch)
    return branches


def _difference(prompts: PromptBuilder, root: Root, restored: base.Observation) -> str:
    """What the policy would see differently now; '' if nothing. The rebuilt prompt must equal the recorded one."""
    if restored.done:
        return 'the restored episode is over'
    if restored.text != root.observation:
        return f'observation {restored.text!r} instead of {root.observation!r}'
    if restored.admissible != root.admissible:
        return f'admissible commands differ: {sorted(set(restored.admissible) ^ set(root.admissible))}'
    prompt = prompts.build(restored.task, root.history, restored, len(root.history))
    return '' if np.array_equal(prompt, root.prompt_tokens) else 'the rebuilt prompt differs from the recorded one'


def _advance(
    pool: workers.WorkerPool, prompts: PromptBuilder, live: dict[int, _Branch], think: bool, max_target: int
) -> None:
    """One command of the oracle in every live branch."""
    targets: dict[int, OracleStep] = {}
    for (slot, branch), command in zip(live.items(), pool.oracle_commands(list(live)), strict=True):
        reason, detail = _objection(branch, command)
        if reason:
            branch.fail(reason, detail)
            continue
        reply_tokens, command_mask = prompts.encode_target(command, think=think)
        if len(reply_tokens) > max_target:
            branch.fail('too long', f'{command!r} makes {len(reply_tokens)} tokens, allowed are {max_target}')
            continue
        seen = branch.observation
        prompt_tokens = prompts.build(seen.task, branch.history, seen, len(branch.history))
        targets[slot] = OracleStep(prompt_tokens, reply_tokens, command_mask, seen.text, command, reward=0.0)
    after = pool.step([targets[slot].command if slot in targets else None for slot in range(pool.num_envs)])
    for slot, target in targets.items():
        branch = live[slot]
        branch.steps.append(dataclasses.replace(target, reward=after[slot].reward))
        branch.history.append((target.observation, target.command))
        branch.observation = after[slot]
        if branch.observation.done and not branch.observation.success:
            branch.fail('budget', 'the episode ended unsolved')


def _objection(branch: _Branch, command: str | None | base.Refusal) -> tuple[str, str]:
    """(reason, detail) for which the oracle's answer ends the branch; ('', '') where it may be executed."""
    if isinstance(command, base.Refusal):
        return 'oracle failed', command.cause
    if command is None:
        return 'no plan', ''
    if not base.admits(branch.observation.admissible, command):
        return 'inadmissible', repr(command)
    if len(branch.steps) == branch.root.steps_left:
        return 'budget', f'not solved within the remaining {branch.root.steps_left} steps'
    return '', ''


def branch_metrics(branches: Sequence[OracleBranch]) -> dict[str, float]:
    """Counts of one update: roots attempted and valid, invalid ones by reason, and environment steps."""
    reasons = collections.Counter(branch.invalid for branch in branches)
    return {
        'oracle/roots': float(len(branches)),
        'oracle/valid': float(reasons['']),
        **{f'oracle/invalid/{reason.replace(" ", "_")}': float(reasons[reason]) for reason in INVALID},
        'oracle/steps': float(sum(len(branch.steps) for branch in branches)),
    }

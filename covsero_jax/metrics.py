"""What a run leaves for people: metrics.jsonl, TensorBoard files, and every trajectory in a readable file.

Metric names are `area/name`. All files are cut back to the checkpoint on resume, so that a resumed run and one that
never stopped leave the same lines.
"""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from covsero_jax import groups as groups_lib
from covsero_jax.trajectory import Group, OracleBranch


class Timer:
    """Seconds per named phase: `with timer('rollout'): ...`; `take()` returns and clears `time/<phase>_s`."""

    def __init__(self):
        self._seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - began

    def take(self) -> dict[str, float]:
        taken = {f'time/{phase}_s': seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken


class MetricsWriter:
    """Appends to `metrics.jsonl` (one line per update) and to TensorBoard event files.

    resume_from: updates with a greater number are dropped from an existing file (they will be made again).
    """

    def __init__(self, folder: str | pathlib.Path, *, resume_from: int):
        from tensorboardX import SummaryWriter

        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / 'metrics.jsonl'
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _update_of(line) <= resume_from]
            replace_file(self._path, ''.join(line + '\n' for line in kept))
        self._file = self._path.open('a')
        self._board = SummaryWriter(str(folder / 'tensorboard'), purge_step=resume_from + 1)

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        row = {name: float(value) for name, value in metrics.items()}
        self._file.write(json.dumps({'update': update, **row}) + '\n')
        self._file.flush()
        for name, value in row.items():
            self._board.add_scalar(name, value, update)

    def close(self) -> None:
        self._file.close()
        self._board.close()


class NoWriter:
    """In the place of MetricsWriter on hosts that write nothing."""

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def read_metrics(folder: str | pathlib.Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl; a torn last line (a crash while writing) is ignored."""
    lines = (pathlib.Path(folder) / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines if _update_of(line) < float('inf')]


def _update_of(line: str) -> float:
    try:
        return json.loads(line)['update']
    except (json.JSONDecodeError, KeyError):
        return float('inf')


def replace_file(path: pathlib.Path, text: str) -> None:
    """Write a whole file or, if stopped, none of it."""
    temporary = path.with_name(path.name + '.tmp')
    temporary.write_text(text)
    temporary.replace(path)


def rollout_metrics(groups: Sequence[Group], task_types: Sequence[str]) -> dict[str, float]:
    """Success, failure shares and reply quality of one update's groups (CovGPO, §10.8).

    task_types: one per task. `group/all_failed/<type>`: number of all-failed groups of this type, 0 where it was not
    played; over any updates, its sum divided by that of `group/all_failed` is P(type | all-failed).
    `group/all_failed_share/<type>`: share of all-failed groups among this type's groups, if there are any.
    `coverage/...`: mean first-visit rate of failed and of successful trajectories (0 when there are none).
    """
    trajectories = [t for group in groups for t in group.trajectories]
    steps = [s for t in trajectories for s in t.steps]
    all_failed = [not any(t.success for t in group.trajectories) for group in groups]
    coverage = [float(groups_lib.first_visit_coverage(t)) for t in trajectories]
    out = {
        'rollout/success_rate': np.mean([t.success for t in trajectories]),
        'rollout/steps': np.mean([len(t.steps) for t in trajectories]),
        'rollout/parsed': np.mean([s.parsed for s in steps]),
        'rollout/admissible': np.mean([s.admissible_command for s in steps]),
        'rollout/truncated': np.mean([s.truncated for s in steps]),
        'rollout/action_tokens': np.mean([len(s.action_tokens) for s in steps]),
        'rollout/prompt_tokens': np.mean([len(s.prompt_tokens) for s in steps]),
        'group/all_failed': sum(all_failed),
        'group/all_failed_share': np.mean(all_failed),
        'coverage/failed': _mean(c for c, t in zip(coverage, trajectories, strict=True) if not t.success),
        'coverage/successful': _mean(c for c, t in zip(coverage, trajectories, strict=True) if t.success),
    }
    if all(t.score is not None for t in trajectories):
        out['rollout/score'] = np.mean([t.score for t in trajectories])
    by_type: dict[str, list[bool]] = collections.defaultdict(list)
    for group, failed in zip(groups, all_failed, strict=True):
        by_type[task_types[group.task_id]].append(failed)
    for kind, failed in sorted(by_type.items()):
        out[f'group/all_failed_share/{kind}'] = np.mean(failed)
    for kind in sorted(set(task_types)):
        out[f'group/all_failed/{kind}'] = sum(by_type[kind])
    return {name: float(value) for name, value in out.items()}


def _mean(values) -> float:
    values = list(values)
    return float(np.mean(values)) if values else 0.0


def write_trajectories(path: pathlib.Path, groups: Sequence[Group], task_names: Sequence[str],
                       decode: Callable[[np.ndarray], str], rows: Mapping[str, np.ndarray]) -> None:
    """One JSON line per episode: task, outcome, and for every step what was seen, replied, done and credited.

    rows: columns over all rows in group, trajectory, step order (advantage, gate, ...), written beside each step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    n, lines = 0, []
    for g, group in enumerate(groups):
        for k, trajectory in enumerate(group.trajectories):
            steps = []
            for step in trajectory.steps:
                steps.append({
                    'observation': step.observation, 'reply': decode(step.action_tokens), 'command': step.command,
                    'parsed': step.parsed, 'admissible': step.admissible_command, 'reward': step.reward,
                    **{name: np.asarray(column[n]).item() for name, column in rows.items()}})
                n += 1
            lines.append(json.dumps({
                'group': g, 'member': k, 'task': task_names[group.task_id], 'success': trajectory.success,
                'stop_reason': trajectory.stop_reason, 'score': trajectory.score, 'steps': steps,
                'last_observation': trajectory.steps[-1].next_observation}))
    replace_file(path, '\n'.join(lines) + '\n')


def write_branches(path: pathlib.Path, branches: Sequence[OracleBranch], task_names: Sequence[str],
                   log_compat_RT: np.ndarray, weight_RT: np.ndarray, gate_R: np.ndarray) -> None:
    """One JSON line per oracle branch of an update: its root, and for every command compatibility and weight."""
    lines = []
    for r, branch in enumerate(branches):
        steps = [{'observation': step.observation, 'command': step.command,
                  'compatibility': float(np.exp(log_compat_RT[r, t])), 'weight': float(weight_RT[r, t])}
                 for t, step in enumerate(branch.steps)]
        root = branch.root
        lines.append(json.dumps({
            'group': root.group, 'member': root.trajectory, 'step': root.step, 'task': task_names[root.task_id],
            'steps_left': root.steps_left, 'invalid': branch.invalid, 'detail': branch.detail, 'gate': float(gate_R[r]),
            'steps': steps}))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, '\n'.join(lines) + '\n')

"""Rollouts: a policy plays groups of episodes in a pool of environments.

Knows neither JAX nor a tokenizer: the policy maps prompt tokens to sampled tokens, a `PromptBuilder` makes the former
and reads the latter.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from covsero_jax import workers
from covsero_jax.envs import base
from covsero_jax.prompts import PromptBuilder
from covsero_jax.trajectory import Group, Policy, Step, Trajectory

_TASK_ORDER = 0x7A5C  # keeps these draws apart from other draws with the same seed


def task_schedule(seed: int, update: int, *, num_tasks: int, num_groups: int) -> np.ndarray:
    """Task ids of the groups of one update, int64 [num_groups].

    All updates together walk through one sequence of passes; each pass is a fresh shuffle of all tasks, so that no task
    repeats inside a pass. A pure function of its arguments: a resumed run needs no cursor.
    """
    if num_tasks < 1:
        raise ValueError('there are no tasks to schedule: num_tasks is 0')
    position = update * num_groups + np.arange(num_groups)
    order = {
        p: np.random.default_rng([seed, _TASK_ORDER, p]).permutation(num_tasks) for p in set(position // num_tasks)
    }
    return np.array([order[p // num_tasks][p % num_tasks] for p in position], np.int64)


def collect_groups(
    pool: workers.WorkerPool,
    policy: Policy,
    prompts: PromptBuilder,
    task_ids: Sequence[int],
    *,
    group_size: int,
    max_steps: int,
    group_ids: Sequence[int] | None = None,
    keep_snapshots: bool = False,
    progress: Callable[[Trajectory], None] | None = None,
) -> list[Group]:
    """Play `group_size` episodes of each task of `task_ids`; one group per entry, in that order.

    An episode ends when the environment says so or after `max_steps` steps. Its slot then goes to the next waiting
    episode: any number of groups fits any pool, and the policy is never asked for a finished episode.

    group_ids: the numbers that identify the groups in `row_ids`; 0, 1, ... unless given.
    keep_snapshots: every Step keeps a snapshot of the environment before its action (SERO restores some of them).
    progress: called with every finished trajectory.

    Raises ValueError, naming the task, if members of a group start from different observations, if an episode is over
    before its first step, or if a reward is not finite; workers.WorkerError if an environment is beyond help.
    """
    if group_size < 1 or max_steps < 1:
        raise ValueError(f'need group_size >= 1 and max_steps >= 1, got {group_size} and {max_steps}')
    group_ids = range(len(task_ids)) if group_ids is None else group_ids
    episodes = [
        [_Episode(group, member, int(task)) for member in range(group_size)]
        for group, task in zip(group_ids, task_ids, strict=True)
    ]
    waiting = deque(episode for members in episodes for episode in members)
    live: dict[int, _Episode] = {}  # by slot
    starts: dict[int, base.Observation] = {}  # by group
    while waiting or live:
        _start_episodes(pool, waiting, live, starts)
        _advance(pool, policy, prompts, live, keep_snapshots)
        for slot, episode in list(live.items()):
            if episode.observation.done or len(episode.steps) == max_steps:
                del live[slot]
                if progress is not None:
                    progress(episode.trajectory())
    return [Group(members[0].task_id, tuple(episode.trajectory() for episode in members)) for members in episodes]


def has_contrast(group: Group) -> bool:
    """The group's trajectories do not all have the same return, before penalties."""
    return len({math.fsum(step.reward for step in trajectory.steps) for trajectory in group.trajectories}) > 1


def collect_until_contrast(
    pool: workers.WorkerPool,
    policy: Policy,
    prompts: PromptBuilder,
    batches: Sequence[Sequence[int]],
    *,
    group_size: int,
    max_steps: int,
    keep_snapshots: bool = False,
    progress: Callable[[Trajectory], None] | None = None,
    collect: Callable[..., list[Group]] = collect_groups,
) -> tuple[list[Group], list[Group]]:
    """Dynamic sampling: play batches of tasks until as many groups as one batch has have contrast (DAPO, 2503.14476, §3.2).

    Returns (kept, played). Groups without contrast are dropped, save those of the last batch that `batches` allows: it
    is kept whole, with a warning. Surplus groups are kept too. With one batch this is `collect_groups`, or what several hosts
    have in its place: `collect`.
    """
    kept: list[Group] = []
    played: list[Group] = []
    for number, task_ids in enumerate(batches):
        group_ids = range(len(played), len(played) + len(task_ids))
        groups = collect(
            pool, policy, prompts, task_ids, group_size=group_size, max_steps=max_steps, group_ids=group_ids,
            keep_snapshots=keep_snapshots, progress=progress,
        )  # fmt: skip
        played += groups
        is_last = number == len(batches) - 1
        kept += [group for group in groups if is_last or has_contrast(group)]
        if len(kept) >= len(task_ids) and not is_last:
            break
    if is_last and number:
        logging.warning(
            'dynamic sampling: only %d of %d groups have contrast after the allowed %d batches; the last batch is kept '
            'as it is', sum(map(has_contrast, played)), len(played), len(batches))  # fmt: skip
    return kept, played


@dataclasses.dataclass
class _Episode:
    """An episode being played."""

    group: int
    member: int
    task_id: int
    observation: base.Observation | None = None
    history: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (observation, command)
    steps: list[Step] = dataclasses.field(default_factory=list)

    def trajectory(self) -> Trajectory:
        success = self.observation.success
        stop_reason = 'success' if success else 'failure' if self.observation.done else 'max_steps'
        return Trajectory(self.task_id, tuple(self.steps), success, stop_reason, self.observation.score)


def _start_episodes(
    pool: workers.WorkerPool, waiting: deque[_Episode], live: dict[int, _Episode], starts: dict[int, base.Observation]
) -> None:
    """Give every free slot to a waiting episode and check that a group has one common start."""
    free = [slot for slot in range(pool.num_envs) if slot not in live][: len(waiting)]
    if not free:
        return
    started = {slot: waiting.popleft() for slot in free}
    observations = pool.reset([started[slot].task_id if slot in started else None for slot in range(pool.num_envs)])
    for slot, episode in started.items():
        episode.observation = observations[slot]
        name = pool.task_names[episode.task_id]
        if episode.observation.done:
            raise ValueError(f'task {name} is over before the first step')
        start = starts.setdefault(episode.group, episode.observation)
        if episode.observation != start:
            raise ValueError(
                f'the members of a group must start alike, but two resets of task {name} give\n'
                f'{start}\nand\n{episode.observation}'
            )
    live |= started


def _advance(
    pool: workers.WorkerPool, policy: Policy, prompts: PromptBuilder, live: dict[int, _Episode], keep_snapshots: bool
) -> None:
    """One step of every live episode."""
    episodes = list(live.values())
    snapshots = pool.snapshots(list(live)) if keep_snapshots else [None] * len(live)
    prompt_tokens = [prompts.build(e.observation.task, e.history, e.observation, len(e.steps)) for e in episodes]
    row_ids = np.array([(e.group, e.member, len(e.steps)) for e in episodes], np.uint32)
    actions = policy(prompt_tokens, row_ids)
    parsed = [
        prompts.parse(action.tokens, episode.observation.admissible, action.truncated)
        for episode, action in zip(episodes, actions, strict=True)
    ]
    commands: list[str | None] = [None] * pool.num_envs
    for slot, reply in zip(live, parsed, strict=True):
        commands[slot] = reply.command
    observations = pool.step(commands)
    columns = zip(live.items(), prompt_tokens, actions, parsed, snapshots, strict=True)
    for (slot, episode), tokens, action, reply, snapshot in columns:
        before, after = episode.observation, observations[slot]
        if not math.isfinite(after.reward):
            raise ValueError(f'task {pool.task_names[episode.task_id]}: {reply.command!r} gives reward {after.reward}')
        episode.steps.append(
            Step(
                observation=before.text,
                next_observation=after.text,
                prompt_tokens=tokens,
                action_tokens=action.tokens,
                action_logprobs=action.logprobs,
                command=reply.command,
                parsed=reply.parsed,
                admissible_command=reply.admissible,
                truncated=reply.truncated,
                admissible=before.admissible,
                reward=after.reward,
                state=before.state,
                next_state=after.state,
                snapshot=snapshot,
            )
        )
        episode.history.append((before.text, reply.command))
        episode.observation = after

"""From text to numbers: observations become integer ids, rewards become returns, trajectories become one table of rows.

Everything here runs once per update on the host (NumPy). After `build_step_table` no estimator sees a string again: it
compares a score column inside the groups that an id column names (`covsero_jax.advantages`). In an id column -1 means
"not compared"; padding rows and histories that are too short need no other mask.
"""

from __future__ import annotations

import collections
import fractions
import itertools
import math
from collections.abc import Sequence

import flax.struct
import numpy as np

from covsero_jax.trajectory import Group, Step, Trajectory

Array = np.ndarray  # or a jax.Array, once the table is inside a compiled function


@flax.struct.dataclass
class StepTable:
    """One row per environment step, in the order group, trajectory, step; padding rows last (ids -1, numbers 0)."""

    group_id_N: Array  # int32: the task group
    trajectory_id_N: Array  # int32: unique over all groups
    anchor_id_N: Array  # int32: same group, same observation (GiGPO's anchor state)
    history_id_HN: Array  # int32: row h is "same group, same last h + 1 observations" (HGPO); -1 where t < h
    episode_return_N: Array  # float32: undiscounted sum of the trajectory's rewards, before any penalty
    step_return_N: Array  # float32: discounted rewards from this step to the end, before any penalty
    goal_return_N: Array  # float32: GraphGPO's graph return of the edge taken here, before any penalty
    penalty_N: Array  # float32: invalid-action penalty of this row alone; estimators subtract it, the gate need not
    coverage_N: Array  # float32: first-visit coverage of the trajectory, repeated on its rows
    coverage_rank_N: Array  # int32: rank of the exact rational coverage in this update; equal rank <=> equal coverage
    novel_N: Array  # bool: the next observation was not seen before in this trajectory
    change_rate_N: Array  # float32: share of the trajectory's steps that changed the observation, on all its rows
    change_rank_N: Array  # int32: rank of that share as an exact rational
    changed_N: Array  # bool: the next observation is not this one
    action_tokens_N: Array  # float32: length of the reply
    failed_N: Array  # bool: the trajectory did not succeed


def discounted_returns(rewards: Sequence[float], discount: float) -> np.ndarray:
    """G_t = sum over k >= t of discount^(k-t) * r_k, float64 [T]. Equal reward suffixes give bit-equal returns."""
    backwards = itertools.accumulate(reversed(rewards), lambda later, reward: reward + discount * later)
    return np.array(list(backwards)[::-1], np.float64)


def anchor_ids(group_ids: Sequence[int], observations: Sequence[str]) -> np.ndarray:
    """Dense int32 [N]: rows share an id iff they share group and exact observation (GiGPO, arXiv 2505.10978, Eq. 6)."""
    return _dense_ids(zip(group_ids, observations, strict=True))


def history_ids(
    group_ids: Sequence[int], trajectory_ids: Sequence[int], observations: Sequence[str], *, depth: int
) -> np.ndarray:
    """Int32 [depth, N]: in row h, ids are shared iff group and last h + 1 observations are (HGPO, arXiv 2602.22817).

    A trajectory's rows stand in time order, one after another. Its first h rows are not compared at level h: -1.
    A prompt history of K observations beside the current one needs depth K + 1.
    """
    anchor_N = anchor_ids(group_ids, observations)
    follows_N = np.zeros(len(anchor_N), bool)
    follows_N[1:] = np.equal(trajectory_ids[1:], trajectory_ids[:-1])
    levels = [anchor_N] if depth else []
    while len(levels) < depth:
        # The window of h + 1 observations is the previous row's window of h, then this row's observation.
        previous_N = np.concatenate([[-1], levels[-1][:-1]])
        compared_N = follows_N & (previous_N >= 0)
        level_N = np.full(len(anchor_N), -1, np.int32)
        level_N[compared_N] = _dense_ids(zip(previous_N[compared_N].tolist(), anchor_N[compared_N].tolist()))
        levels.append(level_N)
    return np.stack(levels) if levels else np.zeros((0, len(anchor_N)), np.int32)


def _dense_ids(keys) -> np.ndarray:
    ids: dict = {}
    return np.array([ids.setdefault(key, len(ids)) for key in keys], np.int32)


def first_visits(trajectory: Trajectory) -> np.ndarray:
    """Bool [T]: novel_t = (o_{t+1} is none of o_0 .. o_t), by exact string equality (CovGPO §4.2)."""
    visited = {trajectory.steps[0].observation} if trajectory.steps else set()
    novel = []
    for step in trajectory.steps:
        novel.append(step.next_observation not in visited)
        visited.add(step.next_observation)
    return np.array(novel, bool)


def first_visit_coverage(trajectory: Trajectory) -> fractions.Fraction:
    """P = (number of first visits) / T as an exact rational, so that ties are decided in integers (CovGPO §4.2, §8.2).

    The terminal observation counts, o_0 does not. Raises ValueError for a trajectory without steps.
    """
    if not trajectory.steps:
        raise ValueError(f'task {trajectory.task_id}: a trajectory without steps has no coverage')
    return fractions.Fraction(int(first_visits(trajectory).sum()), len(trajectory.steps))


def observation_changes(trajectory: Trajectory) -> np.ndarray:
    """Bool [T]: changed_t = [o_{t+1} != o_t]; revisits count. The signal of the Obs-Change control (CovGPO §7.11)."""
    return np.array([step.next_observation != step.observation for step in trajectory.steps], bool)


def goal_distances(group: Group) -> dict[str | None, int]:
    """Steps from each observation of the group to success, in the graph of all its transitions (GraphGPO, 2605.26684).

    Nodes are distinct observations (or what the environment says tells states apart, `Step.node`), edges are executed
    steps of cost 1. The last step of a successful trajectory leads to the one success node, the key None, at distance
    0, whatever text was shown there. Observations that cannot reach it get (largest finite distance) + 1: without a
    success that is 1 everywhere.
    """
    predecessors = collections.defaultdict(list)
    for trajectory in group.trajectories:
        for step, node in zip(trajectory.steps, _next_nodes(trajectory), strict=True):
            predecessors[node].append(step.node)
    distances: dict[str | None, int] = {None: 0}
    frontier = collections.deque(distances)
    while frontier:
        node = frontier.popleft()
        for previous in predecessors[node]:
            if previous not in distances:
                distances[previous] = distances[node] + 1
                frontier.append(previous)
    unreachable = max(distances.values()) + 1
    nodes = {step.node for trajectory in group.trajectories for step in trajectory.steps}
    return dict.fromkeys(nodes | predecessors.keys(), unreachable) | distances


def _next_nodes(trajectory: Trajectory) -> list[str | None]:
    nodes: list[str | None] = [step.next_node for step in trajectory.steps]
    return [*nodes[:-1], None] if trajectory.success else nodes


def goal_returns(group: Group, *, goal_discount: float, goal_reward: float, distance_offset: int) -> list[float]:
    """goal_reward * goal_discount^(d(next) + distance_offset) for each row of the group, in row order."""
    if not any(trajectory.success for trajectory in group.trajectories):  # every distance is 1: no graph needed
        rows = sum(len(trajectory.steps) for trajectory in group.trajectories)
        return [goal_reward * goal_discount ** (1 + distance_offset)] * rows
    distances = goal_distances(group)
    return [
        goal_reward * goal_discount ** (distances[node] + distance_offset)
        for trajectory in group.trajectories
        for node in _next_nodes(trajectory)
    ]


def build_step_table(
    groups: Sequence[Group],
    *,
    discount: float,
    goal_discount: float,
    history_depth: int,
    num_rows: int,
    invalid_penalty: float = 0.1,
    penalise: str = 'parsed',
    goal_reward: float = 10.0,
    distance_offset: int = 0,
) -> StepTable:
    """The table of one update, padded to `num_rows`.

    penalise: 'parsed' (the published rule: replies without the required format) or 'admissible' (also commands that
    were not in the list). distance_offset: 0 as GraphGPO's public recipe, 1 as its paper.
    Raises ValueError for rows that do not fit, an empty trajectory or a reward that is not finite (naming the task).
    """
    if penalise not in ('parsed', 'admissible'):
        raise ValueError(f"penalise is {penalise!r}; use 'parsed' or 'admissible'")
    _check_trajectories(groups)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if len(steps) > num_rows:
        raise ValueError(f'{len(steps)} environment steps do not fit into a table of num_rows={num_rows}')

    lengths = [len(trajectory.steps) for trajectory in trajectories]
    group_sizes = [sum(len(trajectory.steps) for trajectory in group.trajectories) for group in groups]
    group_ids = np.repeat(np.arange(len(groups)), group_sizes).tolist()
    trajectory_ids = np.repeat(np.arange(len(trajectories)), lengths).tolist()
    nodes = [step.node for step in steps]
    novel, changed = ([count(t) for t in trajectories] for count in (first_visits, observation_changes))
    coverage, changes = ([fractions.Fraction(int(x.sum()), len(x)) for x in flags] for flags in (novel, changed))
    rewards = [[step.reward for step in trajectory.steps] for trajectory in trajectories]
    goal = {'goal_discount': goal_discount, 'goal_reward': goal_reward, 'distance_offset': distance_offset}

    def per_trajectory(values, dtype, fill=0):
        return _padded(np.repeat(np.array(values, dtype), lengths), dtype, num_rows, fill)

    def per_row(values, dtype, fill=0):
        return _padded(values, dtype, num_rows, fill)

    return StepTable(
        group_id_N=per_row(group_ids, np.int32, -1),
        trajectory_id_N=per_row(trajectory_ids, np.int32, -1),
        anchor_id_N=per_row(anchor_ids(group_ids, nodes), np.int32, -1),
        history_id_HN=per_row(history_ids(group_ids, trajectory_ids, nodes, depth=history_depth), np.int32, -1),
        episode_return_N=per_trajectory([math.fsum(values) for values in rewards], np.float32),
        step_return_N=per_row(_joined(discounted_returns(values, discount) for values in rewards), np.float32),
        goal_return_N=per_row([value for group in groups for value in goal_returns(group, **goal)], np.float32),
        penalty_N=per_row([invalid_penalty * _is_penalised(step, penalise) for step in steps], np.float32),
        coverage_N=per_trajectory([float(value) for value in coverage], np.float32),
        coverage_rank_N=per_trajectory(_ranks(coverage), np.int32),
        novel_N=per_row(_joined(novel), bool),
        change_rate_N=per_trajectory([float(value) for value in changes], np.float32),
        change_rank_N=per_trajectory(_ranks(changes), np.int32),
        changed_N=per_row(_joined(changed), bool),
        action_tokens_N=per_row([len(step.action_tokens) for step in steps], np.float32),
        failed_N=per_trajectory([not trajectory.success for trajectory in trajectories], bool),
    )


def _is_penalised(step: Step, penalise: str) -> bool:
    return not step.parsed or (penalise == 'admissible' and not step.admissible_command)


def _ranks(values: Sequence[fractions.Fraction]) -> list[int]:
    rank = {value: i for i, value in enumerate(sorted(set(values)))}
    return [rank[value] for value in values]


def _joined(arrays) -> np.ndarray:
    return np.concatenate([np.zeros(0), *arrays])


def _padded(values, dtype, num_rows: int, fill) -> np.ndarray:
    values = np.asarray(values, dtype)
    column = np.full((*values.shape[:-1], num_rows), fill, dtype)
    column[..., : values.shape[-1]] = values
    return column


def _check_trajectories(groups: Sequence[Group]) -> None:
    for group in groups:
        for i, trajectory in enumerate(group.trajectories):
            if not trajectory.steps:
                raise ValueError(f'task {group.task_id}, trajectory {i}: no steps, so nothing to compare')
            for t, step in enumerate(trajectory.steps):
                if not math.isfinite(step.reward):
                    raise ValueError(
                        f'task {group.task_id}, trajectory {i}, step {t}: the reward is {step.reward}; '
                        'the environment must return finite numbers'
                    )

"""Groups of trajectories for the tests of groups, advantages and coverage: by hand and at random."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import advantages_reference as reference
import jax
import numpy as np

from covsero_jax.groups import StepTable, build_step_table
from covsero_jax.trajectory import Group, Step, Trajectory

NO_TOKENS = np.zeros(0, np.int32)


def trajectory(
    observations: Sequence[str],
    *,
    success: bool = False,
    rewards: Sequence[float] | None = None,
    invalid: Collection[int] = (),
    inadmissible: Collection[int] = (),
    tokens: Sequence[int] | None = None,
) -> Trajectory:
    """o_0 .. o_T become T steps; success pays 10 at the last one unless `rewards` are given; `tokens` of each reply."""
    num_steps = len(observations) - 1
    rewards = [0.0] * (num_steps - 1) + [10.0 * success] if rewards is None else rewards
    tokens = [1 + t % 3 for t in range(num_steps)] if tokens is None else tokens
    steps = tuple(
        Step(
            observation=observations[t],
            next_observation=observations[t + 1],
            prompt_tokens=NO_TOKENS,
            action_tokens=np.zeros(tokens[t], np.int32),
            action_logprobs=np.zeros(tokens[t], np.float32),
            command='',
            parsed=t not in invalid,
            admissible_command=t not in inadmissible,
            truncated=False,
            admissible=(),
            reward=rewards[t],
        )
        for t in range(num_steps)
    )
    return Trajectory(task_id=0, steps=steps, success=success, stop_reason='success' if success else 'failure')


def group(*trajectories: Trajectory, task_id: int = 0) -> Group:
    return Group(task_id=task_id, trajectories=trajectories)


def three_trajectories() -> list[Group]:
    """One success A B C and two failures A B D B and A D: nine rows whose advantages are known by hand."""
    return [
        group(
            trajectory(['A', 'B', 'C', 'won'], success=True),
            trajectory(['A', 'B', 'D', 'B', 'F1']),
            trajectory(['A', 'D', 'F2']),
        )
    ]


def random_groups(
    seed: int, *, num_groups: int = 3, group_size: int = 4, max_steps: int = 8, tiny_rewards: bool = True
) -> list[Group]:
    """Few observations, so that anchors repeat; most groups fail; some replies are invalid, some rewards are tiny."""
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(num_groups):
        trajectories = []
        success_rate = rng.choice([0.0, 0.4])
        invalid_rate = rng.choice([0.0, 0.2])
        alphabet = rng.choice(['abcde', 's'], p=[0.85, 0.15])  # 's': nothing new ever happens
        odd_reward = rng.choice([0.0, 5e-4 * tiny_rewards, 0.7], p=[0.8, 0.1, 0.1])
        for _ in range(group_size):
            num_steps = int(rng.integers(1, max_steps + 1))
            success = bool(rng.random() < success_rate)
            rewards = np.zeros(num_steps)
            rewards[-1] = 10.0 * success or odd_reward * (rng.random() < 0.5)
            observations = ['s', *rng.choice(list(alphabet), num_steps)]
            invalid = np.flatnonzero(rng.random(num_steps) < invalid_rate)
            trajectories.append(
                trajectory(observations, success=success, rewards=rewards.tolist(), invalid=invalid.tolist())
            )
        groups.append(group(*trajectories, task_id=g))
    return groups


def varied_groups(seed: int) -> list[Group]:
    """At most 112 rows of everything at once: groups of 1 to 4, rewards of 0 and 10, fractional on any step or tiny,
    penalties, replies of 1 to 9 tokens. All tasks show the same observations, so that only the task tells them apart.
    (Tiny is 2^-11, which float32 holds exactly, also beside 10: references shall differ by arithmetic, not by rewards.)
    """
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(rng.integers(1, 5)):
        success_rate, invalid_rate = rng.choice([0.0, 0.4]), rng.choice([0.0, 0.2])
        alphabet = rng.choice(['abcd', 'abcdefgh', 's'], p=[0.6, 0.25, 0.15])  # 's': nothing new ever happens
        kind = rng.choice(['binary', 'fractional', 'terminal', 'tiny'], p=[0.6, 0.15, 0.15, 0.1])
        trajectories = []
        for _ in range(rng.integers(1, 5)):
            num_steps, success = int(rng.integers(1, 8)), bool(rng.random() < success_rate)
            rewards = np.zeros(num_steps)
            if kind == 'fractional':
                rewards = rng.choice([0.0, 0.25, -0.5, 1 / 3], num_steps)
            elif kind != 'binary':
                rewards[-1] = (2**-11 if kind == 'tiny' else 0.7) * (rng.random() < 0.5)
            rewards[-1] += 10.0 * success
            trajectories.append(
                trajectory(
                    ['s', *rng.choice(list(alphabet), num_steps)],
                    success=success,
                    rewards=rewards.tolist(),
                    invalid=np.flatnonzero(rng.random(num_steps) < invalid_rate).tolist(),
                    tokens=rng.integers(1, 10, num_steps).tolist(),
                )
            )
        groups.append(group(*trajectories, task_id=g))
    return groups


@functools.cache
def varied_rows(seed: int) -> list[reference.Row]:
    return reference.rows_of(varied_groups(seed))


@functools.cache
def varied_tables(seeds: range, *, num_rows: int = 120, **options) -> tuple[StepTable, np.ndarray]:
    """The tables of `varied_groups` stacked, [B, N], and the order of their rows and padding, random in every other."""
    options |= {'discount': reference.DISCOUNT, 'goal_discount': reference.GOAL_DISCOUNT}
    options |= {'history_depth': reference.DEPTH, 'num_rows': num_rows}
    tables, orders = [], []
    for seed in seeds:
        order = np.random.default_rng(seed).permutation(num_rows) if seed % 2 else np.arange(num_rows)
        table = build_step_table(varied_groups(seed), **options)
        tables.append(jax.tree.map(lambda column, order=order: column[..., order], table))
        orders.append(order)
    return jax.tree.map(lambda *columns: np.stack(columns), *tables), np.stack(orders)


def in_table_order(x_BN: np.ndarray, order_BN: np.ndarray) -> np.ndarray:
    """Undo the order of `varied_tables` on a stacked column."""
    return np.take_along_axis(np.asarray(x_BN), np.argsort(order_BN, axis=-1), axis=-1)

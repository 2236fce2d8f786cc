"""Groups of trajectories for the tests of groups, advantages and coverage: by hand and at random."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from covsero_jax.trajectory import Group, Step, Trajectory

NO_TOKENS = np.zeros(0, np.int32)


def trajectory(
    observations: Sequence[str],
    *,
    success: bool = False,
    rewards: Sequence[float] | None = None,
    invalid: Collection[int] = (),
    inadmissible: Collection[int] = (),
) -> Trajectory:
    """o_0 .. o_T become T steps; success pays 10 at the last one unless `rewards` are given."""
    num_steps = len(observations) - 1
    rewards = [0.0] * (num_steps - 1) + [10.0 * success] if rewards is None else rewards
    steps = tuple(
        Step(
            observation=observations[t],
            next_observation=observations[t + 1],
            prompt_tokens=NO_TOKENS,
            action_tokens=NO_TOKENS,
            action_logprobs=np.zeros(0, np.float32),
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

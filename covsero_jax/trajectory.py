"""What a rollout returns: steps, trajectories, groups. Host data, NumPy only.

A *row* of a training batch is one environment step: a fresh prompt and one reply. A trajectory is a tuple of rows, a
group is the trajectories that started from the same initial state of the same task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Step:
    """One environment step of one trajectory."""

    observation: str  # raw environment text before the action
    next_observation: str  # and after it; the terminal one included, since coverage counts it
    prompt_tokens: np.ndarray  # int32 [p], exactly what the policy saw
    action_tokens: np.ndarray  # int32 [a], as sampled; ends with eos unless truncated. Never re-encoded.
    action_logprobs: np.ndarray  # float32 [a], from the sampler; a diagnostic, never a training input
    command: str  # what was sent to the environment
    parsed: bool  # the reply had the required format
    admissible_command: bool  # the command was in `admissible`
    truncated: bool  # the reply was cut by the length limit
    admissible: tuple[str, ...]  # legal commands at `observation`
    reward: float
    state: str | None = None  # what anchor groups and graphs compare, before the action; None = `observation`
    next_state: str | None = None  # and after it
    snapshot: object | None = None  # the environment before the action, where it was kept for SERO's branches

    @property
    def node(self) -> str:
        return self.observation if self.state is None else self.state

    @property
    def next_node(self) -> str:
        return self.next_observation if self.next_state is None else self.next_state


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One episode. `success` is the environment's own verdict, never inferred from `done`."""

    task_id: int
    steps: tuple[Step, ...]
    success: bool
    stop_reason: str  # 'success' | 'failure' | 'max_steps'
    score: float | None = None  # the environment's grade at the end, in [0, 1], where it gives one; never trained on

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of rewards, before any penalty."""
        return float(sum(step.reward for step in self.steps))


@dataclasses.dataclass(frozen=True)
class Group:
    """Trajectories of one task from one initial state."""

    task_id: int
    trajectories: tuple[Trajectory, ...]


@dataclasses.dataclass(frozen=True)
class Root:
    """A decision point of a failed trajectory, where an oracle branch may start: what restores it, and what proves it.

    Everything that the policy saw there is kept, so that a restored environment can be compared with it character for
    character. SERO, C.1.
    """

    group: int  # position of its group, trajectory and step among the collected ones
    trajectory: int
    step: int
    task_id: int
    commands: tuple[str, ...]  # the prefix a_0 .. a_{t-1}
    history: tuple[tuple[str, str], ...]  # (observation, command) pairs before this point
    observation: str
    admissible: tuple[str, ...]
    prompt_tokens: np.ndarray  # int32 [p]
    steps_left: int  # H - t
    policy_return: float  # sum of the rewards that the trajectory got from here on
    snapshot: object | None = None  # of the environment, for restoration by copy


@dataclasses.dataclass(frozen=True)
class OracleStep:
    """One command of the oracle, and the target that it makes for the policy."""

    prompt_tokens: np.ndarray  # int32 [p], what the policy would have seen here
    reply_tokens: np.ndarray  # int32 [a], the reply that gives the command
    command_mask: np.ndarray  # bool [a], the tokens that are scored and learned
    observation: str
    command: str
    reward: float


@dataclasses.dataclass(frozen=True)
class OracleBranch:
    """What the oracle did from a root, in the real environment. An invalid branch never trains, but counts as attempted."""

    root: Root
    steps: tuple[OracleStep, ...]
    invalid: str = ''  # '' = valid, else one of `oracle.INVALID`
    detail: str = ''  # what happened, for people

    @property
    def oracle_return(self) -> float:
        """Sum of the oracle's rewards over the same remaining horizon as `root.policy_return`."""
        return float(sum(step.reward for step in self.steps))


@dataclasses.dataclass(frozen=True)
class SampledAction:
    """One reply of the policy."""

    tokens: np.ndarray  # int32 [a], as sampled; ends with eos unless truncated
    logprobs: np.ndarray  # float32 [a], from the sampler
    truncated: bool  # cut by the length limit


# (prompts: n arrays int32 [p_i], row_ids: uint32 [n, 3] = (group, member, step)) -> n replies. The row id alone must
# decide the randomness of a row, so that a reply does not depend on what else is in the batch.
Policy = Callable[[Sequence[np.ndarray], np.ndarray], Sequence[SampledAction]]

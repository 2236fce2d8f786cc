"""The protocol between environments and everything else. An own environment needs nothing but this file.

An environment is a fixed, ordered set of *tasks* (games, goals, levels). `reset(i)` starts task i, always in the same
initial state, so that the members of a group are comparable; `step` executes one command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the agent sees after `reset` or `step`.

    text: exactly what the environment emitted; coverage compares this string.
    admissible: the legal commands here, sorted.
    reward: of the step just made (0 after reset). done: the episode is over. success: the task is solved (never
    inferred from `done`). task: the instruction, the same on every step of an episode.
    state: what step-level estimators compare to tell whether two rows stand in the same state; None = the text.
    """

    text: str
    admissible: tuple[str, ...]
    reward: float = 0.0
    done: bool = False
    success: bool = False
    task: str = ''
    state: str | None = None


@runtime_checkable
class Env(Protocol):
    """Implement these four methods and two attributes; everything else in the project works with the result."""

    task_names: Sequence[str]  # one per task, sorted: the manifest that evaluation walks through once
    task_types: Sequence[str]  # one per task: the rows of the per-type success table

    def reset(self, task_id: int) -> Observation:
        """Start task `task_id`; the same id always gives the same initial observation."""

    def step(self, command: str) -> Observation:
        """Execute one command. Anything illegal is answered in text and changes nothing; stepping after `done` raises."""

    def snapshot(self) -> object:
        """The present state as a picklable value that shares nothing mutable with the environment."""

    def restore(self, snapshot: object) -> Observation:
        """Return to a snapshot (of the same task set); gives the observation that was current when it was taken."""


class OracleEnv(Env, Protocol):
    """An environment that was built with an oracle. Those of evaluation are built without one, and raise here."""

    def oracle_command(self) -> str | None:
        """The next command of a plan that solves the task from the present state; None when it is lost."""


class OracleForbidden(RuntimeError):
    """Raised when an oracle is asked in an environment that was built without one (evaluation, plain training)."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The answer of an environment, or of a worker, that could not do what was attempted: the cause, as text."""

    cause: str


def replay(env: Env, task_id: int, commands: Sequence[str]) -> Observation:
    """Reset task `task_id` and execute `commands`: the restoration that every deterministic environment has."""
    observation = env.reset(task_id)
    for command in commands:
        observation = env.step(command)
    return observation

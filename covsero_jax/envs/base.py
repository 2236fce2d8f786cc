"""The protocol between environments and everything else. An own environment needs nothing but this file.

An environment is a fixed, ordered set of *tasks* (games, goals, levels). `reset(i)` starts task i, always in the same
initial state, so that the members of a group are comparable; `step` executes one command.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the agent sees after `reset` or `step`.

    text: exactly what the environment emitted; coverage compares this string.
    admissible: the legal commands here, in an order that depends on the state alone; an entry such as
    'search[<your query>]' is a form, see `admits`.
    reward: of the step just made (0 after reset). done: the episode is over. success: the task is solved (never
    inferred from `done`). task: the instruction, the same on every step of an episode.
    state: what step-level estimators compare to tell whether two rows stand in the same state; None = the text.
    score: how much of the task is solved, in [0, 1], where an environment grades it (WebShop); reported, never trained on.
    """

    text: str
    admissible: tuple[str, ...]
    reward: float = 0.0
    done: bool = False
    success: bool = False
    task: str = ''
    state: str | None = None
    score: float | None = None


def evenly_spaced(items: Sequence, count: int) -> tuple:
    """`count` of the items, from the first on; all where there are no more."""
    chosen = min(count, len(items))
    return tuple(items[i * len(items) // chosen] for i in range(chosen))


_FORM = re.compile(r'(\w+)\[<your [^\]]*>\]')  # a command with a free part


def admits(admissible: Sequence[str], command: str) -> bool:
    """Whether `command` is one of these, or fills in a form: 'search[<your query>]' admits 'search[red shoes]'."""
    if command in admissible:
        return True
    forms = [form.group(1) for form in map(_FORM.fullmatch, admissible) if form]
    return any(
        command.startswith(f'{name}[') and command.endswith(']') and bool(command[len(name) + 1 : -1].strip())
        for name in forms
    )


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
        """The next command of a plan that solves the task from the present state; None when it is lost.

        An environment whose oracle has a known bound also has `oracle_steps`, one number per task: from any state in
        which the episode is not over, so many remaining steps suffice. Roots of SERO's branches respect it.
        """


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

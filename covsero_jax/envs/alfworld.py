"""ALFWorld as an `Env`: one adapter over two engines that say the same, character for character.

`native` is our own engine (alfworld_engine.py): microseconds, no extra packages. `textworld` is the official one
(alfworld_textworld.py): slow, for comparison. `make_env` is what worker processes call.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import NamedTuple, Protocol

from covsero_jax.envs import (
    alfworld_data,
    alfworld_engine,
    alfworld_explorer,
    alfworld_oracle,
    alfworld_summary,
    alfworld_textworld,
    base,
)

ORACLES = ('', 'planner', 'explorer')
ENGINES = ('native', 'textworld')
OBSERVATIONS = ('raw', 'enriched', 'enriched_state')


class Engine(Protocol):
    """Plays one game at a time. `won` is a property of the present state; there is no step limit and no end."""

    def start(self, task_id: int) -> str:
        """Begin a game; returns its first text."""

    def step(self, command: str) -> str:
        """Execute a command; returns the feedback."""

    def admissible(self) -> tuple[str, ...]:
        """The legal commands, sorted."""

    def won(self) -> bool:
        """Whether the goal holds now."""

    def save(self) -> object:
        """The position in the game as a picklable value."""

    def load(self, task_id: int, saved: object) -> None:
        """Return to a position of game `task_id`."""

    def state(self) -> alfworld_engine.State:
        """The full, hidden state: for the oracle only."""


class NativeEngine:
    """The engine protocol over `alfworld_engine.State`."""

    def __init__(self, games: alfworld_data.GameSet):
        self._games = games

    def start(self, task_id: int) -> str:
        self._state = self._games.game(task_id).initial_state()
        return self._state.intro()

    def step(self, command: str) -> str:
        return self._state.step(command)

    def admissible(self) -> tuple[str, ...]:
        return self._state.admissible()

    def won(self) -> bool:
        return self._state.won()

    def save(self) -> tuple:
        return self._state.save()

    def load(self, task_id: int, saved: tuple) -> None:
        self._state = alfworld_engine.State(self._games.game(task_id), saved)

    def state(self) -> alfworld_engine.State:
        return self._state


class Watched(NamedTuple):
    """What has happened in an episode so far, newest first. Snapshots share it: O(1) at every step."""

    before: Watched | None
    command: str | None  # None at the reset
    observation: base.Observation

    def since(self, known: Watched | None) -> list[tuple[str | None, base.Observation]]:
        """The commands after `known` (None: all of them) and what they led to, oldest first."""
        happened, at = [], self
        while at is not known:
            happened.append((at.command, at.observation))
            at = at.before
        return happened[::-1]

    def __reduce__(self) -> tuple:
        return _link, (self.since(None),)  # flat: pickle would recurse at every step, and fail in long episodes


def _link(happened: list[tuple[str | None, base.Observation]]) -> Watched | None:
    watched = None
    for command, observation in happened:
        watched = Watched(watched, command, observation)
    return watched


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A position in an episode: which game, how far, what was seen, and the engine's own part."""

    task_id: int
    name: str
    engine: str
    num_steps: int
    observation: base.Observation
    summary: alfworld_summary.Summary
    saved: object
    watched: Watched | None  # only kept for the explorer


class AlfworldEnv:
    """An `Env` (and `OracleEnv` when built with an oracle) over a set of games.

    reward = success_reward on the step that reaches the goal, else 0; success = the goal holds; done = success or
    max_steps commands were executed (the official limit is 50; illegal commands count). Hidden facts never leave it.
    observation: 'raw'; 'enriched', the text and `alfworld_summary` of the episode, both shown to the policy and, with
    the legal commands, compared by step-level estimators (GraphGPO's recipe); 'enriched_state', only compared.
    oracle: '' (none), 'planner' (a shortest plan, from the hidden state) or 'explorer' (`alfworld_explorer`: it knows
    what the episode has shown, whoever played it, and searches in an order that the game's name decides).
    """

    def __init__(self, games: alfworld_data.GameSet, *, engine: str = 'native', max_steps: int = 50,
                 oracle: str = '', success_reward: float = 10.0, observation: str = 'raw'):
        if oracle not in ORACLES:
            raise ValueError(f'unknown oracle {oracle!r}; there are {", ".join(filter(None, ORACLES))}, "" for none')
        if engine not in ENGINES:
            raise ValueError(f'unknown engine {engine!r}; there are {", ".join(ENGINES)}')
        if observation not in OBSERVATIONS:
            raise ValueError(f'unknown observation {observation!r}; there are {", ".join(OBSERVATIONS)}')
        if max_steps < 1:
            raise ValueError(f'max_steps must be at least 1, not {max_steps}')
        self.task_names, self.task_types = games.names, games.types
        self._games, self._engine_name, self._max_steps = games, engine, max_steps
        self._oracle, self._success_reward = oracle, success_reward
        self._engine: Engine = NativeEngine(games) if engine == 'native' else alfworld_textworld.TextworldEngine(games)
        self._task_id, self._num_steps = -1, 0
        self._kind, self._summary = observation, alfworld_summary.Summary()
        self._observation: base.Observation | None = None
        self._watched: Watched | None = None
        self._explorer: tuple[Watched, alfworld_explorer.Explorer] | None = None  # and how far it has watched

    def reset(self, task_id: int) -> base.Observation:
        if not 0 <= task_id < len(self._games):
            raise IndexError(f'task {task_id} of {len(self._games)} games')
        self._observation = None  # a game that cannot be started leaves no episode behind
        text = self._engine.start(task_id)
        self._task_id, self._num_steps = task_id, 0
        self._summary, self._watched, self._explorer = alfworld_summary.Summary(), None, None
        return self._observe(text, None)

    def step(self, command: str) -> base.Observation:
        if self._current().done:
            raise RuntimeError('the episode is over; call reset before the next step')
        text = self._engine.step(command)
        self._num_steps += 1
        self._summary = self._summary.after(command, text)
        return self._observe(text, command)

    def snapshot(self) -> Snapshot:
        observation = self._current()
        name = self.task_names[self._task_id]
        return Snapshot(self._task_id, name, self._engine_name, self._num_steps, observation, self._summary,
                        self._engine.save(), self._watched)

    def restore(self, snapshot: Snapshot) -> base.Observation:
        """Raises ValueError for a snapshot of other games, of another engine, or of what the explorer did not watch."""
        names = self.task_names[snapshot.task_id : snapshot.task_id + 1]
        if names != (snapshot.name,) or snapshot.engine != self._engine_name:
            raise ValueError(f'a snapshot of game {snapshot.name} (task {snapshot.task_id}, engine {snapshot.engine}) '
                             'belongs to another environment')
        if self._oracle == 'explorer' and snapshot.watched is None:
            raise ValueError("oracle='explorer' must have watched the episode: take the snapshot in an environment "
                             'with it, or restore by replay')
        self._engine.load(snapshot.task_id, snapshot.saved)
        self._task_id, self._num_steps, self._observation = snapshot.task_id, snapshot.num_steps, snapshot.observation
        self._summary, self._watched, self._explorer = snapshot.summary, snapshot.watched, None
        return self._observation

    def oracle_command(self) -> str | None:
        """The oracle's next command; None when the planner sees that the game is lost, or the explorer has no idea.

        Raises OracleForbidden, see `base`.
        """
        if not self._oracle:
            raise base.OracleForbidden('this environment was built without an oracle')
        if self._current().done:
            raise RuntimeError('the episode is over; there is no next command')
        if self._oracle == 'explorer':
            return self._informed_explorer().command()
        plan = alfworld_oracle.plan(self._engine.state())
        return plan[0] if plan else None

    def _informed_explorer(self) -> alfworld_explorer.Explorer:
        """The explorer, told what it has not watched yet; a new one after every reset and restore."""
        entry = self._games.entries[self._task_id]
        known, explorer = self._explorer or (None, alfworld_explorer.Explorer(entry.task, seed=entry.id))
        for command, observation in self._watched.since(known):
            explorer.observe(command, observation)
        self._explorer = (self._watched, explorer)
        return explorer

    def _current(self) -> base.Observation:
        if self._observation is None:
            raise RuntimeError('no episode has been started; call reset first')
        return self._observation

    def _observe(self, text: str, command: str | None) -> base.Observation:
        success, admissible = self._engine.won(), self._engine.admissible()
        enriched = text if self._kind == 'raw' else f'{text}\n{self._summary}'
        self._observation = base.Observation(
            text=enriched if self._kind == 'enriched' else text, admissible=admissible,
            state=None if self._kind == 'raw' else alfworld_summary.state_key(enriched, admissible),
            reward=self._success_reward if success and self._num_steps else 0.0,
            done=success or self._num_steps >= self._max_steps, success=success,
            task=self._games.entries[self._task_id].task)
        if self._oracle == 'explorer':
            self._watched = Watched(self._watched, command, dataclasses.replace(self._observation, text=text))
        return self._observation


def make_env(data_folder: str | pathlib.Path | None, split: str, *, engine: str = 'native', max_steps: int = 50,
             oracle: str = '', success_reward: float = 10.0, observation: str = 'raw',
             max_games: int | None = None) -> AlfworldEnv:
    """An environment over the games of one split; `functools.partial(make_env, ...)` is picklable.

    All environments of a process share the list of games and the parsed games. max_games: an evenly spaced subset.
    Raises alfworld_data.AlfworldDataError, and ImportError for engine='textworld' without the extra.
    """
    games = _games(data_folder and str(data_folder), split, max_games)
    return AlfworldEnv(games, engine=engine, max_steps=max_steps, oracle=oracle, success_reward=success_reward,
                       observation=observation)


@functools.lru_cache(maxsize=8)
def _games(data_folder: str | None, split: str, max_games: int | None) -> alfworld_data.GameSet:
    games = alfworld_data.find_games(data_folder, split)
    return games if max_games is None else games.subset(max_games)

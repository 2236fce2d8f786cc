"""The official ALFWorld engine (packages alfworld and textworld) behind the same engine protocol as the native one.

It is for comparison: 4-18 steps/s, seconds per reset, up to 8 MB per game. What it does to the process that uses it:

* It is not thread safe (shared parser state, a swapped `sys.stdout`): use it from one thread, best in the spawned
  workers of workers.py. With num_workers=0 it runs in the trainer's own process, which works but holds all of it up.
* It overwrites `sys.argv` and calls `sys.exit` on a bad game, and importing alfworld sets ALFWORLD_DATA; all three are
  undone here.
* Its state cannot be copied: a saved position is the list of commands, and `load` replays it.

The wrapper stack is our own, PddlEnv and AlfredDemangler, instead of `AlfredTWEnv.init_env`: that one shares an env
between the slots of a batch and leaks the hidden facts with the expert.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

from covsero_jax.envs import alfworld_data, alfworld_engine


class TextworldEngine:
    """Plays the games of `games` on the official engine. Raises ImportError when it is not installed."""

    def __init__(self, games: alfworld_data.GameSet):
        self._games, self._env = games, _make_official_env(games.folder)
        self._loaded = -1  # the game that `_env` has loaded: a second start of the same game need not load it again
        self._task_id = -1
        self._commands: list[str] = []

    def start(self, task_id: int) -> str:
        path = self._games.path(task_id)
        with _contained(path):
            if self._loaded != task_id:
                self._loaded = -1
                self._env.load(str(path))
                self._loaded = task_id
            self._frame = self._env.reset()
        self._task_id, self._commands = task_id, []
        return self._frame.feedback

    def step(self, command: str) -> str:
        self._frame, self.score, self.done = self._env.step(command)
        self._commands.append(command)
        return self._frame.feedback

    def admissible(self) -> tuple[str, ...]:
        return tuple(self._frame['admissible_commands'])

    def won(self) -> bool:
        return bool(self._frame['won'])

    def save(self) -> tuple[str, ...]:
        return tuple(self._commands)

    def load(self, task_id: int, saved: tuple[str, ...]) -> None:
        self.start(task_id)
        for command in saved:
            self.step(command)

    def fast_downward_plan(self) -> list[str]:
        """The official planner's plan from here, for timing it: seconds in a small room, minutes in a kitchen."""
        with _contained(self._games.path(self._task_id)):
            return self._env.unwrapped._pddl_state.replan(self._env.unwrapped._entity_infos)

    def state(self) -> alfworld_engine.State:
        """The native engine's state after the same commands: the official one cannot be read."""
        state = self._games.game(self._task_id).initial_state()
        for command in self._commands:
            state.step(command)
        return state


def _make_official_env(folder: pathlib.Path):
    variable = os.environ.get('ALFWORLD_DATA')
    os.environ['ALFWORLD_DATA'] = str(folder)  # the import creates this folder, by default one in the home folder
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs import PddlEnv
    except ImportError as error:
        raise ImportError(
            "the official ALFWorld engine is not installed; run  pip install -e '.[alfworld]'  (it compiles for some "
            f"minutes), or use env.engine = 'native', which plays the same games without it ({error})") from error
    finally:
        if variable is None:
            del os.environ['ALFWORLD_DATA']
        else:
            os.environ['ALFWORLD_DATA'] = variable
    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False)


@contextlib.contextmanager
def _contained(path: object) -> Iterator[None]:
    """Turns whatever a bad game does, `sys.exit` included, into a GameError, and gives `sys.argv` back."""
    arguments = list(sys.argv)
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise alfworld_engine.GameError(f'{path}: the official engine cannot load this game ({error!r})') from error
    finally:
        sys.argv[:] = arguments

"""Keys and doors: a tiny deterministic text environment for the unit tests, and an example of an own environment.

Rooms lie in a row from west to east. The passage between two neighbours is free or a locked door, whose key lies in some
room further west. The last room is the goal: it pays reward 1. The first room has a window; leaving through it ends the
episode unsolved. Illegal commands are answered with 'Nothing happens.' and change nothing, as in ALFWorld.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import NamedTuple

from covsero_jax.envs import base


class Level(NamedTuple):
    doors: tuple[str, ...]  # doors[i] is the colour of the door between rooms i and i + 1, '' for a free passage
    keys: tuple[str, ...]  # keys[i] is the colour of the key that lies in room i, '' for none


class State(NamedTuple):
    room: int = 0
    held: tuple[str, ...] = ()  # colours, sorted
    unlocked: tuple[str, ...] = ()
    outside: bool = False


LEVELS = {
    'one_door/far': Level(('', '', 'red'), ('', 'red', '', '')),
    'one_door/near': Level(('red',), ('red', '')),
    'passage/long': Level(('', '', '', ''), ('', 'blue', '', '', '')),
    'passage/short': Level(('', ''), ('', '', '')),
    'two_doors/backtrack': Level(('', 'blue', 'red'), ('red', 'blue', '', '')),
    'two_doors/chain': Level(('blue', 'red'), ('blue', 'red', '')),
}
TASK = 'Reach the last room.'


@functools.cache
def moves(level: Level, state: State) -> dict[str, State]:
    """Every legal command and the state it leads to: all rules of the game."""
    room, held, unlocked, _ = state
    legal = {'look': state}
    if room == 0:
        legal['climb out of the window'] = state._replace(outside=True)
    else:
        legal['go west'] = state._replace(room=room - 1)
    if (key := level.keys[room]) and key not in held:
        legal[f'take {key} key'] = state._replace(held=tuple(sorted((*held, key))))
    if room < len(level.doors):
        door = level.doors[room]
        if not door or door in unlocked:
            legal['go east'] = state._replace(room=room + 1)
        elif door in held:
            legal[f'unlock {door} door'] = state._replace(unlocked=tuple(sorted((*unlocked, door))))
    return dict(sorted(legal.items()))


@functools.cache
def describe(level: Level, state: State) -> str:
    if state.outside:
        return 'You stand in the rain. The window is too high to go back.'
    text = f'You are in room {state.room}.'
    if state.room == len(level.doors):
        return f'{text} This is the last room.'
    if (key := level.keys[state.room]) and key not in state.held:
        text += f' A {key} key lies here.'
    if door := level.doors[state.room]:
        text += f' To the east is {"an open" if door in state.unlocked else "a locked"} {door} door.'
    return f'{text} You hold: {", ".join(state.held) or "nothing"}.'


class KeyDoorEnv:
    """`base.Env` over `LEVELS`; with `oracle=True` also `base.OracleEnv`."""

    task_names = tuple(sorted(LEVELS))
    task_types = tuple(name.split('/')[0] for name in task_names)

    def __init__(self, *, oracle: bool = False):
        self._oracle = oracle

    def reset(self, task_id: int) -> base.Observation:
        self._level, self._state = LEVELS[self.task_names[task_id]], State()
        return self._observe(describe(self._level, self._state))

    def step(self, command: str) -> base.Observation:
        if self._observation.done:
            raise RuntimeError('the episode is over: call reset')
        if command not in self._observation.admissible:
            return self._observe('Nothing happens.')
        self._state = moves(self._level, self._state)[command]
        return self._observe(describe(self._level, self._state))

    def snapshot(self) -> object:
        return self._level, self._state, self._observation

    def restore(self, snapshot: object) -> base.Observation:
        self._level, self._state, self._observation = snapshot
        return self._observation

    def oracle_command(self) -> str | None:
        """First command of the shortest plan (breadth first); None outside the window and when already solved."""
        if not self._oracle:
            raise base.OracleForbidden('this KeyDoorEnv was built without oracle=True')
        if self._observation.done:
            return None
        frontier, seen = deque([(self._state, None)]), {self._state}
        while frontier:
            state, first = frontier.popleft()
            if state.room == len(self._level.doors):
                return first
            for command, following in moves(self._level, state).items():
                if following not in seen and not following.outside:
                    seen.add(following)
                    frontier.append((following, first or command))
        return None

    def _observe(self, text: str) -> base.Observation:
        solved = self._state.room == len(self._level.doors)
        done = solved or self._state.outside
        admissible = () if done else tuple(moves(self._level, self._state))
        self._observation = base.Observation(text, admissible, float(solved), done, solved, TASK)
        return self._observation

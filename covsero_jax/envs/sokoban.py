"""Sokoban as an `Env`: text grids, native rewards, and a solver as oracle. `make_env` is what worker processes call.

The grid is RAGEN's and verl-agent's: '#' wall, '_' floor, 'O' target, '√' box on a target, 'X' box, 'P' player, 'S' player
on a target. It is the whole state but for the number of steps, so coverage compares exactly the states visited. CovGPO's
Sokoban (10.1.1) is visual and compares keys of images, where different states may share a key ("key aliasing") and first
visits are undercounted; that does not happen here, and figures of the two are not the same quantity.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import NamedTuple

from covsero_jax.envs import base, sokoban_levels, sokoban_solver
from covsero_jax.envs.sokoban_levels import Room, Task
from covsero_jax.envs.sokoban_rules import MOVES, Level, State, is_solved, move, start, steps

REWARDS = ('native', 'success')
STEP_REWARD, BOX_REWARD, SOLVED_REWARD = -0.1, 1.0, 10.0  # gym-sokoban's
ORACLE_NODES = 300_000  # seconds; all 10x10 levels with four boxes that were tried need fewer
INSTRUCTION = ('Push every box (X) onto a target (O). # is a wall, _ floor, √ a box on a target, P you, S you on a target. '
               'Boxes can be pushed one at a time and never pulled.')


class Snapshot(NamedTuple):
    """A position in an episode."""

    task_id: int
    level: Level
    state: State
    num_steps: int


class SokobanEnv:
    """An `Env` (and `OracleEnv` when built with use_oracle=True) over some levels.

    reward = -0.1 per step, +1 (-1) for a box pushed onto (off) a target, +10 when all are there ('native'); or
    success_reward then, else 0 ('success'). success = all boxes on targets, at once; done = success, or max_steps commands.
    Any command but the four moves changes nothing, and is a step as well.
    """

    def __init__(self, tasks: Sequence[Task], *, max_steps: int = 15, reward: str = 'native', success_reward: float = 10.0,
                 use_oracle: bool = False):
        if reward not in REWARDS:
            raise ValueError(f'unknown reward {reward!r}; there are {", ".join(REWARDS)}')
        if max_steps < 1:
            raise ValueError(f'max_steps must be at least 1, not {max_steps}')
        self._levels = [task.level for task in tasks]
        self.task_names, self.task_types = tuple(task.name for task in tasks), tuple(task.kind for task in tasks)
        self._max_steps, self._reward, self._success_reward = max_steps, reward, success_reward
        self._use_oracle = use_oracle
        self._task_id, self._state, self._num_steps, self._is_done = -1, None, 0, False
        self._plan: tuple[State, tuple[str, ...]] | None = None  # the oracle's, and where it stands

    def reset(self, task_id: int) -> base.Observation:
        if not 0 <= task_id < len(self._levels):
            raise IndexError(f'task {task_id} of {len(self._levels)} levels')
        self._task_id, self._num_steps = task_id, 0
        self._state = start(self._levels[task_id])
        return self._observe(0.0)

    def step(self, command: str) -> base.Observation:
        level, before = self._levels[self._task_id], self._current()
        if self._is_done:
            raise RuntimeError('the episode is over; call reset before the next step')
        if command in MOVES:
            self._state = move(level, before, steps(level)[MOVES.index(command)])
        self._num_steps += 1
        return self._observe(self._reward_of(level, before, self._state))

    def _reward_of(self, level: Level, before: State, after: State) -> float:
        if self._reward == 'success':
            return self._success_reward if is_solved(level, after) else 0.0
        gained = len(after.boxes & level.targets) - len(before.boxes & level.targets)
        return STEP_REWARD + BOX_REWARD * gained + SOLVED_REWARD * is_solved(level, after)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._task_id, self._levels[self._task_id], self._current(), self._num_steps)

    def restore(self, snapshot: Snapshot) -> base.Observation:
        """Raises ValueError for a snapshot of other levels. The observation's reward is 0."""
        if not 0 <= snapshot.task_id < len(self._levels) or self._levels[snapshot.task_id] != snapshot.level:
            raise ValueError(f'the snapshot is of another level than task {snapshot.task_id} of this environment')
        self._task_id, _, self._state, self._num_steps = snapshot
        return self._observe(0.0)

    def oracle_command(self) -> str | None:
        """The next move of a shortest solution; None = dead end, or too few steps are left, or `ORACLE_NODES` did not do.

        Raises OracleForbidden, see `base`.
        """
        if not self._use_oracle:
            raise base.OracleForbidden('this environment was built without an oracle')
        state, level = self._current(), self._levels[self._task_id]
        if self._is_done:
            raise RuntimeError('the episode is over; there is no next command')
        known = self._plan is not None and self._plan[0] == state
        plan = self._plan[1] if known else _solution(level, state, self._max_steps - self._num_steps)
        if not plan:
            return None
        self._plan = (move(level, state, steps(level)[MOVES.index(plan[0])]), plan[1:])
        return plan[0]

    def _current(self) -> State:
        if self._state is None:
            raise RuntimeError('no episode has been started; call reset first')
        return self._state

    def _observe(self, reward: float) -> base.Observation:
        level, state = self._levels[self._task_id], self._state
        success = is_solved(level, state)
        self._is_done = success or self._num_steps >= self._max_steps
        return base.Observation(render(level, state), MOVES, reward, self._is_done, success, INSTRUCTION)


def _solution(level: Level, state: State, max_moves: int) -> tuple[str, ...] | None:
    try:
        return sokoban_solver.solve(level, state, max_moves, ORACLE_NODES)
    except sokoban_solver.TooHard:
        return None


def render(level: Level, state: State) -> str:
    """The text grid: a row per line, cells separated by blanks."""
    cells = list(_empty(level))
    for box in state.boxes:
        cells[box] = '√' if box in level.targets else 'X'
    cells[state.player] = 'S' if state.player in level.targets else 'P'
    width = level.width
    return '\n'.join([' '.join(cells[i : i + width]) for i in range(0, len(cells), width)])


@functools.lru_cache(20_000)
def _empty(level: Level) -> tuple[str, ...]:
    return tuple('#' if i in level.walls else 'O' if i in level.targets else '_' for i in range(level.height * level.width))


def make_env(split: str, *, levels: str | os.PathLike = 'generated', height: int = 6, width: int = 6, boxes: int = 1,
             min_moves: int = 4, max_moves: int = 12, num_levels: int = 1000, levels_seed: int = 0, max_steps: int = 15,
             reward: str = 'native', success_reward: float = 10.0, oracle: bool = False) -> SokobanEnv:
    """An environment over the levels of one split; `functools.partial(make_env, ...)` is picklable.

    levels: 'generated', or a file or folder of levels, see `sokoban_levels.from_files`; height to max_moves and
    levels_seed describe generated ones, see `sokoban_levels.generate`. num_levels: at most so many.
    Raises ValueError (LevelError for files).
    """
    if split not in sokoban_levels.SPLITS:
        raise ValueError(f'unknown split {split!r}; there are {", ".join(sokoban_levels.SPLITS)}')
    if num_levels < 1:
        raise ValueError(f'num_levels must be at least 1, not {num_levels}')
    room = Room(height, width, boxes, min_moves, max_moves)
    return SokobanEnv(_tasks(split, str(levels), room, num_levels, levels_seed), max_steps=max_steps, reward=reward,
                      success_reward=success_reward, use_oracle=oracle)


@functools.lru_cache(16)
def _tasks(split: str, levels: str, room: Room, num_levels: int, seed: int) -> tuple[Task, ...]:
    if levels == 'generated':
        return sokoban_levels.generate(room, split, num_levels, seed)
    return sokoban_levels.from_files(levels, split, num_levels)


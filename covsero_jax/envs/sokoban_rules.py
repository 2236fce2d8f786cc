"""Sokoban's rules: an immutable level, a small state, and one pure function that moves."""

from __future__ import annotations

from typing import NamedTuple

MOVES = ('down', 'left', 'right', 'up')


class Level(NamedTuple):
    """A room. A cell is a number, row * width + column; walls surround every cell that can be reached."""

    height: int
    width: int
    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]  # at the start
    player: int  # at the start


class State(NamedTuple):
    """Everything that changes. Boxes are alike, so they are a set."""

    player: int
    boxes: frozenset[int]


def steps(level: Level) -> tuple[int, int, int, int]:
    """What each of MOVES adds to the player's cell."""
    return (level.width, -1, 1, -level.width)


def start(level: Level) -> State:
    return State(level.player, level.boxes)


def move(level: Level, state: State, step: int) -> State:
    """The state after a step, which pushes a box that has a free cell behind it; the same object where the way is barred."""
    cell = state.player + step
    if cell in level.walls:
        return state
    if cell not in state.boxes:
        return State(cell, state.boxes)
    behind = cell + step
    if behind in level.walls or behind in state.boxes:
        return state
    return State(cell, state.boxes - {cell} | {behind})


def is_solved(level: Level, state: State) -> bool:
    """All boxes stand on targets; there is nothing in between."""
    return state.boxes == level.targets

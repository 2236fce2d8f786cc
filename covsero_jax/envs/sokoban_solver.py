"""Shortest solutions of Sokoban levels, in moves of the player, by A*."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Iterable

from covsero_jax.envs.sokoban_rules import MOVES, Level, State, is_solved, steps

MAX_NODES = 2_000_000  # some minutes, and about 1 GB
_EXACT_BOXES = 6  # up to so many boxes the bound matches boxes with targets


class TooHard(RuntimeError):
    """The search met its limit before it knew."""


@functools.lru_cache(4096)
def push_distances(level: Level) -> dict[int, tuple[tuple[int, int], ...]]:
    """cell -> ((number of a target, pushes that a box here needs at least to get there), ...).

    Other boxes are left out of account, so the truth may be more. Cells that are missing are dead: a box there is lost.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    size = level.height * level.width
    for number, target in enumerate(sorted(level.targets)):
        distance, queue = {target: 0}, deque([target])
        while queue:
            cell = queue.popleft()
            for step in steps(level):
                before, player = cell - step, cell - 2 * step  # where the box was pushed from, and by whom
                if 0 <= player < size and {before, player}.isdisjoint(level.walls) and before not in distance:
                    distance[before] = distance[cell] + 1
                    queue.append(before)
        for cell, pushes in distance.items():
            found.setdefault(cell, []).append((number, pushes))
    return {cell: tuple(entries) for cell, entries in found.items()}


def lower_bound(level: Level, boxes: Iterable[int]) -> int | None:
    """Pushes that are needed at least, every box with a target of its own; None = some box has none left: a dead end.

    With many boxes each takes its nearest target, which is less exact and much cheaper.
    """
    distances = push_distances(level)
    rows = [distances.get(box, ()) for box in boxes]
    if not all(rows):
        return None
    if len(rows) > _EXACT_BOXES:
        return sum(min(pushes for _, pushes in row) for row in rows)
    best = {0: 0}  # set of taken targets, as bits -> fewest pushes
    for row in rows:
        following: dict[int, int] = {}
        for taken, pushes in best.items():
            for number, more in row:
                bit = 1 << number
                if not taken & bit and pushes + more < following.get(taken | bit, 1 << 30):
                    following[taken | bit] = pushes + more
        best = following
    return min(best.values(), default=None)


def solve(level: Level, state: State, max_moves: int | None = None, max_nodes: int = MAX_NODES) -> tuple[str, ...] | None:
    """The fewest moves that solve the level from `state`; None = it is lost, or needs more than max_moves.

    A* over (player, boxes) with `lower_bound`, which no move changes by more than one: the first solution found is a
    shortest one. Equal costs are searched last in, first out, so the answer is always the same one.
    Raises TooHard after max_nodes expanded states.
    """
    bound = lower_bound(level, state.boxes)
    if bound is None or (max_moves is not None and bound > max_moves):
        return None
    bounds, parents, costs = {state.boxes: bound}, {state: (state, -1)}, {state: 0}
    queue, ticket = [(bound, 0, 0, state)], itertools.count(-1, -1)
    for expanded in itertools.count(1):
        if not queue:
            return None
        _, _, cost, here = heapq.heappop(queue)
        if cost > costs[here]:
            continue
        if is_solved(level, here):
            return _path(parents, here)
        if expanded > max_nodes:
            raise TooHard(f'no answer after {max_nodes:,} states')
        for number, there in enumerate(_followers(level, here)):
            if there is None or cost + 1 >= costs.get(there, 1 << 30):
                continue
            if there.boxes not in bounds:
                bounds[there.boxes] = lower_bound(level, there.boxes)
            bound = bounds[there.boxes]
            if bound is None or (max_moves is not None and cost + 1 + bound > max_moves):
                continue
            costs[there], parents[there] = cost + 1, (here, number)
            heapq.heappush(queue, (cost + 1 + bound, next(ticket), cost + 1, there))
    raise AssertionError('unreachable')


def _followers(level: Level, state: State) -> list[State | None]:
    """What each of MOVES leads to; None where the way is barred. `sokoban_rules.move`, inlined for speed."""
    out, walls, boxes = [], level.walls, state.boxes
    for step in steps(level):
        cell = state.player + step
        if cell in walls:
            out.append(None)
        elif cell not in boxes:
            out.append(State(cell, boxes))
        else:
            behind = cell + step
            out.append(None if behind in walls or behind in boxes else State(cell, boxes - {cell} | {behind}))
    return out


def _path(parents: dict[State, tuple[State, int]], state: State) -> tuple[str, ...]:
    moves = []
    while True:
        state, number = parents[state]
        if number < 0:
            return tuple(moves[::-1])
        moves.append(MOVES[number])

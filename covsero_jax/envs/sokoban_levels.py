"""Sokoban's levels: what they are, reading them from files, and generating them by the length of the shortest solution."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tqdm

from covsero_jax.envs import cache, sokoban_solver
from covsero_jax.envs.base import evenly_spaced
from covsero_jax.envs.sokoban_rules import Level, start, steps

VERSION = 1  # of generated levels
SPLITS = ('train', 'valid', 'test')
WALL_SHARE = 0.12  # of a generated room's inner cells
MAX_TRIES = 50_000  # drawn rooms for one accepted level


class LevelError(ValueError):
    """Levels that cannot be used; the message names the file, the level and what is wrong."""


class Task(NamedTuple):
    """A level with its name and the row of the success table that it counts in."""

    name: str
    kind: str
    level: Level


# ----------------------------------------------------------------------------------------------------------- texts

_PLAYER, _BOX, _TARGET = '@+', '$*', '.*+'  # the usual file format: '*' and '+' stand on a target; ' ' is floor


def parse(rows: Sequence[str], where: str) -> Level:
    """A level in the usual format (XSB): '#' wall, '@' player, '$' box, '.' target, '*' box and '+' player on a target.

    Raises LevelError, which begins with `where`, for other characters, no or several players, no boxes, as many boxes as
    targets not being there, a level that is solved already, and a room with a hole in its wall.
    """
    width = max(map(len, rows))
    cells = ''.join(row.ljust(width) for row in rows)
    found = {name: frozenset(i for i, cell in enumerate(cells) if cell in symbols)
             for name, symbols in (('wall', '#'), ('player', _PLAYER), ('box', _BOX), ('target', _TARGET))}
    level = Level(len(rows), width, found['wall'], found['target'], found['box'], min(found['player'], default=0))
    if unknown := set(cells) - set('# _-' + _PLAYER + _BOX + _TARGET):
        problem = f'unknown characters {" ".join(sorted(unknown))!r}; levels consist of # @ $ . * + and blanks'
    elif len(found['player']) != 1:
        problem = f'{len(found["player"]) or "no"} players, but there must be one (@, or + on a target)'
    elif not level.boxes:
        problem = 'no boxes'
    elif len(level.boxes) != len(level.targets):
        problem = f'{len(level.boxes)} boxes, but {len(level.targets)} targets'
    elif level.boxes == level.targets:
        problem = 'it is solved already'
    elif any(i // width in (0, len(rows) - 1) or i % width in (0, width - 1) for i in inside(level)):
        problem = 'the player can leave through a hole in the wall'
    else:
        return level
    raise LevelError(f'{where}: {problem}')


def inside(level: Level) -> frozenset[int]:
    """The cells that the player could reach if there were no boxes; those of an open room end at its border."""
    seen, stack, size = {level.player}, [level.player], level.height * level.width
    while stack:
        cell = stack.pop()
        row, column = divmod(cell, level.width)
        if 0 < row < level.height - 1 and 0 < column < level.width - 1:
            new = [c for d in steps(level) if 0 <= (c := cell + d) < size and c not in level.walls | seen]
            seen.update(new)
            stack += new
    return frozenset(seen)


def to_text(level: Level) -> str:
    """The inverse of `parse`."""
    def symbol(cell: int) -> str:
        on_target = cell in level.targets
        if cell == level.player:
            return '+' if on_target else '@'
        if cell in level.boxes:
            return '*' if on_target else '$'
        return '.' if on_target else '#' if cell in level.walls else ' '

    return '\n'.join(''.join(symbol(row * level.width + column) for column in range(level.width))
                     for row in range(level.height))


def canonical(level: Level) -> str:
    """The same text for a level, its rotations and its reflections: no split has a twin of another split's level."""
    rows, twins = to_text(level).split('\n'), []
    for _ in range(4):
        rows = [''.join(column) for column in zip(*rows[::-1], strict=True)]
        twins += ['\n'.join(rows), '\n'.join(row[::-1] for row in rows)]
    return min(twins)


def split_of(level: Level) -> str:
    """The split a level belongs to, decided by its content: 80 % train, 10 % valid, 10 % test."""
    share = zlib.crc32(canonical(level).encode()) / 2**32
    return 'test' if share < 0.1 else 'valid' if share < 0.2 else 'train'


# ----------------------------------------------------------------------------------------------------------- files


def read_file(path: str | os.PathLike) -> list[tuple[str, Level]]:
    """(title, level) of a file such as Boxoban's: levels stand between blank lines or lines with '; title'."""
    path = pathlib.Path(path)
    try:
        lines = path.read_text('utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LevelError(f'{path} cannot be read: {error}') from error
    found, rows, title = [], [], ''
    for number, line in enumerate([*lines, ''], 1):
        if line.strip() and not line.startswith(';'):
            rows.append(line.rstrip())
            continue
        if rows:
            found.append((title, parse(rows, f'{path}, level {len(found)} {title!r} (line {number - len(rows)})')))
            rows, title = [], ''
        if line.startswith(';'):
            title = line[1:].strip()
    if not found:
        raise LevelError(f'{path} has no levels')
    return found


def from_files(path: str | os.PathLike, split: str, num_levels: int) -> tuple[Task, ...]:
    """Levels of a file, or of all *.txt of a folder, in order; equal ones once; evenly spaced if there are too many.

    A folder with subfolders train, valid, test (Boxoban's layout) is split as they are, everything else by `split_of`.
    """
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise LevelError(f'{path}: no such file or folder; use a file of levels, a folder of *.txt, or levels=generated')
    folders = [path / name for name in SPLITS if (path / name).is_dir()]
    if folders and path / split not in folders:
        raise LevelError(f'{path} has no split {split!r}, only {", ".join(folder.name for folder in folders)}')
    place = path / split if folders else path
    files = sorted(place.glob('*.txt')) if place.is_dir() else [place]
    if not files:
        raise LevelError(f'{place} has no *.txt files')
    chosen: dict[Level, Task] = {}
    for file in files:
        for number, (_, level) in enumerate(read_file(file)):
            if folders or split_of(level) == split:
                plural = '' if len(level.boxes) == 1 else 'es'
                chosen.setdefault(level, Task(f'{file.stem}-{number:05d}', f'{len(level.boxes)} box{plural}', level))
    if not chosen:
        raise LevelError(f'{path}: none of its levels falls into split {split!r}; use more levels, or subfolders '
                         f'{", ".join(SPLITS)}')
    return evenly_spaced(tuple(chosen.values()), num_levels)


# ------------------------------------------------------------------------------------------------------- generator


class Room(NamedTuple):
    """What is asked of generated levels. Moves: of the shortest solution, inclusive."""

    height: int
    width: int
    boxes: int
    min_moves: int
    max_moves: int


def generate(room: Room, split: str, num_levels: int, seed: int) -> tuple[Task, ...]:
    """Distinct solvable levels of one split; the first n are the same however many are asked for.

    A room with random walls, boxes, targets and player is accepted when `split_of` gives it to this split and its shortest
    solution has min_moves to max_moves moves. Kept in the cache folder. Raises ValueError for rooms that cannot exist.
    """
    if room.boxes < 1 or (room.height - 2) * (room.width - 2) < 2 * room.boxes + 1 or min(room[:2]) < 3:
        raise ValueError(f'a room of {room.height}x{room.width} cells, walls included, has no place for {room.boxes} boxes, '
                         'as many targets and a player')
    if not 1 <= room.min_moves <= room.max_moves:
        raise ValueError(f'min_moves={room.min_moves} must be at least 1 and at most max_moves={room.max_moves}')
    if num_levels < 1:
        raise ValueError(f'num_levels must be at least 1, not {num_levels}')
    file = cache.folder() / 'sokoban' / f'v{VERSION}-{"-".join(map(str, room))}-{seed}-{split}-{num_levels}.txt'
    if file.is_file():
        kept = [(level, int(moves)) for moves, level in read_file(file)]
    else:
        drawn = _draw(room, split, seed)
        kept = [next(drawn) for _ in tqdm.trange(num_levels, desc='levels', leave=False, delay=1)]
        with cache.replacing(file) as temporary:
            temporary.write_text(''.join(f'; {moves}\n{to_text(level)}\n\n' for level, moves in kept))
    return tuple(Task(f'{room.height}x{room.width}-{room.boxes}-{i:05d}', _kind(moves), level)
                 for i, (level, moves) in enumerate(kept))


def _kind(moves: int) -> str:
    return f'{moves // 3 * 3:02d}-{moves // 3 * 3 + 2:02d} moves'


def _draw(room: Room, split: str, seed: int) -> Iterator[tuple[Level, int]]:
    """Accepted (level, moves of its shortest solution), for ever."""
    seen = set()
    for index in itertools.count():
        draw = random.Random(f'sokoban/{room}/{seed}/{split}/{index}')
        for _ in range(MAX_TRIES):
            level = _room(room, draw)
            if level.boxes == level.targets or level in seen or split_of(level) != split:
                continue
            moves = sokoban_solver.solve(level, start(level), room.max_moves)
            if moves is not None and len(moves) >= room.min_moves:
                break
        else:
            raise ValueError(f'{MAX_TRIES:,} drawn rooms and none like {room} for split {split!r} after {index} levels: ask for '
                             'fewer levels, a larger room or other numbers of moves')
        seen.add(level)
        yield level, len(moves)


def _room(room: Room, draw: random.Random) -> Level:
    height, width, boxes = room[:3]
    inner = [row * width + column for row in range(1, height - 1) for column in range(1, width - 1)]
    while True:
        free = [cell for cell in inner if draw.random() >= WALL_SHARE]
        if len(free) > 2 * boxes:
            break
    chosen = draw.sample(free, 2 * boxes + 1)
    walls = frozenset(range(height * width)) - set(free)
    level = Level(height, width, walls, frozenset(chosen[:boxes]), frozenset(chosen[boxes:-1]), chosen[-1])
    return level._replace(walls=frozenset(range(height * width)) - inside(level) - level.targets - level.boxes)

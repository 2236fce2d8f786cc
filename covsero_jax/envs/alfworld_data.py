"""Folders of ALFWorld games and their compact cache.

Games lie in the official layout, `FOLDER/json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl`; FOLDER is what the alfworld package
calls ALFWORLD_DATA, or a folder of generated games.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import warnings
import zipfile
import zlib
from collections.abc import Callable

from covsero_jax.envs import alfworld_engine, base, cache

LAYOUT = 'json_2.1.1'  # the folder name that alfworld-download uses for every version of the data
GAME_FILE = 'game.tw-pddl'
TASK_TYPES = (
    'pick_and_place_simple',
    'look_at_obj_in_light',
    'pick_clean_then_place_in_recep',
    'pick_heat_then_place_in_recep',
    'pick_cool_then_place_in_recep',
    'pick_two_obj_and_place',
)
CACHE_FORMAT = 2
PARSED_GAMES = 256  # kept per process: parsing a kitchen takes milliseconds, keeping it 0.2 MB


class AlfworldDataError(ValueError):
    """A folder of games that cannot be used; the message names the folder or file and says what to do."""


@dataclasses.dataclass(frozen=True)
class GameEntry:
    """One game of a split.

    id: its folder below the data folder, with '/'; digest: of the problem and the task; plan_length: commands of the
    expert plan that the file holds (`walkthrough`), 0 where it holds none.
    """

    id: str
    task: str
    task_type: str
    digest: str
    plan_length: int


class GameSet:
    """The games of one split, sorted by id, parsed when first played.

    skipped: reason -> how many games of the folder were left out. hash: names the manifest; equal exactly when ids,
    problems and task sentences are, on any machine.
    """

    def __init__(self, folder: pathlib.Path, entries: tuple[GameEntry, ...], skipped: dict[str, int],
                 cache: pathlib.Path | None):
        self.folder, self.entries, self.skipped, self._cache_path = folder, entries, skipped, cache
        self.names = tuple(entry.id for entry in entries)
        self.types = tuple(entry.task_type for entry in entries)
        self.plan_lengths = tuple(entry.plan_length for entry in entries)
        lines = ''.join(f'{entry.id} {entry.digest}\n' for entry in entries)
        self.hash = hashlib.sha256(lines.encode()).hexdigest()[:16]
        self.game = functools.lru_cache(maxsize=PARSED_GAMES)(self._parse)

    def __len__(self) -> int:
        return len(self.entries)

    def path(self, task_id: int) -> pathlib.Path:
        """The game file, for the official engine."""
        return self.folder / self.names[task_id] / GAME_FILE

    def subset(self, max_games: int) -> GameSet:
        """At most `max_games` games, evenly spaced in the sorted list, so that all task types stay represented."""
        if max_games < 1:
            raise ValueError(f'max_games must be at least 1, not {max_games}')
        return GameSet(self.folder, base.evenly_spaced(self.entries, max_games), self.skipped, self._cache_path)

    def _parse(self, task_id: int) -> alfworld_engine.Game:
        entry = self.entries[task_id]
        if self._zip is not None:
            try:
                return alfworld_engine.Game(self._zip.read(entry.id).decode(), entry.task)
            except (zipfile.BadZipFile, zlib.error, EOFError, OSError):
                pass  # a damaged member: the game file itself is still there
            except alfworld_engine.GameError as error:
                raise alfworld_engine.GameError(f'{self.path(task_id)}: {error}') from error
        return alfworld_engine.read_game(self.path(task_id))

    @functools.cached_property
    def _zip(self) -> zipfile.ZipFile | None:
        return zipfile.ZipFile(self._cache_path) if self._cache_path else None


def find_games(data_folder: str | pathlib.Path | None, split: str) -> GameSet:
    """All playable games of `split`, sorted by path; `data_folder=None` means the variable ALFWORLD_DATA.

    As the official package does, games with movable receptacles or slicing and games not marked solvable are left out;
    `GameSet.skipped` counts them. The result is cached in one file under COVSERO_CACHE (default ~/.cache/covsero_jax),
    so that a second start reads no game. Raises AlfworldDataError.
    """
    folder = _data_folder(data_folder)
    root = folder / LAYOUT / split
    if not root.is_dir():
        below = folder / LAYOUT
        splits = sorted(p.name for p in below.iterdir() if p.is_dir()) if below.is_dir() else []
        raise AlfworldDataError(
            f'no split {split!r}: folder {root} does not exist'
            + (f'; found: {", ".join(splits)}' if splits else f"; {folder} is not an ALFWorld data folder (run "
               f"'alfworld-download --data-dir {folder}')"))
    files, skipped = _game_files(root)
    stats = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    fingerprint = hashlib.sha256(repr(
        [CACHE_FORMAT, sorted(skipped.items()), [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]
    ).encode()).hexdigest()
    key = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]
    cache_file = cache.folder() / 'alfworld' / f'{split}-{key}.zip'
    index = _read_index(cache_file, fingerprint)
    if index is None:
        index, cache_file = _build_cache(folder, files, skipped, cache_file, fingerprint)
    entries = tuple(GameEntry(*row) for row in index['games'])
    if not entries:
        reasons = ', '.join(f'{count} {reason}' for reason, count in sorted(index['skipped'].items()))
        raise AlfworldDataError(f'0 playable games in {root} ({reasons or f"no {GAME_FILE} below it"}); '
                                f'check the folder, or download the data again')
    return GameSet(folder, entries, index['skipped'], cache_file)


def _data_folder(data_folder: str | pathlib.Path | None) -> pathlib.Path:
    named = data_folder or os.environ.get('ALFWORLD_DATA')
    if not named:
        raise AlfworldDataError('the variable ALFWORLD_DATA is not set; set it to the folder that contains '
                                f"'{LAYOUT}' (alfworld-download makes one), or use the embedded games")
    folder = pathlib.Path(named).expanduser().absolute()
    if not folder.is_dir():
        source = 'the data folder' if data_folder else 'ALFWORLD_DATA names a folder that'
        raise AlfworldDataError(f'{source} does not exist: {folder}')
    return folder


def _game_files(root: pathlib.Path) -> tuple[list[pathlib.Path], collections.Counter]:
    files, skipped = [], collections.Counter()
    for where, _, names in os.walk(root, followlinks=True):
        if GAME_FILE not in names:
            skipped['without a game file'] += 'traj_data.json' in names
            continue
        # the official package looks at the whole path; below the root is what it means
        place = where[len(str(root)):]
        if 'movable' in place:
            skipped['with movable receptacles'] += 1
        elif 'Sliced' in place:
            skipped['with slicing'] += 1
        else:
            files.append(pathlib.Path(where) / GAME_FILE)
    return sorted(files, key=lambda path: path.as_posix()), +skipped


def _read_index(cache: pathlib.Path, fingerprint: str) -> dict | None:
    """The index of a cache file; None when there is none, it is out of date or damaged."""
    try:
        with zipfile.ZipFile(cache) as file:
            index = json.loads(file.read('index.json'))
        return index if index['fingerprint'] == fingerprint else None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError):
        return None


def _build_cache(folder: pathlib.Path, files: list[pathlib.Path], skipped: collections.Counter, cache_file: pathlib.Path,
                 fingerprint: str) -> tuple[dict, pathlib.Path | None]:
    """Read every game file once and keep what is needed; where no cache can be written, warn and do without."""
    try:
        with (cache.replacing(cache_file) as temporary,
              zipfile.ZipFile(temporary, 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as archive):
            index = _read_entries(folder, files, skipped, archive.writestr) | {'fingerprint': fingerprint}
            archive.writestr('index.json', json.dumps(index))
        return index, cache_file
    except OSError as error:
        warnings.warn(f'the list of games is not cached ({cache_file}: {error.strerror}); every start reads all game files. '
                      'Set COVSERO_CACHE to a folder that can be written.', stacklevel=3)
        return _read_entries(folder, files, skipped, lambda name, text: None), None


def _read_entries(folder: pathlib.Path, files: list[pathlib.Path], skipped: collections.Counter,
                  store: Callable[[str, str], None]) -> dict:
    games, skipped = [], collections.Counter(skipped)
    for path in files:
        record = _read_record(path)
        if not record.get('solvable'):
            skipped['not marked solvable'] += 1
            continue
        try:
            problem, task = record['pddl_problem'], alfworld_engine.task_sentence(record['grammar'])
            plan_length = len(record.get('walkthrough') or ())
        except (KeyError, TypeError) as error:
            raise AlfworldDataError(f'{path}: not an ALFWorld game (no field {error})') from error
        except alfworld_engine.GameError as error:
            raise AlfworldDataError(f'{path}: {error}') from error
        name = path.parent.relative_to(folder).as_posix()
        prefix = path.parent.parent.name.partition('-')[0]
        digest = hashlib.sha256(f'{task}\n{problem}'.encode()).hexdigest()[:16]
        games.append((name, task, prefix if prefix in TASK_TYPES else 'other', digest, plan_length))
        store(name, problem)
    return {'games': games, 'skipped': dict(skipped)}


def _read_record(path: pathlib.Path) -> dict:
    try:
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise AlfworldDataError(f'{path}: cannot be read ({error.strerror})') from error
    except ValueError as error:
        raise AlfworldDataError(f'{path}: not an ALFWorld game (not JSON: {error})') from error
    if not isinstance(record, dict):
        raise AlfworldDataError(f'{path}: not an ALFWorld game (a {type(record).__name__}, not an object)')
    return record

"""New ALFWorld games in ALFWorld's own file format: seeded, of any size, solvable by construction.

A *scene* is a fixed set of receptacles at fixed locations, a function of (seed, difficulty, scene number). A *game*
puts objects into a scene and asks for one of the six tasks, a function of (seed, difficulty, split, index): game i
never depends on how many games are made. As in ALFWorld, valid_seen plays new games in scenes of train, valid_unseen
plays in scenes that train never sees. Every game comes with a shortest plan, checked by playing it.

What real games have and these do not: an object in two receptacles at once, objects lying on the floor, and scenery
that no command can reach (windows, chairs).
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import random
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping

from covsero_jax.envs import alfworld_oracle, alfworld_pddl
from covsero_jax.envs import alfworld_rooms as rooms
from covsero_jax.envs.alfworld_engine import NOTHING_HAPPENS, Game
from covsero_jax.envs.alfworld_rooms import DIFFICULTIES, Difficulty

__all__ = ['DIFFICULTIES', 'Difficulty', 'GeneratedGame', 'ensure_games', 'generate_game', 'write_games']

VERSION = 1  # of the games: raise it when the same seed gives other games, and caches are rebuilt
SPLITS = ('train', 'valid_seen', 'valid_unseen')
MANIFEST = 'manifest.json'
Progress = Callable[[int, int], None]  # (games written, games in all)


@dataclasses.dataclass(frozen=True)
class Task:
    """One task type. rooms: room kind -> how many of the real games of this type play there.

    able: the objects that can be treated so; appliance: the receptacle that does it, which is never the destination.
    """

    sentences: tuple[str, str]
    rooms: Mapping[str, int]
    condition: str = ''
    able: frozenset[str] | None = None
    appliance: str = ''
    copies: int = 1


TASKS = {
    'pick_and_place_simple': Task(
        ('put a {obj} in {recep}', 'put some {obj} on {recep}'),
        {'kitchen': 101, 'livingroom': 237, 'bedroom': 263, 'bathroom': 294}),
    'look_at_obj_in_light': Task(
        ('look at {obj} under the {recep}', 'examine the {obj} with the {recep}'), {'livingroom': 54, 'bedroom': 304}),
    'pick_clean_then_place_in_recep': Task(
        ('put a clean {obj} in {recep}', 'clean some {obj} and put it in {recep}'), {'kitchen': 568, 'bathroom': 177},
        '(cleanable ?o) (isClean ?o) ', rooms.CLEANABLE, 'SinkBasin'),
    'pick_heat_then_place_in_recep': Task(
        ('put a hot {obj} in {recep}', 'heat some {obj} and put it in {recep}'), {'kitchen': 523},
        '(heatable ?o) (isHot ?o) ', rooms.HEATABLE, 'Microwave'),
    'pick_cool_then_place_in_recep': Task(
        ('put a cool {obj} in {recep}', 'cool some {obj} and put it in {recep}'), {'kitchen': 607},
        '(coolable ?o) (isCool ?o) ', rooms.COOLABLE, 'Fridge'),
    'pick_two_obj_and_place': Task(
        ('put two {obj} in {recep}', 'find two {obj} and put them in {recep}'),
        {'kitchen': 132, 'livingroom': 242, 'bedroom': 263, 'bathroom': 262}, copies=2),
}
TASK_TYPES = tuple(TASKS)  # game i is of type i % 6: every split is balanced
LIGHT, LAMP = 'look_at_obj_in_light', 'DeskLamp'


@dataclasses.dataclass(frozen=True)
class GeneratedGame:
    """name: the game's folder below the data folder; task: the sentence without its full stop; problem: PDDL.

    walkthrough: a shortest plan; scene: the scene's number; pddl_params: the targets, in ALFWorld's own words.
    """

    name: str
    task_type: str
    task: str
    problem: str
    walkthrough: tuple[str, ...]
    scene: int
    pddl_params: Mapping[str, str | bool]


@dataclasses.dataclass(frozen=True)
class _Draw:
    """A task and where everything stands. place: the receptacle type to put it in, or the lamp to hold it at."""

    task_type: str
    target: str
    place: str
    objects: tuple[tuple[str, str, rooms.Receptacle], ...]  # (PDDL name, type, where)


def generate_game(seed: int, split: str, index: int, difficulty: Difficulty) -> GeneratedGame:
    """Game `index` of a split; valid_seen game i plays in the scene of train game i.

    Raises ValueError for an unknown split or when no such game exists.
    """
    if split not in SPLITS:
        raise ValueError(f'unknown split {split!r}; the splits are {", ".join(SPLITS)}')
    task_type = TASK_TYPES[index % len(TASK_TYPES)]
    rng = random.Random(f'{seed}/{split}/{index}/{difficulty}')
    seen = generate_game(seed, 'train', index, difficulty).scene if split == 'valid_seen' else None
    for _ in range(1000):
        scene = seen or _draw_scene(rng, task_type, unseen=split == 'valid_unseen')
        receptacles = rooms.build_scene(seed, scene, difficulty)
        draw = _draw_game(rng, task_type, scene, receptacles, difficulty)
        if draw is None or not _belongs(draw, scene, split):
            continue
        task = rng.choice(TASKS[task_type].sentences).format(obj=draw.target.lower(), recep=draw.place.lower())
        trial = f'trial_T{rng.randint(20200101, 20200128)}_{rng.randrange(240000):06d}_{index:06d}'
        start, = alfworld_pddl.location_names(rng, 1, taken={r.location for r in receptacles})
        problem = _problem(trial, draw, receptacles, start)
        walkthrough = _solve(problem, task)
        if walkthrough and len(walkthrough) <= (difficulty.max_plan or len(walkthrough)):
            name = f'json_2.1.1/{split}/{task_type}-{draw.target}-None-{draw.place}-{scene}/{trial}'
            parent, lamp = ('', LAMP) if task_type == LIGHT else (draw.place, '')
            params = {'object_target': draw.target, 'parent_target': parent, 'toggle_target': lamp,
                      'mrecep_target': '', 'object_sliced': False}
            return GeneratedGame(name, task_type, task, problem, walkthrough, scene, params)
    raise ValueError(f'no {task_type} game in 1000 draws with {difficulty}: allow longer plans or more receptacles')


def _draw_scene(rng: random.Random, task_type: str, *, unseen: bool) -> int:
    kind = rooms.weighted_choice(rng, TASKS[task_type].rooms)
    return rng.choice([n for n in rooms.ROOMS[kind].scenes if (n in rooms.UNSEEN_SCENES) == unseen])


def _draw_game(rng: random.Random, task_type: str, scene: int, receptacles: tuple[rooms.Receptacle, ...],
               difficulty: Difficulty) -> _Draw | None:
    """A task and a place for every object, or None when this scene cannot hold the task."""
    room, task, present = rooms.ROOMS[rooms.room_kind(scene)], TASKS[task_type], {r.kind for r in receptacles}
    types = sorted(room.usual) + [o for o in sorted(room.occasional) if rng.random() < 0.3]
    hosts = {o: [r for r in sorted(present) if o in rooms.FITS.get(r, ())] for o in types}
    extras = {o: sorted(present & rooms.EXTRAS[o]) for o in room.extras}
    if task_type == LIGHT:
        targets = [(o, LAMP) for o in types if hosts[o] and extras[LAMP]]
    else:
        targets = [(o, r) for o in types if (task.able is None or o in task.able) and len(hosts[o]) > 1
                   for r in hosts[o] if r not in rooms.NOT_A_DESTINATION and r != task.appliance]
    if not targets:
        return None
    target = rng.choice(sorted({o for o, _ in targets}))
    place = rng.choice([r for o, r in targets if o == target])
    hosts[target] = [r for r in hosts[target] if r != place]  # nothing of the task is done at the start
    others = [o for o in types if o != target and hosts[o]]
    chosen = rng.sample(others, min(rng.randint(*difficulty.distractors), len(others)))
    counts = {o: rng.randint(1, difficulty.copies) for o in chosen}
    counts[target] = max(task.copies, rng.randint(1, difficulty.copies))
    for extra, where in extras.items():
        if where and (extra == place or rng.random() < difficulty.extras):
            hosts[extra], counts[extra] = where, 1
    objects = []
    for obj in sorted(counts):
        for name in sorted(alfworld_pddl.entity_names(rng, obj, counts[obj])):
            host = rng.choice(hosts[obj])
            objects.append((name, obj, rng.choice([r for r in receptacles if r.kind == host])))
    return _Draw(task_type, target, place, tuple(objects))


def _belongs(draw: _Draw, scene: int, split: str) -> bool:
    """Train and valid_seen share scenes, so the content decides: the same game can never be in both."""
    where = sorted((obj, receptacle.name) for _, obj, receptacle in draw.objects)
    held_out = zlib.crc32(repr((scene, draw.task_type, draw.target, draw.place, where)).encode()) % 4 == 0
    return split == 'valid_unseen' or held_out == (split == 'valid_seen')


def _problem(trial: str, draw: _Draw, receptacles: tuple[rooms.Receptacle, ...], start: str) -> str:
    object_types, task = {obj for _, obj, _ in draw.objects}, TASKS[draw.task_type]
    entities = [(f'{obj}Type', 'otype') for obj in object_types] + [(name, 'object') for name, _, _ in draw.objects]
    facts = [f'atLocation agent1 {start}']
    for r in receptacles:
        entities += [(r.name, 'receptacle'), (f'{r.kind}Type', 'rtype'), (r.location, 'location')]
        facts += [f'receptacleType {r.name} {r.kind}Type', f'receptacleAtLocation {r.name} {r.location}']
        facts += [f'openable {r.name}'] * r.openable
    for kind in sorted({r.kind for r in receptacles} & rooms.FITS.keys()):
        facts += [f'canContain {kind}Type {obj}Type' for obj in sorted(object_types & rooms.FITS[kind])]
    for name, obj, r in draw.objects:
        facts += [f'objectType {name} {obj}Type', f'inReceptacle {name} {r.name}']
        facts += [f'objectAtLocation {name} {r.location}']
        facts += [f'{attribute} {name}' for attribute, types in rooms.ATTRIBUTES.items() if obj in types]
    goal = alfworld_pddl.goal_text(draw.target, draw.place, lamp=draw.task_type == LIGHT, copies=task.copies,
                                   condition=task.condition)
    return alfworld_pddl.problem(f'plan_{trial}', [*entities, (start, 'location')], facts, goal)


def _solve(problem: str, task: str) -> tuple[str, ...] | None:
    """A shortest plan, played to its end; None when there is none or nothing to do."""
    state = Game(problem, task).initial_state()
    commands = alfworld_oracle.plan(state)
    if not commands:
        return None
    if any(state.step(command) == NOTHING_HAPPENS for command in commands) or not state.won():
        raise RuntimeError(f'the oracle plan {commands} of a generated game does not win; this is a bug')
    return tuple(commands)


def write_games(folder: str | os.PathLike, *, seed: int, difficulty: Difficulty, num_games: Mapping[str, int],
                progress: Progress | None = None) -> None:
    """Write `num_games[split]` games per split in ALFWorld's layout, and a manifest; all of it or nothing.

    The folder then serves as ALFWORLD_DATA. Raises FileExistsError when it exists, ValueError for a bad request.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f'{folder} exists: delete it or choose another folder')
    for split, count in num_games.items():
        if split not in SPLITS or count < 0:
            raise ValueError(f'num_games[{split!r}] = {count}: need counts >= 0 of {", ".join(SPLITS)}')
    todo = [(split, index) for split, count in num_games.items() for index in range(count)]
    partial = folder.parent / f'.{folder.name}.{uuid.uuid4().hex}'
    try:
        partial.mkdir(parents=True)
        for done, (split, index) in enumerate(todo):
            game = generate_game(seed, split, index, difficulty)
            (partial / game.name).mkdir(parents=True)
            for name, text in alfworld_pddl.game_files(
                    game.name.rpartition('/')[2], game.task_type, game.task, game.problem, game.walkthrough, game.scene,
                    dict(game.pddl_params)).items():
                (partial / game.name / name).write_text(text, encoding='utf-8')
            if progress is not None:
                progress(done + 1, len(todo))
        manifest = {**_request(seed, difficulty, num_games), 'sha256': _digest(partial)}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding='utf-8')
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def ensure_games(cache_folder: str | os.PathLike, *, difficulty: Difficulty, seed: int, num_games: Mapping[str, int],
                 progress: Progress | None = None) -> pathlib.Path:
    """The folder of these games inside `cache_folder`, written when it is missing, damaged or of another version.

    Any number of processes may ask at once: one writes, the others wait for it.
    """
    cache, request = pathlib.Path(cache_folder), _request(seed, difficulty, num_games)
    key = json.dumps({**request, 'version': None}, sort_keys=True).encode()
    folder = cache / f'alfworld-seed{seed}-{hashlib.sha256(key).hexdigest()[:8]}'
    if _intact(folder, request):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / '.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _intact(folder, request):
            for leftover in (folder, *cache.glob(f'.{folder.name}.*')):  # damaged, or of a writer that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            write_games(folder, seed=seed, difficulty=difficulty, num_games=num_games, progress=progress)
    return folder


def _request(seed: int, difficulty: Difficulty, num_games: Mapping[str, int]) -> dict:
    """What a manifest says was asked for, in the form in which JSON gives it back."""
    request = {'version': VERSION, 'seed': seed, 'difficulty': dataclasses.asdict(difficulty),
               'num_games': dict(num_games)}
    return json.loads(json.dumps(request))


def _intact(folder: pathlib.Path, request: dict) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding='utf-8'))
        return manifest == {**request, 'sha256': _digest(folder)}
    except (OSError, ValueError):
        return False


def _digest(folder: pathlib.Path) -> str:
    """A hash of the names and bytes of all game files."""
    total = hashlib.sha256()
    for path in sorted(folder.glob('json_2.1.1/*/*/*/*')):
        total.update(f'{path.relative_to(folder)}\n'.encode())
        total.update(path.read_bytes())
    return total.hexdigest()

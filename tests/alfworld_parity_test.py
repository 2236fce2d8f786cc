"""The native engine against the official one, live: real games (ALFWORLD_DATA) and generated ones.

Slow: run `pytest -m slow tests/alfworld_parity_test.py -s` where `pip install -e '.[alfworld]'` was done; skipped
elsewhere. PARITY_GAMES sets the games per source (default 12, spread over the six task types). Text, admissible
commands, won, score and done must be equal after every command.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable

import pytest

from covsero_jax import workers
from covsero_jax.envs import (
    alfworld,
    alfworld_data,
    alfworld_engine,
    alfworld_games,
    alfworld_oracle,
    alfworld_textworld,
)

pytest.importorskip('textworld', reason="the official engine is not installed (pip install -e '.[alfworld]')")
pytest.importorskip('alfworld', reason="the official engine is not installed (pip install -e '.[alfworld]')")
pytestmark = pytest.mark.slow

NUM_GAMES = int(os.environ.get('PARITY_GAMES', '12'))
WALK_STEPS = 40
INVALID = ('', 'Look', 'go to nowhere 1', 'put pen 1 in/on desk 1', 'take', 'xyzzy', 'move a to b', 'go to loc 3')
BLOCKING = ('papertowelrolltype', 'teddybeartype')  # fit no receptacle in most games


@pytest.fixture(scope='module', params=['real data', 'generated tiny', 'generated real'])
def games(request, tmp_path_factory) -> alfworld_data.GameSet:
    """All games of a source; the tests draw from it."""
    source, name = request.param.split()
    if source == 'generated':
        folder = alfworld_games.ensure_games(
            tmp_path_factory.mktemp('games'), difficulty=alfworld_games.DIFFICULTIES[name], seed=1,
            num_games={'train': 2 * NUM_GAMES, 'valid_seen': 6, 'valid_unseen': 6})
        return alfworld_data.find_games(folder, 'train')
    if not os.environ.get('ALFWORLD_DATA'):
        pytest.skip('ALFWORLD_DATA is not set: no real games')
    return alfworld_data.find_games(None, 'train')


class Pair:
    """Both engines on the same game; every call asserts that they say the same."""

    def __init__(self, games: alfworld_data.GameSet):
        self.games = games
        self.native, self.official = alfworld.NativeEngine(games), alfworld_textworld.TextworldEngine(games)
        self.num_games = self.num_steps = 0

    def start(self, task_id: int) -> None:
        self.task_id = task_id
        self.num_games += 1
        assert self.native.start(task_id) == self.official.start(task_id), self.games.names[task_id]
        self.compare('reset')

    def step(self, command: str) -> None:
        self.num_steps += 1
        where = (self.games.names[self.task_id], command)
        assert self.native.step(command) == self.official.step(command), where
        assert self.native.won() == bool(self.official.score) == self.official.done, where
        self.compare(command)

    def compare(self, command: str) -> None:
        where = (self.games.names[self.task_id], command)
        assert self.native.admissible() == self.official.admissible(), where
        assert self.native.won() == self.official.won(), where

    def run(self, task_ids: Iterable[int], play: Callable[[Pair, random.Random], None], what: str) -> None:
        for task_id in task_ids:
            self.start(task_id)
            play(self, random.Random(task_id))
        print(f'\n{what}: {self.num_games} games, {self.num_steps} steps, 0 mismatches')
        assert self.num_steps > 0


@pytest.fixture
def pair(games) -> Pair:
    return Pair(games)


def spread(games: alfworld_data.GameSet, count: int) -> list[int]:
    """Up to `count` different task ids, drawn evenly from the task types."""
    rng, of_kind = random.Random(0), {}
    for i in rng.sample(range(len(games)), len(games)):
        of_kind.setdefault(games.types[i], []).append(i)
    rounds = itertools.zip_longest(*(of_kind[kind] for kind in sorted(of_kind)))
    return [i for i in itertools.chain.from_iterable(rounds) if i is not None][:count]


def walk(pair: Pair, rng: random.Random, num_steps: int = WALK_STEPS) -> None:
    """Commands at random: some invalid, the rest mostly other things than walking about."""
    for _ in range(num_steps):
        admissible = pair.native.admissible()
        handling = [c for c in admissible if not c.startswith('go to')]
        draw = rng.random()
        if draw < 0.08:
            command = rng.choice(INVALID)
        elif draw < 0.16:
            command = rng.choice(admissible) + rng.choice([' ', '.', ' 1', '\n'])
        elif draw < 0.2:
            command = 'go to ' + rng.choice(list(pair.native.state().game.name.values()))
        else:
            command = rng.choice(handling if draw < 0.7 else admissible)
        pair.step(command)


def test_random_walks_are_equal(pair):
    pair.run(spread(pair.games, NUM_GAMES), walk, 'random walks')


def test_walkthroughs_and_the_steps_after_the_end_are_equal(pair):
    def play(pair, rng):
        for command in json.loads(pair.games.path(pair.task_id).read_text(encoding='utf-8'))['walkthrough']:
            pair.step(command)
        assert pair.official.won()
        walk(pair, rng, num_steps=10)  # `won` may become false again

    pair.run(spread(pair.games, NUM_GAMES), play, 'walkthroughs and 10 steps more')


def test_oracle_wins_on_the_official_engine_from_random_states(pair):
    def play(pair, rng):
        walk(pair, rng, num_steps=10)
        for command in alfworld_oracle.plan(pair.native.state()) or ():
            assert not pair.official.won() and command in pair.official.admissible()
            pair.step(command)
        assert pair.official.won() or alfworld_oracle.plan(pair.native.state()) is None

    pair.run(spread(pair.games, NUM_GAMES // 2), play, 'oracle after 10 random steps')


def test_dead_ends_are_equal(pair):
    def play(pair, rng):
        for command in dead_end(pair.native.state()):
            pair.step(command)
        assert alfworld_oracle.plan(pair.native.state()) is None
        walk(pair, rng, num_steps=15)

    # only games that can be lost; parsing all of a large split to find them would take minutes
    candidates = spread(pair.games, 40 * max(1, NUM_GAMES // 4))
    lost = [i for i in candidates if dead_end(pair.games.game(i).initial_state())][: NUM_GAMES // 4]
    if not lost:
        pytest.skip('no game with a dead end in this source')
    pair.run(lost, play, 'dead ends')


def dead_end(state: alfworld_engine.State) -> list[str]:
    """Commands that pick up an object which fits no receptacle, or [] when the game has none (or is not lost by it)."""
    game = state.game
    for receptacle, objects in state.contents.items():
        for obj in objects:
            if obj in game.pickupable and game.object_type[obj] in BLOCKING:
                name = game.name[receptacle]
                commands = [f'go to {name}', f'open {name}', f'take {game.name[obj]} from {name}']
                if receptacle not in game.openable:
                    commands.remove(f'open {name}')
                end = state.copy()
                for command in commands:
                    end.step(command)
                if end.held == obj and alfworld_oracle.plan(end) is None:
                    return commands
    return []


def test_two_official_engines_in_one_process_do_not_disturb_each_other(games):
    first, second = spread(games, 2)
    arguments = list(sys.argv)
    interleaved = Pair(games), Pair(games)
    interleaved[0].start(first)
    interleaved[1].start(second)
    for step in range(10):
        for pair in interleaved:
            walk(pair, random.Random(step), num_steps=1)
    assert sys.argv == arguments


def test_adapter_episodes_are_equal_and_restore_works(games):
    """Whole episodes through AlfworldEnv: every field of the observation, snapshots, the step after the end."""
    [task_id] = spread(games, 1)
    envs = [alfworld.AlfworldEnv(games, engine=engine, oracle='planner', max_steps=30) for engine in alfworld.ENGINES]
    rng, seen = random.Random(1), [env.reset(task_id) for env in envs]
    for _ in range(5):
        command = rng.choice(seen[0].admissible)
        seen = [env.step(command) for env in envs]
        assert seen[0] == seen[1]
    snapshots = [env.snapshot() for env in envs]
    endings = [finish(env) for env in envs]
    assert endings[0] == endings[1] and endings[0][-1].done
    for env, snapshot, observation, ending in zip(envs, snapshots, seen, endings, strict=True):
        with pytest.raises(RuntimeError, match='over'):
            env.step('look')
        assert env.restore(snapshot) == observation
        assert finish(env) == ending


def finish(env: alfworld.AlfworldEnv) -> list:
    observations = [env.step('look')]
    while not observations[-1].done:
        observations.append(env.step(env.oracle_command() or 'inventory'))
    return observations


def test_spawned_workers_give_the_same_observations(games):
    make_env = functools.partial(alfworld.make_env, str(games.folder), 'train', max_games=6)
    seen = []
    for engine in alfworld.ENGINES:
        factory = functools.partial(make_env, engine=engine)
        with workers.WorkerPool(factory, num_envs=2, num_workers=2, timeout_s=300) as pool:
            seen.append([pool.reset([0, 5]), *(pool.step([command] * 2) for command in ('look', 'inventory', 'nothing'))])
    assert seen[0] == seen[1]


def test_a_game_that_the_official_engine_cannot_load_is_a_clear_error(games, tmp_path):
    folder = tmp_path / games.names[0]
    folder.mkdir(parents=True)
    record = json.loads(games.path(0).read_text(encoding='utf-8'))
    record['pddl_problem'] = record['pddl_problem'].replace('(:init', '(:init (nonsense', 1)
    (folder / alfworld_data.GAME_FILE).write_text(json.dumps(record), encoding='utf-8')
    bad = alfworld_data.find_games(tmp_path, games.names[0].split('/')[1])
    with pytest.raises(alfworld_engine.GameError, match='game.tw-pddl'):
        alfworld_textworld.TextworldEngine(bad).start(0)

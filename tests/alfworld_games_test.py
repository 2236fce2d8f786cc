"""The generator: solvable by construction, the same bytes for the same seed, and a cache that heals itself."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import multiprocessing
import pathlib
import shutil

import hypothesis
import pytest
from hypothesis import strategies as st

from covsero_jax.envs import alfworld_engine, alfworld_games, alfworld_oracle, alfworld_pddl, alfworld_rooms

TINY, REAL = alfworld_games.DIFFICULTIES['tiny'], alfworld_games.DIFFICULTIES['real']
COUNTS = {'train': 12, 'valid_seen': 6, 'valid_unseen': 6}


def generate(difficulty, split, count, seed=0):
    return [alfworld_games.generate_game(seed, split, i, difficulty) for i in range(count)]


def initial_state(game):
    return alfworld_engine.Game(game.problem, game.task).initial_state()


def objects_by_type(state):
    types = collections.Counter(state.game.object_type[o] for objects in state.contents.values() for o in objects)
    return {kind.removesuffix('type'): count for kind, count in types.items()}


def contents(game):
    """What tells two games apart for a player: which types stand where, without their numbers, and the task."""
    state, kinds = initial_state(game), collections.Counter()
    for receptacle, objects in state.contents.items():
        kinds.update((receptacle, state.game.object_type[o]) for o in objects)
    return game.scene, game.task_type, tuple(game.pddl_params.values()), frozenset(kinds.items())


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


@pytest.mark.parametrize('difficulty', alfworld_games.DIFFICULTIES.values(), ids=alfworld_games.DIFFICULTIES)
def test_every_walkthrough_wins_at_its_last_command_and_not_before(difficulty):
    for split in alfworld_games.SPLITS:
        for game in generate(difficulty, split, 12):
            state = initial_state(game)
            assert len(game.walkthrough) == len(alfworld_oracle.plan(state)) > 0
            for command in game.walkthrough:
                assert not state.won()
                assert state.step(command) != alfworld_engine.NOTHING_HAPPENS
            assert state.won()


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(seed=st.integers(0, 2**40), index=st.integers(0, 10**6), split=st.sampled_from(alfworld_games.SPLITS),
                  name=st.sampled_from(sorted(alfworld_games.DIFFICULTIES)))
def test_any_seed_and_index_gives_a_game_of_its_type_that_can_be_won(seed, index, split, name):
    game = alfworld_games.generate_game(seed, split, index, alfworld_games.DIFFICULTIES[name])
    assert game.task_type == alfworld_games.TASK_TYPES[index % 6]
    assert game == alfworld_games.generate_game(seed, split, index, alfworld_games.DIFFICULTIES[name])
    state = initial_state(game)
    for command in game.walkthrough:
        state.step(command)
    assert state.won()


def test_splits_are_balanced_and_share_neither_names_nor_contents():
    games = {split: generate(TINY, split, count) for split, count in (('train', 300), ('valid_seen', 90),
                                                                     ('valid_unseen', 90))}
    for of_split in games.values():
        assert len(set(collections.Counter(g.task_type for g in of_split).values())) == 1
        assert {g.task_type for g in of_split} == set(alfworld_games.TASK_TYPES)
    together = [g for of_split in games.values() for g in of_split]
    assert len({g.name for g in together}) == len({g.problem for g in together}) == len(together)

    assert len({contents(g) for g in together}) == len(together)
    scenes = {split: {g.scene for g in of_split} for split, of_split in games.items()}
    assert scenes['valid_seen'] <= scenes['train']
    assert scenes['valid_unseen'] and not scenes['valid_unseen'] & scenes['train']


def test_validation_games_never_occur_in_training_even_where_there_are_few_different_games():
    bare = alfworld_games.Difficulty((4, 4), (5, 5), (0, 0), copies=1)
    train, valid = (generate(bare, split, 240) for split in ('train', 'valid_seen'))
    assert len({contents(g) for g in train}) < 240  # so few that training repeats some
    assert not {contents(g) for g in train} & {contents(g) for g in valid}
    assert [g.scene for g in train] == [g.scene for g in valid]


def test_the_task_is_not_begun_and_its_targets_are_there():
    for game in generate(REAL, 'train', 30):
        state, params = initial_state(game), game.pddl_params
        target = params['object_target'].lower()
        assert objects_by_type(state)[target] >= (2 if game.task_type == 'pick_two_obj_and_place' else 1)
        if game.task_type == 'look_at_obj_in_light':
            assert objects_by_type(state)[params['toggle_target'].lower()] == 1
            continue
        inside = [o for r, objects in state.contents.items() for o in objects
                  if state.game.receptacle_type[r] == params['parent_target'].lower() + 'type']
        assert target + 'type' not in {state.game.object_type[o] for o in inside}


@pytest.mark.parametrize('difficulty', alfworld_games.DIFFICULTIES.values(), ids=alfworld_games.DIFFICULTIES)
def test_rooms_have_the_size_and_the_traits_of_their_difficulty(difficulty):
    stacked = stuck = dead_ends = 0
    for game in generate(difficulty, 'train', 36):
        state = initial_state(game)
        kitchen = game.scene < 200
        low, high = difficulty.kitchen_receptacles if kitchen else difficulty.receptacles
        assert low <= len(state.game.receptacles) <= high
        assert state.location not in state.game.location.values()
        counts = objects_by_type(state)
        fixed = {extra.lower() for extra in alfworld_rooms.EXTRAS}
        others = counts.keys() - fixed - {game.pddl_params['object_target'].lower()}
        assert len(others) <= difficulty.distractors[1]
        if difficulty.distractors[0] <= 5:  # the larger wishes exceed what some bathrooms have
            assert len(others) >= difficulty.distractors[0]
        assert max(counts.values()) <= max(2, difficulty.copies)
        stacked += len(state.game.location) - len(set(state.game.location.values()))
        dead_ends += sum(kind.lower() in counts for kind in alfworld_rooms.DEAD_ENDS)
        stuck += sum(state.game.receptacle_type[r] in ('cabinettype', 'drawertype') and r not in state.game.openable
                     for r in state.game.receptacles)
    assert (stacked > 0) == (difficulty.shared > 0)
    assert (stuck > 0) == (difficulty.stuck > 0)
    assert (dead_ends > 0) == (difficulty.extras > 0)


def test_scenes_are_fixed_and_longest_plans_are_respected():
    by_scene = collections.defaultdict(set)
    for game in generate(TINY, 'train', 120) + generate(TINY, 'valid_seen', 60):
        by_scene[game.scene].add(tuple(initial_state(game).game.location.items()))
    assert {len(rooms) for rooms in by_scene.values()} == {1}
    assert len({rooms for s in by_scene.values() for rooms in s}) == len(by_scene)
    short = dataclasses.replace(TINY, max_plan=8)
    assert max(len(g.walkthrough) for g in generate(TINY, 'train', 60)) > 8
    assert max(len(g.walkthrough) for g in generate(short, 'train', 60)) <= 8


def test_impossible_wishes_say_what_is_wrong():
    with pytest.raises(ValueError, match=r'Difficulty.receptacles = \(7, 6\)'):
        dataclasses.replace(TINY, receptacles=(7, 6))
    with pytest.raises(ValueError, match='at most .* receptacles'):
        alfworld_games.generate_game(0, 'train', 3, dataclasses.replace(TINY, kitchen_receptacles=(500, 500)))
    with pytest.raises(ValueError, match='longer plans'):
        alfworld_games.generate_game(0, 'train', 5, dataclasses.replace(TINY, max_plan=1))
    with pytest.raises(ValueError, match='valid_train'):
        alfworld_games.generate_game(0, 'valid_train', 0, TINY)


def test_games_stay_what_they_are():
    """A seed's games are part of every published number: when they change on purpose, raise VERSION too."""
    problems = [alfworld_games.generate_game(3, split, i, difficulty).problem for difficulty in (TINY, REAL)
                for split in alfworld_games.SPLITS for i in range(6)]
    digest = hashlib.sha256(''.join(problems).encode()).hexdigest()[:16]
    assert (alfworld_games.VERSION, digest) == (1, '57c3b1952dbf1943')


def test_pddl_declares_everything_once():
    """Fast Downward exits on an undeclared name, and on one name with two types."""
    domain = (alfworld_pddl.DATA / 'alfworld_domain.pddl').read_text()
    for game in generate(REAL, 'train', 6):
        declared = game.problem[game.problem.index('(:objects'):game.problem.index('(:init')].split('\n')[1:-2]
        names = [line.partition(' - ')[0] for line in declared]
        assert len(set(names)) == len(names)
        body = game.problem[game.problem.index('(:init'):]
        used = {word for line in body.replace('(', ' ').replace(')', ' ').split('\n') for word in line.split()
                if '_bar_' in word or word.endswith('Type')} - {'receptacleType', 'objectType'}
        assert used <= set(names)
        assert {f'{kind}Type' for kind, _ in alfworld_pddl.ACTION_TYPES} <= set(names)
        assert all(f'{kind}Type' in domain for kind, _ in alfworld_pddl.ACTION_TYPES)


def test_files_are_read_back_as_the_games_that_were_written(tmp_path):
    alfworld_games.write_games(tmp_path / 'a', seed=0, difficulty=TINY, num_games=COUNTS)
    paths = sorted((tmp_path / 'a').rglob('game.tw-pddl'))
    assert len(paths) == sum(COUNTS.values())
    for split, count in COUNTS.items():
        for game in generate(TINY, split, count):
            folder = tmp_path / 'a' / game.name
            state = alfworld_engine.read_game(folder / 'game.tw-pddl').initial_state()
            assert state.intro() == initial_state(game).intro()
            record = json.loads((folder / 'game.tw-pddl').read_text())
            trajectory = json.loads((folder / 'traj_data.json').read_text())
            assert record['solvable'] and record['walkthrough'] == list(game.walkthrough)
            assert (folder / 'initial_state.pddl').read_text() == record['pddl_problem'] == game.problem
            assert trajectory['task_type'] == game.task_type and trajectory['pddl_params'] == game.pddl_params
    with pytest.raises(FileExistsError, match='delete it'):
        alfworld_games.write_games(tmp_path / 'a', seed=0, difficulty=TINY, num_games=COUNTS)
    with pytest.raises(ValueError, match='valid_all'):
        alfworld_games.write_games(tmp_path / 'b', seed=0, difficulty=TINY, num_games={'valid_all': 1})
    assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_same_seed_same_bytes_and_more_games_change_no_game(tmp_path):
    calls = []
    for name, seed, num_games in (('a', 1, COUNTS), ('b', 1, COUNTS), ('c', 1, {'train': 18}), ('d', 2, COUNTS)):
        alfworld_games.write_games(tmp_path / name, seed=seed, difficulty=TINY, num_games=num_games,
                                   progress=lambda *done: calls.append(done))
    a, b, more, other = (tree(tmp_path / name) for name in 'abcd')
    assert a == b
    assert calls[:24] == [(i + 1, 24) for i in range(24)]
    trained = {name for name in a if name.startswith('json_2.1.1/train/')}
    assert trained and all(more[name] == a[name] for name in trained)
    assert not trained & other.keys()


def test_cache_is_written_once_and_per_request(tmp_path):
    written = []

    def ensure(seed=0, difficulty=TINY):
        return alfworld_games.ensure_games(tmp_path / 'cache', difficulty=difficulty, seed=seed, num_games=COUNTS,
                                           progress=lambda done, _: written.append(done))

    first = ensure()
    assert len(written) == 24
    before = tree(first)
    assert ensure() == first and len(written) == 24
    assert len({first, ensure(seed=1), ensure(difficulty=alfworld_games.DIFFICULTIES['small'])}) == 3
    assert tree(first) == before


@pytest.mark.parametrize('damage', ['missing game', 'changed byte', 'no manifest', 'bad manifest', 'older version',
                                    'extra game', 'empty folder'])
def test_cache_heals(tmp_path, damage):
    def ensure():
        return alfworld_games.ensure_games(tmp_path, difficulty=TINY, seed=0, num_games=COUNTS)

    folder = ensure()
    good, manifest = tree(folder), folder / 'manifest.json'
    game = next(folder.rglob('game.tw-pddl'))
    if damage == 'missing game':
        shutil.rmtree(game.parent)
    elif damage == 'changed byte':
        game.write_bytes(game.read_bytes().replace(b'agent1', b'agent2', 1))
    elif damage == 'no manifest':
        manifest.unlink()
    elif damage == 'bad manifest':
        manifest.write_text(manifest.read_text()[:20])
    elif damage == 'older version':
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), 'version': 0}))
    elif damage == 'extra game':
        shutil.copytree(game.parent, game.parent.with_name('trial_copy'))
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    (tmp_path / f'.{folder.name}.killed' / 'json_2.1.1').mkdir(parents=True)  # a writer that was killed half-way
    assert tree(folder) != good
    assert ensure() == folder and tree(folder) == good
    assert {p.name for p in tmp_path.iterdir()} == {folder.name, '.lock'}


def test_a_failed_writer_leaves_nothing_behind(tmp_path):
    def full_disk(done, _):
        if done == 3:
            raise OSError(28, 'No space left on device')

    with pytest.raises(OSError, match='No space left'):
        alfworld_games.ensure_games(tmp_path, difficulty=TINY, seed=0, num_games=COUNTS, progress=full_disk)
    assert [p.name for p in tmp_path.iterdir()] == ['.lock']


def _ensure(arguments):
    folder, seed = arguments
    return tree(alfworld_games.ensure_games(pathlib.Path(folder), difficulty=TINY, seed=seed, num_games=COUNTS))


def test_processes_may_ask_at_once(tmp_path):
    with multiprocessing.get_context('spawn').Pool(3) as pool:
        trees = pool.map(_ensure, [(str(tmp_path), 0)] * 6, chunksize=1)
    assert all(files == trees[0] and len(files) == 3 * 24 + 1 for files in trees)

"""Sokoban: rules, levels and their files, the generator, the solver against brute force, and the environment."""

import functools
import os
import pathlib
import pickle
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax import workers
from covsero_jax.envs import base, sokoban, sokoban_image, sokoban_levels, sokoban_solver
from covsero_jax.envs.sokoban_levels import LevelError, Room
from covsero_jax.envs.sokoban_rules import MOVES, Level, State, is_solved, move, start, steps

ROW = '#######\n#@ $ .#\n#######'  # right three times: once freely, twice pushing
CORNER = '######\n#$ . #\n# @  #\n######'  # the box stands in a corner that is no target


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'cache'))
    sokoban._tasks.cache_clear()


def level_of(text: str) -> Level:
    return sokoban_levels.parse(text.split('\n'), 'test')


def env_of(tmp_path: pathlib.Path, *texts: str, **options) -> sokoban.SokobanEnv:
    folder = tmp_path / 'levels' / 'train'
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'own.txt').write_text('\n\n'.join(texts))
    return sokoban.make_env('train', levels=tmp_path / 'levels', **options)


def shortest(level: Level, state: State) -> int | None:
    """Breadth first, without any knowledge of the game: moves of the shortest solution."""
    distance, queue = {state: 0}, deque([state])
    while queue:
        here = queue.popleft()
        if is_solved(level, here):
            return distance[here]
        for step in steps(level):
            there = move(level, here, step)
            if there not in distance:
                distance[there] = distance[here] + 1
                queue.append(there)
    return None


def random_room(seed: int, height: int, width: int, boxes: int) -> Level:
    return sokoban_levels._room(Room(height, width, boxes, 1, 1), random.Random(f'test/{seed}'))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 6), st.integers(4, 6), st.integers(1, 2))
def test_the_solver_is_as_short_as_brute_force_and_its_moves_solve(seed, height, width, boxes):
    boxes = min(boxes, ((height - 2) * (width - 2) - 1) // 2)
    level = random_room(seed, height, width, boxes)
    found = sokoban_solver.solve(level, start(level))
    assert (None if found is None else len(found)) == shortest(level, start(level))
    if found is not None:
        state = start(level)
        for command in found:
            assert move(level, state, steps(level)[MOVES.index(command)]) != state
            state = move(level, state, steps(level)[MOVES.index(command)])
        assert is_solved(level, state)
        assert len(found) == 0 or sokoban_solver.solve(level, start(level), len(found) - 1) is None
        assert sokoban_solver.solve(level, start(level), len(found)) == found


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.sampled_from(MOVES), max_size=40))
def test_moves_are_pure_keep_boxes_apart_and_never_enter_walls(seed, commands):
    level = random_room(seed, 6, 6, 2)
    state = start(level)
    for command in commands:
        before = State(*state)
        after = move(level, state, steps(level)[MOVES.index(command)])
        assert state == before
        assert len(after.boxes) == 2
        assert {after.player, *after.boxes}.isdisjoint(level.walls)
        assert after.player not in after.boxes
        assert len(after.boxes - before.boxes) <= 1  # one box at a time
        state = after


def test_the_bound_sees_dead_ends_and_never_says_too_much():
    for seed in range(300):
        level = random_room(seed, 5, 6, 2)
        bound, moves = sokoban_solver.lower_bound(level, level.boxes), shortest(level, start(level))
        assert moves is None or (bound is not None and bound <= moves)
    assert sokoban_solver.lower_bound(level_of(CORNER), level_of(CORNER).boxes) is None


def test_many_boxes_are_bounded_by_their_nearest_targets():
    row = level_of('#' * 26 + '\n#@ ' + '$.' * 9 + '    #\n#' + ' ' * 24 + '#\n' + '#' * 26)
    assert sokoban_solver.lower_bound(row, row.boxes) == 9
    pair = level_of('########\n#@$$ ..#\n########')
    assert sokoban_solver.lower_bound(pair, pair.boxes) == 6  # not 3 + 2: both have the same nearest one


def test_too_hard_is_said_and_is_no_plan_for_the_oracle(monkeypatch):
    level = random_room(3, 6, 6, 2)
    with pytest.raises(sokoban_solver.TooHard, match='1 states'):
        sokoban_solver.solve(level_of(ROW.replace('@ $', '@  $').replace('#######', '########')), State(9, frozenset({12})), max_nodes=1)
    monkeypatch.setattr(sokoban, 'ORACLE_NODES', 0)
    assert sokoban._solution(level, start(level), 15) is None


@pytest.mark.parametrize('text, problem', [
    ('#####\n# $.#\n#####', 'no players'), ('#####\n#@@$.#\n#####', '2 players'), ('####\n#@.#\n####', 'no boxes'),
    ('######\n#@$$.#\n######', '2 boxes, but 1 targets'), ('#####\n#@* #\n#####', 'solved already'),
    ('#####\n#@$. \n#####', 'hole in the wall'), ('#####\n#@$.#\n## ##', 'hole in the wall'), ('#####\n#@$.#\n#####\n#  ##', None), ('#####\n#@$!#\n#####', 'unknown characters'),
])
def test_bad_levels_are_named(text, problem, tmp_path):
    file = tmp_path / 'bad.txt'
    file.write_text(f'; fine\n{ROW}\n\n; bad\n{text}\n')
    if problem is None:  # an opening that cannot be reached is none
        assert len(sokoban_levels.read_file(file)) == 2
        return
    with pytest.raises(LevelError, match=r"bad\.txt, level 1 'bad' \(line 7\): .*" + problem):
        sokoban.make_env('train', levels=file)


def test_bad_places_and_options_are_named(tmp_path):
    (tmp_path / 'empty.txt').write_text('\n\n')
    (tmp_path / 'data' / 'train').mkdir(parents=True)
    for arguments, problem in (
        ({'levels': tmp_path / 'nothing'}, 'no such file'), ({'levels': tmp_path / 'empty.txt'}, 'has no levels'),
        ({'levels': tmp_path / 'data'}, r'no \*.txt'), ({'reward': 'huge'}, 'unknown reward'), ({'max_steps': 0}, 'max_steps'),
        ({'num_levels': 0}, 'num_levels'), ({'height': 4, 'width': 4, 'boxes': 2}, 'has no place'),
        ({'min_moves': 9, 'max_moves': 8}, 'min_moves=9')):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            sokoban.make_env('train', **({'num_levels': 3} | arguments))
    with pytest.raises(LevelError, match=r"no split 'test', only train"):
        sokoban.make_env('test', levels=tmp_path / 'data')
    with pytest.raises(ValueError, match='unknown split'):
        sokoban.make_env('valid_seen')


def test_rooms_that_cannot_be_drawn_are_said(monkeypatch):
    monkeypatch.setattr(sokoban_levels, 'MAX_TRIES', 20)
    with pytest.raises(ValueError, match='20 drawn rooms and none like'):
        sokoban_levels.generate(Room(4, 4, 1, 90, 99), 'train', 1, 0)


def test_text_round_trip_and_twins():
    for seed in range(50):
        level = random_room(seed, 5, 7, 2)
        assert level_of(sokoban_levels.to_text(level)) == level
        turned = level_of('\n'.join(''.join(c) for c in zip(*sokoban_levels.to_text(level).split('\n')[::-1], strict=True)))
        assert turned != level
        assert sokoban_levels.canonical(turned) == sokoban_levels.canonical(level)
        assert sokoban_levels.split_of(turned) == sokoban_levels.split_of(level)
        a, b = (sokoban_solver.solve(x, start(x)) for x in (level, turned))
        assert (a is None) == (b is None) and len(a or ()) == len(b or ())


def test_generated_levels_are_as_asked_disjoint_and_the_same_again():
    room = Room(6, 6, 1, 5, 8)
    splits = {split: sokoban_levels.generate(room, split, 60, 3) for split in sokoban_levels.SPLITS}
    twins = [sokoban_levels.canonical(task.level) for tasks in splits.values() for task in set(tasks)]
    assert len({task.level for tasks in splits.values() for task in tasks}) == 180
    assert all(sokoban_levels.split_of(task.level) == split for split, tasks in splits.items() for task in tasks)
    assert len({t for t in twins[:60]} & {t for t in twins[60:]}) == 0
    for task in splits['valid']:
        moves = shortest(task.level, start(task.level))
        assert 5 <= moves <= 8
        assert int(task.kind[:2]) <= moves <= int(task.kind[3:5])
    assert sokoban_levels.generate(room, 'test', 60, 3) == splits['test']  # from the file
    assert sokoban_levels.generate(room, 'test', 20, 3) == splits['test'][:20]
    assert sokoban_levels.generate(room, 'test', 20, 4) != splits['test'][:20]


def test_files_are_split_by_content_and_thinned_evenly(tmp_path):
    levels = [sokoban_levels.to_text(t.level) for t in sokoban_levels.generate(Room(6, 6, 1, 4, 12), 'train', 30, 0)]
    levels += [sokoban_levels.to_text(t.level) for t in sokoban_levels.generate(Room(6, 6, 1, 4, 12), 'test', 7, 0)]
    (tmp_path / 'mixed.txt').write_text('\n\n'.join(levels + levels[:5]))
    train, test = (sokoban.make_env(split, levels=tmp_path / 'mixed.txt') for split in ('train', 'test'))
    assert (len(train.task_names), len(test.task_names)) == (30, 7)  # repeated levels count once
    assert set(train.task_types) == {'1 box'}
    thin = sokoban.make_env('train', levels=tmp_path / 'mixed.txt', num_levels=10)
    assert thin.task_names == train.task_names[::3]
    with pytest.raises(LevelError, match="falls into split 'valid'"):
        sokoban.make_env('valid', levels=tmp_path / 'mixed.txt')


def test_native_rewards_are_gym_sokobans(tmp_path):
    env = env_of(tmp_path, ROW, '########\n#@$.   #\n# $.   #\n########', max_steps=20)
    env.reset(0)
    assert [round(env.step(c).reward, 9) for c in ('up', 'right', 'right')] == [-0.1, -0.1, -0.1]
    last = env.step('right')
    assert (round(last.reward, 9), last.done, last.success) == (10.9, True, True)
    env.reset(1)
    on, off = env.step('right'), env.step('right')
    assert (round(on.reward, 9), round(off.reward, 9), off.done) == (0.9, -1.1, False)


def test_success_is_all_boxes_and_the_success_reward_nothing_else(tmp_path):
    env = env_of(tmp_path, ROW, '########\n#@$.   #\n# $.   #\n########', max_steps=20, reward='success', success_reward=7)
    env.reset(1)
    rewards = [env.step(c) for c in ('right', 'left', 'down', 'right')]
    assert [o.reward for o in rewards] == [0, 0, 0, 7]
    assert [o.success for o in rewards] == [False, False, False, True]


def test_grid_and_its_picture(tmp_path):
    env = env_of(tmp_path, '########\n#+$. * #\n#    $ #\n########')
    first = env.reset(0)
    assert first.text == '# # # # # # # #\n# S X O _ √ _ #\n# _ _ _ _ X _ #\n# # # # # # # #'
    assert first.admissible == tuple(sorted(first.admissible))
    png = sokoban_image.from_text(first.text, cell=20)
    assert png.startswith(b'\x89PNG')
    assert (int.from_bytes(png[16:20]), int.from_bytes(png[20:24])) == (160, 80)
    assert png != sokoban_image.from_text(env.step('right').text, cell=20)
    with pytest.raises(ValueError, match='not a grid'):
        sokoban_image.from_text('hello')


def test_the_grid_and_the_level_are_the_state():
    """No two states of a level look alike: coverage counts exactly the states visited."""
    level = level_of('#######\n#@    #\n# $ $.#\n#   . #\n#######')
    seen, stack = {start(level)}, [start(level)]
    while stack:
        here = stack.pop()
        new = {move(level, here, step) for step in steps(level)} - seen
        seen |= new
        stack += new
    assert len(seen) > 50
    assert len({sokoban.render(level, state) for state in seen}) == len(seen)


def test_protocol_limits_and_snapshots(tmp_path):
    env = env_of(tmp_path, ROW, max_steps=3, oracle=True)
    assert isinstance(env, base.Env)
    with pytest.raises(RuntimeError, match='call reset'):
        env.step('up')
    assert env.reset(0) == env.reset(0)
    with pytest.raises(IndexError):
        env.reset(1)
    kept = pickle.loads(pickle.dumps(env.snapshot()))
    texts = [env.step(c).text for c in ('jump', 'right', 'right')]
    assert texts[0] == env.reset(0).text
    env.restore(kept)
    assert [env.step(c).text for c in ('jump', 'right', 'right')] == texts
    with pytest.raises(RuntimeError, match='episode is over'):
        env.step('up')
    sokoban._tasks.cache_clear()
    other = env_of(tmp_path, ROW.replace('@ $', '@$ '))
    with pytest.raises(ValueError, match='another level'):
        other.restore(kept)
    with pytest.raises(base.OracleForbidden):
        other.oracle_command()


def test_the_oracle_solves_from_wherever_it_can_be_solved_in_time():
    env = sokoban.make_env('train', num_levels=80, oracle=True)
    rng, outcomes = random.Random(0), []
    for task in range(80):
        observation = env.reset(task)
        for _ in range(rng.randrange(12)):
            if not observation.done:
                observation = env.step(rng.choice(MOVES))
        if observation.done:
            continue
        snapshot = env.snapshot()
        needed, left = shortest(snapshot.level, snapshot.state), 15 - snapshot.num_steps
        while not observation.done and (command := env.oracle_command()):
            observation = env.step(command)
        assert observation.success == (needed is not None and needed <= left)
        assert not observation.success or env.snapshot().num_steps == snapshot.num_steps + needed
        outcomes.append(observation.success)
    assert 0.3 < sum(outcomes) / len(outcomes) < 0.95  # dead ends and late roots exist: branches really are filtered


def test_every_level_is_solved_from_its_start():
    env = sokoban.make_env('valid', num_levels=100, height=7, width=7, boxes=2, min_moves=6, max_moves=20, max_steps=20, oracle=True)
    for task in range(100):
        observation = env.reset(task)
        while not observation.done:
            observation = env.step(env.oracle_command())
        assert observation.success


def test_worker_processes_have_the_same_levels():
    make = functools.partial(sokoban.make_env, 'train', num_levels=10)
    with workers.WorkerPool(make, num_envs=4, num_workers=2, timeout_s=60) as pool:
        assert pool.task_names == make().task_names
        assert pool.oracle_steps == ()
        assert [o.text for o in pool.reset([3, 3, 5, 7])] == [make().reset(i).text for i in (3, 3, 5, 7)]


def test_boxoban_levels_are_solved_shortest():
    """SOKOBAN_DATA: a file of Boxoban levels (10x10, four boxes). 60 of them, each solution checked by playing it."""
    if not (path := os.environ.get('SOKOBAN_DATA')):
        pytest.skip('set SOKOBAN_DATA to a file, or a folder of files, of Boxoban levels')
    files = sorted(pathlib.Path(path).glob('*.txt')) if pathlib.Path(path).is_dir() else [pathlib.Path(path)]
    levels = [level for _, level in sokoban_levels.read_file(files[0])][:60]
    solved = 0
    for level in levels:
        assert (level.height, level.width, len(level.boxes)) == (10, 10, 4)
        state = start(level)
        for command in sokoban_solver.solve(level, state):
            state = move(level, state, steps(level)[MOVES.index(command)])
        solved += is_solved(level, state)
    assert solved == len(levels) >= 40

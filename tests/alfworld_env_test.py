"""Folders of games, their cache, and the adapter on the native engine, with hand-written games."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys

import pytest

from covsero_jax.envs import alfworld, alfworld_data, alfworld_engine, base

GRAMMAR = '"template": "move {o} to {r}"  "rhs": "Your task is to: %s."'
PROBLEM = """(define (problem tiny) (:domain alfred) (:objects agent1 - agent)
(:init (atLocation agent1 loc_start)
 (receptacleAtLocation Desk_bar_1 loc_1) (receptacleType Desk_bar_1 DeskType)
 (receptacleAtLocation Drawer_bar_1 loc_2) (receptacleType Drawer_bar_1 DrawerType) (openable Drawer_bar_1)
 (receptacleAtLocation Bin_bar_1 loc_3) (receptacleType Bin_bar_1 BinType)
 (objectType Pen_bar_1 PenType) (pickupable Pen_bar_1) (inReceptacle Pen_bar_1 Drawer_bar_1)
 (objectType Bear_bar_1 BearType) (pickupable Bear_bar_1) (inReceptacle Bear_bar_1 Bin_bar_1)
 (canContain DeskType PenType) (canContain DrawerType PenType))
(:goal (and (exists (?r - receptacle ?o - object)
 (and (inReceptacle ?o ?r) (objectType ?o PenType) (receptacleType ?r DeskType))))))"""
SOLUTION = ('go to drawer 1', 'open drawer 1', 'take pen 1 from drawer 1', 'go to desk 1', 'move pen 1 to desk 1')
LOST = ('go to bin 1', 'take bear 1 from bin 1')  # the bear fits nowhere


def write_game(folder: pathlib.Path, name: str, split: str = 'train', **changes: object) -> pathlib.Path:
    path = folder / alfworld_data.LAYOUT / split / name / alfworld_data.GAME_FILE
    path.parent.mkdir(parents=True)
    record = {'pddl_problem': PROBLEM, 'grammar': GRAMMAR % 'put some pen on desk', 'solvable': True} | changes
    path.write_text(json.dumps(record), encoding='utf-8')
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test sees the user's cache or data, or what another test has found."""
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('ALFWORLD_DATA', raising=False)
    alfworld._games.cache_clear()


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    data = tmp_path / 'data'
    write_game(data, 'pick_and_place_simple-Pen-None-Desk-301/trial_1')
    write_game(data, 'look_at_obj_in_light-Pen-None-DeskLamp-301/trial_2')
    write_game(data, 'pick_two_obj_and_place-Pen-None-Desk-301/trial_0')
    return data


def make_env(folder: pathlib.Path, **arguments: object) -> alfworld.AlfworldEnv:
    return alfworld.make_env(folder, 'train', **arguments)


def play(env: base.Env, commands: tuple[str, ...]) -> list[base.Observation]:
    return [env.step(command) for command in commands]


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_games_are_sorted_by_path_and_typed(folder):
    games = alfworld_data.find_games(folder, 'train')
    assert list(games.names) == sorted(games.names) and len(games) == 3
    assert games.types == ('look_at_obj_in_light', 'pick_and_place_simple', 'pick_two_obj_and_place')
    assert all(games.path(i).is_file() for i in range(3))
    assert not games.skipped


def test_order_on_disk_and_place_of_the_folder_change_nothing(folder, tmp_path):
    other = tmp_path / 'elsewhere'
    for name in reversed(alfworld_data.find_games(folder, 'train').names):
        shutil.copytree(folder / name, other / name)
    first, second = (alfworld_data.find_games(place, 'train') for place in (folder, other))
    assert first.entries == second.entries and first.hash == second.hash


@pytest.mark.parametrize('change', [{'pddl_problem': PROBLEM + ' '}, {'grammar': GRAMMAR % 'do something else'}])
def test_hash_depends_on_problem_and_task(folder, change):
    before = alfworld_data.find_games(folder, 'train')
    name = 'pick_and_place_simple-Pen-None-Desk-301/trial_1'
    shutil.rmtree(folder / alfworld_data.LAYOUT / 'train' / name)
    write_game(folder, name, **change)
    after = alfworld_data.find_games(folder, 'train')
    assert after.names == before.names and after.hash != before.hash


def test_unplayable_games_are_left_out_and_counted(folder):
    write_game(folder, 'pick_and_place_with_movable_recep-Pen-Mug-Desk-301/trial_1')
    write_game(folder, 'pick_and_place_simple-AppleSliced-None-Desk-301/trial_1')
    write_game(folder, 'pick_and_place_simple-Book-None-Desk-301/trial_1', solvable=False)
    path = write_game(folder, 'pick_and_place_simple-Mug-None-Desk-301/trial_1')
    path.rename(path.with_name('traj_data.json'))
    for _ in ('scan', 'cache'):
        games = alfworld_data.find_games(folder, 'train')
        assert len(games) == 3
        assert games.skipped == {'with movable receptacles': 1, 'with slicing': 1, 'not marked solvable': 1,
                                 'without a game file': 1}


def test_variable_names_the_folder(folder, monkeypatch):
    monkeypatch.setenv('ALFWORLD_DATA', str(folder))
    assert alfworld_data.find_games(None, 'train').hash == alfworld_data.find_games(folder, 'train').hash


def test_missing_variable_folder_and_split_are_named(folder, tmp_path, monkeypatch):
    with pytest.raises(alfworld_data.AlfworldDataError, match='ALFWORLD_DATA is not set'):
        alfworld_data.find_games(None, 'train')
    monkeypatch.setenv('ALFWORLD_DATA', str(tmp_path / 'gone'))
    with pytest.raises(alfworld_data.AlfworldDataError, match='ALFWORLD_DATA names.*gone'):
        alfworld_data.find_games(None, 'train')
    with pytest.raises(alfworld_data.AlfworldDataError, match='valid_seen.*found: train'):
        alfworld_data.find_games(folder, 'valid_seen')
    with pytest.raises(alfworld_data.AlfworldDataError, match='not an ALFWorld data folder.*alfworld-download'):
        alfworld_data.find_games(tmp_path, 'train')


def test_no_playable_game_is_an_error_with_the_reasons(tmp_path):
    write_game(tmp_path, 'pick_and_place_simple-Pen-None-Desk-301/trial_1', solvable=False)
    with pytest.raises(alfworld_data.AlfworldDataError, match='0 playable games.*1 not marked solvable'):
        alfworld_data.find_games(tmp_path, 'train')
    (tmp_path / alfworld_data.LAYOUT / 'valid_seen').mkdir()
    with pytest.raises(alfworld_data.AlfworldDataError, match='0 playable games.*no game.tw-pddl below'):
        alfworld_data.find_games(tmp_path, 'valid_seen')


@pytest.mark.parametrize('content, message', [
    ('not json', 'not JSON'), ('[]', 'a list'), ('', 'not JSON'), ('\x00\xff', 'not JSON'),
    (json.dumps({'solvable': True}), "no field 'pddl_problem'"),
    (json.dumps({'solvable': True, 'pddl_problem': PROBLEM, 'grammar': 'put {o} in/on {r}'}), 'alfworld >= 0.4'),
])
def test_a_file_that_is_no_game_is_named(folder, content, message):
    path = write_game(folder, 'pick_and_place_simple-Mug-None-Desk-301/trial_1')
    path.write_text(content, encoding='latin-1')
    with pytest.raises(alfworld_data.AlfworldDataError, match=message) as caught:
        alfworld_data.find_games(folder, 'train')
    assert str(path) in str(caught.value)


def test_a_problem_that_cannot_be_played_is_named_at_reset(folder):
    path = write_game(folder, 'a/trial', pddl_problem='(define (problem empty))')
    env = make_env(folder)
    with pytest.raises(alfworld_engine.GameError, match='a/trial/game.tw-pddl'):
        env.reset(0)
    assert str(path) in str(folder / env.task_names[0] / alfworld_data.GAME_FILE)
    assert not env.reset(1).done  # the environment is still usable


def test_subset_is_evenly_spaced(folder):
    games = alfworld_data.find_games(folder, 'train')
    assert games.subset(2).names == (games.names[0], games.names[1])
    assert games.subset(99).names == games.names
    assert games.subset(1).game(0).task == 'put some pen on desk'
    with pytest.raises(ValueError, match='max_games'):
        games.subset(0)


# ---- cache -----------------------------------------------------------------------------------------------------------


def the_cache(tmp_path: pathlib.Path) -> pathlib.Path:
    [path] = (tmp_path / 'cache' / 'alfworld').iterdir()
    return path


def test_second_start_reads_no_game_file(folder, tmp_path, monkeypatch):
    first = alfworld_data.find_games(folder, 'train')
    monkeypatch.setattr(alfworld_data, '_read_record', None)  # calling it would raise
    second = alfworld_data.find_games(folder, 'train')
    assert second.entries == first.entries and second.hash == first.hash
    assert second.game(0).initial_state().intro() == first.game(0).initial_state().intro()
    assert the_cache(tmp_path).suffix == '.zip'


def test_changed_added_and_removed_games_are_noticed(folder, tmp_path):
    first = alfworld_data.find_games(folder, 'train')
    path = write_game(folder, 'pick_and_place_simple-Mug-None-Desk-301/trial_1')
    assert len(alfworld_data.find_games(folder, 'train')) == 4
    stat = path.stat()
    path.write_text(path.read_text(encoding='utf-8').replace('some pen', 'that pen'), encoding='utf-8')
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # the same size, another time
    assert 'that pen' in {entry.task.replace('put ', '').replace(' on desk', '') for entry in
                          alfworld_data.find_games(folder, 'train').entries}
    shutil.rmtree(path.parent)
    assert alfworld_data.find_games(folder, 'train').hash == first.hash
    the_cache(tmp_path)  # still one file


@pytest.mark.parametrize('damage', ['truncated', 'garbage', 'empty', 'no index'])
def test_damaged_cache_is_rebuilt(folder, tmp_path, damage):
    first, path = alfworld_data.find_games(folder, 'train'), the_cache(tmp_path)
    whole = path.read_bytes()
    path.write_bytes({'truncated': whole[: len(whole) // 2], 'garbage': b'x' * 1000, 'empty': b'',
                      'no index': whole.replace(b'index.json', b'xndex.json')}[damage])
    again = alfworld_data.find_games(folder, 'train')
    assert again.hash == first.hash
    assert again.game(0).initial_state().intro() == first.game(0).initial_state().intro()
    assert abs(len(the_cache(tmp_path).read_bytes()) - len(whole)) < 50


def test_damaged_member_is_read_from_the_game_file(folder, tmp_path):
    intro = alfworld_data.find_games(folder, 'train').game(0).initial_state().intro()
    path = the_cache(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[200:220] = bytes(20)  # inside the first problem; the index comes last
    path.write_bytes(whole)
    assert alfworld_data.find_games(folder, 'train').game(0).initial_state().intro() == intro


def test_a_cache_that_cannot_be_written_is_a_warning_only(folder, tmp_path, monkeypatch):
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'file'))
    (tmp_path / 'file').write_text('not a folder')
    with pytest.warns(UserWarning, match='COVSERO_CACHE'):
        games = alfworld_data.find_games(folder, 'train')
    assert games.game(2).initial_state().intro()


# ---- adapter ---------------------------------------------------------------------------------------------------------


def test_is_an_env(folder):
    env = make_env(folder)
    assert isinstance(env, base.Env)
    assert env.task_names == alfworld_data.find_games(folder, 'train').names and len(env.task_types) == 3


def test_solving_is_rewarded_once_and_ends_the_episode(folder):
    env = make_env(folder)
    first = env.reset(1)
    assert first.text.startswith('-= Welcome') and first.text.endswith(f'Your task is to: {first.task}.')
    observations = play(env, SOLUTION)
    assert [o.reward for o in observations] == [0.0, 0.0, 0.0, 0.0, 10.0]
    assert [o.done for o in observations] == [o.success for o in observations] == [False] * 4 + [True]
    assert {o.task for o in observations} == {first.task}
    with pytest.raises(RuntimeError, match='over'):
        env.step('look')
    assert env.reset(1) == first


def test_step_limit_is_done_but_no_success(folder):
    env = make_env(folder, max_steps=3)
    env.reset(0)
    observations = play(env, ('look', 'nonsense', 'help'))
    assert [o.done for o in observations] == [False, False, True]
    assert not any(o.success or o.reward for o in observations)
    env.reset(0)
    assert env.step('look').done is False  # the count starts again


def test_solving_on_the_last_step_is_a_success(folder):
    env = make_env(folder, max_steps=len(SOLUTION), success_reward=1.0)
    env.reset(0)
    last = play(env, SOLUTION)[-1]
    assert last.done and last.success and last.reward == 1.0


@pytest.mark.parametrize('command', ['', 'Look', 'go to drawer', 'put pen 1 in/on desk 1', 'take pen 1 from drawer 1'])
def test_anything_illegal_changes_nothing(folder, command):
    env = make_env(folder)
    before = env.reset(0)
    after = env.step(command)
    assert after.text == 'Nothing happens.' and after.admissible == before.admissible and after.reward == 0.0


def test_admissible_commands_are_sorted_and_are_those_that_do_something(folder):
    env = make_env(folder)
    observation = env.reset(0)
    assert list(observation.admissible) == sorted(observation.admissible)
    for command in observation.admissible:
        env.reset(0)
        assert env.step(command).text != 'Nothing happens.'


def test_snapshot_continues_identically_also_through_pickle(folder):
    env, other = make_env(folder), make_env(folder)
    env.reset(0)
    seen = play(env, SOLUTION[:3])[-1]
    snapshot = env.snapshot()
    rest = play(env, SOLUTION[3:])
    for place in (env, other):
        for copy in (snapshot, pickle.loads(pickle.dumps(snapshot))):
            assert place.restore(copy) == seen
            assert play(place, SOLUTION[3:]) == rest
    env.restore(snapshot)
    play(env, ('move pen 1 to drawer 1', 'close drawer 1'))
    assert env.restore(snapshot) == seen  # what was done since does not reach it
    assert base.replay(env, 0, SOLUTION[:3]) == seen


def test_snapshot_keeps_the_step_count(folder):
    env = make_env(folder, max_steps=4)
    env.reset(0)
    play(env, ('look', 'look', 'look'))
    snapshot = env.snapshot()
    env.reset(1)
    env.restore(snapshot)
    assert env.step('look').done


@pytest.mark.parametrize('steps', [3, 3000])
def test_what_the_explorer_watched_survives_pickle_however_long(folder, steps):
    env, other = (make_env(folder, oracle='explorer', max_steps=9999) for _ in range(2))
    env.reset(0)
    play(env, (*SOLUTION[:2], *['look'] * steps))
    assert other.restore(pickle.loads(pickle.dumps(env.snapshot()))) == env.restore(env.snapshot())
    assert other.oracle_command() == env.oracle_command() == SOLUTION[2]  # it remembers what was in the drawer


def test_snapshot_of_other_games_is_refused(folder, tmp_path):
    write_game(tmp_path / 'other', 'pick_and_place_simple-Mug-None-Desk-301/trial_1')
    env, other = make_env(folder), make_env(tmp_path / 'other')
    env.reset(2)
    with pytest.raises(ValueError, match='trial_0.*another environment'):
        other.restore(env.snapshot())


def test_oracle_solves_and_knows_when_the_game_is_lost(folder):
    env = make_env(folder, oracle='planner')
    observation = env.reset(0)
    while not observation.done:
        observation = env.step(env.oracle_command())
    assert observation.success
    with pytest.raises(RuntimeError, match='over'):
        env.oracle_command()
    env.reset(0)
    play(env, LOST)
    assert env.oracle_command() is None


def test_without_oracle_it_is_forbidden(folder):
    env = make_env(folder)
    env.reset(0)
    with pytest.raises(base.OracleForbidden):
        env.oracle_command()


def test_wrong_use_is_named(folder):
    env = make_env(folder)
    for call in (lambda: env.step('look'), env.snapshot):
        with pytest.raises(RuntimeError, match='reset'):
            call()
    for task_id in (-1, 3):
        with pytest.raises(IndexError, match=f'task {task_id} of 3'):
            env.reset(task_id)
    with pytest.raises(ValueError, match='native, textworld'):
        make_env(folder, engine='unity')
    with pytest.raises(ValueError, match='max_steps'):
        make_env(folder, max_steps=0)


def test_partial_is_picklable_and_envs_of_a_process_share_parsed_games(folder):
    factory = pickle.loads(pickle.dumps(functools.partial(alfworld.make_env, str(folder), 'train', max_games=2)))
    first, second = factory(), factory()
    assert len(first.task_names) == 2
    first.reset(0), second.reset(0)
    assert first._engine.state().game is second._engine.state().game
    play(first, SOLUTION[:2])
    assert second.step(SOLUTION[0]).text.endswith('closed.')  # but no state


def test_official_engine_without_the_extra_names_the_command(folder):
    code = ("import sys; sys.modules['textworld'] = None\n"
            f"from covsero_jax.envs import alfworld\nalfworld.make_env({str(folder)!r}, 'train', engine='textworld')")
    result = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "pip install -e '.[alfworld]'" in result.stderr and "'native'" in result.stderr


def test_no_jax_and_no_textworld_is_imported():
    code = ("import sys\nfrom covsero_jax.envs import alfworld\n"
            "assert not {'jax', 'textworld', 'alfworld'} & set(sys.modules), sorted(sys.modules)")
    subprocess.run([sys.executable, '-c', code], check=True)

"""The doctor finds what is wrong, names it, and its exit code says so. Real folders, nothing replaced."""

from __future__ import annotations

import ast
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from covsero_jax.envs import alfworld_data, alfworld_games
from experiments import doctor

ROOT = pathlib.Path(doctor.__file__).parents[1]
NUM_GAMES = {'train': 6, 'valid_seen': 6, 'valid_unseen': 6}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'cache'))
    monkeypatch.delenv('ALFWORLD_DATA', raising=False)


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    return alfworld_games.ensure_games(
        tmp_path / 'games', difficulty=alfworld_games.DIFFICULTIES['tiny'], seed=0, num_games=NUM_GAMES)


def levels(findings) -> list[str]:
    return [finding.level for finding in findings]


def wrong(findings) -> list[str]:
    return [finding.text for finding in findings if finding.level == 'wrong']


def rewrite(folder: pathlib.Path, **changes: object) -> list[pathlib.Path]:
    """Change a field in every game of the train split; a value may be a function of the old one."""
    paths = sorted((folder / alfworld_data.LAYOUT / 'train').rglob(alfworld_data.GAME_FILE))
    for path in paths:
        record = json.loads(path.read_text(encoding='utf-8'))
        record |= {key: value(record[key]) if callable(value) else value for key, value in changes.items()}
        path.write_text(json.dumps(record), encoding='utf-8')
    return paths


def test_a_good_folder_is_all_ok_and_counted(folder):
    findings = list(doctor.check_games(folder, NUM_GAMES))
    assert levels(findings) == ['ok'] * 3
    assert all('6 games' in finding.text for finding in findings)


def test_an_incomplete_folder_is_a_note(folder):
    findings = list(doctor.check_games(folder, doctor.OFFICIAL_COUNTS))
    assert levels(findings) == ['ok', 'note'] * 3
    assert '3553 games were expected' in findings[1].text


def test_missing_folder_and_split_are_wrong(folder, tmp_path):
    assert 'gone' in wrong(doctor.check_games(tmp_path / 'gone', {'train': 6}))[0]
    assert 'valid_train' in wrong(doctor.check_games(folder, {'valid_train': 200}))[0]


def test_unsolvable_games_are_counted_and_none_left_is_wrong(folder):
    paths = rewrite(folder)
    path = paths[0]
    path.write_text(json.dumps(json.loads(path.read_text(encoding='utf-8')) | {'solvable': False}), encoding='utf-8')
    [ok, note] = doctor.check_games(folder, {'train': 6})
    assert (ok.level, note.level) == ('ok', 'note')
    assert '5 games, 1 not marked solvable left out' in ok.text
    rewrite(folder, solvable=False)
    assert '6 not marked solvable' in wrong(doctor.check_games(folder, {'train': 6}))[0]


@pytest.mark.parametrize('changes', [
    {'grammar': lambda text: text.replace('move {o} to {r}', 'put {o} in/on {r}')},
    {'walkthrough': ['go to loc 3']},
])
def test_data_of_another_version_is_wrong(folder, changes):
    rewrite(folder, **changes)
    [text] = wrong(doctor.check_games(folder, {'train': 6}))
    assert 'alfworld >= 0.4' in text and str(folder) in text


def test_a_walkthrough_that_does_not_win_and_a_broken_problem_are_wrong(folder):
    rewrite(folder, walkthrough=lambda commands: commands[:-1])
    assert 'does not win' in wrong(doctor.check_games(folder, {'train': 6}))[0]
    rewrite(folder, pddl_problem='nothing')
    assert 'game.tw-pddl' in wrong(doctor.check_games(folder, {'train': 6}))[0]


def test_bounds_are_those_of_setup_py():
    calls = [node for node in ast.walk(ast.parse((ROOT / 'setup.py').read_text(encoding='utf-8')))
             if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'setup']
    arguments = {keyword.arg: keyword.value for keyword in calls[0].keywords}
    required = [name.partition('>=') for name in ast.literal_eval(arguments['install_requires'])]
    assert {name: version for name, _, version in required} == doctor.PACKAGES
    assert ast.literal_eval(arguments['python_requires']) == '>=' + '.'.join(map(str, doctor.PYTHON))
    extras = dict(name.partition('==')[::2] for name in ast.literal_eval(arguments['extras_require'])['alfworld'])
    assert {name.partition('[')[0]: version for name, version in extras.items()} == doctor.OFFICIAL_ENGINE


def test_old_and_missing_packages_are_named(monkeypatch):
    assert not wrong(doctor.check_versions())
    monkeypatch.setattr(doctor, 'PACKAGES', {'numpy': '999.1', 'no-such-package-here': ''})
    old, missing = wrong(doctor.check_versions())
    assert 'numpy>=999.1' in old and np.__version__ in old
    assert 'no-such-package-here is not installed' in missing


@pytest.mark.parametrize('version, minimum, enough', [
    ('0.10.2', '0.6', True), ('0.6', '0.10', False), ('4.50.0.dev0', '4.50', True), ('1.0rc1', '', True),
    ('0.2.3', '0.2.4', False),
])
def test_versions_are_compared_as_numbers(version, minimum, enough):
    assert (doctor._numbers(version) >= doctor._numbers(minimum)) == enough


def test_disk_and_devices(tmp_path, monkeypatch):
    assert not wrong(doctor.check_disk([tmp_path / 'not' / 'yet' / 'made']))
    assert not wrong(doctor.check_devices())
    monkeypatch.setattr(doctor, 'MIN_FREE_GIB', 1e9)
    assert 'GiB free' in wrong(doctor.check_disk([tmp_path]))[0]


def test_tiny_policy_missing_damaged_and_whole(tmp_path):
    assert 'config.json, tokenizer.json, model.safetensors' in wrong(doctor.check_tiny_policy(tmp_path))[0]
    (tmp_path / 'config.json').write_text(json.dumps({'architectures': ['Qwen2ForCausalLM']}))
    (tmp_path / 'tokenizer.json').write_text('{}')
    (tmp_path / 'model.safetensors').write_bytes(b'\x10\x00')
    assert 'damaged' in wrong(doctor.check_tiny_policy(tmp_path))[0]
    safetensors_numpy.save_file({'weight': np.zeros(3, np.float32)}, tmp_path / 'model.safetensors')
    [finding] = doctor.check_tiny_policy(tmp_path)
    assert finding.level == 'ok' and 'Qwen2ForCausalLM, 1 tensors' in finding.text


def test_exit_code_and_one_line_per_finding(folder, tmp_path, capsys):
    assert doctor.report([lambda: doctor.check_games(folder, NUM_GAMES)]) == 0
    assert capsys.readouterr().out.count('\n') == 3 + 2
    assert doctor.report([lambda: doctor.check_games(tmp_path / 'gone', NUM_GAMES)]) == 1
    assert '3 thing(s) wrong' in capsys.readouterr().out


def test_command_line_reports_a_wrong_folder_and_fails(tmp_path):
    result = subprocess.run([sys.executable, '-m', 'experiments.doctor', f'--data={tmp_path / "gone"}'], cwd=ROOT,
                            capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert f'wrong  the data folder does not exist: {tmp_path / "gone"}' in result.stdout
    assert 'ALFWORLD_DATA is not set' in result.stdout and 'device(s)' in result.stdout

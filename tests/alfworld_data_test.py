"""What the list of games knows about expert plans."""

from __future__ import annotations

import pathlib

import pytest
from alfworld_env_test import SOLUTION, write_game

from covsero_jax.envs import alfworld_data


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path / 'cache'))
    data = tmp_path / 'data'
    write_game(data, 'pick_and_place_simple-Pen-None-Desk-301/trial_0', walkthrough=SOLUTION)
    write_game(data, 'pick_and_place_simple-Pen-None-Desk-301/trial_1')
    write_game(data, 'pick_and_place_simple-Pen-None-Desk-301/trial_2', walkthrough=None)
    write_game(data, 'pick_and_place_simple-Pen-None-Desk-301/trial_3', walkthrough=SOLUTION[:2])
    return data


def test_plan_lengths_are_those_of_the_files(folder, monkeypatch):
    first = alfworld_data.find_games(folder, 'train')
    assert first.plan_lengths == (5, 0, 0, 2)
    assert first.subset(2).plan_lengths == (5, 0)
    monkeypatch.setattr(alfworld_data, '_read_record', None)  # from here on only the cache can be read
    assert alfworld_data.find_games(folder, 'train').entries == first.entries


def test_a_cache_without_plan_lengths_is_rebuilt(folder, monkeypatch):
    read = alfworld_data._read_entries

    def read_without(*arguments) -> dict:
        index = read(*arguments)
        return index | {'games': [row[:-1] for row in index['games']]}

    with monkeypatch.context() as patch:
        patch.setattr(alfworld_data, 'CACHE_FORMAT', 1)
        patch.setattr(alfworld_data, '_read_entries', read_without)
        with pytest.raises(TypeError, match='plan_length'):  # the cache is written before that
            alfworld_data.find_games(folder, 'train')
    assert alfworld_data.find_games(folder, 'train').plan_lengths == (5, 0, 0, 2)


def test_the_manifest_is_about_games_not_plans(folder, tmp_path):
    other = tmp_path / 'other'
    for name in alfworld_data.find_games(folder, 'train').names:
        write_game(other, name.partition('/train/')[2], walkthrough=['look'])
    first, second = alfworld_data.find_games(folder, 'train'), alfworld_data.find_games(other, 'train')
    assert first.hash == second.hash and first.plan_lengths != second.plan_lengths


def test_a_walkthrough_that_is_none_names_the_file(folder):
    path = write_game(folder, 'pick_and_place_simple-Pen-None-Desk-301/trial_4', walkthrough=7)
    with pytest.raises(alfworld_data.AlfworldDataError, match=str(path)):
        alfworld_data.find_games(folder, 'train')

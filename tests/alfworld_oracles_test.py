"""ALFWorld's two oracles from states that somebody else's commands have reached: random, half of them illegal."""

from __future__ import annotations

import multiprocessing
import random

import pytest

from configs import base as configs
from covsero_jax.envs import alfworld, alfworld_games, base
from experiments import environments

PREFIX, GAMES = 15, 24


def make_env(oracle, **arguments):
    config = configs.get_config('smoke')
    config.env.num_train = 48
    return alfworld.make_env(environments.data_folder(config), 'train', max_steps=50, oracle=oracle, **arguments)


def wander(env, task, length=PREFIX, seed=0):
    """A random prefix: (observation, commands); stops before the end of the episode."""
    rng = random.Random(f'{task}/{seed}')
    observation, commands = env.reset(task), []
    while len(commands) < length:
        command = rng.choice(observation.admissible) if rng.random() < 0.7 else 'go to the moon'
        after = env.step(command)
        if after.done:
            return base.replay(env, task, commands), commands
        observation = after
        commands.append(command)
    return observation, commands


def finish(env, observation):
    """The oracle's commands until the end: (last observation, commands). Each must be legal."""
    commands = []
    while not observation.done:
        command = env.oracle_command()
        assert command in observation.admissible
        observation = env.step(command)
        commands.append(command)
    return observation, commands


def continuations(oracle):
    """From 24 small rooms, and the plans of 30 larger ones, in which many ways are equally short."""
    env = make_env(oracle)
    games = [alfworld_games.generate_game(0, 'train', i, alfworld_games.DIFFICULTIES['medium']) for i in range(30)]
    return [finish(env, wander(env, task)[0])[1] for task in range(GAMES)] + [game.walkthrough for game in games]


@pytest.mark.parametrize('oracle', ['planner', 'explorer'])
@pytest.mark.parametrize('seed', [0, 1])
def test_they_win_from_foreign_states_by_legal_commands(oracle, seed):
    env = make_env(oracle)
    for task in range(GAMES):
        assert finish(env, wander(env, task, seed=seed)[0])[0].success


def test_the_planner_is_never_longer():
    planner, explorer = make_env('planner'), make_env('explorer')
    lengths = [[len(finish(env, wander(env, task)[0])[1]) for env in (planner, explorer)] for task in range(GAMES)]
    assert all(a <= b for a, b in lengths) and sum(a for a, _ in lengths) < sum(b for _, b in lengths)


@pytest.mark.parametrize('oracle', ['planner', 'explorer'])
def test_copy_and_replay_continue_alike(oracle):
    env, other = make_env(oracle), make_env(oracle)
    for task in range(GAMES):
        _, commands = wander(env, task)
        snapshot = env.snapshot()
        there = finish(env, env.restore(snapshot))
        assert finish(env, env.restore(snapshot)) == there  # what was explored since then is forgotten
        assert finish(other, other.restore(snapshot)) == there == finish(other, base.replay(other, task, commands))


@pytest.mark.parametrize('oracle', ['planner', 'explorer'])
def test_they_are_the_same_in_every_process(oracle, monkeypatch):
    """Ties between equally short plans included: they must not be broken by the order of a set of strings."""
    found = []
    for hash_seed in ('1', '2'):
        monkeypatch.setenv('PYTHONHASHSEED', hash_seed)
        with multiprocessing.get_context('spawn').Pool(1) as pool:
            found.append(pool.apply(continuations, (oracle,)))
    assert found[0] == found[1] == continuations(oracle)


def test_asking_on_the_way_changes_nothing():
    """Told step by step or all at once, the explorer knows the same."""
    env = make_env('explorer')
    for task in range(GAMES):
        _, commands = wander(env, task)
        expected = env.oracle_command()
        base.replay(env, task, commands[:5])
        for command in commands[5:]:
            env._informed_explorer()
            env.step(command)
        assert env.oracle_command() == expected


def test_the_explorer_reads_the_raw_text():
    raw, enriched = make_env('explorer'), make_env('explorer', observation='enriched')
    for task in range(8):
        assert finish(raw, wander(raw, task)[0])[1] == finish(enriched, wander(enriched, task)[0])[1]


def test_the_explorer_must_have_watched():
    blind, env = make_env('planner'), make_env('explorer')
    _, commands = wander(blind, 0)
    with pytest.raises(ValueError, match='restore by replay'):
        env.restore(blind.snapshot())
    base.replay(env, 0, commands)
    assert blind.restore(env.snapshot()).text == env.restore(env.snapshot()).text


def test_heating_undoes_cooling():
    """In a cool-task, something cooled and then heated must be cooled again."""
    env, undone = make_env('explorer'), 0
    for task in (i for i, kind in enumerate(env.task_types) if kind == 'pick_cool_then_place_in_recep'):
        observation = env.reset(task)
        while not (env._watched.command or '').startswith('cool '):
            observation = env.step(env.oracle_command())
        held = env._watched.command.removeprefix('cool ').split(' with ')[0]
        microwave = next(c for c in observation.admissible if c.startswith('go to microwave'))
        heat = f'heat {held} with {microwave.removeprefix("go to ")}'
        if heat in env.step(microwave).admissible:  # not everything that can be cooled can be heated
            observation, commands = finish(env, env.step(heat))
            assert observation.success and any(command.startswith('cool ') for command in commands)
            undone += 1
    assert undone


def test_unknown_oracles_list_those_that_exist():
    with pytest.raises(ValueError, match='planner, explorer'):
        make_env('oracle')

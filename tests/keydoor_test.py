"""The tiny environment keeps every promise of the protocol."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax.envs import base, keydoor

TASKS = range(len(keydoor.LEVELS))
SHORTEST = {  # moves + keys taken + doors unlocked
    'one_door/far': 3 + 1 + 1,
    'one_door/near': 1 + 1 + 1,
    'passage/long': 4,
    'passage/short': 2,
    'two_doors/backtrack': 3 + 2 + 2,
    'two_doors/chain': 2 + 2 + 2,
}


def solve(env: keydoor.KeyDoorEnv, observation: base.Observation) -> tuple[int, base.Observation]:
    steps = 0
    while not observation.done:
        observation = env.step(env.oracle_command())
        steps += 1
    return steps, observation


def test_keeps_the_protocol():
    env = keydoor.KeyDoorEnv()
    assert isinstance(env, base.Env)
    assert list(env.task_names) == sorted(set(env.task_names))
    assert len(env.task_types) == len(env.task_names)
    assert sorted(set(env.task_types)) == ['one_door', 'passage', 'two_doors']


@pytest.mark.parametrize('task', TASKS)
def test_the_oracle_solves_every_task_by_the_shortest_way(task):
    env = keydoor.KeyDoorEnv(oracle=True)
    steps, last = solve(env, env.reset(task))
    assert (last.done, last.success, last.reward, last.admissible) == (True, True, 1.0, ())
    assert steps == SHORTEST[env.task_names[task]]


def test_the_oracle_is_forbidden_unless_asked_for():
    env = keydoor.KeyDoorEnv()
    env.reset(0)
    with pytest.raises(base.OracleForbidden):
        env.oracle_command()


def test_the_window_ends_the_episode_without_success():
    env = keydoor.KeyDoorEnv(oracle=True)
    env.reset(0)
    last = env.step('climb out of the window')
    assert (last.done, last.success, last.reward) == (True, False, 0.0)
    assert env.oracle_command() is None
    with pytest.raises(RuntimeError, match='over'):
        env.step('look')


@given(task=st.sampled_from(TASKS), choices=st.lists(st.integers(0, 5), max_size=15), cut=st.integers(0, 15))
@settings(deadline=None, max_examples=60)
def test_replay_and_snapshot_restore_the_same_state(task, choices, cut):
    env = keydoor.KeyDoorEnv(oracle=True)
    observations, commands, snapshots = [env.reset(task)], [], [pickle.dumps(env.snapshot())]
    for choice in choices:
        if observations[-1].done:
            break
        assert list(observations[-1].admissible) == sorted(observations[-1].admissible)
        commands.append((*observations[-1].admissible, 'xyzzy')[choice % (1 + len(observations[-1].admissible))])
        observations.append(env.step(commands[-1]))
        if commands[-1] == 'xyzzy':
            assert observations[-1].text == 'Nothing happens.'
            assert observations[-1].admissible == observations[-2].admissible
        snapshots.append(pickle.dumps(env.snapshot()))
    cut = min(cut, len(commands))
    other = keydoor.KeyDoorEnv(oracle=True)
    assert base.replay(other, task, commands[:cut]) == observations[cut]
    assert env.restore(pickle.loads(snapshots[cut])) == observations[cut]
    if not observations[cut].done:
        assert solve(env, observations[cut]) == solve(other, observations[cut])

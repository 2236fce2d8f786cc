"""Evaluation: each game once, the same result for every pool, no help from an oracle."""

import collections
import functools
import hashlib
import json

import pytest
import scripted

from covsero_jax import evaluate, workers
from covsero_jax.envs import base, keydoor

RESETS = collections.Counter()  # by task


class Counting(keydoor.KeyDoorEnv):
    """Counts resets; whoever asks its oracle is caught."""

    def reset(self, task_id):
        RESETS[task_id] += 1
        return super().reset(task_id)

    def oracle_command(self):
        raise AssertionError('an evaluation asked the oracle')


def run(make_env=keydoor.KeyDoorEnv, policy=None, *, num_envs=3, num_workers=0, max_steps=9, **arguments):
    policy = scripted.RandomPolicy() if policy is None else policy
    with workers.WorkerPool(make_env, num_envs=num_envs, num_workers=num_workers, timeout_s=60) as pool:
        manifest = {'task_names': pool.task_names, 'task_types': pool.task_types} | arguments
        return evaluate.evaluate(pool, policy, scripted.JsonPrompts(), max_steps=max_steps, **manifest)


@functools.cache
def reference() -> evaluate.EvalResult:
    result = run(num_envs=6)
    assert 0 < result.success_rate < 1  # the example tells the games apart
    return result


@pytest.mark.parametrize('num_envs', [1, 3, 6, 10])
def test_each_game_is_played_exactly_once(num_envs):
    RESETS.clear()
    assert run(Counting, num_envs=num_envs) == reference()
    assert RESETS == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize('num_workers', [1, 4])
def test_result_does_not_depend_on_workers(num_workers):
    assert run(num_workers=num_workers, num_envs=4) == reference()


def test_evaluation_never_calls_oracle():
    assert run(Counting) == reference()  # its oracle raises


def test_done_without_success_is_not_success():
    result = run(policy=scripted.scripted_policy({game: ['do climb out of the window'] for game in range(6)}))
    assert result.success_rate == 0.0
    assert result.mean_steps == 1.0


def test_success_by_hand():
    result = run(policy=scripted.scripted_policy({game: ['do go east', 'go east'] for game in range(6)}), max_steps=5)
    assert result.success == (False, False, True, True, False, False)
    assert result.per_type == {'one_door': (0, 2), 'passage': (2, 2), 'two_doors': (0, 2)}
    assert result.success_rate == 2 / 6
    assert result.mean_steps == (4 * 5 + 4 + 2) / 6
    assert result.parsed_rate == 6 / 26
    # far: 2 of 5 moves are free; near: 0; passages: all 6; backtrack: 1; chain: 0
    assert result.admissible_rate == (2 + 0 + 6 + 1 + 0) / 26


def test_a_subset_keeps_its_games_and_their_randomness():
    policy = scripted.RandomPolicy()
    result = run(policy=policy, task_ids=[4, 1])
    assert result.task_names == ('one_door/near', 'two_doors/backtrack')
    assert result.success == (reference().success[1], reference().success[4])
    assert {row[0] for row in policy.rows} == {1, 4}
    assert result.manifest_hash != reference().manifest_hash


def test_report():
    report = reference().to_dict()
    assert json.loads(json.dumps(report)) == report
    names = sorted(keydoor.LEVELS)
    assert report['manifest_hash'] == hashlib.sha256('\n'.join(names).encode()).hexdigest()
    assert evaluate.manifest_hash(names[::-1]) == report['manifest_hash']
    assert report['num_games'] == 6
    assert list(report['success']) == names
    assert sum(row['games'] for row in report['per_type'].values()) == 6
    assert sum(row['successes'] for row in report['per_type'].values()) == sum(report['success'].values())


def test_wrong_manifests_are_refused():
    names = keydoor.KeyDoorEnv.task_names
    with pytest.raises(ValueError, match='sorted'):
        run(task_names=names[::-1])
    with pytest.raises(ValueError, match='other games'):
        run(task_names=[name + 'x' for name in names])
    with pytest.raises(ValueError, match='at most once'):
        run(task_ids=[1, 1])
    with pytest.raises(ValueError, match='at least one'):
        run(task_ids=[])
    with pytest.raises(ValueError, match='outside'):
        run(task_ids=[6])


def test_pools_built_for_evaluation_have_no_oracle():
    with workers.WorkerPool(keydoor.KeyDoorEnv, num_envs=1, num_workers=0, timeout_s=60) as pool:
        pool.reset([0])
        with pytest.raises(base.OracleForbidden):
            pool.oracle_commands([0])

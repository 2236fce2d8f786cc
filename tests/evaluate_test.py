"""Evaluation: each game once, the same result for every pool, no help from an oracle."""

import collections
import functools
import hashlib
import json

import pytest
import scripted

from configs import base as configs
from covsero_jax import evaluate, workers
from covsero_jax.envs import alfworld_data, alfworld_explorer, alfworld_oracle, base, keydoor
from experiments import environments, wiring
from experiments import evaluate as experiment

RESETS = collections.Counter()  # by task
ASKED = []  # who has asked an oracle; pools turn what an oracle raises into an answer, so raising is not enough


def refuse(*arguments, **keywords):
    """In place of an oracle."""
    ASKED.append(arguments)
    raise AssertionError('an evaluation asked the oracle')


@pytest.fixture(autouse=True)
def nobody_has_asked():
    ASKED.clear()


class Counting(keydoor.KeyDoorEnv):
    """Counts resets; whoever asks its oracle is caught."""

    def reset(self, task_id):
        RESETS[task_id] += 1
        return super().reset(task_id)

    def oracle_command(self):
        refuse(self)


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
    assert run(Counting) == reference()
    assert not ASKED


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


# ---- by length of the expert plan ------------------------------------------------------------------------------------


def test_strata_are_counted_like_types():
    result = run(strata=reference().task_types)
    assert result.per_stratum == result.per_type == reference().per_type
    assert reference().per_stratum == {} == reference().to_dict()['per_stratum']
    labels = ('short', 'long', 'long', 'short', 'unknown', 'long')
    result = run(strata=labels)
    assert result.success == reference().success
    for label in set(labels):
        won = [success for success, its_label in zip(result.success, labels, strict=True) if its_label == label]
        assert result.per_stratum[label] == (sum(won), len(won))
        assert result.to_dict()['per_stratum'][label]['success_rate'] == sum(won) / len(won)
    assert run(strata=labels, task_ids=[4, 1]).strata == ('long', 'unknown')
    with pytest.raises(ValueError, match='5 strata for a manifest of 6'):
        run(strata=labels[:5])


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A few generated games, written before anything is patched."""
    monkeypatch.setenv('COVSERO_CACHE', str(tmp_path))
    environments._generated_games.cache_clear()
    config = configs.get_config('smoke')
    config.env.num_train, config.env.num_valid, config.env.max_steps, config.env.num_workers = 6, 12, 12, 0
    environments.data_folder(config)
    yield config
    environments._generated_games.cache_clear()


def test_games_are_stratified_by_the_plans_in_their_files(config):
    games = alfworld_data.find_games(environments.data_folder(config), 'valid_seen')
    lengths = [len(json.loads(games.path(i).read_text())['walkthrough']) for i in range(len(games))]
    config.eval.plan_bounds = 4, 6
    expected = ['short' if n <= 4 else 'medium' if n <= 6 else 'long' for n in lengths]
    assert experiment.plan_strata(config, 'valid_seen') == tuple(expected) and len(set(expected)) == 3
    config.eval.plan_bounds = 1, 100
    assert set(experiment.plan_strata(config, 'valid_seen')) == {'medium'}
    config.eval.plan_bounds = 6, 4
    with pytest.raises(wiring.ConfigError, match='plan_bounds'):
        experiment.plan_strata(config, 'valid_seen')


def test_games_without_plans_have_no_strata(config):
    games = alfworld_data.find_games(environments.data_folder(config), 'valid_seen')
    for i in range(len(games)):
        record = json.loads(games.path(i).read_text())
        games.path(i).write_text(json.dumps(record | {'walkthrough': [] if i else ['look']}))
    assert experiment.plan_strata(config, 'valid_seen') == ('short', *['unknown'] * 11)
    games.path(0).write_text(json.dumps(record | {'walkthrough': []}))
    assert experiment.plan_strata(config, 'valid_seen') == ()
    config.env.name = 'evaluate_test:make_counting'
    assert experiment.plan_strata(config, 'valid_seen') == ()


def test_strata_are_reported_apart_from_task_types():
    results = {'valid_seen': run(strata=['long', 'long', 'short', 'short', 'short', 'short']), 'valid_unseen': reference()}
    (won, games), rates = results['valid_seen'].per_stratum['short'], experiment.as_metrics(results)
    assert rates['eval/valid_seen/success_by_plan/short'] == won / games
    assert not any('success_rate' in name or 'unseen' in name for name in rates if 'by_plan' in name)
    table = experiment.plan_table(results).splitlines()
    assert [line.split()[0] for line in table[1:]] == ['short', 'long']
    assert f'({won}/{games})' in table[1] and table[1].split()[-1] == '-'
    assert experiment.plan_table({'valid_unseen': reference()}) == ''


# ---- no oracle -------------------------------------------------------------------------------------------------------


def make_counting(*, split, max_steps, oracle):
    del split, max_steps, oracle
    return Counting()


@pytest.fixture(params=['planner', 'explorer', 'own'])
def guarded(request, config, monkeypatch):
    """A configuration whose oracles raise, and the name of one of them."""
    if request.param == 'own':
        config.env.name = 'evaluate_test:make_counting'
    monkeypatch.setattr(alfworld_oracle, 'plan', refuse)
    monkeypatch.setattr(alfworld_explorer, 'Explorer', refuse)
    return config, request.param


def test_whole_evaluations_never_ask_an_oracle(guarded):
    config, _ = guarded
    for split in config.eval.splits:
        with wiring.make_pool(config, split, config.eval.num_envs) as pool:
            result = evaluate.evaluate(
                pool, scripted.RandomPolicy(), scripted.JsonPrompts(), pool.task_names, pool.task_types,
                max_steps=config.env.max_steps, strata=experiment.plan_strata(config, split))
        assert result.num_games == len(pool.task_names) and result.mean_steps > 1
    assert not ASKED


def test_training_asks_the_guarded_oracle(guarded):
    """The test above can fail: the same oracles, asked, do raise."""
    config, oracle = guarded
    with wiring.make_pool(config, config.env.train_split, 1, oracle=oracle) as pool:
        pool.reset([0])
        [answer] = pool.oracle_commands([0])
    assert ASKED and 'an evaluation asked the oracle' in answer.cause


def test_the_evaluator_builds_pools_without_an_oracle(config):
    config.sero.variant = 'sero'
    with experiment.Evaluator(config, policy=None, prompts=None) as evaluator:
        for pool in evaluator._pools.values():
            pool.reset([0] * pool.num_envs)
            with pytest.raises(base.OracleForbidden):
                pool.oracle_commands([0])

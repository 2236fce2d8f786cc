"""SERO's offline experiments: banks from real rollouts, and what is measured on them."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import faulty_oracles
import hypothesis
import jax
import numpy as np
import pytest
import scripted
from hypothesis import strategies as st

from configs import alfworld_hgpo
from covsero_jax import bank, checkpoint, learner, oracle, rollout, trajectory, workers
from covsero_jax.envs import base, keydoor
from experiments import oracle_bank, oracle_checks, oracle_plots, sero, wiring

SMOKE = ['--config=configs/alfworld_hgpo.py:smoke', '--config.env.num_workers=0', '--config.env.max_steps=15',
         '--config.rollout.group_size=2', '--config.rollout.row_buckets=(8,)']
ROOTS = 7  # not a multiple of the groups of a batch
MAX_STEPS = 12
SICK = keydoor.KeyDoorEnv.task_names.index(faulty_oracles.SICK)
PROMPTS = scripted.JsonPrompts()


# ---- the restoration report ------------------------------------------------------------------------------------------


def pool_of(make_env):
    return workers.WorkerPool(make_env, num_envs=6, num_workers=0, timeout_s=60.0)


@functools.cache
def roots():
    """Two steps into each of six tasks, with 10 left."""
    with pool_of(keydoor.KeyDoorEnv) as pool:
        policy = scripted.scripted_policy({g: ['look'] for g in range(6)})
        groups = rollout.collect_groups(pool, policy, PROMPTS, range(6), group_size=2, max_steps=MAX_STEPS,
                                        keep_snapshots=True)
        return [oracle.make_root(groups, g, 0, 2, max_steps=MAX_STEPS) for g in range(6)]


def branches_of(make_env, restoration, chosen=None, *, spoiled=False):
    with pool_of(make_env) as pool:
        if spoiled:  # a Forgetful environment's first episode is as it should be
            pool.reset([SICK, *[None] * 5])
            pool.reset([None] * SICK + [SICK] + [None] * (5 - SICK))
        return oracle.collect_branches(pool, PROMPTS, chosen or roots(), restoration=restoration, max_target=99)


def healthy(restoration='copy', chosen=None):
    return branches_of(functools.partial(keydoor.KeyDoorEnv, oracle=True), restoration, chosen)


def test_copy_and_replay_agree_and_the_oracle_wins():
    report = oracle_checks.restoration(healthy('copy'), healthy('replay'), [], [])
    assert report['roots'] == report['agree'] == report['solvable'] == report['won'] == 6 and report['won_share'] == 1
    assert report['validated'] == {'copy': 6, 'replay': 6} and report['lost'] == {} and report['dead_ends'] == 0
    assert [row['won'] for row in report['by_steps_left']] == [0, 6, 0, 0]
    lengths = [len(branch.steps) for branch in healthy()]
    assert report['plan_length'][0] == min(lengths) and report['plan_length'][-1] == max(lengths)


@pytest.mark.parametrize('what, reason', [('text', 'mismatch'), ('admissible', 'mismatch'), ('raises', 'not restored')])
def test_a_planted_mismatch_shows(what, reason):
    sick = branches_of(functools.partial(faulty_oracles.Forgetful, what), 'replay', spoiled=True)
    report = oracle_checks.restoration(healthy('copy'), sick, [], [])
    assert report['agree'] == 5 and report['validated'] == {'copy': 6, 'replay': 5}
    assert report['invalid'] == {'copy': {}, 'replay': {reason: 1}} and report['solvable'] == 6
    assert oracle_checks.restoration(sick, healthy('replay'), [], [])['solvable'] == 5  # not restored: says nothing


@pytest.mark.parametrize('mischief, solvable, lost', [
    ('gives_up', 5, {}), ('forbidden_word', 6, {'inadmissible': 1}), ('raises', 6, {'oracle failed': 1}),
    ('loops', 6, {'budget': 1})])
def test_dead_ends_are_told_from_failures(mischief, solvable, lost):
    make_env = functools.partial(faulty_oracles.OracleKeyDoor, getattr(faulty_oracles, mischief))
    copies, replays = branches_of(make_env, 'copy'), branches_of(make_env, 'replay')
    report = oracle_checks.restoration(copies, replays, [], [])
    assert (report['agree'], report['won'], report['solvable'], report['dead_ends']) == (6, 5, solvable, 6 - solvable)
    assert report['lost'] == lost and report['won_share'] == 5 / solvable
    assert report['won_share_in_time'] == 5 / (solvable - lost.get('budget', 0))


def test_a_different_continuation_is_no_agreement():
    changed = healthy('replay')
    changed[2] = dataclasses.replace(changed[2], steps=changed[2].steps[:-1])
    assert oracle_checks.restoration(healthy('copy'), changed, [], [])['agree'] == 5


def test_what_ran_out_of_budget_is_looked_at_again():
    hurried = [dataclasses.replace(root, steps_left=3) for root in roots()]
    branches = healthy('copy', hurried)
    late = [branch for branch in branches if branch.invalid == 'budget']
    assert 0 < len(late) < 6
    again = healthy('replay', [dataclasses.replace(branch.root, steps_left=10) for branch in late])
    report = oracle_checks.restoration(branches, healthy('replay', hurried), late, again)
    assert report['agree'] == 6 and report['lost'] == {'budget': len(late)}
    seen = report['out_of_budget']
    assert seen['won_with_more_time'] == len(late) and seen['steps_left'] == [3] * 5 and seen['steps_needed'][0] > 3
    assert f'won: {6 - len(late)} of 6' in oracle_checks.restoration_table(report)


# ---- the proxy check -------------------------------------------------------------------------------------------------


@hypothesis.given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6))
@hypothesis.settings(deadline=None)
def test_a_prefix_is_reproduced_when_everything_before_matched(rows):
    match_KT = np.array(rows)
    expected = [[all(row[:j]) for j in range(4)] for row in rows]
    assert oracle_checks.reproduces_prefix(match_KT).tolist() == expected


def policy_that_matches(branches, share):
    """Of 10 samples at step (branch, step), the first share[branch][step] * 10 give the oracle's command."""
    def act(prompts, row_ids):
        replies = []
        for prompt, (r, k, j) in zip(prompts, row_ids.tolist(), strict=True):
            assert prompt is branches[r].steps[j].prompt_tokens
            text = 'do ' + (branches[r].steps[j].command if k < round(10 * share[r][j]) else 'look around')
            replies.append(trajectory.SampledAction(scripted.encode(text), np.zeros(len(text), np.float32), False))
        return replies

    return act


def weighed_with(share):
    """Compatibilities that are these shares, and SERO's weights from them."""
    compat_RT = np.ones((len(share), MAX_STEPS), np.float32)
    for r, values in enumerate(share):
        compat_RT[r, :len(values)] = values
    reach_RT = np.cumprod(np.pad(compat_RT[:, :-1], ((0, 0), (1, 0)), constant_values=1.0), axis=1)
    return sero.Weighed(np.log(compat_RT), None, reach_RT, None, None)


def test_a_policy_as_compatible_as_it_matches_has_rank_correlation_one():
    branches, rng = healthy(), np.random.default_rng(0)
    share = [rng.integers(1, 11, len(branch.steps)) / 10 for branch in branches]
    matches = oracle_checks.sample_matches(policy_that_matches(branches, share), PROMPTS, branches, 10)
    np.testing.assert_allclose(np.concatenate([match_KT.mean(axis=0) for match_KT in matches]), np.concatenate(share))
    report = oracle_checks.proxy(matches, weighed_with(share), seed=0)
    assert report['match']['rho'] == pytest.approx(1) and report['match']['interval'] == pytest.approx([1, 1])
    assert report['steps'] == sum(map(len, share)) == len(report['rows']['weight'])
    assert sum(row['steps'] for row in report['bins']) == report['steps'] - len(branches)  # all but roots
    for r in range(len(branches)):  # low samples match first: a prefix is reproduced as often as its rarest command
        mine = np.array(report['rows']['branch']) == r
        expected = np.minimum.accumulate([1.0, *share[r][:-1]])
        np.testing.assert_allclose(np.array(report['rows']['reproduced'])[mine], expected)


@pytest.mark.parametrize('value', [0.0, 1.0])
def test_without_any_difference_there_is_no_correlation(value):
    branches = healthy()
    share = [np.full(len(branch.steps), value) for branch in branches]
    matches = oracle_checks.sample_matches(policy_that_matches(branches, share), PROMPTS, branches, 10)
    report = oracle_checks.proxy(matches, weighed_with([np.linspace(0.5, 0.9, len(s)) for s in share]), seed=0)
    assert report['match']['rho'] is None and 'all equal' in report['match']['why']
    assert all(row['reproduced'] in (None, value) for row in report['bins'])
    assert 'undefined' in oracle_checks.proxy_table(report)


@hypothesis.given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=6, max_size=6))
@hypothesis.settings(deadline=None, max_examples=8)
def test_rank_correlation_knows_order_only(points):
    x_Q, y_Q = np.array(points, float).T
    branch_Q = np.array([0, 0, 1, 1, 2, 2])
    measured = oracle_checks.rank_correlation(x_Q, y_Q, branch_Q, 0)
    again = oracle_checks.rank_correlation(np.exp(x_Q), y_Q, branch_Q, 0)
    assert (measured['rho'] is None) == (np.ptp(x_Q) == 0 or np.ptp(y_Q) == 0)
    if measured['rho'] is not None:
        low, high = measured['interval']
        assert -1 <= low <= high <= 1 and measured['rho'] == pytest.approx(again['rho'])
        assert measured['rho'] == pytest.approx(-oracle_checks.rank_correlation(-x_Q, y_Q, branch_Q, 0)['rho'])


def test_the_interval_resamples_branches_not_steps():
    """One branch many times over is one observation: nothing varies, however many steps it has."""
    x_Q = np.array([0.0, 1, 2, 3])
    y_Q = np.array([0.0, 2, 1, 3])
    rho, interval = (oracle_checks.rank_correlation(x_Q, y_Q, np.zeros(4), 0)[name] for name in ('rho', 'interval'))
    assert rho == pytest.approx(0.8) and interval == pytest.approx([rho, rho])
    spread = oracle_checks.rank_correlation(x_Q, y_Q, np.arange(4), 0)['interval']
    assert spread[0] < rho < spread[1]


# ---- from the command line, with the packaged policy and ALFWorld ----------------------------------------------------


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A bank, the report of its restoration, and a proxy check."""
    folder = tmp_path_factory.mktemp('oracle')
    oracle_bank.main(['collect', *SMOKE, f'--roots={ROOTS}', f'--out={folder}/bank.jsonl',
                      f'--check_restoration={folder}/restoration.json'])
    oracle_bank.main(['proxy', *SMOKE, f'--bank={folder}/bank.jsonl', '--samples=4', f'--out={folder}/proxy.json'])
    return folder


def read_bank(path: pathlib.Path):
    about = json.loads(path.read_text().splitlines()[0])
    return bank.read_bank(path, about)[0], about


def test_collect_writes_as_many_roots_as_asked(folder):
    branches, about = read_bank(folder / 'bank.jsonl')
    assert len(branches) == ROOTS and about['counts']['oracle/roots'] == ROOTS
    valid = [branch for branch in branches if not branch.invalid]
    assert about['counts']['oracle/valid'] == len(valid) > 0 and all(branch.oracle_return == 10.0 for branch in valid)
    assert about['rollout_steps'] > ROOTS and about['oracle'] == 'planner'
    assert about['policy'] == 'the packaged tiny policy'


def test_the_check_of_restoration_is_written(folder):
    report = json.loads((folder / 'restoration.json').read_text())
    assert report['kind'] == 'restoration' and {'config', 'commit', 'date'} <= report.keys()
    assert report['roots'] == report['agree'] == report['validated']['copy'] == ROOTS
    lost = report['lost'].get('budget', 0)
    assert report['won'] + lost == report['solvable'] == ROOTS
    assert report['out_of_budget']['won_with_more_time'] == report['out_of_budget']['roots'] == lost


def test_restoring_the_other_way_makes_the_same_bank(folder, tmp_path, capsys):
    oracle_bank.main(['collect', *SMOKE, f'--roots={ROOTS}', f'--out={tmp_path}/bank.jsonl',
                      '--config.sero.restoration=replay'])
    again = (tmp_path / 'bank.jsonl').read_text().splitlines()
    assert again[1:] == (folder / 'bank.jsonl').read_text().splitlines()[1:]
    assert f'results: {tmp_path}/bank.jsonl: {ROOTS} roots of the packaged tiny policy' in capsys.readouterr().out


def test_the_proxy_is_measured_on_every_step_of_valid_branches(folder):
    branches, _ = read_bank(folder / 'bank.jsonl')
    lengths = [len(branch.steps) for branch in branches if not branch.invalid]
    report = json.loads((folder / 'proxy.json').read_text())
    rows = {name: np.array(column) for name, column in report['rows'].items()}
    assert len(rows['depth']) == sum(lengths) == report['steps'] and report['branches'] == len(lengths)
    assert rows['depth'].tolist() == [j for n in lengths for j in range(n)]
    root = rows['depth'] == 0
    assert (rows['weight'][root] == 1).all() and (rows['reproduced'][root] == 1).all()
    for name in ('matched', 'reproduced', 'compatibility', 'weight'):
        assert (rows[name] >= 0).all() and (rows[name] <= 1).all()
    follows = ~root[1:]
    expected = (rows['weight'] * rows['compatibility'])[:-1][follows]
    np.testing.assert_allclose(rows['weight'][1:][follows], expected, rtol=2e-3, atol=1e-6)  # four digits are kept
    assert (np.diff(rows['reproduced'])[follows] <= 0).all()
    low, high = report['match']['interval']
    assert -1 <= low <= report['match']['rho'] <= high <= 1 and report['match']['rho'] > 0.5  # paper: 0.763


def test_the_proxy_depends_on_the_seed_alone(folder, tmp_path):
    oracle_bank.main(['proxy', *SMOKE, f'--bank={folder}/bank.jsonl', '--samples=4', f'--out={tmp_path}/proxy.json'])
    first, again = (json.loads(path.read_text()) for path in (folder / 'proxy.json', tmp_path / 'proxy.json'))
    assert first == again


def test_a_bank_of_other_games_is_refused(folder):
    with pytest.raises(bank.BankError, match=f'{folder}/bank.jsonl: games is'):
        oracle_bank.main(['proxy', *SMOKE, f'--bank={folder}/bank.jsonl', '--config.env.games_seed=1'])
    with pytest.raises(bank.BankError, match='prompt is'):
        oracle_bank.main(['replay', *SMOKE, f'--bank={folder}/bank.jsonl', '--config.prompt.history=1'])


def test_the_policy_can_be_a_checkpoint(tmp_path):
    config = oracle_bank.build(oracle_bank.parse(['proxy', *SMOKE, '--bank=b'])[0], SMOKE[1:])
    policy, mesh = wiring.load_policy(config), wiring.make_mesh(config)
    other = jax.tree.map(lambda x: 0.9 * x, policy.params)
    saved = checkpoint.Checkpoints(tmp_path / 'run')
    saved.save(7, learner.create_state(other, learner.make_optimizer(wiring.optimizer_config(config)), mesh, policy.config), {})
    saved.close()
    options, overrides = oracle_bank.parse(['proxy', *SMOKE, '--bank=b', f'--workdir={tmp_path}/run'])
    loaded, source = oracle_bank.load(options, oracle_bank.build(options, overrides))
    assert source == f'{tmp_path}/run, update 7'
    jax.tree.map(np.testing.assert_array_equal, loaded.params, other)


class Gift(keydoor.KeyDoorEnv):
    """Whatever is done wins."""

    def step(self, command: str) -> base.Observation:
        return base.Observation('You win.', (), 10.0, done=True, success=True)


def test_a_policy_without_failures_has_nothing_to_collect():
    config = alfworld_hgpo.get_config('smoke')
    policy = wiring.load_policy(config)
    with pool_of(Gift) as pool, pytest.raises(wiring.ConfigError, match='nothing to collect'):
        prompts = wiring.make_prompts(config, policy.tokenizer)
        oracle_bank.collect_bank(config, policy, prompts, pool, 3, both_ways=False)


@pytest.mark.parametrize('arguments', [
    ['collect', '--roots=0', '--out=b'], ['collect', '--roots=3'], ['proxy'], ['collect', '--out=b', '--verbose'],
    ['collect', '--out=b', '--model=a', '--workdir=b'], []])
def test_wrong_arguments_end_with_usage(arguments, capsys):
    with pytest.raises(SystemExit):
        oracle_bank.parse(arguments)
    assert 'usage:' in capsys.readouterr().err


# ---- pictures --------------------------------------------------------------------------------------------------------


def run_with_sero(seed: int) -> dict:
    """A result file: eight updates in which the weight at depth 1 rises; depth 2 is reached in the last four only."""
    curves = {'oracle/weight/00': [1.0] * 8, 'oracle/weight/01': [(u + seed) / 10 for u in range(8)],
              'oracle/weight/02': [None] * 4 + [0.25] * 4, 'oracle/effective_depth': [1.0 + u / 10 for u in range(8)]}
    return {'experiment': 'hgpo+sero', 'seed': seed, 'config': {}, 'evaluations': [], 'curves': curves}


def test_weights_early_and_late():
    runs = [run_with_sero(0), run_with_sero(1)]
    early, late = (oracle_plots.weights_of_runs(runs, updates) for updates in (slice(4), slice(-4, None)))
    np.testing.assert_allclose(early[:2], [1, 0.2])
    np.testing.assert_allclose(late[:3], [1, 0.6, 0.25])
    assert np.isnan(early[2:]).all() and np.isnan(late[3:]).all()


def test_pictures_are_drawn(folder, tmp_path, capsys):
    (tmp_path / 'run.json').write_text(json.dumps(run_with_sero(0)))
    oracle_bank.main(['show', f'{folder}/proxy.json', f'{tmp_path}/run.json', f'--out={tmp_path}/new'])
    assert capsys.readouterr().out.strip() == f'results: {tmp_path}/new/weight_by_depth.png, {tmp_path}/new/proxy.png'
    assert all((tmp_path / 'new' / name).stat().st_size > 10_000 for name in ('weight_by_depth.png', 'proxy.png'))
    report = json.loads((folder / 'proxy.json').read_text())
    assert oracle_plots.weights_of_proxy(report)[0] == 1


def test_a_file_that_cannot_be_drawn_is_named(folder, tmp_path):
    (tmp_path / 'run.json').write_text(json.dumps(run_with_sero(0) | {'curves': {'rollout/success_rate': [0.5]}}))
    for path, message in ((tmp_path / 'run.json', 'had no oracle'), (folder / 'restoration.json', 'is neither'),
                          (folder / 'bank.jsonl', 'is neither'), (tmp_path / 'missing.json', 'No such file')):
        with pytest.raises(wiring.ConfigError, match=message):
            oracle_plots.draw([path], tmp_path)

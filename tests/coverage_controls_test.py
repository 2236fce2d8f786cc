"""CovGPO's controls: what each compares in the place of first-visit coverage, and that nothing else changes with it."""

from __future__ import annotations

import functools

import advantages_reference as reference
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from table_examples import (
    group,
    in_table_order,
    random_groups,
    three_trajectories,
    trajectory,
    varied_groups,
    varied_rows,
    varied_tables,
)

from covsero_jax import advantages, coverage, coverage_controls, groups
from covsero_jax.coverage import CoverageConfig
from covsero_jax.coverage_controls import RANDOM, UNGATED_BY_COVERAGE, VARIANTS

TABLE = {'discount': 0.95, 'goal_discount': 0.5, 'history_depth': 3}
MODES = ('ideal', 'deployed')
KEY = jax.random.key(7)
# The other estimators have no comparison that these have not; all of them meet the reference, below.
CASES = (('gigpo', 'ideal'), ('gigpo', 'deployed'), ('hgpo', 'deployed'), ('graphgpo', 'ideal'))
CONDITIONAL = tuple(variant for variant in VARIANTS if variant != 'always_on')


@functools.cache
def many_groups():
    """One update of all the tasks of many random batches, about 50 groups, and padding; every table here is as long."""
    batch = [members for seed in range(20) for members in varied_groups(seed)]
    return groups.build_step_table(batch, num_rows=1024, **TABLE)


def run(table, config, key=KEY, *, name='gigpo', **options):
    compare = coverage.with_coverage(advantages.make_compare(table, **options), table, config, key)
    advantage_N, comparisons = advantages.ESTIMATORS[name](table, compare)
    return advantage_N, comparisons, coverage.gate_metrics(comparisons)


run_jit = jax.jit(run, static_argnames=('config', 'name'))


def estimate(table, config, key=KEY, *, name='gigpo'):
    """`run` op by op: each op is compiled once for all the configurations of this file.

    In a stack of one, because under vmap a `cond` is a choice between two columns and not a program of its own.
    """
    stacks = jax.tree.map(lambda x: x[None], (table, key))
    out = jax.vmap(lambda table, key: run(table, config, key, name=name))(*stacks)
    return jax.tree.map(lambda x: x[0], out)


@functools.cache
def compared(variant, *, name='gigpo', mode='ideal', coverage_credit='trajectory'):
    """(comparisons of the control, comparisons of CovGPO) on `many_groups`, as NumPy."""
    configs = (CoverageConfig(variant=v, mode=mode, coverage_credit=coverage_credit) for v in (variant, 'covgpo'))
    return tuple(jax.device_get(estimate(many_groups(), config, name=name)[1]) for config in configs)


def rows_by_group(id_N):
    return [np.flatnonzero(id_N == g) for g in np.unique(id_N[id_N >= 0])]


def bits(x_N):
    return np.asarray(x_N).view(np.int32)


def test_many_groups_hold_what_the_tests_below_need():
    table = many_groups()
    assert 500 < (table.group_id_N >= 0).sum() < 1024 and table.group_id_N.max() > 40
    for _, comparisons in (compared('off', mode=mode) for mode in MODES):
        for comparison in comparisons:
            opened = [rows for rows in rows_by_group(comparison.id_N) if comparison.gate.open_N[rows[0]]]
            assert len(opened) > 5 and max(map(len, opened)) > 5


# ---- dealing values out anew ----------------------------------------------------------------------------------------

permute = jax.jit(coverage_controls.permute_members)
members = st.lists(st.integers(0, 7), min_size=24, max_size=24)  # row -> member, in any order
homes = st.lists(st.integers(-1, 2), min_size=8, max_size=8)  # member -> group, -1: not compared


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(members, homes, st.integers(0, 2**31 - 1))
def test_values_stay_in_their_group_and_whole_on_members(members, homes, seed):
    member_id_N = np.int32(members)
    id_N = np.int32(homes)[member_id_N]
    x_N = np.float32(member_id_N) + 0.5  # tells which member's value a row got
    dealt_N = np.asarray(permute(x_N, id_N, member_id_N, jax.random.key(seed)))
    giver_N = np.int32(dealt_N - 0.5)
    np.testing.assert_array_equal(np.int32(homes)[giver_N], id_N)
    np.testing.assert_array_equal(dealt_N[id_N < 0], x_N[id_N < 0])
    for g in range(3):
        present = sorted(set(member_id_N[id_N == g]))
        receivers = {member: set(giver_N[member_id_N == member]) for member in present}
        assert all(len(givers) == 1 for givers in receivers.values())
        assert sorted(giver for givers in receivers.values() for giver in givers) == present


def test_every_deal_is_equally_likely_and_groups_are_independent():
    """Two groups of three members: 36 joint deals, 18,000 keys. P(chi2 with 35 degrees of freedom > 66.62) = 0.001."""
    member_id_N = np.int32([0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 6])
    id_N = np.int32([0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1])
    keys = jax.random.split(jax.random.key(0), 18_000)
    dealt_KN = jax.vmap(lambda key: permute(np.float32(member_id_N), id_N, member_id_N, key))(keys)
    deals, counts = np.unique(np.asarray(dealt_KN)[:, [0, 3, 4, 6, 7, 9]], axis=0, return_counts=True)
    assert len(deals) == 36
    assert ((counts - 500) ** 2 / 500).sum() < 66.62


# ---- which member gets the score ----------------------------------------------------------------------------------


@pytest.mark.parametrize('credit', ['trajectory', 'transition'])
@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_shuffle_keeps_each_groups_scores_and_the_gates(name, credit, mode):
    table, moved = many_groups(), 0
    for mine, true in zip(*compared('shuffle', name=name, mode=mode, coverage_credit=credit), strict=True):
        np.testing.assert_array_equal(mine.gate.open_N, true.gate.open_N)
        for rows in rows_by_group(mine.id_N):
            own, others = mine.gate.score_N[rows], true.gate.score_N[rows]
            if mine.level == 'trajectory':
                _, first, path = np.unique(table.trajectory_id_N[rows], return_index=True, return_inverse=True)
                np.testing.assert_array_equal(own, own[first][path])  # one score for each trajectory
                own, others = own[first], others[first]
            np.testing.assert_array_equal(np.sort(own), np.sort(others))
            moved += mine.gate.open_N[rows[0]] and (own != others).any()
    assert moved > 10


@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_random_gives_every_trajectory_one_number_at_all_levels(name, mode):
    table, scores = many_groups(), []
    for mine, true in zip(*compared('random', name=name, mode=mode), strict=True):
        np.testing.assert_array_equal(mine.gate.open_N, true.gate.open_N)
        scores.append(mine.gate.score_N)
        np.testing.assert_array_equal(scores[0], scores[-1])
    values = [np.unique(scores[0][rows]) for rows in rows_by_group(table.trajectory_id_N)]
    assert {len(value) for value in values} == {1}
    values = np.concatenate(values)
    assert len(np.unique(values)) == len(values) > 100 and values.min() >= 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 4 * (12 * len(values)) ** -0.5  # four standard errors


# ---- when it moved --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_shuffle_h_keeps_the_number_of_first_visits_of_each_group(name, mode):
    """Over members and time: rows hold 0 or 1, trajectories the mean of what their rows were dealt."""
    table, moved = many_groups(), 0
    for mine in compared('shuffle_h', name=name, mode=mode)[0]:
        score_N = mine.gate.score_N.astype(np.float64)
        for rows in rows_by_group(mine.id_N):
            first_visits = table.novel_N[rows].sum()
            assert score_N[rows].sum() == pytest.approx(first_visits, abs=1e-5)
            if mine.level == 'step':
                assert set(score_N[rows]) <= {0.0, 1.0}
                moved += (score_N[rows] != table.novel_N[rows]).any()
                continue
            for path in np.unique(table.trajectory_id_N[rows]):
                own = score_N[table.trajectory_id_N == path]
                assert len(set(own)) == 1 and own.sum() == pytest.approx(round(own.sum()), abs=1e-5)
                moved += (own != table.coverage_N[table.trajectory_id_N == path]).any()
    assert moved > 20


@pytest.mark.parametrize('mode', MODES)
def test_random_h_gives_every_row_one_number(mode):
    table = many_groups()
    episode, step = compared('random_h', mode=mode)[0]
    real_N = table.group_id_N >= 0
    assert len(np.unique(step.gate.score_N[real_N])) == real_N.sum()
    for rows in rows_by_group(table.trajectory_id_N):
        mean = step.gate.score_N[rows].astype(np.float64).mean()
        np.testing.assert_allclose(episode.gate.score_N[rows], mean, rtol=1e-6)
    for depth in compared('random_h', name='hgpo', mode=mode)[0]:
        np.testing.assert_array_equal(depth.gate.score_N, step.gate.score_N)  # the update's, at every depth


@pytest.mark.parametrize('variant', UNGATED_BY_COVERAGE)
@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_horizontal_controls_open_wherever_there_is_no_score(name, variant, mode):
    table, more = many_groups(), 0
    for mine, true in zip(*compared(variant, name=name, mode=mode), strict=True):
        expected_N = mine.gate.zero_N if mode == 'deployed' else mine.gate.zero_N & mine.gate.all_failed_N
        if name == 'graphgpo' and mine.level == 'step':
            contrast_N = np.zeros(1024, bool)
            for rows in rows_by_group(mine.id_N):
                contrast_N[rows] = len(set(table.goal_return_N[rows])) > 1
            expected_N = expected_N & ~contrast_N
        np.testing.assert_array_equal(mine.gate.open_N, expected_N)
        assert (mine.gate.open_N >= true.gate.open_N).all()
        more += (mine.gate.open_N > true.gate.open_N).sum()
    assert more > 10


# ---- new, or only different -----------------------------------------------------------------------------------------

CYCLER, EXPLORER, IDLER = 'abcabcabca', 'abcdeeeeee', 'aaaaaaaaaa'  # 9 changes, 2 first visits | 4 and 4 | 0 and 0


def test_obs_change_credits_the_cycler_and_coverage_the_explorer():
    """The worked group of §7.11: of the cycler's nine observation changes, two are first visits."""
    paths = [trajectory(path) for path in (CYCLER, EXPLORER, IDLER)]
    assert [groups.observation_changes(path).sum() for path in paths] == [9, 4, 0]
    assert [groups.first_visits(path).sum() for path in paths] == [2, 4, 0]
    table = groups.build_step_table([group(*paths)], num_rows=1024, **TABLE)
    for variant, rates in (('obs_change', [1, 4 / 9, 0]), ('covgpo', [2 / 9, 4 / 9, 0])):
        advantage_N, (episode,), _ = estimate(table, CoverageConfig(variant=variant, mode='ideal'), name='grpo')
        np.testing.assert_allclose(episode.gate.score_N[:27], np.repeat(np.float32(rates), 9), rtol=1e-6)
        expected = 0.3 * (np.array(rates) - np.mean(rates)) / np.std(rates, ddof=1)
        np.testing.assert_allclose(advantage_N[:27], np.repeat(expected, 9), rtol=1e-5, atol=1e-6)
        ranking = sorted(range(3), key=lambda path: -float(advantage_N[9 * path]))
        assert ranking == ([0, 1, 2] if variant == 'obs_change' else [1, 0, 2])


def test_obs_change_gates_on_its_own_spread():
    """Equal change, unequal coverage: only CovGPO opens; and the other way round."""
    for paths, opens in ((('abcd', 'abab'), {'covgpo': True, 'obs_change': False}),
                         (('abab', 'abbb'), {'covgpo': False, 'obs_change': True})):  # fmt: skip
        table = groups.build_step_table([group(*map(trajectory, paths))], num_rows=1024, **TABLE)
        for variant, is_open in opens.items():
            for mode in MODES:
                _, (episode,), _ = estimate(table, CoverageConfig(variant=variant, mode=mode), name='grpo')
                assert episode.gate.open_N[:6].all() == episode.gate.open_N.any() == is_open


def test_obs_change_of_a_transition_is_its_own():
    table = many_groups()
    _, step = compared('obs_change', coverage_credit='transition')[0]
    real_N = table.group_id_N >= 0
    np.testing.assert_array_equal(step.gate.score_N[real_N], table.changed_N[real_N].astype(np.float32))


# ---- a fallback, or always there ------------------------------------------------------------------------------------


@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_always_on_adds_coverage_to_every_group_where_it_varies(name, mode):
    """base + lambda z(P), in float64; groups with a reward too, and whatever the mode."""
    table, with_reward = many_groups(), 0
    for mine in compared('always_on', name=name, mode=mode)[0]:
        for rows in rows_by_group(mine.id_N):
            rate, path = table.coverage_N[rows].astype(np.float64), table.trajectory_id_N[rows]
            weight = 1 / np.equal.outer(path, path).sum(-1) if mine.level == 'trajectory' else np.ones(len(rows))
            members = round(weight.sum())
            z = np.zeros(len(rows))
            if members > 1 and len(set(table.coverage_rank_N[rows])) > 1:
                centred = rate - (weight * rate).sum() / members
                z = centred / (((weight * centred**2).sum() / (members - mine.ddof)) ** 0.5 + 1e-6)
            np.testing.assert_allclose(mine.advantage_N[rows], mine.base_N[rows] + 0.3 * z, atol=3e-6)
            with_reward += z.any() and mine.base_N[rows].any()
    assert with_reward > 20


def test_always_on_by_hand():
    """Coverage 1, 3 / 4 and 1 beside GRPO's 1.1547, -0.5774, -0.5774: z is 0.5774, -1.1547, 0.5774."""
    table = groups.build_step_table(three_trajectories(), num_rows=1024, **TABLE)
    config = CoverageConfig(variant='always_on', coverage_scale=0.5)
    coverage_N = [3 / 3] * 3 + [3 / 4] * 4 + [2 / 2] * 2
    np.testing.assert_array_equal(table.coverage_N[:9], np.float32(coverage_N))
    third = 3**-0.5
    expected = [2 * third + 0.5 * third] * 3 + [-third - 0.5 * 2 * third] * 4 + [-third + 0.5 * third] * 2
    np.testing.assert_allclose(estimate(table, config, name='grpo')[0][:9], expected, atol=1e-5)


# ---- what no control may change -------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames='name')
def base(table, name):
    return advantages.ESTIMATORS[name](table, advantages.make_compare(table))[0]


@pytest.mark.parametrize('name', ['gigpo', 'hgpo', 'graphgpo'])
def test_off_is_the_base_bit_for_bit(name):
    """Against a compiled program that never heard of coverage; the diagnostics are there."""
    advantage_N, _, metrics = run_jit(many_groups(), CoverageConfig(variant='off'), name=name)
    np.testing.assert_array_equal(bits(advantage_N), bits(base(many_groups(), name)))
    for key, value in metrics.items():
        assert value == 0 if key.endswith(('triggered', 'repair', 'added_to_penalty')) else value > 0, key


@pytest.mark.parametrize('variant', CONDITIONAL)
@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_groups_that_stay_closed_keep_the_base_bits(name, variant, mode):
    """Bit by bit in every comparison (where no reward is inside the tolerance); padding is exactly 0 everywhere."""
    opened = 0
    for mine in compared(variant, name=name, mode=mode)[0]:
        closed_N = ~mine.gate.open_N & ~mine.gate.tolerated_N
        np.testing.assert_array_equal(bits(mine.advantage_N)[closed_N], bits(mine.base_N)[closed_N])
        assert (mine.advantage_N[mine.id_N < 0] == 0).all()
        changed_N = bits(mine.advantage_N) != bits(mine.base_N)
        opened += changed_N.any()
    assert opened or variant == 'off'


@pytest.mark.parametrize('variant', ['shuffle', 'shuffle_h', 'obs_change'])
def test_compiled_controls_keep_the_bits_of_the_base_program(variant):
    batch = [members for seed in range(12) for members in random_groups(seed, tiny_rewards=False)]
    table = groups.build_step_table(batch, num_rows=1024, **TABLE)
    assert 0 < (table.group_id_N < 0).sum()
    advantage_N, comparisons, _ = run_jit(table, CoverageConfig(variant=variant), name='gigpo')
    open_N = np.any([comparison.gate.open_N for comparison in comparisons], axis=0)
    assert open_N.any()
    np.testing.assert_array_equal(bits(advantage_N)[~open_N], bits(base(table, 'gigpo'))[~open_N])
    assert (advantage_N[table.group_id_N < 0] == 0).all()


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_invariants_hold_for_every_variant(name, mode, variant):
    for comparison in compared(variant, name=name, mode=mode)[0]:
        coverage.check_gate(comparison, CoverageConfig(variant=variant, mode=mode))


@pytest.mark.parametrize('variant', ['covgpo', 'shuffle'])
@pytest.mark.parametrize(('name', 'mode'), CASES)
def test_invariants_hold_where_transitions_are_credited(name, mode, variant):
    own, true = compared('shuffle', name=name, mode=mode, coverage_credit='transition')
    for comparison in own if variant == 'shuffle' else true:
        coverage.check_gate(comparison, CoverageConfig(variant=variant, mode=mode, coverage_credit='transition'))


@pytest.mark.parametrize('variant', RANDOM)
def test_same_key_same_result_other_key_other_result(variant):
    config = CoverageConfig(variant=variant)
    first, again, other = (estimate(many_groups(), config, jax.random.key(seed))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(bits(first), bits(again))
    assert (bits(first) != bits(other)).any()


@pytest.mark.parametrize('variant', RANDOM)
def test_padding_does_not_change_what_is_drawn(variant):
    short = many_groups()
    long = jax.tree.map(
        lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 500)], constant_values=x[..., -1].min()), short
    )
    keys = jax.random.split(KEY)
    for level, column in (('trajectory', 'group_id_N'), ('step', 'anchor_id_N')):
        score_N, longer_N = (
            coverage_controls.score(
                variant, table, level, getattr(table, column), coverage_credit='trajectory', keys=tuple(keys)
            )[0]
            for table in (short, long)
        )
        real_N = short.group_id_N >= 0
        np.testing.assert_array_equal(score_N[real_N], longer_N[: len(score_N)][real_N])


def test_a_random_control_needs_a_key():
    for variant in VARIANTS:
        table = many_groups()
        if variant in RANDOM:
            with pytest.raises(ValueError, match=f"variant '{variant}' draws at random and needs a key"):
                coverage.with_coverage(advantages.make_compare(table), table, CoverageConfig(variant=variant))
        else:
            coverage.with_coverage(advantages.make_compare(table), table, CoverageConfig(variant=variant))


def test_an_unknown_variant_lists_those_that_exist():
    with pytest.raises(ValueError, match="variant is 'shufle'; choose one of .*'covgpo'.*'shuffle_h'.*'off'"):
        CoverageConfig(variant='shufle')


@pytest.mark.parametrize('num_rows', [0, 1024])
@pytest.mark.parametrize('variant', ['covgpo', 'always_on', 'shuffle', 'shuffle_h', 'off'])
def test_an_empty_update_is_zero_and_its_metrics_finite(variant, num_rows):
    table = groups.build_step_table([], num_rows=num_rows, **TABLE)
    advantage_N, _, metrics = estimate(table, CoverageConfig(variant=variant))
    assert advantage_N.shape == (num_rows,) and (advantage_N == 0).all()
    assert all(value == (0.3 if variant == 'always_on' and 'scale' in key else 0) for key, value in metrics.items())


# ---- against an independent reference -------------------------------------------------------------------------------

CONTROLS = (
    {'variant': 'always_on', 'mode': 'deployed'},
    {'variant': 'shuffle', 'mode': 'ideal', 'coverage_credit': 'transition'},
    {'variant': 'random', 'mode': 'deployed', 'q_fail_scope': 'task', 'episode_stats': 'rows'},
    {'variant': 'shuffle_h', 'mode': 'deployed'},
    {'variant': 'random_h', 'mode': 'ideal'},
    {'variant': 'obs_change', 'mode': 'deployed', 'coverage_credit': 'transition', 'gate_on': 'penalised'},
    {'variant': 'off', 'mode': 'deployed'},
)
MORE_CONTROLS = (
    {'variant': 'always_on', 'mode': 'ideal', 'coverage_credit': 'transition', 'levels': ('step',)},
    {'variant': 'shuffle', 'mode': 'deployed'},
    {'variant': 'random', 'mode': 'ideal', 'normalisation': 'mean', 'coverage_scale': 0.7},
    {'variant': 'shuffle_h', 'mode': 'ideal', 'gate_on': 'penalised'},
    {'variant': 'random_h', 'mode': 'deployed', 'gate_tolerance': 0.8},
    {'variant': 'obs_change', 'mode': 'ideal'},
)


def worst_difference(name, options, seeds):
    """Largest |code - reference| on these batches; the reference is told what the control drew, and nothing else."""
    table, order_BN = varied_tables(seeds)
    config = {key: value for key, value in options.items() if key not in ('normalisation', 'episode_stats')}
    shared = {key: options[key] for key in options.keys() - config.keys()}

    def scored(table, key):
        advantage_N, comparisons, metrics = run(table, CoverageConfig(**config), key, name=name, **shared)
        return advantage_N, [comparison.gate.score_N for comparison in comparisons], metrics

    advantage_BN, scores, metrics = jax.device_get(jax.vmap(scored)(table, jax.random.split(KEY, len(seeds))))
    advantage_BN, *scores = (in_table_order(x_BN, order_BN) for x_BN in (advantage_BN, *scores))
    worst = 0.0
    for b, seed in enumerate(seeds):
        rows = varied_rows(seed)
        drawn = [score_BN[b].astype(np.float64) for score_BN in scores] if options['variant'] in RANDOM else ()
        expected, counts = reference.advantages(rows, reference.Options(name, **options), drawn)
        worst = max(worst, np.abs(advantage_BN[b, : len(rows)] - expected).max())
        assert (advantage_BN[b, len(rows) :] == 0).all()
        for (level, what), number in counts.items():
            assert metrics[f'{level}/{what}'][b] == pytest.approx(number, rel=1e-5, abs=1e-6), (seed, level, what)
    return worst


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_matches_numpy_reference(name):
    """1,050 batches, 150 for each control."""
    worst = max(worst_difference(name, options, range(150 * i, 150 * i + 150)) for i, options in enumerate(CONTROLS))
    print(f'{name}: worst difference {worst:.1e}')
    assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_every_control_matches_numpy_reference(name):
    """1,000 batches for each control, with more options."""
    for options in CONTROLS + MORE_CONTROLS:
        worst = max(worst_difference(name, options, range(100 * i, 100 * i + 100)) for i in range(10))
        print(f'{name} {options}: worst difference {worst:.1e}')
        assert worst < 1e-5, options

"""group_compare and the estimators: relations first, then hand-computed vectors, then an independent reference."""

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
    varied_rows,
    varied_tables,
)

from covsero_jax import advantages, groups

TABLE = {'discount': 0.95, 'goal_discount': 0.5, 'history_depth': 3}
CONSTANTS = [0.0, 0.7, 2 / 3, 0.35, 10.0, 9.9, 10 * 0.95**7, -0.1, 1e-30, 3e7]
compare_jit = jax.jit(advantages.group_compare, static_argnames=('use_std', 'ddof'))


def table_of(batch, num_rows=128, **options):
    return groups.build_step_table(batch, num_rows=num_rows, **TABLE | options)


@functools.partial(jax.jit, static_argnames=('normalisation', 'episode_stats'))
def every_estimator(table, normalisation='mean_std', episode_stats='trajectory'):
    compare = advantages.make_compare(table, normalisation=normalisation, episode_stats=episode_stats)
    return {name: estimator(table, compare)[0] for name, estimator in advantages.ESTIMATORS.items()}


def test_constant_group_is_exactly_zero():
    """Every value in every group size at once, beside a group that does vary; eager and compiled."""
    cases = [(value, size) for value in CONSTANTS for size in [*range(1, 17), 400]]
    values, sizes = zip(*cases, strict=True)
    score_N = np.float32([*np.repeat(values, sizes), 1.0, 2.0])
    id_N = np.repeat(np.arange(len(cases) + 1), [*sizes, 2]).astype(np.int32)
    for compare in (advantages.group_compare, compare_jit):
        for options in ({'ddof': 0}, {'ddof': 1}, {'use_std': False}):
            advantage_N = compare(score_N, id_N, **options)
            assert (advantage_N[:-2] == 0.0).all() and (advantage_N[-2:] != 0.0).all()


def test_constant_group_of_trajectories_is_exactly_zero():
    """Rows that share a vote: fractional weights round, and no mean of equal numbers need be that number."""
    cases = [(value, size, rows) for value in CONSTANTS for size in (2, 8, 16) for rows in (3, 7, 50)]
    score_N = np.float32(np.concatenate([np.full(size * rows, value) for value, size, rows in cases]))
    weight_N = np.float32(np.concatenate([np.full(size * rows, 1 / rows) for _, size, rows in cases]))
    id_N = np.repeat(np.arange(len(cases)), [size * rows for _, size, rows in cases]).astype(np.int32)
    for compare in (advantages.group_compare, compare_jit):
        assert (compare(score_N, id_N, weight_N=weight_N) == 0.0).all()


@functools.cache
def constant_groups():
    """Groups of one return each (discount 1, so every step's return too), of every size; then one group that differs.

    Lengths differ, so that votes are fractions that round, and so do the numbers of tokens.
    """
    batch = [
        group(*(trajectory('s' * (2 + i % 3) + 'd', rewards=[0.0] * (1 + i % 3) + [value]) for i in range(size)))
        for value in CONSTANTS
        for size in (1, 2, 3, 7, 16)
    ]
    batch.append(group(trajectory('sab', success=True), trajectory('sbb'), trajectory('s' * 8)))
    return table_of(batch, num_rows=1024, discount=1.0)


@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'jit'])
def test_constant_groups_are_exactly_zero_in_every_estimator(compiled):
    """Nothing of the group that differs reaches them either: REINFORCE++ whitens over the update."""
    table = constant_groups()
    differs_N = table.group_id_N == 5 * len(CONSTANTS)
    assert differs_N.sum() == 11
    for options in ({}, {'normalisation': 'mean'}, {'episode_stats': 'rows'}):
        estimates = every_estimator(table, **options) if compiled else every_estimator.__wrapped__(table, **options)
        for name, advantage_N in estimates.items():
            assert (advantage_N[~differs_N] == 0.0).all(), (name, options)
            assert (advantage_N[differs_N] != 0.0).any(), (name, options)


def test_groups_are_centred_and_scaled():
    rng = np.random.default_rng(0)
    id_N = rng.integers(0, 10, 200).astype(np.int32)
    score_N = rng.normal(5.0, 3.0, 200).astype(np.float32)
    for ddof in (0, 1):
        advantage_N = np.asarray(compare_jit(score_N, id_N, ddof=ddof))
        for g in range(10):
            assert abs(advantage_N[id_N == g].sum()) < 1e-5
            assert advantage_N[id_N == g].std(ddof=ddof) == pytest.approx(1.0, abs=1e-5)


def test_values_close_together_keep_their_digits():
    """Coverage 7/20 and 7/21 in 400 rows: a mean rounded at 0.35 would shift every advantage."""
    values = np.float32([7 / 20] * 399 + [7 / 21])
    advantage_N = np.asarray(compare_jit(values, np.zeros(400, np.int32)), np.float64)
    exact = values.astype(np.float64)
    np.testing.assert_allclose(advantage_N, (exact - exact.mean()) / (exact.std(ddof=1) + 1e-6), rtol=1e-5)


def test_groups_are_independent():
    rng = np.random.default_rng(1)
    id_N = rng.integers(0, 5, 64).astype(np.int32)
    score_N = rng.normal(size=64).astype(np.float32)
    changed_N = np.where(id_N == 3, 100 * score_N, score_N).astype(np.float32)
    before_N, after_N = compare_jit(score_N, id_N), compare_jit(changed_N, id_N)
    np.testing.assert_array_equal(before_N[id_N != 3], after_N[id_N != 3])


@pytest.mark.parametrize('seed', range(3))
def test_padding_rows_change_nothing(seed):
    batch = random_groups(seed)
    short, long = every_estimator(table_of(batch)), every_estimator(table_of(batch, num_rows=256))
    for name in advantages.ESTIMATORS:
        np.testing.assert_array_equal(short[name], long[name][:128])
        assert (long[name][128:] == 0).all()


def shuffled(table, order):
    return jax.tree.map(lambda column: column[..., order], table)


@pytest.mark.parametrize('seed', range(3))
def test_row_order_does_not_matter(seed):
    table, order = table_of(random_groups(seed)), np.random.default_rng(seed).permutation(128)
    plain, mixed = every_estimator(table), every_estimator(shuffled(table, order))
    for name in advantages.ESTIMATORS:
        np.testing.assert_allclose(plain[name][order], mixed[name], atol=2e-6)


def test_estimators_work_under_vmap():
    tables = [table_of(random_groups(seed)) for seed in range(3)]
    stacked = jax.vmap(every_estimator)(jax.tree.map(lambda *columns: np.stack(columns), *tables))
    for i, table in enumerate(tables):
        for name, advantage_N in every_estimator(table).items():
            np.testing.assert_allclose(stacked[name][i], advantage_N, atol=1e-6)


def test_wrong_columns_are_refused():
    id_N = np.zeros(4, np.int32)
    score_N = np.zeros(4, np.float32)
    for columns in [
        (np.zeros(4, np.int32), id_N),
        (np.zeros(5, np.float32), id_N),
        (score_N[:, None], id_N),
        (score_N, id_N.astype(np.float32)),
    ]:
        with pytest.raises(AssertionError):
            advantages.group_compare(*columns)
    with pytest.raises(ValueError, match="normalisation is 'std'"):
        advantages.make_compare(table_of(three_trajectories()), normalisation='std')
    with pytest.raises(ValueError, match="episode_stats is 'token'"):
        advantages.make_compare(table_of(three_trajectories()), episode_stats='token')


def example(estimator, *, normalisation='mean_std', episode_stats='trajectory', goal_discount=0.1, **options):
    table = table_of(three_trajectories(), num_rows=9, goal_discount=goal_discount)
    compare = advantages.make_compare(table, normalisation=normalisation, episode_stats=episode_stats)
    return estimator(table, compare, **options)[0]


def test_grpo_by_hand():
    """One success of three rows, failures of four and two: nine rows, three trajectories."""
    for options, won, lost in [
        ({'episode_stats': 'rows'}, 1.3333, -0.6667),
        ({'episode_stats': 'rows', 'normalisation': 'mean'}, 6.6667, -3.3333),
        ({'episode_stats': 'trajectory'}, 1.1547, -0.5774),
        ({'episode_stats': 'trajectory', 'normalisation': 'mean'}, 6.6667, -3.3333),
    ]:
        np.testing.assert_allclose(example(advantages.grpo, **options), [won] * 3 + [lost] * 6, atol=6e-5)


STEP_STD = [1.1547, 1.1547, 0, -0.5774, -0.5774, 0, -0.5774, -0.5774, 0]
STEP_MEAN = [6.0167, 6.3333, 0, -3.0083, -3.1667, 0, -3.1667, -3.0083, 0]


@pytest.mark.parametrize(('normalisation', 'step'), [('mean_std', STEP_STD), ('mean', STEP_MEAN)])
def test_gigpo_by_hand(normalisation, step):
    episode = example(advantages.grpo, normalisation=normalisation)
    for step_weight in (0.0, 1.0, 0.8):
        joint = example(advantages.gigpo, normalisation=normalisation, step_weight=step_weight)
        np.testing.assert_allclose(joint, episode + step_weight * np.float32(step), atol=6e-5)


def test_hgpo_by_hand():
    paper = [1.4142, 1.1381, 0, -0.7071, -0.9024, 0, -0.7071, -0.7071, 0]
    np.testing.assert_allclose(example(advantages.hgpo), paper, atol=6e-5)
    recipe = [1.4142, 1.1657, 0, -0.7071, -0.8828, 0, -0.7071, -0.7071, 0]
    np.testing.assert_allclose(example(advantages.hgpo, weight_offset=2), recipe, atol=6e-5)
    mean = [6.0167, 5.2778, 0, -3.0083, -4.2222, 0, -3.1667, -3.0083, 0]
    np.testing.assert_allclose(example(advantages.hgpo, normalisation='mean'), mean, atol=6e-5)


def test_hgpo_episode_term_is_one_more_level():
    episode, plain, both = (
        np.asarray(example(estimator, **options))
        for estimator, options in [
            (advantages.grpo, {}),
            (advantages.hgpo, {'length_alpha': 0.0}),
            (advantages.hgpo, {'length_alpha': 0.0, 'episode_weight': 1.0}),
        ]
    )
    depths = np.array([1, 2, 0, 1, 2, 0, 1, 1, 0])  # levels at which each row has a contrast
    np.testing.assert_allclose(both, (depths * plain + episode) / (depths + 1), atol=6e-6)


@pytest.mark.parametrize('level', [0.0, 1.0, 10.0, 1000.0])
def test_hgpo_skips_the_level_at_whose_mean_a_row_is(level):
    """Of three in one context the middle one is at their mean: only the level with the fourth has something to say."""
    paths = [trajectory('xba', rewards=[0.0, level + more]) for more in (0.0, 0.1, 0.2)]
    table = table_of([group(*paths, trajectory('yba', rewards=[0.0, -2.0]))], num_rows=8, discount=1.0, history_depth=2)
    advantage_N, (state, _) = advantages.hgpo(table, advantages.make_compare(table))
    assert abs(state.advantage_N[3]) > 0.1
    assert float(advantage_N[3]) == pytest.approx(float(state.advantage_N[3]), rel=1e-5)


def test_graphgpo_by_hand():
    graph = [0.5773, 1.1547, 0, 0.5773, -0.5695, 0.7071, -0.5852, -1.1547, -0.7071]
    np.testing.assert_allclose(example(advantages.graphgpo, episode_weight=0.0), graph, atol=6e-5)
    joint = example(advantages.graphgpo, step_weight=0.5)
    np.testing.assert_allclose(joint, example(advantages.grpo) + 0.5 * np.float32(graph), atol=6e-5)


def test_rloo_by_hand():
    """10 - (0 + 0) / 2 and 0 - (10 + 0) / 2. By rows, 9 members of mean 10 / 3: 9 / 8 of 20 / 3 and of -10 / 3."""
    for episode_stats, won, lost in (('trajectory', 10.0, -5.0), ('rows', 7.5, -3.75)):
        advantage_N = example(advantages.rloo, episode_stats=episode_stats, normalisation='mean_std')
        np.testing.assert_allclose(advantage_N, [won] * 3 + [lost] * 6, rtol=1e-6)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.lists(st.sampled_from([0.0, 10.0, 0.3, -1.5]), min_size=1, max_size=6), st.integers(0, 5))
def test_rloo_is_the_return_minus_the_mean_of_the_others(returns, offset):
    idle = [(i + offset) % 3 for i in range(len(returns))]
    paths = [trajectory('a' * (2 + n), rewards=[0.0] * n + [value]) for n, value in zip(idle, returns, strict=True)]
    table = table_of([group(*paths)], num_rows=18)
    advantage_N = np.asarray(every_estimator(table)['rloo'])
    for i, own in enumerate(returns):
        others = [*returns[:i], *returns[i + 1 :]]
        expected = own - sum(others) / len(others) if others else 0.0
        np.testing.assert_allclose(advantage_N[table.trajectory_id_N == i], expected, atol=5e-6)


def test_reinforce_pp_by_hand():
    """Replies of 1 2 3 | 1 2 3 1 | 1 2 tokens: 6 times 20 / 3 and 10 times -10 / 3, mean 5 / 12 and variance 23.4375.

    A second task, of 16 tokens in failures only, halves the mean and is in the variance, but stays at 0.
    """
    advantage_N = example(advantages.reinforce_pp)
    np.testing.assert_allclose(advantage_N, [6.25 / 23.4375**0.5] * 3 + [-3.75 / 23.4375**0.5] * 6, rtol=1e-6)

    failures = group(trajectory('abcdefg'), trajectory('abc', tokens=(3, 1)))
    table = table_of([*three_trajectories(), failures], num_rows=20)
    assert table.action_tokens_N[9:].sum() == 16
    advantage_N, _ = advantages.reinforce_pp(table, advantages.make_compare(table))
    std = ((6 * (20 / 3) ** 2 + 10 * (10 / 3) ** 2) / 32 - (5 / 24) ** 2) ** 0.5
    expected = [(20 / 3 - 5 / 24) / std] * 3 + [(-10 / 3 - 5 / 24) / std] * 6
    np.testing.assert_allclose(advantage_N[:9], expected, rtol=1e-6)
    assert (advantage_N[9:] == 0).all()


def test_reinforce_pp_is_white_over_tokens():
    """Where every group has contrast, the tokens' mean is 0 and their variance 1."""
    batch = [
        group(trajectory('abc', success=True), trajectory('ab', rewards=[value], tokens=(9,)), trajectory('abcd'))
        for value in (0.3, 4.0, -2.0)
    ]
    table = table_of(batch, num_rows=32)
    advantage_N, _ = advantages.reinforce_pp(table, advantages.make_compare(table))
    assert abs((table.action_tokens_N * advantage_N).sum()) < 1e-4
    np.testing.assert_allclose((table.action_tokens_N * advantage_N**2).sum(), table.action_tokens_N.sum(), rtol=1e-5)


def test_penalty_hits_its_own_row_only():
    """Relative to the same batch without it: equal among valid rows, and the returns before it are untouched."""
    batch = [group(trajectory('abc', success=True, invalid={1}), trajectory('abc', success=True))]
    table = table_of(batch, num_rows=4)
    assert table.step_return_N[0] == table.step_return_N[2] and table.episode_return_N[1] == 10
    compare = advantages.make_compare(table, normalisation='mean')
    advantage_N, _ = advantages.gigpo(table, compare)
    # Episode: mean of (9.95, 10) is 9.975. Anchor b: 9.9 against 10. Anchor a: no contrast.
    np.testing.assert_allclose(advantage_N, [0.025, -0.075 - 0.05, 0.025, 0.025 + 0.05], atol=1e-6)


def test_penalty_in_an_all_failed_group_stays_bounded():
    """400 failed rows, 10 of them malformed: -0.1 is divided by the rows' own spread, never by eps."""
    paths = [trajectory('a' * 51, invalid=[9] if i else [9, 19, 29]) for i in range(8)]
    for episode_stats in ('rows', 'trajectory'):
        table = table_of([group(*paths)], num_rows=400)
        compare = advantages.make_compare(table, episode_stats=episode_stats)
        advantage_N = np.asarray(advantages.grpo(table, compare)[0])
        is_invalid = table.penalty_N > 0
        slack = 0.1 if episode_stats == 'rows' else 0.5  # ddof 1 of 400 rows or of 8 trajectories
        assert advantage_N[is_invalid] == pytest.approx(-6.24, abs=slack)
        assert advantage_N[~is_invalid] == pytest.approx(0.16, abs=0.02)


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_single_trajectory_group_has_no_advantage():
    """Even where its rows differ by a penalty: one member, no comparison. Nor has a state that is seen once."""
    table = table_of([group(trajectory('abcd', success=True, invalid={1}))], num_rows=4)
    for advantage_N in every_estimator(table).values():
        assert (advantage_N == 0).all()


@pytest.mark.parametrize('num_rows', [0, 8])
def test_an_empty_update_has_no_advantage(num_rows):
    for advantage_N in every_estimator(table_of([], num_rows=num_rows)).values():
        assert advantage_N.shape == (num_rows,) and (advantage_N == 0).all()


# ---- against an independent reference -------------------------------------------------------------------------------

COMMON = (
    {},
    {'normalisation': 'mean'},
    {'episode_stats': 'rows'},
    {'ddof': 0, 'episode_stats': 'rows'},
    {'normalisation': 'mean', 'episode_stats': 'rows'},
)
OPTIONS = {
    'grpo': COMMON,
    'gigpo': (*COMMON, {'step_weight': 0.8}),
    'hgpo': (
        *COMMON[:3],
        {'ddof': 1},
        {'length_alpha': 0.0},
        {'length_alpha': 2.0, 'normalisation': 'mean'},
        {'weight_offset': 2},
        {'episode_weight': 1.0},
        {'episode_weight': 0.5, 'weight_offset': 2, 'ddof': 1, 'episode_stats': 'rows'},
    ),
    'graphgpo': (
        *COMMON,
        {'distance_offset': 1},
        {'step_weight': 0.5},
        {'episode_weight': 0.0},
        {'episode_weight': 2.0},
    ),
    'rloo': COMMON[::2],
    'reinforce_pp': COMMON[::2],
}


def estimates(table, name, options):
    """[B, N] of stacked tables. The defaults are compiled; the rest runs op by op, which compiles each op once."""
    options = {key: value for key, value in options.items() if key != 'distance_offset'}
    shared = {key: options.pop(key) for key in ('normalisation', 'episode_stats') if key in options}

    def estimate(table):
        return advantages.ESTIMATORS[name](table, advantages.make_compare(table, **shared), **options)[0]

    return jax.device_get((jax.vmap(estimate) if options or shared else jax.jit(jax.vmap(estimate)))(table))


def worst_difference(name, options, seeds):
    """Largest |code - reference| over the random batches of these seeds; what lies outside the rows must be exactly 0."""
    distance = {'distance_offset': options['distance_offset']} if 'distance_offset' in options else {}
    table, order_BN = varied_tables(seeds, **distance)
    worst = 0.0
    for advantage_N, seed in zip(in_table_order(estimates(table, name, options), order_BN), seeds, strict=True):
        rows = varied_rows(seed)
        expected, _ = reference.advantages(rows, reference.Options(name, **options))
        worst = max(worst, np.abs(advantage_N[: len(rows)] - expected).max())
        assert (advantage_N[len(rows) :] == 0).all()
    return worst


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_matches_numpy_reference(name):
    """1,000 batches: a hundred at a time, the options in turn."""
    options = OPTIONS[name]
    worst = max(worst_difference(name, options[i % len(options)], range(100 * i, 100 * i + 100)) for i in range(10))
    print(f'{name}: worst difference {worst:.1e}')
    assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_every_option_matches_numpy_reference(name):
    """1,000 batches for each."""
    for options in OPTIONS[name]:
        worst = max(worst_difference(name, options, range(100 * i, 100 * i + 100)) for i in range(10))
        print(f'{name} {options}: worst difference {worst:.1e}')
        assert worst < 1e-5, options

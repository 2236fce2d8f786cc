"""group_compare and the estimators: relations first, then hand-computed vectors, then an independent reference."""

from __future__ import annotations

import functools

import advantages_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table_examples import group, random_groups, three_trajectories, trajectory

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


def test_graphgpo_by_hand():
    graph = [0.5773, 1.1547, 0, 0.5773, -0.5695, 0.7071, -0.5852, -1.1547, -0.7071]
    np.testing.assert_allclose(example(advantages.graphgpo, episode_weight=0.0), graph, atol=6e-5)
    joint = example(advantages.graphgpo, step_weight=0.5)
    np.testing.assert_allclose(joint, example(advantages.grpo) + 0.5 * np.float32(graph), atol=6e-5)


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


@pytest.mark.parametrize('episode_stats', ['trajectory', 'rows'])
@pytest.mark.parametrize('normalisation', ['mean_std', 'mean'])
@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_matches_numpy_reference(name, normalisation, episode_stats):
    options = reference.Options(name, normalisation=normalisation, episode_stats=episode_stats)
    for seed in range(30):
        batch = random_groups(seed)
        rows = reference.rows_of(batch)
        expected, _ = reference.advantages(rows, options)
        result = every_estimator(table_of(batch), normalisation, episode_stats)[name]
        np.testing.assert_allclose(result[: len(rows)], expected, atol=2e-5, err_msg=f'seed {seed}')


def test_single_trajectory_group_has_no_episode_advantage():
    """Even where its rows differ by a penalty: one member, no comparison."""
    table = table_of([group(trajectory('abcd', success=True, invalid={1}))], num_rows=4)
    advantage_N, _ = advantages.grpo(table, advantages.make_compare(table))
    assert (advantage_N == 0).all() and jnp.isfinite(advantage_N).all()

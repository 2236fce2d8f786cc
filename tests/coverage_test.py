"""CovGPO's gate around every estimator: where it opens, what it leaves alone, and what its invariants catch."""

from __future__ import annotations

import functools

import advantages_reference as reference
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table_examples import group, in_table_order, random_groups, trajectory, varied_rows, varied_tables

from covsero_jax import advantages, coverage, groups
from covsero_jax.coverage import CoverageConfig

TABLE = {'discount': 0.95, 'goal_discount': 0.5, 'history_depth': 3}
IDEAL = CoverageConfig(mode='ideal')
DEPLOYED = CoverageConfig(mode='deployed')
SEEDS = range(200)


def table_of(batch, num_rows=128):
    return groups.build_step_table(batch, num_rows=num_rows, **TABLE)


@functools.partial(jax.jit, static_argnames=('name', 'config', 'episode_stats'))
def gated(table, name='gigpo', config=IDEAL, episode_stats='trajectory'):
    compare = coverage.with_coverage(advantages.make_compare(table, episode_stats=episode_stats), table, config)
    advantage_N, comparisons = advantages.ESTIMATORS[name](table, compare)
    return advantage_N, comparisons, coverage.gate_metrics(comparisons)


@functools.partial(jax.jit, static_argnames=('name', 'episode_stats'))
def base(table, name='gigpo', episode_stats='trajectory'):
    return advantages.ESTIMATORS[name](table, advantages.make_compare(table, episode_stats=episode_stats))[0]


FAILED = group(trajectory('abcb', invalid=()), trajectory('aabc'), trajectory('aaaa'))  # coverage 2/3, 2/3, 0


# ---- where the gate opens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_gate_opens_only_in_all_failed_groups(name):
    triggered = 0
    for seed in SEEDS[:50]:
        table = table_of(random_groups(seed))
        _, comparisons, _ = gated(table, name)
        for comparison in comparisons:
            open_N, id_N = np.asarray(comparison.gate.open_N), np.asarray(comparison.id_N)
            assert table.failed_N[np.isin(id_N, id_N[open_N])].all() and (id_N[open_N] >= 0).all()
            triggered += open_N.any()
    assert triggered > 10


def test_no_coverage_spread_no_gate():
    """Equal rates, also of different lengths (2 of 6 = 1 of 3), leave an all-failed group at exactly zero."""
    for paths in (('abcb', 'cbab'), ('abcbabc', 'abab'), ('aa', 'bb', 'aaa')):
        table = table_of([group(*map(trajectory, paths))])
        for config in (IDEAL, DEPLOYED):
            advantage_N, _, metrics = gated(table, config=config)
            assert (advantage_N == 0).all()
            assert metrics['trajectory/zero_degenerate'] == metrics['trajectory/zero_score'] == 1
            assert metrics['trajectory/triggered'] == metrics['step/triggered'] == 0


def test_singleton_groups_stay_at_zero():
    table = table_of([group(trajectory('abcd'))])
    advantage_N, _, metrics = gated(table)
    assert (advantage_N == 0).all()
    assert (metrics['trajectory/singleton'], metrics['step/singleton'], metrics['step/groups']) == (1, 3, 3)


def test_a_success_closes_the_gate_even_where_returns_vanish():
    """With discount 0 the early rows of a success score exactly 0; their group has not failed for that."""
    batch = [group(trajectory('abc', success=True), trajectory('abaa'))]
    table = groups.build_step_table(batch, num_rows=8, discount=0.0, goal_discount=0.5, history_depth=3)
    _, (_, step), _ = gated(table)
    assert step.gate.zero_N[0] and not step.gate.open_N.any()


def test_graph_contrast_among_failures_closes_the_gate():
    """Two failed exits of b, one nearer to success: GraphGPO already tells them apart, so coverage does not."""
    batch = [
        group(trajectory('cw', success=True), trajectory('bc'), trajectory('bb'), trajectory('dd'), trajectory('de'))
    ]
    table = table_of(batch)
    advantage_N, (_, edge), _ = gated(table, 'graphgpo')
    assert edge.gate.zero_N[1] and edge.base_N[1] > 0 and not edge.gate.open_N[1:3].any()
    assert edge.gate.open_N[3:5].all()  # d has no such contrast: both exits are lost
    assert advantage_N[4] > advantage_N[3]


# ---- what it does there, and nowhere else -----------------------------------------------------------------------


def test_fallback_by_hand():
    """Coverage 2/3, 2/3, 0: z is 0.57735, 0.57735, -1.1547; scale 0.3."""
    advantage_N, _, metrics = gated(table_of([FAILED]), 'grpo')
    np.testing.assert_allclose(advantage_N[:9], [0.173205] * 6 + [-0.34641] * 3, atol=1e-5)
    assert (advantage_N[9:] == 0).all() and metrics['trajectory/scale'] == np.float32(0.3)
    assert metrics['trajectory/repair'] == pytest.approx(0.3 * (6 * 0.57735 + 3 * 1.1547) / 9, abs=1e-5)


@pytest.mark.parametrize('config', [IDEAL, DEPLOYED], ids=['ideal', 'deployed'])
@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_outside_the_gate_is_bitwise_base(name, config):
    """In the program with the gate and against a program that never heard of it (no rewards inside the tolerance)."""
    unchanged = 0
    for seed in SEEDS[:50]:
        table = table_of(random_groups(seed, tiny_rewards=False))
        advantage_N, comparisons, _ = gated(table, name, config)
        opened_N = np.zeros(128, bool)
        for comparison in comparisons:
            open_N = np.asarray(comparison.gate.open_N)
            np.testing.assert_array_equal(bits(comparison.advantage_N)[~open_N], bits(comparison.base_N)[~open_N])
            opened_N |= open_N
        np.testing.assert_array_equal(bits(advantage_N)[~opened_N], bits(base(table, name))[~opened_N])
        unchanged += ((advantage_N != 0) & ~opened_N).any()
    assert unchanged > 10


def bits(x_N):
    return np.asarray(x_N).view(np.int32)


@pytest.mark.parametrize(
    ('name', 'config'),
    [(name, CoverageConfig(coverage_scale=0.0)) for name in advantages.ESTIMATORS]
    + [('gigpo', CoverageConfig(levels=()))],
)
def test_switched_off_is_the_base_estimator(name, config):
    for seed in SEEDS[:10]:
        table = table_of(random_groups(seed))
        advantage_N, _, metrics = gated(table, name, config)
        np.testing.assert_array_equal(bits(advantage_N), bits(base(table, name)))
        assert all(value == 0 for key, value in metrics.items() if key.endswith(('triggered', 'repair')))


def test_levels_gate_on_their_own():
    table = table_of([FAILED])
    both = [
        gated(table, config=CoverageConfig(mode='ideal', levels=levels))[0] for levels in (('trajectory',), ('step',))
    ]
    assert (both[0] != 0).any() and (both[1] != 0).any()
    np.testing.assert_array_equal(both[0], gated(table, 'grpo')[0])
    np.testing.assert_allclose(both[0] + both[1], gated(table)[0], atol=1e-7)


def test_penalty_contrast_is_kept_and_the_fallback_added():
    """gate_on=task: the penalties' advantage plus the fallback. gate_on=penalised: the penalties close the gate."""
    table = table_of([group(trajectory('abcb', invalid={1}), trajectory('aabc'), trajectory('aaaa'))])
    penalties = base(table, 'grpo')
    fallback = gated(table_of([FAILED]), 'grpo')[0]
    assert (penalties[:9] != 0).all()
    for config in (IDEAL, DEPLOYED):  # one group, so q_fail is 1 and both modes have the same scale
        advantage_N, _, metrics = gated(table, 'grpo', config)
        np.testing.assert_allclose(advantage_N, penalties + fallback, atol=1e-6)
        assert metrics['trajectory/added_to_penalty'] == 1
        assert metrics['trajectory/repair'] == pytest.approx(float(jnp.abs(fallback[:9]).mean()), abs=1e-6)
    for mode in ('ideal', 'deployed'):
        advantage_N, _, metrics = gated(table, 'grpo', CoverageConfig(mode=mode, gate_on='penalised'))
        np.testing.assert_array_equal(bits(advantage_N), bits(penalties))
        assert metrics['trajectory/triggered'] == metrics['trajectory/zero_score'] == 0


def test_deployed_scale_by_hand():
    """One of two task groups failed: q_fail is 1/2 at the trajectory level; of the three anchors two are zero-score."""
    batch = [FAILED, group(trajectory('xy', success=True), trajectory('xx'))]
    table = table_of(batch)
    _, _, metrics = gated(table, config=DEPLOYED)
    assert metrics['trajectory/q_fail'] == 0.5 and metrics['trajectory/scale'] == np.float32(0.15)
    # Anchors: a, b, c of the failed group (no score) and x of the other (a success among its rows).
    assert metrics['step/groups'] == 4 and metrics['step/zero_score'] == 3
    assert metrics['step/q_fail'] == 0.75 and metrics['step/scale'] == pytest.approx(0.225)
    _, _, metrics = gated(table, config=CoverageConfig(q_fail_scope='task'))
    assert metrics['step/q_fail'] == 0.5 and metrics['step/scale'] == np.float32(0.15)
    ideal, deployed = gated(table, 'grpo')[0], gated(table, 'grpo', DEPLOYED)[0]
    np.testing.assert_allclose(deployed[:9], 0.5 * ideal[:9], atol=1e-7)


def test_without_the_score_gap_the_deployed_gate_interferes():
    """The counterexample to strict extension: contrast of 5e-4 is base advantage, and the tolerance swallows it."""
    batch = [group(trajectory('abc', rewards=[0, 5e-4]), trajectory('aaa', rewards=[0, 0]))]
    table = table_of(batch)
    kept, _, metrics = gated(table, 'grpo', IDEAL)
    np.testing.assert_array_equal(bits(kept), bits(base(table, 'grpo')))
    assert metrics['trajectory/gap_violations'] == 0
    replaced, _, metrics = gated(table, 'grpo', DEPLOYED)
    assert metrics['trajectory/gap_violations'] == 1
    np.testing.assert_allclose(replaced[:4], [0.2121] * 2 + [-0.2121] * 2, atol=1e-4)
    equal = table_of([group(trajectory('ab', rewards=[5e-4]), trajectory('ac'))])
    assert (gated(equal, 'grpo', DEPLOYED)[0] == 0).all()  # inside the tolerance, degenerate coverage: zeros


def test_transition_credit_spares_the_no_op():
    """At anchor a the better trajectory's rate credits its no-op too; credit of its own transition does not."""
    table = table_of([group(trajectory('aabc'), trajectory('aaaa'))])
    config = CoverageConfig(mode='ideal', levels=('step',))
    inherited = gated(table, config=config)[0]
    own = gated(table, config=CoverageConfig(mode='ideal', levels=('step',), coverage_credit='transition'))[0]
    assert inherited[0] == inherited[1] > 0  # a -> a (no-op) and a -> b alike
    assert own[1] > 0 > own[0] == own[3]


def test_padding_and_order_change_nothing():
    for seed in SEEDS[:5]:
        table, order = table_of(random_groups(seed)), np.random.default_rng(seed).permutation(128)
        for name in advantages.ESTIMATORS:
            advantage_N, _, metrics = gated(table, name, DEPLOYED)
            mixed_N, _, mixed_metrics = gated(jax.tree.map(lambda c, o=order: c[..., o], table), name, DEPLOYED)
            np.testing.assert_allclose(advantage_N[order], mixed_N, atol=3e-6)
            chex.assert_trees_all_close(metrics, mixed_metrics, atol=1e-5)
    longer_N, _, metrics = gated(table_of(random_groups(0), num_rows=256), config=DEPLOYED)
    advantage_N, _, expected = gated(table_of(random_groups(0)), config=DEPLOYED)
    np.testing.assert_array_equal(advantage_N, longer_N[:128])
    chex.assert_trees_all_close(metrics, expected, atol=1e-6)
    assert (longer_N[128:] == 0).all()


def test_gate_works_under_vmap_and_eagerly():
    tables = [table_of(random_groups(seed)) for seed in range(3)]
    stacked = jax.vmap(lambda table: gated(table, 'grpo', DEPLOYED))(jax.tree.map(lambda *c: np.stack(c), *tables))
    for i, table in enumerate(tables):
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, i=i: x[i], stacked), gated(table, 'grpo', DEPLOYED), atol=1e-6
        )
    with jax.disable_jit():
        eager = gated(tables[0], 'grpo', DEPLOYED)
    chex.assert_trees_all_close(eager, gated(tables[0], 'grpo', DEPLOYED), atol=1e-6)


def test_unknown_options_are_refused():
    for options in ({'mode': 'soft'}, {'gate_on': 'reward'}, {'q_fail_scope': 'all'}, {'coverage_credit': 'row'}):
        with pytest.raises(ValueError, match=next(iter(options))):
            CoverageConfig(**options)
    with pytest.raises(ValueError, match="levels is 'step'"):
        CoverageConfig(levels='step')


# ---- against an independent reference -------------------------------------------------------------------------------

GATES = (
    {'mode': 'ideal'},
    {'mode': 'deployed'},
    {'mode': 'deployed', 'gate_on': 'penalised'},
    {'mode': 'ideal', 'gate_on': 'penalised', 'coverage_credit': 'transition'},
    {'mode': 'deployed', 'q_fail_scope': 'task', 'episode_stats': 'rows'},
    {'mode': 'deployed', 'q_fail_scope': 'task', 'gate_on': 'penalised', 'coverage_scale': 0.7},
    {'mode': 'deployed', 'coverage_credit': 'transition', 'normalisation': 'mean'},
    {'mode': 'deployed', 'levels': ('step',)},
    {'mode': 'ideal', 'levels': ('trajectory',)},
    {'mode': 'deployed', 'gate_tolerance': 0.8},  # wide: rewards of 0.7, and penalties beside them, are inside
)
SHOULD_OCCUR = ('triggered', 'gap_violations', 'added_to_penalty', 'zero_degenerate', 'singleton')


def worst_difference(name, options, seeds, seen):
    """Largest |code - reference| of an advantage on these batches. The gate metrics must agree; `seen` adds some up.

    The default gate is compiled; the rest runs op by op, which compiles each op only once.
    """
    table, order_BN = varied_tables(seeds)
    config = {key: value for key, value in options.items() if key not in ('normalisation', 'episode_stats')}
    shared = {key: options[key] for key in options.keys() - config.keys()}

    def estimate(table):
        compare = advantages.make_compare(table, **shared)
        compare = coverage.with_coverage(compare, table, CoverageConfig(**config))
        advantage_N, comparisons = advantages.ESTIMATORS[name](table, compare)
        return advantage_N, coverage.gate_metrics(comparisons)

    run = jax.jit(jax.vmap(estimate)) if options == GATES[1] else jax.vmap(estimate)
    advantage_BN, metrics = jax.device_get(run(table))
    worst = 0.0
    for b, (advantage_N, seed) in enumerate(zip(in_table_order(advantage_BN, order_BN), seeds, strict=True)):
        rows = varied_rows(seed)
        expected, counts = reference.advantages(rows, reference.Options(name, variant='covgpo', **options))
        worst = max(worst, np.abs(advantage_N[: len(rows)] - expected).max())
        assert (advantage_N[len(rows) :] == 0).all()
        assert {f'{level}/{what}' for level, what in counts} == metrics.keys()
        for (level, what), number in counts.items():
            assert metrics[f'{level}/{what}'][b] == pytest.approx(number, rel=1e-5, abs=1e-6), (seed, level, what)
            if what in seen:
                seen[what] += number
    return worst


@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_matches_numpy_reference(name):
    """Advantages and every gate metric on 1,000 batches, a hundred for each gate."""
    seen = dict.fromkeys(SHOULD_OCCUR, 0)
    worst = max(worst_difference(name, options, range(100 * i, 100 * i + 100), seen) for i, options in enumerate(GATES))
    print(f'{name}: worst difference {worst:.1e}')
    assert worst < 1e-5
    assert all(number > 20 for number in seen.values()), seen


@pytest.mark.slow
@pytest.mark.parametrize('name', advantages.ESTIMATORS)
def test_every_gate_matches_numpy_reference(name):
    """1,000 batches for each gate."""
    for options in GATES:
        seen = dict.fromkeys(SHOULD_OCCUR, 0)
        worst = max(worst_difference(name, options, range(100 * i, 100 * i + 100), seen) for i in range(10))
        print(f'{name} {options}: worst difference {worst:.1e}')
        assert worst < 1e-5, options


# ---- the invariants, and gates that break them ----------------------------------------------------------------------


check_gate_jit = chex.chexify(jax.jit(coverage.check_gate, static_argnames='config'), async_check=False)


@pytest.mark.parametrize('config', [IDEAL, DEPLOYED], ids=['ideal', 'deployed'])
def test_invariants_hold_for_every_estimator(config):
    opened = 0
    for seed in SEEDS[:10]:
        for name in advantages.ESTIMATORS:
            _, comparisons, _ = gated(table_of(random_groups(seed)), name, config)
            for comparison in comparisons:
                check_gate_jit(comparison, config=config)
                opened += bool(comparison.gate.open_N.any())
    assert opened > 10


def broken_gates():
    """Batch: rows 0-8 failed (gate open), 9-11 a success and a failure (gate closed), then padding."""
    table = table_of([FAILED, group(trajectory('xyz', success=True), trajectory('xx'))])
    _, (good,), _ = gated(table, 'grpo')
    advantage_N, base_N, open_N = (np.asarray(x) for x in (good.advantage_N, good.base_N, good.gate.open_N))
    assert open_N.nonzero()[0].tolist() == list(range(9)) and (base_N[9:12] != 0).all()
    row_N = np.arange(128)
    ulp_N = np.where(row_N == 9, np.nextafter(advantage_N, np.float32(9)), advantage_N)
    negative_zero_N = np.where(row_N == 9, np.float32(-0.0), advantage_N)
    zero_base_N = np.where(row_N == 9, np.float32(0.0), base_N)
    return {
        'a: one bit more': ('(a)', good.replace(advantage_N=ulp_N)),
        'a: minus zero': (
            '(a)',
            good.replace(advantage_N=negative_zero_N, base_N=zero_base_N, gate=good.gate.replace(kept_N=zero_base_N)),
        ),
        'a: always on': ('(a)', good.replace(advantage_N=advantage_N + np.float32(0.1) * (row_N >= 9) * (row_N < 12))),
        'b: open where the base has contrast': (
            '(b)',
            good.replace(gate=good.gate.replace(open_N=np.asarray(good.id_N) >= 0)),
        ),
        'c: not centred': ('(c)', good.replace(advantage_N=advantage_N + np.float32(1e-3) * open_N)),
        'c: twice the scale': ('(c)', good.replace(advantage_N=np.where(open_N, 2 * advantage_N, advantage_N))),
        'c: no fallback': ('(c)', good.replace(advantage_N=base_N)),
        'd: nan': ('(d)', good.replace(advantage_N=np.where(row_N == 2, np.float32(np.nan), advantage_N))),
        'e: padding': ('(e)', good.replace(advantage_N=np.where(row_N == 14, np.float32(0.1), advantage_N))),
    }


def test_broken_gates_are_caught():
    for case, (invariant, comparison) in broken_gates().items():
        with pytest.raises(AssertionError) as caught:
            check_gate_jit(comparison, config=IDEAL)
        assert invariant in str(caught.value), case

"""CovGPO's propositions (the paper's sections 4.1 and 7), executed on real trajectories, estimators and losses.

Exact wherever the statement is: integers, fractions, float32 bits. Only the trap's waiting time is also simulated.
Everywhere P is first-visit coverage, T the number of steps, K the number of members, lambda the fallback's scale.
"""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import propositions_cases as cases
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from table_examples import group, random_groups, trajectory

from covsero_jax import advantages, coverage, groups
from covsero_jax.coverage import CoverageConfig

ROWS = 64
SCALE = 0.3
IDEAL = CoverageConfig(mode='ideal', coverage_scale=SCALE)
DEPLOYED = CoverageConfig(mode='deployed', coverage_scale=SCALE)
ESTIMATORS = advantages.ESTIMATORS | {'hgpo with episodes': functools.partial(advantages.hgpo, episode_weight=1.0)}

examples = settings(deadline=None, derandomize=True, max_examples=30)
any_paths = st.lists(st.text('abcd', min_size=2, max_size=8), min_size=2, max_size=6)
equally_long_paths = st.lists(st.text('abcde', min_size=6, max_size=6), min_size=2, max_size=6)

FAILED = group(trajectory('abcb'), trajectory('aabc'), trajectory('aaaa'))  # P is 2/3, 2/3, 0; nine rows
MIXED = group(trajectory('sdf', success=True), trajectory('ss'))  # three rows that do learn


def table_of(rollouts, num_rows=ROWS):
    """With goal_discount 0.93, GraphGPO's score of every failed row, 9.3, is no float32: its zeros are not for free."""
    return groups.build_step_table(rollouts, num_rows=num_rows, discount=0.95, goal_discount=0.93, history_depth=3)


@functools.partial(jax.jit, static_argnames=('names', 'config', 'normalisation', 'episode_stats'))
def estimates(table, names, config, normalisation, episode_stats):
    compare = advantages.make_compare(table, normalisation=normalisation, episode_stats=episode_stats)
    if config is not None:
        compare = coverage.with_coverage(compare, table, config)
    return {name: ESTIMATORS[name](table, compare) for name in names}


def every_estimator(table, config=None, *, normalisation='mean_std', episode_stats='trajectory'):
    """{name: (advantage_N, comparisons)} on the host; without a config there is no gate in the program."""
    return jax.device_get(estimates(table, tuple(ESTIMATORS), config, normalisation, episode_stats))


def grpo(table, config=None):
    """(advantage_N, the one comparison), trajectories compared."""
    advantage_N, (comparison,) = jax.device_get(estimates(table, ('grpo',), config, 'mean_std', 'trajectory')['grpo'])
    return advantage_N, comparison


def triggered_rows(comparisons):
    return np.any([comparison.gate.open_N for comparison in comparisons], axis=0)


def triggered_groups(comparison):
    """Row numbers of each group whose gate opened."""
    open_ids = np.unique(comparison.id_N[comparison.gate.open_N])
    return [np.flatnonzero(comparison.id_N == group_id) for group_id in open_ids]


def assert_same_bits(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.view(np.int32), y.view(np.int32)), one, other)


def mean(values):
    return Fraction(sum(values)) / len(values)


def covariance(x, y):
    """Of equally likely pairs; exact for fractions, integers and (as the binary fractions they are) floats."""
    x, y = ([Fraction(value) for value in values] for values in (x, y))
    return mean([a * b for a, b in zip(x, y, strict=True)]) - mean(x) * mean(y)


def coverages(paths):
    return [groups.first_visit_coverage(trajectory(path)) for path in paths]


# ---- 1 ----------------------------------------------------------------------------------------------------------------


@examples
@given(any_paths, st.integers(0, 99))
def test_1_the_trap_is_exact(paths, seed):
    """Proposition 4.1 (section 7.1). Hypothesis: every member of a group failed and every reward was 0. Then every
    estimator's advantages of its rows are exactly 0.0, alone and beside a group that does learn, and so is the policy
    gradient that the group contributes (KL and entropy off). Exact: float32 zeros.
    """
    failed, logits = group(*map(trajectory, paths)), cases.random_logits(seed)
    for rollouts in ([failed], [failed, MIXED]):
        table, decision_2N = table_of(rollouts), cases.decisions(rollouts, ROWS)
        for name, (advantage_N, _) in every_estimator(table).items():
            assert (advantage_N[table.group_id_N == 0] == 0.0).all(), name
            own, whole = (
                np.asarray(cases.loss_gradient(logits, decision_2N, advantage_N, row_N))
                for row_N in (table.group_id_N == 0, table.group_id_N >= 0)
            )
            assert (own == 0.0).all() and whole.any() == (MIXED in rollouts), name
        for name, (advantage_N, _) in every_estimator(table, normalisation='mean', episode_stats='rows').items():
            assert (advantage_N[table.group_id_N == 0] == 0.0).all(), name


def test_1_the_trap_holds_in_a_train_step():
    """Proposition 4.1 through a language model: a train step on an all-failed group has a gradient norm of exactly 0.0
    and leaves every parameter and all of Adam's moments bit for bit. One success among the rows ends that.
    """
    fresh = jax.device_get(cases.qwen()[2])
    for name, (advantage_N, _) in every_estimator(table_of([FAILED])).items():
        state, metrics = cases.qwen_update(advantage_N, np.arange(ROWS) < 9)
        assert metrics['update/grad_norm'] == 0.0, name
        assert_same_bits(state.params, fresh.params)
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == np.float32]
        assert len(moments) == 2 * len(jax.tree.leaves(state.params)) and not any(x.any() for x in moments)
    for name, (advantage_N, _) in every_estimator(table_of([FAILED, MIXED])).items():
        assert cases.qwen_update(advantage_N, np.arange(ROWS) < 12)[1]['update/grad_norm'] > 0.0, name


def test_1_waiting_time_is_exponential_in_the_horizon():
    """Proposition 4.1, second part. Hypotheses: a fixed policy; a rollout takes H steps, each right with probability eps
    independently, and one miss loses it; K independent rollouts make a group. Then a group succeeds with probability
    q = 1 - (1 - eps^H)^K, and the mean number of groups until one does is 1 / q >= eps^-H / K, with equality for K = 1
    (and eps > 0). Exact, in fractions; q by adding up all 2^K outcomes.
    """
    for eps, horizon, size in itertools.product(
        (Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)), (1, 6, 50), (1, 3, 8)
    ):
        rollout = {True: eps**horizon, False: 1 - eps**horizon}
        outcomes = itertools.product((True, False), repeat=size)
        q = sum(math.prod(rollout[success] for success in outcome) for outcome in outcomes if any(outcome))
        waiting_time, bound = 1 / q, eps**-horizon / size  # q is that of every group: the wait is geometric
        assert q == 1 - (1 - eps**horizon) ** size
        assert (waiting_time == bound) if size == 1 else (waiting_time > bound)


def test_1_waiting_time_in_simulation():
    """Proposition 4.1, second part, with the chain rolled out step by step (fixed seed): the mean wait for a successful
    group, over more than 10^5 of them, is 1 / q within 5 standard errors. A right program misses that once in 10^6 seeds.
    """
    eps, horizon, size = 0.6, 3, 2
    right = np.random.default_rng(0).random((300_000, size, horizon)) < eps
    waits = np.diff(np.flatnonzero(right.all(axis=2).any(axis=1)), prepend=-1)
    q = 1 - (1 - eps**horizon) ** size
    standard_error = math.sqrt(1 - q) / q / math.sqrt(len(waits))
    assert len(waits) > 100_000 and abs(waits.mean() - 1 / q) < 5 * standard_error


# ---- 2 and 3 ----------------------------------------------------------------------------------------------------------


@examples
@given(st.integers(2, 9).flatmap(lambda size: st.tuples(*[st.text('abcde', min_size=size, max_size=size)] * 2)))
def test_2_coverage_orders_by_distinct_observations_at_equal_length(paths):
    """Section 7.2. Hypothesis: two trajectories of equal length T. P = (distinct observations - 1) / T, so P orders them
    as their numbers of distinct observations do, ties included. Exact as fractions, in the table's integer rank, and in
    its float32 column.
    """
    distinct = [len(set(path)) for path in paths]
    length = len(paths[0]) - 1
    assert coverages(paths) == [Fraction(count - 1, length) for count in distinct]
    table = table_of([group(*map(trajectory, paths))])
    for column_N in (table.coverage_rank_N, table.coverage_N):
        assert np.sign(column_N[0] - column_N[length]) == np.sign(distinct[0] - distinct[1])


def test_2_coverage_is_a_rate_at_unequal_lengths():
    """Section 7.2, where its hypothesis fails: one new observation in one step beats two new ones in four."""
    short, long = coverages(['ab', 'abcbc'])
    assert short == 1 and long == Fraction(1, 2)


@examples
@given(st.text('abcde', min_size=2, max_size=8), st.data())
def test_2_no_ops_and_cycles_add_nothing(path, data):
    """Section 7.2. Into any trajectory goes a no-op, or a cycle through observations that were visited before: its steps
    are no first visits, and every other step is one if and only if it was. P falls from n / T to n / (T + steps).
    """
    at = data.draw(st.integers(0, len(path) - 1))
    detour = data.draw(st.text(path[: at + 1], max_size=4)) + path[at]  # one letter: a no-op
    longer = trajectory(path[: at + 1] + detour + path[at + 1 :])
    novel = groups.first_visits(trajectory(path))
    np.testing.assert_array_equal(groups.first_visits(longer), np.insert(novel, at, [False] * len(detour)))
    assert groups.first_visit_coverage(longer) == Fraction(int(novel.sum()), len(path) - 1 + len(detour))


states = st.integers(0, 5)
worlds = st.tuples(st.lists(st.tuples(states, states), min_size=6, max_size=6), st.text('abcd', min_size=6, max_size=6))


@examples
@given(worlds)
def test_2_and_3_the_threshold_and_the_deficit_bound(world):
    """Sections 7.2 and 7.3. In a task where every success shows D observations beside the first one, P >= D / T is
    necessary for a success of length T. A prefix with n first visits that a valid continuation without reset completes
    needs at least D - n more actions. Exact: all episodes of random worlds, whose states may look alike.
    """
    deficit = len(cases.required_observations(*world))
    successes = [path for path, success in cases.episodes(*world, budget=6) if success]
    assume(successes)
    for path in successes:
        length, novel = len(path) - 1, groups.first_visits(trajectory(path, success=True))
        assert groups.first_visit_coverage(trajectory(path, success=True)) >= Fraction(deficit, length)
        for steps in range(length + 1):
            assert length - steps >= deficit - novel[:steps].sum()


def test_2_the_threshold_is_tight_and_not_sufficient():
    """Section 7.2: behind a lies a corridor b c to the goal d, and behind b a side room e with a dead end f: D = 3. All
    episodes of four steps that succeed attain P = D / T; so do failures.
    """
    successors, shown = [(0, 1), (2, 3), (2, 5), (3, 4), (4, 4), ()], 'abcefd'
    assert cases.required_observations(successors, shown) == set('bcd')
    full = {path: success for path, success in cases.episodes(successors, shown, budget=4) if len(path) == 5}
    successes, failures = ([path for path in full if full[path] == outcome] for outcome in (True, False))
    assert successes == ['aabcd', 'abccd'] and coverages(successes) == [Fraction(3, 4)] * 2
    assert Fraction(3, 4) in coverages(failures)


def test_3_the_deficit_does_not_order_the_remaining_work():
    """Section 7.3, what it does not say: after two steps in a corridor a b c d with side rooms e, f behind a, the prefix
    of higher coverage has the smaller deficit and more left to do. The distances are those of the groups' own graph.
    """
    rollouts = group(trajectory('abcd', success=True), trajectory('aefea'), trajectory('aab'))
    distance = groups.goal_distances(rollouts)
    (low, high), left = coverages(['aab', 'aef']), {letter: distance[letter] for letter in 'bf'}
    assert low < high and left == {'b': 2, 'f': 5}
    assert left['b'] == 3 - 1 and left['f'] > 3 - 2  # D - n: attained, and far from it


# ---- 4 ----------------------------------------------------------------------------------------------------------------


@examples
@given(equally_long_paths, st.lists(st.fractions(0, Fraction(1, 6), max_denominator=60), min_size=6, max_size=6))
def test_4_the_fallback_covaries_with_a_coverage_monotone_continuation(paths, increments):
    """Section 7.4 (Chebyshev's sum inequality). Hypotheses: a triggered group of equally long trajectories; the chance f
    that a continuation succeeds does not decrease with P. Then the centred P and f have covariance >= 0. So has the
    float32 fallback of every estimator, exactly: rounding keeps its order (equal P, equal bits) and each sign.
    """
    continuation = list(itertools.accumulate(increments))  # by the number of first visits, 0 .. 5
    rates = coverages(paths)
    value = [continuation[int(rate * 5)] for rate in rates]
    pairs = [(i, j) for i in range(len(paths)) for j in range(len(paths))]
    products = [(rates[i] - rates[j]) * (value[i] - value[j]) for i, j in pairs]
    assert covariance(rates, value) == mean(products) / 2 >= 0
    assert covariance(rates, [-f for f in value]) <= 0  # without the assumption: any sign

    table = table_of([group(*map(trajectory, paths))])
    for name, (_, comparisons) in every_estimator(table, IDEAL).items():
        for comparison in comparisons:
            if comparison.level == 'trajectory':
                assert comparison.gate.open_N.any() == (len(set(rates)) > 1)
            for rows in triggered_groups(comparison):
                members = [(rates[table.trajectory_id_N[row]], float(comparison.advantage_N[row])) for row in rows]
                fallback = dict(members)
                assert len(set(members)) == len(fallback), name  # a function of P
                assert sorted(fallback.values()) == [fallback[rate] for rate in sorted(fallback)], name
                assert len(set(fallback.values())) == len(fallback), name
                centre = mean([rate for rate, _ in members])
                assert all((a > 0) == (rate > centre) or rate == centre for rate, a in members), name
                f = [continuation[int(rate * 5)] for rate, _ in members]
                assert covariance([a for _, a in members], f) >= 0, name


# ---- 5 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('config', [IDEAL, DEPLOYED], ids=['ideal', 'deployed'])
def test_5_strict_extension(config):
    """Proposition 4.2 (section 7.5). Ideal gate: on rows outside triggered groups, the advantage of every estimator is
    bit-equal to the base's, computed by a program without a gate, and so is the parameter gradient of those rows' loss.
    Deployed gate: the same under the score gap, that no group has 0 < max |score| < 1e-3; here no reward is tiny. The
    loss is a sum: a mean over rows with an advantage (`count_zero_rows=False`) would be rescaled by those that gain one.
    """
    learnt = opened = 0
    for seed in range(25):
        rollouts = random_groups(seed, tiny_rewards=False, max_steps=5)
        table, decision_2N, logits = table_of(rollouts), cases.decisions(rollouts, ROWS), cases.random_logits(seed)
        base = every_estimator(table)
        for name, (advantage_N, comparisons) in every_estimator(table, config).items():
            open_N = triggered_rows(comparisons)
            outside_N = ~open_N & (table.group_id_N >= 0)
            assert_same_bits(advantage_N[~open_N], base[name][0][~open_N])
            gradients = [
                np.asarray(cases.loss_gradient(logits, decision_2N, a_N, outside_N))
                for a_N in (advantage_N, base[name][0])
            ]
            assert_same_bits(*gradients)
            learnt += gradients[0].any()
            opened += open_N.any()
    assert learnt > 25 and opened > 25


@pytest.mark.parametrize('config', [IDEAL, DEPLOYED], ids=['ideal', 'deployed'])
def test_5_strict_extension_in_a_train_step(config):
    """Proposition 4.2 through a language model: a train step on the rows outside triggered groups ends in the same bits,
    parameters and Adam's moments (the gradient itself) alike; on all rows the fallback shows.
    """
    table = table_of([FAILED, MIXED])
    base = every_estimator(table)
    for name, (advantage_N, comparisons) in every_estimator(table, config).items():
        real_N, outside_N = table.group_id_N >= 0, (table.group_id_N >= 0) & ~triggered_rows(comparisons)
        assert outside_N[9:12].all() and outside_N.sum() < 12
        (state, metrics), (base_state, _) = (cases.qwen_update(a_N, outside_N) for a_N in (advantage_N, base[name][0]))
        assert metrics['update/grad_norm'] > 0.0
        assert_same_bits(state, base_state)
        gated, plain = (cases.qwen_update(a_N, real_N)[1] for a_N in (advantage_N, base[name][0]))
        assert gated['update/grad_norm'] != plain['update/grad_norm'], name


def test_5_without_the_score_gap_the_deployed_gate_interferes():
    """Proposition 4.2's hypothesis is needed: a partial reward of 5e-4 lies inside the tolerance of 1e-3. Normalised, it
    is a full base advantage; the deployed gate replaces it (and counts the violation), the ideal gate keeps its bits.
    """
    rollouts = [group(trajectory('aab', rewards=[0, 5e-4]), trajectory('abc'))]
    table, decision_2N, logits = table_of(rollouts), cases.decisions(rollouts, ROWS), cases.random_logits(0)
    real_N = table.group_id_N >= 0

    def gradient(advantage_N):
        return np.asarray(cases.loss_gradient(logits, decision_2N, advantage_N, real_N))

    base, ideal, deployed = every_estimator(table), every_estimator(table, IDEAL), every_estimator(table, DEPLOYED)
    for name in ESTIMATORS:
        base_N, ideal_N, deployed_N = (result[name][0] for result in (base, ideal, deployed))
        assert base_N.any(), name
        assert_same_bits(ideal_N, base_N)
        assert_same_bits(gradient(ideal_N), gradient(base_N))
        metrics = coverage.gate_metrics(deployed[name][1])
        assert sum(value for key, value in metrics.items() if key.endswith('gap_violations')) > 0, name
        assert (np.abs(deployed_N - base_N)[real_N] > 0.1).any(), name
        assert np.abs(gradient(deployed_N) - gradient(base_N)).max() > 0.1, name


# ---- 6 ----------------------------------------------------------------------------------------------------------------


def direction(x):
    return x / np.linalg.norm(x)


@examples
@given(any_paths, st.integers(0, 99))
def test_6_reinforce_identity(paths, seed):
    """Section 7.6. Hypotheses: a fixed admitted group (all failed, P not constant) compared as trajectories, nothing
    clipped, rows summed without length weights. The ascent direction is c * sum_i (P_i - mean P) grad log pi(tau_i) with
    c = lambda / (std(P) + 1e-6) > 0: within float32 rounding. So lambda, and the deployed lambda * q_fail, do not turn it;
    twice lambda gives twice the gradient, bit for bit.
    """
    rollouts, rates = [group(*map(trajectory, paths))], coverages(paths)
    assume(len(set(rates)) > 1)
    table, decision_2N, logits = table_of(rollouts), cases.decisions(rollouts, ROWS), cases.random_logits(seed)
    real_N = table.group_id_N >= 0
    centred = np.float64([rate - mean(rates) for rate in rates])
    expected = np.tensordot(
        centred[table.trajectory_id_N[real_N]], cases.score_functions(logits, decision_2N)[real_N], 1
    )
    ascent = {}
    for scale in (0.25, 0.5):
        for mode in ('ideal', 'deployed'):
            advantage_N, _ = grpo(table, CoverageConfig(mode=mode, coverage_scale=scale))
            ascent[scale, mode] = -np.asarray(cases.loss_gradient(logits, decision_2N, advantage_N, real_N))
        c = scale / (math.sqrt((centred**2).sum() / (len(paths) - 1)) + advantages.EPS)
        np.testing.assert_allclose(ascent[scale, 'ideal'], c * expected, atol=1e-5)
    assert_same_bits(ascent[0.5, 'ideal'], 2 * ascent[0.25, 'ideal'])
    assume(np.linalg.norm(expected) > 1e-3)  # a direction there is
    for found in ascent.values():
        assert np.sum(direction(found) * direction(expected)) > 1 - 1e-5


# ---- 7 ----------------------------------------------------------------------------------------------------------------


def chain_score(path, state):
    """d log pi(trajectory) / d (logit of advancing in `state`): sum over its visits of [advanced] - 1/2."""
    return sum((after != before) - Fraction(1, 2) for before, after in itertools.pairwise(path) if before == state)


def test_7_the_fallback_alone_guarantees_no_escape():
    """Section 7.7, the counterexample. A chain a, b, goal; two steps, each advances with probability 1/2 or stays. The
    failures a a a, a a b, a b b are equally likely, with P = 0, 1/2, 1/2. The frontier logit, that of advancing in b, has
    scores 0, 0, -1/2: a failure that was asked in b has stayed there. So coverage and frontier score, given failure, have
    covariance -1/36, and a group of K has the expected centred update -(K - 1) / 36: what the fallback rewards in b is
    being there, and the price is staying there. (For advancing in a the covariance is +5/36.) Exact, all enumerated.
    """
    failures = cases.CHAIN[:3]
    assert {cases.chain_probability(path, Fraction(1, 2)) for path in failures} == {Fraction(1, 4)}
    rates, frontier = coverages(failures), [chain_score(path, 'b') for path in failures]
    assert covariance(rates, frontier) == Fraction(-1, 36)
    assert covariance(rates, [chain_score(path, 'a') for path in failures]) == Fraction(5, 36)
    for size in (2, 3, 4):
        updates = [
            sum((rates[i] - mean([rates[j] for j in members])) * frontier[i] for i in members)
            for members in itertools.product(range(3), repeat=size)
        ]
        assert mean(updates) == -(size - 1) * Fraction(1, 36)


def test_7_the_deployed_loss_pushes_the_frontier_down():
    """Section 7.7 with the real fallback: over all 27 equally likely failed groups of three, the policy gradient of the
    normalised fallback lowers the frontier logit, by lambda * sqrt(3) / 9 a group; 18 of them have dispersion of P.
    """
    rollouts = [
        group(*map(cases.chain_trajectory, members)) for members in itertools.product(cases.CHAIN[:3], repeat=3)
    ]
    table, decision_2N = table_of(rollouts, 162), cases.decisions(rollouts, 162)
    advantage_N, comparison = grpo(table, IDEAL)
    ascent = -np.asarray(cases.loss_gradient(cases.chain_logits(), decision_2N, advantage_N, table.group_id_N >= 0))
    assert len(triggered_groups(comparison)) == 18
    assert ascent[cases.FRONTIER] == pytest.approx(-27 * SCALE * math.sqrt(3) / 9, rel=1e-5)


# ---- 8 ----------------------------------------------------------------------------------------------------------------


def largest_z(members, ddof):
    """(K - 1) / sqrt(K) with ddof 1 and sqrt(K - 1) with ddof 0."""
    return (members - 1) / math.sqrt(members - 1 + ddof)


@examples
@given(any_paths, st.integers(0, 99))
def test_8_norm_bound(paths, seed):
    """Section 7.8. The fallback is exactly 0 outside the gate. Inside, |P_i - mean| / std is at most (K - 1) / sqrt(K)
    (sqrt(K - 1) where the base divides by K): K d_i^2 <= (K - 1) sum_j d_j^2, with equality iff the others are all equal,
    exact in fractions; no float32 fallback exceeds lambda times it. With |grad log pi| <= M, an assumption about the
    policy, the fallback's share of the mean loss then has a gradient of at most lambda * M * (K - 1) / sqrt(K).
    """
    rates = coverages(paths)
    deviations = [rate - mean(rates) for rate in rates]
    for i, deviation in enumerate(deviations):
        bound = Fraction(len(rates) - 1, len(rates)) * sum(d**2 for d in deviations)
        assert deviation**2 <= bound
        assert (deviation**2 == bound) == (len({*rates[:i], *rates[i + 1 :]}) == 1)

    rollouts = [group(*map(trajectory, paths)), MIXED]
    table, decision_2N, logits = table_of(rollouts), cases.decisions(rollouts, ROWS), cases.random_logits(seed)
    for name, (_, comparisons) in every_estimator(table, IDEAL).items():
        for comparison in comparisons:
            fallback_N = comparison.advantage_N - comparison.base_N
            assert (fallback_N[~comparison.gate.open_N] == 0.0).all(), name
            for rows in triggered_groups(comparison):
                members = len(set(table.trajectory_id_N[rows])) if comparison.level == 'trajectory' else len(rows)
                assert np.abs(fallback_N[rows]).max() <= np.float32(SCALE) * largest_z(members, comparison.ddof), name

    advantage_N, comparison = grpo(table, IDEAL)
    rows = np.flatnonzero(table.group_id_N == 0)
    gradient = cases.loss_gradient(logits, decision_2N, advantage_N - comparison.base_N, table.group_id_N == 0)
    largest_score = max(np.linalg.norm(score) for score in cases.score_functions(logits, decision_2N)[rows])
    assert np.linalg.norm(gradient) / len(rows) <= SCALE * largest_score * largest_z(len(paths), 1)


def test_8_the_bound_on_z_is_attained():
    """Section 7.8: one member that explores among K - 1 that stand still, up to the 1e-6 that is added to std."""
    for size in range(2, 9):
        advantage_N, _ = grpo(table_of([group(trajectory('abcd'), *[trajectory('aaaa')] * (size - 1))]), IDEAL)
        assert advantage_N[0] == pytest.approx(SCALE * largest_z(size, 1), rel=1e-5)


# ---- 9 ----------------------------------------------------------------------------------------------------------------


def test_9_the_fallback_disengages():
    """Section 7.9. Hypothesis: the K rollouts of a group are independent and each succeeds with probability p. Then
    P(all fail) = (1 - p)^K, decreasing in p; the gate opens with at most that probability, namely P(all fail) times the
    chance of dispersion given that. Exact: every group of three rollouts of the chain (p is the square of its step's
    probability), weighted with fractions, through the real gate.
    """
    outcomes = list(itertools.product(cases.CHAIN, repeat=3))
    table = table_of([group(*map(cases.chain_trajectory, members)) for members in outcomes], 384)
    _, comparison = grpo(table, IDEAL)
    opened = {outcomes[table.group_id_N[rows[0]]] for rows in triggered_groups(comparison)}
    failed = {members for members in outcomes if not any(path.endswith('s') for path in members)}
    all_fail = []
    for advance in [Fraction(tenths, 10) for tenths in range(11)]:
        of_path = {path: cases.chain_probability(path, advance) for path in cases.CHAIN}
        of_group = {members: math.prod(of_path[path] for path in members) for members in outcomes}
        all_fail.append(sum(of_group[members] for members in failed))
        triggered = sum(of_group[members] for members in opened)
        stuck, entered, stayed, success = of_path.values()
        assert sum(of_group.values()) == 1 and success == advance**2
        assert all_fail[-1] == (1 - success) ** 3
        assert triggered == all_fail[-1] - stuck**3 - (entered + stayed) ** 3 <= all_fail[-1]
    assert all_fail == sorted(set(all_fail), reverse=True) and (all_fail[0], all_fail[-1]) == (1, 0)


# ---- 10 ---------------------------------------------------------------------------------------------------------------

CONFLICT = ['aas', 'aabcs', 'aabcs', 'aabcs', 'aabcd', 'aabcd', 'aabcd', 'abcde']  # those that end in s succeed


def conflict_table():
    rates = coverages(CONFLICT)
    assert rates[0] == Fraction(1, 2) < set(rates[1:-1]).pop() == Fraction(3, 4) < rates[-1] == 1
    return table_of([group(*[trajectory(path, success=path.endswith('s')) for path in CONFLICT])])


@pytest.mark.parametrize('config', [IDEAL, DEPLOYED], ids=['ideal', 'deployed'])
def test_10_reward_progress_conflict(config):
    """Section 7.10. A short success may have less coverage (1/2) than a long failure (1). In the group that holds both,
    the gate is closed: every estimator's comparison of trajectories ranks each success above each failure.
    """
    table = conflict_table()
    compared = set()
    for name, (_, comparisons) in every_estimator(table, config).items():
        for comparison in comparisons:
            if comparison.level == 'trajectory':
                success = comparison.advantage_N[(table.group_id_N >= 0) & ~table.failed_N]
                failure = comparison.advantage_N[(table.group_id_N >= 0) & table.failed_N]
                assert not comparison.gate.open_N.any() and success.min() > failure.max(), name
                compared.add(name)
    assert compared == ESTIMATORS.keys() - {'hgpo'}  # as published, HGPO compares no trajectories


def test_10_always_on_coverage_can_reverse_the_ranking():
    """Section 7.10: base advantage + lambda * z(P), without a gate. In this group of eight the long failure overtakes the
    short success at lambda = 1/2, inside the range of the paper's sweep.
    """
    table = conflict_table()
    success, failure = 0, int((table.group_id_N >= 0).sum()) - 1
    for scale, reversed_ in ((0.3, False), (0.7, True)):
        advantage_N, _ = grpo(table, CoverageConfig(variant='always_on', mode='ideal', coverage_scale=scale))
        assert (advantage_N[failure] > advantage_N[success]) == reversed_

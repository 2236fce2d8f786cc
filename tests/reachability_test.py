"""SERO's weights: relations first, then examples worked by hand (spec: SERO, 4.3, 4.4, F)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covsero_jax import losses, reachability

R, T, A = 3, 5, 4
KEY = jax.random.key(0)
probabilities = st.lists(st.floats(1e-6, 1.0), min_size=R * T, max_size=R * T).map(
    lambda p: np.log(np.array(p, np.float32)).reshape(R, T))
lengths = st.lists(st.integers(0, T), min_size=R, max_size=R).map(
    lambda n: np.arange(T)[None] < np.array(n)[:, None])


def weights(variant, log_c, mask, key=KEY, **options):
    reach = reachability.reachability_weights(jnp.asarray(log_c), jnp.asarray(mask))
    return np.asarray(reachability.scheme_weights(reach, mask, reachability.WeightConfig(variant, **options), key))


@settings(deadline=None, max_examples=60)
@given(probabilities, lengths)
def test_root_weight_is_one_and_weights_never_increase_with_depth(log_c, mask):
    w = weights('sero', log_c, mask)
    assert (w[:, 0] == mask[:, 0]).all()
    assert (np.diff(w, axis=1) <= 0).all() and (w[~mask] == 0).all() and (w[mask] > 0).all()


@settings(deadline=None, max_examples=60)
@given(probabilities, lengths)
def test_weights_are_the_product_of_earlier_compatibilities(log_c, mask):
    expected = np.ones((R, T))
    for j in range(1, T):
        expected[:, j] = expected[:, j - 1] * np.exp(log_c[:, j - 1].astype(np.float64))
    np.testing.assert_allclose(weights('sero', log_c, mask), np.where(mask, expected, 0), rtol=2e-5)


@settings(deadline=None, max_examples=40)
@given(probabilities, st.integers(0, T - 1), st.floats(1e-6, 1.0))
def test_a_command_does_not_affect_its_own_weight_nor_earlier_ones(log_c, j, other):
    changed = log_c.copy()
    changed[:, j] = np.log(np.float32(other))
    mask = np.ones((R, T), bool)
    a, b = weights('sero', log_c, mask), weights('sero', changed, mask)
    assert (a[:, : j + 1] == b[:, : j + 1]).all()
    if j < T - 1 and other < 0.5 * np.exp(log_c[:, j]).min():
        assert (b[:, j + 1] < a[:, j + 1]).all()


def test_long_unlikely_branches_keep_their_order():
    """0.01 ** 18 is still a float32; a product that rounds at every step would not be closer than the sum of logs."""
    log_c = np.full((1, 19), np.log(np.float32(0.01)))
    w = np.asarray(reachability.reachability_weights(jnp.asarray(log_c), jnp.ones((1, 19), bool)))
    assert (np.diff(w) < 0).all()
    np.testing.assert_allclose(np.log(w[0, 18]), 18 * np.log(0.01), rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(probabilities, lengths, st.integers(0, 2**31 - 1))
def test_shuffled_weights_are_the_same_weights_elsewhere(log_c, mask, seed):
    w = weights('sero', log_c, mask)
    shuffled = weights('shuffled', log_c, mask, jax.random.key(seed))
    np.testing.assert_array_equal(np.sort(w, axis=1), np.sort(shuffled, axis=1))
    assert (shuffled[~mask] == 0).all()


def test_shuffling_moves_something():
    log_c = np.log(np.full((R, T), 0.5, np.float32))
    mask = np.ones((R, T), bool)
    moved = [(weights('shuffled', log_c, mask, jax.random.key(k)) != weights('sero', log_c, mask)).any() for k in range(5)]
    assert all(moved)


@pytest.mark.parametrize('variant', reachability.VARIANTS)
def test_matched_mass_is_that_of_sero(variant):
    rng = np.random.default_rng(0)
    log_c, mask = np.log(rng.uniform(0.05, 1, (R, T))).astype(np.float32), np.arange(T)[None] < np.array([[5], [2], [0]])
    plain, matched = weights(variant, log_c, mask), weights(variant, log_c, mask, match_mass=True)
    np.testing.assert_allclose(matched.sum(axis=1), weights('sero', log_c, mask).sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(matched * plain.sum(axis=1, keepdims=True), plain * matched.sum(axis=1, keepdims=True), rtol=1e-6)
    if variant == 'sero':
        np.testing.assert_array_equal(matched, plain)


@pytest.mark.parametrize('variant, expected', [
    ('sero', [1, 0.5, 0.125, 0.1125]),
    ('full_flat', [1, 1, 1, 1]),
    ('root_only', [1, 0, 0, 0]),
    ('short_bridge', [1, 1, 1, 0]),
    ('depth_decay', [1, 0.9, 0.81, 0.729]),
])
def test_worked_branch(variant, expected):
    """c = 0.5, 0.25, 0.9, (0.3): w_1 = 0.5, w_2 = 0.5 * 0.25, w_3 = 0.125 * 0.9; the last c is used by nobody."""
    log_c = np.log(np.array([[0.5, 0.25, 0.9, 0.3, 0.7]], np.float32))
    mask = np.array([[True, True, True, True, False]])
    np.testing.assert_allclose(weights(variant, log_c, mask), [[*expected, 0]], rtol=1e-6)


def test_short_bridge_and_decay_take_their_options():
    log_c, mask = np.zeros((1, T), np.float32), np.ones((1, T), bool)
    assert weights('short_bridge', log_c, mask, bridge=1).tolist() == weights('root_only', log_c, mask).tolist()
    np.testing.assert_allclose(weights('depth_decay', log_c, mask, decay=0.5), [[1, 0.5, 0.25, 0.125, 0.0625]])


def test_compatibility_is_the_geometric_mean_of_the_command_tokens():
    """Tokens 0.5 and 0.125 of a command: sqrt(0.0625) = 0.25, whatever tags and padding hold; one token counts as it is."""
    logprob = np.log(np.array([[0.9, 0.5, 0.125, 0.1], [0.1, 0.2, 1e-30, 0.3], [0.4, 0.4, 0.4, 0.4]], np.float32))
    mask = np.array([[False, True, True, False], [False, True, False, False], [False] * 4])
    c = np.exp(reachability.log_compatibility(jnp.asarray(logprob), jnp.asarray(mask)))
    np.testing.assert_allclose(c, [0.25, 0.2, 1.0], rtol=1e-6)


def test_the_gate_by_hand():
    """Oracle wins where the policy failed: 10 / 10 = 1. No gain, a loss, and an invalid branch: 0. A partial gain: 0.4."""
    gate = reachability.branch_gate(
        jnp.array([10.0, 10.0, 0.0, 10.0, 7.0]), jnp.array([0.0, 10.0, 3.0, 0.0, 3.0]),
        jnp.array([True, True, True, False, True]), scale=10.0)
    np.testing.assert_allclose(gate, [1, 0, 0, 0, 0.4], rtol=1e-6)


def test_no_gradient_passes_weights_or_gates():
    def total(log_c):
        reach = reachability.reachability_weights(log_c, jnp.ones((R, T), bool))
        return reach.sum() + reachability.branch_gate(log_c[:, 0], log_c[:, 1], jnp.ones(R, bool)).sum()

    assert (jax.grad(total)(jnp.linspace(-2, -0.1, R * T).reshape(R, T)) == 0).all()


def test_nll_is_mean_or_sum_over_command_tokens_only():
    logprob = jnp.log(jnp.array([[0.9, 0.5, 0.25, jnp.inf], [0.3, 0.3, 0.3, 0.3]]))
    mask = jnp.array([[False, True, True, False], [False] * 4])
    np.testing.assert_allclose(losses.oracle_nll(logprob, mask), [np.log(8) / 2, 0], rtol=1e-6)
    np.testing.assert_allclose(losses.oracle_nll(logprob, mask, nll='token_sum'), [np.log(8), 0], rtol=1e-6)
    with pytest.raises(ValueError, match='token_mean'):
        losses.oracle_nll(logprob, mask, nll='mean')


@pytest.mark.parametrize('options, message', [
    ({'variant': 'flat'}, 'full_flat'), ({'bridge': 0}, 'bridge'), ({'decay': 1.5}, 'decay')])
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        reachability.WeightConfig(**options)

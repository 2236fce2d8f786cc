from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from covsero_jax import losses

ROWS, ACTIONS = 4, 6
values = st.floats(-3.0, 3.0, width=32)
settings = hypothesis.settings(deadline=None, max_examples=50)


def rows_of(elements):
    return hnp.arrays(np.float32, (ROWS,), elements=elements)


def tokens_of(elements):
    return hnp.arrays(np.float32, (ROWS, ACTIONS), elements=elements)


masks = hnp.arrays(bool, (ROWS, ACTIONS))
ONES_B = jnp.ones(ROWS)


def mean_loss(logprob_BA, old_logprob_BA, advantage_B, mask_BA, ref_logprob_BA=None):
    """The reduction that the learner does, without a model: sum / max(count, 1)."""
    logprob_BA, old_BA = (losses.where_real(x, mask_BA) for x in (logprob_BA, old_logprob_BA))
    loss_BA = losses.clipped_policy_loss(logprob_BA, old_BA, advantage_B)
    if ref_logprob_BA is not None:
        loss_BA += losses.kl_penalty(logprob_BA, losses.where_real(ref_logprob_BA, mask_BA))
    total, count = losses.masked_sum(loss_BA, mask_BA, ONES_B[: len(mask_BA)])
    return total / jnp.maximum(count, 1.0)


loss_and_grad = jax.jit(jax.value_and_grad(mean_loss))


@settings
@hypothesis.given(tokens_of(values), rows_of(values), masks)
def test_ratio_one_gives_plain_policy_gradient(logprob_BA, advantage_B, mask_BA):
    _, grad_BA = loss_and_grad(logprob_BA, logprob_BA, advantage_B, mask_BA)
    expected_BA = -advantage_B[:, None] * mask_BA / max(mask_BA.sum(), 1)  # d/dlogprob of -A logprob, averaged
    np.testing.assert_allclose(grad_BA, expected_BA, atol=1e-6)


def test_advantage_fills_exactly_its_own_action_mask():
    """Three steps of one trajectory with actions of 1, 4 and 2 tokens: no step borrows another one's mask."""
    mask_BA = jnp.array([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]], bool)
    advantage_B = jnp.array([1.0, -2.0, 3.0])
    zeros_BA = jnp.zeros((3, 4))
    _, grad_BA = jax.value_and_grad(mean_loss)(zeros_BA, zeros_BA, advantage_B, mask_BA)
    np.testing.assert_allclose(7 * grad_BA, [[-1, 0, 0, 0], [2, 2, 2, 2], [-3, -3, 0, 0]], atol=1e-6)


@settings
@hypothesis.given(tokens_of(values), tokens_of(values), rows_of(values), tokens_of(values))
def test_masked_equals_subset(logprob_BA, old_BA, advantage_B, ref_BA):
    mask_BA = np.zeros((ROWS, ACTIONS), bool)
    mask_BA[:3, :4] = True
    whole, whole_grad = loss_and_grad(logprob_BA, old_BA, advantage_B, mask_BA, ref_BA)
    cut = (slice(3), slice(4))
    part, part_grad = loss_and_grad(logprob_BA[cut], old_BA[cut], advantage_B[:3], mask_BA[cut], ref_BA[cut])
    np.testing.assert_allclose(whole, part, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(whole_grad[cut], part_grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.where(mask_BA, 0.0, whole_grad), 0.0)


@pytest.mark.parametrize('poison', [200.0, -200.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize('column', ['logprob', 'old', 'ref'])
def test_padding_may_hold_anything(poison, column):
    rng = np.random.default_rng(0)
    clean = dict(zip(('logprob', 'old', 'ref'), rng.normal(size=(3, ROWS, ACTIONS)).astype(np.float32), strict=True))
    mask_BA = rng.random((ROWS, ACTIONS)) < 0.6
    mask_BA[2] = False  # a fully masked row
    dirty = clean | {column: np.where(mask_BA, clean[column], poison).astype(np.float32)}
    advantage_B = jnp.array([1.0, -1.0, 2.0, 0.5])
    results = [loss_and_grad(x['logprob'], x['old'], advantage_B, mask_BA, x['ref']) for x in (clean, dirty)]
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


def test_one_where_would_not_be_enough():
    """Why `where_real` stands before the exponential too: the masked sum alone keeps the value clean, not the gradient."""
    single = jax.value_and_grad(lambda x: losses.masked_sum(jnp.exp(x), jnp.array([[True, False]]), jnp.ones(1))[0])
    value, grad = single(jnp.array([[0.0, 200.0]]))
    assert value == 1.0 and np.isnan(grad[0, 1])


@pytest.mark.parametrize('advantage', [1.0, -1.0, 0.0])
@pytest.mark.parametrize('gap', [200.0, -200.0])
def test_extreme_ratio_on_a_real_token_is_finite(advantage, gap):
    value, grad = loss_and_grad(np.array([[gap]]), np.zeros((1, 1)), np.array([advantage]), np.ones((1, 1), bool))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_empty_batch_is_zero():
    value, grad = loss_and_grad(np.ones((2, 3)), np.ones((2, 3)), np.ones(2), np.zeros((2, 3), bool))
    assert value == 0 and not grad.any()


@pytest.mark.parametrize(
    ('ratio', 'advantage', 'loss', 'has_gradient'),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.4, False),  # risen enough: stopped at 1 + clip_high
        (0.5, 2.0, -1.0, True),  # fallen, though it should rise: never stopped
        (0.5, -2.0, 1.6, False),
        (1.5, -2.0, 3.0, True),
        (5.0, -2.0, 6.0, False),  # dual clip: 3 |A| instead of 10
    ],
)
def test_clipping(ratio, advantage, loss, has_gradient):
    def token_loss(logprob):
        return losses.clipped_policy_loss(logprob[None, None], jnp.zeros((1, 1)), jnp.array([advantage]))[0, 0]

    value, grad = jax.value_and_grad(token_loss)(jnp.log(ratio))
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    assert (grad != 0) == has_gradient
    clipped = losses.is_clipped(jnp.log(ratio)[None, None], jnp.array([advantage]))
    assert bool(clipped[0, 0]) == (not has_gradient and ratio != 5.0)


def test_asymmetric_clip_range():
    logprob_BA, advantage_B = jnp.log(jnp.array([[1.25]])), jnp.ones(1)
    assert losses.is_clipped(logprob_BA, advantage_B) and not losses.is_clipped(logprob_BA, advantage_B, clip_high=0.28)
    loss_BA = losses.clipped_policy_loss(logprob_BA, jnp.zeros((1, 1)), advantage_B, clip_high=0.28)
    np.testing.assert_allclose(loss_BA, -1.25, rtol=1e-6)


def test_no_gradient_through_weights():
    logprob_BA = jnp.full((2, 3), 0.1)
    grad_B = jax.grad(lambda a: jnp.sum(losses.clipped_policy_loss(logprob_BA, jnp.zeros((2, 3)), a)))(jnp.ones(2))
    np.testing.assert_array_equal(grad_B, 0.0)


@settings
@hypothesis.given(tokens_of(values), tokens_of(values))
def test_kl_penalty_is_k3(logprob_BA, ref_BA):
    difference_BA = (ref_BA - logprob_BA).astype(np.float64)
    expected_BA = np.exp(difference_BA) - difference_BA - 1
    np.testing.assert_allclose(losses.kl_penalty(logprob_BA, ref_BA), expected_BA, rtol=1e-4, atol=1e-5)


def test_kl_penalty_is_zero_at_the_reference_and_bounded_far_from_it():
    far = losses.kl_penalty(jnp.array([[-300.0, 300.0, 0.7]]), jnp.array([[0.0, 0.0, 0.7]]))
    np.testing.assert_allclose(far, [[np.exp(10.0) - 11, 9 + np.exp(-10.0), 0.0]], rtol=1e-5)


def test_aggregations_by_hand():
    """Rows of 1, 3 and 2 tokens with losses 6, 3 and 12; the first two rows are one trajectory."""
    mask_BA = jnp.array([[1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    loss_BA = jnp.array([[6.0], [3.0], [12.0]]) * jnp.ones((1, 3))
    trajectory_tokens_B = jnp.array([4.0, 4.0, 2.0])
    expected = {
        'token': (6 + 3 * 3 + 2 * 12) / 6,
        'sequence': (6 + 3 + 12) / 3,
        'trajectory': ((6 + 3 * 3) / 4 + 12) / 2,
    }
    for aggregation, value in expected.items():
        weight_B = losses.row_weights(mask_BA, trajectory_tokens_B, aggregation=aggregation)
        total, count = losses.masked_sum(loss_BA, mask_BA, weight_B)
        np.testing.assert_allclose(total / count, value, rtol=1e-6, err_msg=aggregation)


def test_unknown_aggregation_is_named():
    with pytest.raises(ValueError, match="'row' is not one of"):
        losses.row_weights(jnp.ones((1, 1), bool), None, aggregation='row')


# ---- GSPO: the ratio of the whole reply -----------------------------------------------------------------------------

GSPO_CLIP = {'clip_low': 0.3, 'clip_high': 0.2}  # wide, so that both sides of it occur


def gspo_loss(logprob_BA, old_logprob_BA, advantage_B, mask_BA, **clip):
    """As the learner does it: where_real, then the mean over rows, each the mean of its tokens."""
    logprob_BA, old_BA = (losses.where_real(x, mask_BA) for x in (logprob_BA, old_logprob_BA))
    loss_BA = losses.sequence_policy_loss(logprob_BA, old_BA, mask_BA, advantage_B, **clip)
    total, count = losses.masked_sum(loss_BA, mask_BA, losses.row_weights(mask_BA, None, aggregation='sequence'))
    return total / jnp.maximum(count, 1.0)


def gspo_objective(logprob_BA, old_logprob_BA, advantage_B, mask_BA, *, clip_low, clip_high):
    """The paper's own objective (Eq. 5-7), one ratio per reply, negated; rows without tokens are not replies."""
    length_B = jnp.sum(mask_BA, axis=-1)
    mean_B = jnp.sum(jnp.where(mask_BA, logprob_BA - old_logprob_BA, 0.0), axis=-1) / jnp.maximum(length_B, 1)
    ratio_B = jnp.exp(mean_B)
    bounded_B = jnp.clip(ratio_B, 1 - clip_low, 1 + clip_high)
    objective_B = jnp.minimum(ratio_B * advantage_B, bounded_B * advantage_B)
    return -jnp.sum(jnp.where(length_B > 0, objective_B, 0.0)) / jnp.maximum(jnp.sum(length_B > 0), 1)


gspo_grad = jax.jit(jax.value_and_grad(gspo_loss), static_argnames=('clip_low', 'clip_high'))
objective_grad = jax.jit(jax.value_and_grad(gspo_objective), static_argnames=('clip_low', 'clip_high'))


def test_gspo_by_hand():
    """Log-ratios 0.2 and -0.1 have mean 0.05: both tokens hold A exp(0.05), and its gradient on their own log-prob."""
    args = (jnp.array([[0.2, -0.1, 7.0]]), jnp.zeros((1, 3)), jnp.array([2.0]), jnp.array([[True, True, False]]))
    loss_BA = losses.sequence_policy_loss(args[0], args[1], args[3], args[2], clip_high=0.1)
    np.testing.assert_allclose(loss_BA[0, :2], -2 * np.exp(0.05), rtol=1e-6)
    value, grad_BA = jax.value_and_grad(gspo_loss)(*args, clip_high=0.1)
    np.testing.assert_allclose(value, -2 * np.exp(0.05), rtol=1e-6)
    np.testing.assert_allclose(grad_BA, [[-np.exp(0.05), -np.exp(0.05), 0]], rtol=1e-6)  # (1 / 2) A r each
    value, grad_BA = jax.value_and_grad(gspo_loss)(*args, clip_high=0.01)
    np.testing.assert_allclose(value, -2 * 1.01, rtol=1e-6)
    assert not grad_BA.any()


@settings
@hypothesis.given(tokens_of(st.floats(-1.0, 1.0, width=32)), rows_of(values), masks)
def test_gspo_is_the_sequence_objective(log_ratio_BA, advantage_B, mask_BA):
    """Value and gradient of each row's log-probs, inside and outside the clip range."""
    old_BA = np.full((ROWS, ACTIONS), -2.0, np.float32)
    args = (old_BA + log_ratio_BA, old_BA, advantage_B, mask_BA)
    ratio_B = np.exp(np.where(mask_BA, args[0] - old_BA, 0).sum(-1) / mask_BA.sum(-1).clip(1))
    hypothesis.assume((np.abs(ratio_B[:, None] - [0.7, 1.2]) > 1e-5).all())  # at an edge either gradient is right
    value, grad_BA = gspo_grad(*args, **GSPO_CLIP)
    expected, expected_BA = objective_grad(*args, **GSPO_CLIP)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad_BA, expected_BA, rtol=1e-5, atol=1e-6)


@settings
@hypothesis.given(tokens_of(values), rows_of(values), masks)
def test_gspo_at_ratio_one_has_the_ppo_gradient_of_sequence_aggregation(logprob_BA, advantage_B, mask_BA):
    value, grad_BA = gspo_grad(logprob_BA, logprob_BA, advantage_B, mask_BA)
    length_B = mask_BA.sum(-1)
    expected_BA = -(advantage_B / length_B.clip(1))[:, None] * mask_BA / max((length_B > 0).sum(), 1)
    np.testing.assert_allclose(grad_BA, expected_BA, atol=1e-6)
    np.testing.assert_allclose(value, expected_BA.sum(), atol=1e-5)


@pytest.mark.parametrize('poison', [200.0, -np.inf, np.inf, np.nan])
def test_gspo_padding_may_hold_anything(poison):
    rng = np.random.default_rng(0)
    logprob_BA, old_BA = rng.normal(0, 0.1, (2, ROWS, ACTIONS)).astype(np.float32)
    mask_BA = rng.random((ROWS, ACTIONS)) < 0.6
    mask_BA[2] = False
    advantage_B = np.float32([1.0, -1.0, 2.0, 0.5])
    clean = gspo_grad(logprob_BA, old_BA, advantage_B, mask_BA, **GSPO_CLIP)
    assert np.isfinite(clean[0]) and (clean[1] != 0).any()
    for columns in ((True, False), (False, True), (True, True)):
        dirty = [
            np.where(mask_BA | (not poisoned), x_BA, np.float32(poison))
            for x_BA, poisoned in zip((logprob_BA, old_BA), columns, strict=True)
        ]
        jax.tree.map(np.testing.assert_array_equal, gspo_grad(*dirty, advantage_B, mask_BA, **GSPO_CLIP), clean)
    longer_BA, longer_old_BA, longer_mask_BA = (
        np.pad(x_BA, ((0, 1), (0, 3)), constant_values=fill)
        for x_BA, fill in ((logprob_BA, 5), (old_BA, -5), (mask_BA, False))
    )
    longer_B = np.append(advantage_B, np.float32(9))
    value, grad_BA = gspo_grad(longer_BA, longer_old_BA, longer_B, longer_mask_BA, **GSPO_CLIP)
    np.testing.assert_allclose(value, clean[0], rtol=1e-6)
    np.testing.assert_allclose(grad_BA[:ROWS, :ACTIONS], clean[1], rtol=1e-6)
    assert not grad_BA[ROWS:].any() and not grad_BA[:, ACTIONS:].any()


@pytest.mark.parametrize(
    ('ratio', 'advantage', 'loss', 'is_clipped'),
    [
        (1 + 3.9e-4, 1.0, -(1 + 3.9e-4), False),
        (1 + 4.1e-4, 1.0, -(1 + 4e-4), True),
        (1 - 2.9e-4, -1.0, 1 - 2.9e-4, False),
        (1 - 3.1e-4, -1.0, 1 - 3e-4, True),
        (0.5, 1.0, -0.5, False),  # fallen, though it should rise: never stopped
        (5.0, -1.0, 5.0, False),  # no dual clip
    ],
)
def test_gspo_clips_at_its_published_range(ratio, advantage, loss, is_clipped):
    """3e-4 below and 4e-4 above, by default."""
    logprob_BA = np.full((1, 3), np.log(ratio), np.float32)
    mask_BA, advantage_B = np.ones((1, 3), bool), np.float32([advantage])
    value, grad_BA = gspo_grad(logprob_BA, np.zeros((1, 3), np.float32), advantage_B, mask_BA)
    np.testing.assert_allclose(value, loss, rtol=1e-6)
    assert (grad_BA != 0).all() != is_clipped and (grad_BA != 0).any() != is_clipped
    log_ratio_BA = losses.sequence_log_ratio(logprob_BA, jnp.zeros((1, 3)), mask_BA)
    assert losses.is_clipped(log_ratio_BA, advantage_B, clip_low=3e-4, clip_high=4e-4).all() == is_clipped


def test_gspo_of_extreme_replies_is_finite():
    old_BA, mask_BA = np.zeros((1, 2), np.float32), np.ones((1, 2), bool)
    for gap in (200.0, -200.0):
        for advantage in (1.0, -1.0):
            value, grad_BA = gspo_grad(old_BA + np.float32(gap), old_BA, np.float32([advantage]), mask_BA)
            assert np.isfinite(value) and np.isfinite(grad_BA).all()

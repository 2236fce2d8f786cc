"""Per-token losses of the policy update, and the masked sums that reduce them.

Everything is a (sum, count) that the caller divides once per minibatch, so micro-batches, padding rows and the device mesh
change nothing. Padding may hold anything, even inf: `where_real` before the exponentials and `masked_sum` after them keep
it out of values *and* gradients. One of the two is not enough: the gradient of a masked exp(200) is 0 * inf = NaN.

Suffix letters: B rows, A action tokens.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

AGGREGATIONS = ('token', 'sequence', 'trajectory')
POLICY_LOSSES = ('ppo', 'gspo')
ORACLE_NLL = ('token_mean', 'token_sum')
RATIO_BOUND = 20.0  # nats; far outside any clip range, and exp of it is finite in float32
SEQUENCE_RATIO_BOUND = 10.0  # nats
KL_BOUND = 10.0  # nats


def where_real(x_BA: Array, mask_BA: Array) -> Array:
    """x on real tokens, 0 on padding; also stops padding's gradient before anything nonlinear can turn it into NaN."""
    chex.assert_equal_shape([x_BA, mask_BA])
    return jnp.where(mask_BA, x_BA, 0.0)


def masked_sum(x_BA: Array, mask_BA: Array, weight_B: Array) -> tuple[Array, Array]:
    """(sum_ba w_b m_ba x_ba, sum_ba w_b m_ba): divide sums of these, never average averages."""
    chex.assert_equal_shape([x_BA, mask_BA])
    chex.assert_equal_shape_prefix([x_BA, weight_B], x_BA.ndim - 1)
    return jnp.sum(where_real(x_BA, mask_BA) * weight_B[..., None]), jnp.sum(mask_BA * weight_B[..., None])


def row_weights(mask_BA: Array, trajectory_tokens_B: Array | None, *, aggregation: str) -> Array:
    """The weight of each token of a row, [B], so that sum / count of `masked_sum` is the mean over

    token: all tokens (default; DAPO, arXiv 2503.14476, section 3.3);  sequence: rows, each the mean of its tokens (GRPO,
    arXiv 2402.03300, Eq. 3);  trajectory: trajectories, each the mean of its tokens in this update. A trajectory whose
    rows fall into several minibatches counts in each for the share of its tokens that is there. NumPy in, NumPy out: the
    learner counts whole minibatches on the host.
    """
    if aggregation == 'token':
        return np.ones(mask_BA.shape[:-1], np.float32)
    if aggregation == 'sequence':
        return 1.0 / mask_BA.sum(axis=-1).clip(min=1).astype(np.float32)
    if aggregation == 'trajectory':
        return 1.0 / trajectory_tokens_B
    raise ValueError(f'aggregation={aggregation!r} is not one of {AGGREGATIONS}')


def log_ratio(logprob_BA: Array, old_logprob_BA: Array) -> Array:
    """log pi - log pi_old, bounded to +-20 nats so that the ratio and its gradient stay finite. [B, A]."""
    chex.assert_equal_shape([logprob_BA, old_logprob_BA])
    return jnp.clip(logprob_BA - old_logprob_BA, -RATIO_BOUND, RATIO_BOUND)


def clipped_policy_loss(
    logprob_BA: Array,
    old_logprob_BA: Array,
    advantage_B: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Array:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and at most dual_clip |A| where A < 0. [B, A], to be minimised.

    r = pi / pi_old per token; a row's advantage applies to each of its action tokens. PPO (arXiv 1707.06347, Eq. 7);
    asymmetric range: DAPO (arXiv 2503.14476, section 3.1: clip_high = 0.28); dual clip: arXiv 1912.09729.
    """
    log_ratio_BA = log_ratio(logprob_BA, old_logprob_BA)
    advantage_BA = _per_token(advantage_B, log_ratio_BA)
    loss_BA = _clipped(log_ratio_BA, advantage_BA, clip_low, clip_high)
    return jnp.where(advantage_BA < 0, jnp.minimum(loss_BA, -advantage_BA * dual_clip), loss_BA)


def sequence_policy_loss(
    logprob_BA: Array,
    old_logprob_BA: Array,
    mask_BA: Array,
    advantage_B: Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Array:
    """GSPO: as above without dual clip, r the ratio of the whole reply: exp(mean over its tokens of log pi / pi_old).

    GSPO-token form (arXiv 2507.18071, Eq. 13-15): every token holds the reply's ratio, its gradient is its own token's.
    With aggregation='sequence' that is GSPO exactly. [B, A], to be minimised.
    """
    log_ratio_BA = sequence_log_ratio(logprob_BA, old_logprob_BA, mask_BA)
    return _clipped(log_ratio_BA, _per_token(advantage_B, log_ratio_BA), clip_low, clip_high)


def sequence_log_ratio(logprob_BA: Array, old_logprob_BA: Array, mask_BA: Array) -> Array:
    """Mean over the row's real tokens of log pi - log pi_old, on each of them, with the gradient of its own log pi.

    At most 10 nats, as in the public code: without a dual clip nothing else bounds the loss of A < 0.
    """
    length_B = jnp.maximum(jnp.sum(mask_BA, axis=-1), 1)
    mean_B = jnp.sum(where_real(log_ratio(logprob_BA, old_logprob_BA), mask_BA), axis=-1) / length_B
    own_BA = logprob_BA - jax.lax.stop_gradient(logprob_BA)  # 0, with a gradient
    return own_BA + jax.lax.stop_gradient(jnp.minimum(mean_B, SEQUENCE_RATIO_BOUND))[..., None]


def _clipped(log_ratio_BA: Array, advantage_BA: Array, clip_low: float, clip_high: float) -> Array:
    ratio_BA = jnp.exp(log_ratio_BA)
    return jnp.maximum(-advantage_BA * ratio_BA, -advantage_BA * jnp.clip(ratio_BA, 1 - clip_low, 1 + clip_high))


def is_clipped(log_ratio_BA: Array, advantage_B: Array, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Array:
    """Tokens whose policy gradient the clip range stops: the ratio has left it on the side that A favours. bool [B, A]."""
    ratio_BA = jnp.exp(log_ratio_BA)
    advantage_BA = _per_token(advantage_B, ratio_BA)
    return ((advantage_BA > 0) & (ratio_BA > 1 + clip_high)) | ((advantage_BA < 0) & (ratio_BA < 1 - clip_low))


def kl_penalty(logprob_BA: Array, ref_logprob_BA: Array) -> Array:
    """KL(pi || pi_ref) per sampled token, k3: exp(d) - d - 1 with d = log pi_ref - log pi clamped to +-10 nats. [B, A].

    Estimator: GRPO (arXiv 2402.03300, Eq. 4). Unclamped, one token that the policy has left makes it inf.
    """
    chex.assert_equal_shape([logprob_BA, ref_logprob_BA])
    difference_BA = jnp.clip(ref_logprob_BA - logprob_BA, -KL_BOUND, KL_BOUND)
    return jnp.exp(difference_BA) - difference_BA - 1.0


def oracle_nll(logprob_BA: Array, command_mask_BA: Array, *, nll: str = 'token_mean') -> Array:
    """-log pi of the command tokens of each row, their mean or their sum, [B]; 0 for rows without any. SERO, 4.4, C.2."""
    if nll not in ORACLE_NLL:
        raise ValueError(f'nll={nll!r} is not one of {ORACLE_NLL}')
    total_B = -jnp.sum(where_real(logprob_BA, command_mask_BA), axis=-1)
    return total_B / jnp.maximum(jnp.sum(command_mask_BA, axis=-1), 1) if nll == 'token_mean' else total_B


def _per_token(advantage_B: Array, like_BA: Array) -> Array:
    chex.assert_equal_shape_prefix([like_BA, advantage_B], like_BA.ndim - 1)
    return jnp.broadcast_to(jax.lax.stop_gradient(advantage_B)[..., None], like_BA.shape)

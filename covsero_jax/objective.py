"""What one optimizer step minimises, as pure functions of one micro-batch: log-probabilities, policy term, oracle term.

Everything is a sum divided by the count of the *whole* minibatch, so that shares of micro-batches just add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from covsero_jax import losses, model
from covsero_jax.batch import OracleBatch, PolicyBatch, TokenBatch
from covsero_jax.packing import PackedTokens, segment_mask

Array = jax.Array
PyTree = Any
Metrics = dict[str, Array]

METRICS = (  # of the loss; each is a sum over micro-batches, or a maximum if its name says so
    'loss/total', 'loss/policy', 'loss/kl', 'loss/entropy', 'loss/clip_fraction', 'loss/old_kl', 'loss/ratio_max',
    'batch/action_tokens', 'loss/oracle',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """loss = policy + kl_coef * KL(pi || ref) - entropy_coef * entropy, each a weighted token mean over the minibatch.

    With kl_coef = 0 no reference log-probs are needed. count_zero_rows = False leaves rows of advantage 0 out of the
    policy term's denominator (they never were in its numerator); KL and entropy always average over every real token.
    policy_loss 'gspo' compares whole replies; it wants a clip range of 3e-4 / 4e-4 and aggregation 'sequence'.
    """

    policy_loss: str = 'ppo'  # losses.POLICY_LOSSES
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coef: float = 0.01
    entropy_coef: float = 0.001
    aggregation: str = 'token'  # losses.AGGREGATIONS
    count_zero_rows: bool = True
    oracle_coef: float = 0.1  # lambda_O of SERO; only used where there are oracle batches
    oracle_nll: str = 'token_mean'  # losses.ORACLE_NLL
    temperature: float = 1.0  # that of the rollout: the ratio compares distributions at one temperature
    chunk: int = 16  # action positions whose logits exist at one time: [rows, chunk, vocabulary]

    def __post_init__(self):
        if self.aggregation not in losses.AGGREGATIONS:
            raise ValueError(f'aggregation={self.aggregation!r} is not one of {losses.AGGREGATIONS}')
        if self.policy_loss not in losses.POLICY_LOSSES:
            raise ValueError(f'policy_loss={self.policy_loss!r} is not one of {losses.POLICY_LOSSES}')
        if self.policy_loss == 'gspo' and self.aggregation != 'sequence':
            raise ValueError(f"policy_loss='gspo' averages over replies: aggregation='sequence', not {self.aggregation!r}")
        if self.oracle_nll not in losses.ORACLE_NLL:
            raise ValueError(f'oracle_nll={self.oracle_nll!r} is not one of {losses.ORACLE_NLL}')
        if self.temperature <= 0 or self.chunk < 1:
            raise ValueError(f'temperature={self.temperature} and chunk={self.chunk} must be positive')


def token_logprobs(
    params: PyTree, tokens: TokenBatch | PackedTokens, *, config: model.QwenConfig, temperature: float, chunk: int,
    rows: NamedSharding | None = None,
) -> tuple[Array, Array]:
    """log pi(action token | everything before it) and the entropy of that distribution in nats, float32 [B, A] each.

    pi = softmax(logits / temperature) over the whole vocabulary, no top-k or top-p. Only the action window reaches the
    vocabulary, `chunk` positions at a time and again in the backward pass, so [B, A, V] never exists. Positions that
    `action_mask_BA` masks hold finite numbers without meaning. Packed rows give the same numbers (B counts rows, not
    sequences). rows: see model.Qwen. ValueError if `chunk` < A does not divide A (packed: T).
    """
    packed = isinstance(tokens, PackedTokens)
    hidden_BAD, action_BA = (_packed_window if packed else _padded_window)(params, tokens, model.Qwen(config, rows))

    def chunk_logprobs(window: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden_BCD, action_BC = window
        logprob_BCV = jax.nn.log_softmax(model.project(params, hidden_BCD, config) / temperature)
        logprob_BC = jnp.take_along_axis(logprob_BCV, action_BC[..., None], axis=-1)[..., 0]
        return logprob_BC, -jnp.sum(jnp.exp(logprob_BCV) * logprob_BCV, axis=-1)

    out = _map_chunks(jax.checkpoint(chunk_logprobs, prevent_cse=False), (hidden_BAD, action_BA), chunk)
    return tuple(_unpacked(x_BT, tokens) for x_BT in out) if packed else out


def _padded_window(params: PyTree, tokens: TokenBatch, decoder: model.Qwen) -> tuple[Array, Array]:
    """(hidden states that predict them, action tokens), [B, A, D] and [B, A]."""
    chex.assert_rank([tokens.prompt_BP, tokens.action_BA], 2)
    chex.assert_equal_shape([tokens.prompt_BP, tokens.prompt_mask_BP])
    chex.assert_equal_shape([tokens.action_BA, tokens.action_mask_BA])
    before_action = tokens.prompt_BP.shape[1] - 1  # position t predicts token t + 1
    mask_BL = jnp.concatenate([tokens.prompt_mask_BP, tokens.action_mask_BA], axis=1)
    position_BL, mask_BLL = model.positions_and_mask(mask_BL)
    token_BL = jnp.concatenate([tokens.prompt_BP, tokens.action_BA], axis=1)
    hidden_BLD, _ = decoder.apply({'params': params}, token_BL, position_BL, mask_BLL, window=before_action)
    return hidden_BLD[:, :-1], tokens.action_BA


def _packed_window(params: PyTree, tokens: PackedTokens, decoder: model.Qwen) -> tuple[Array, Array]:
    """The same of all rows of a sequence after one another, [B, T, D] and [B, T]."""
    chex.assert_equal_shape([tokens.token_BL, tokens.segment_BL, tokens.position_BL])
    chex.assert_equal_shape([tokens.target_BT, tokens.action_BT])
    hidden_BLD, _ = decoder.apply(
        {'params': params}, tokens.token_BL, tokens.position_BL, segment_mask(tokens.segment_BL))
    return jnp.take_along_axis(hidden_BLD, tokens.target_BT[:, :, None], axis=1), tokens.action_BT


def _unpacked(x_BT: Array, tokens: PackedTokens) -> Array:
    """Action tokens of sequences [B, T] to rows [B * R, A]."""
    B, R, A = tokens.slot_BRA.shape
    return jnp.take_along_axis(x_BT, tokens.slot_BRA.reshape(B, R * A), axis=1).reshape(B * R, A)


def policy_objective(
    params: PyTree, micro: PolicyBatch, counts: Array, *, config: model.QwenConfig, loss: LossConfig,
    rows: NamedSharding | None = None,
) -> tuple[Array, Metrics]:
    """This micro-batch's share of the minibatch loss, and of its metrics. They add up over micro-batches (maxima apart)."""
    policy_count, count = counts[0], counts[1]
    mask_BA = micro.tokens.action_mask_BA
    weight_B = losses.row_weights(mask_BA, micro.trajectory_tokens_B, aggregation=loss.aggregation)
    logprob_BA, entropy_BA = token_logprobs(
        params, micro.tokens, config=config, temperature=loss.temperature, chunk=loss.chunk, rows=rows
    )
    logprob_BA = losses.where_real(logprob_BA, mask_BA)
    old_logprob_BA = losses.where_real(micro.old_logprob_BA, mask_BA)

    def total(x_BA: Array) -> Array:
        return losses.masked_sum(x_BA, mask_BA, weight_B)[0]

    clip = {'clip_low': loss.clip_low, 'clip_high': loss.clip_high}
    if loss.policy_loss == 'gspo':
        log_ratio_BA = losses.sequence_log_ratio(logprob_BA, old_logprob_BA, mask_BA)
        policy_BA = losses.sequence_policy_loss(logprob_BA, old_logprob_BA, mask_BA, micro.advantage_B, **clip)
    else:
        log_ratio_BA = losses.log_ratio(logprob_BA, old_logprob_BA)
        policy_BA = losses.clipped_policy_loss(
            logprob_BA, old_logprob_BA, micro.advantage_B, dual_clip=loss.dual_clip, **clip
        )
    policy = total(policy_BA) / policy_count
    entropy = total(entropy_BA) / count
    kl = jnp.zeros(())
    if loss.kl_coef:
        kl = total(losses.kl_penalty(logprob_BA, losses.where_real(micro.ref_logprob_BA, mask_BA))) / count
    objective = policy + loss.kl_coef * kl - loss.entropy_coef * entropy
    clipped_BA = losses.is_clipped(log_ratio_BA, micro.advantage_B, **clip)
    metrics = {
        'loss/total': objective,
        'loss/policy': policy,
        'loss/kl': kl,
        'loss/entropy': entropy,
        'loss/clip_fraction': total(clipped_BA.astype(jnp.float32)) / count,
        'loss/old_kl': total(losses.kl_penalty(logprob_BA, old_logprob_BA)) / count,
        'loss/ratio_max': jnp.max(jnp.exp(log_ratio_BA)),
        'batch/action_tokens': jnp.sum(mask_BA).astype(jnp.float32),
    }
    return objective, metrics


def oracle_objective(
    params: PyTree, micro: OracleBatch, scale: Array, *, config: model.QwenConfig, loss: LossConfig,
    rows: NamedSharding | None = None,
) -> tuple[Array, Metrics]:
    """This micro-batch's share of oracle_coef * L_O: the likelihood of the oracle's commands, weighted (SERO, 4.4)."""
    logprob_BA, _ = token_logprobs(
        params, micro.tokens, config=config, temperature=loss.temperature, chunk=loss.chunk, rows=rows
    )
    nll_B = losses.oracle_nll(logprob_BA, micro.command_mask_BA, nll=loss.oracle_nll)
    oracle = scale * jnp.sum(jax.lax.stop_gradient(micro.weight_B) * nll_B)
    return loss.oracle_coef * oracle, {'loss/oracle': oracle, 'loss/total': loss.oracle_coef * oracle}


def counts_of(minibatch: Sequence[PolicyBatch], loss: LossConfig) -> np.ndarray:
    """Denominators over the whole minibatch, [policy term, everything else]. They do not depend on the parameters.

    On the host, from columns that were there before any program ran: this waits for no computation.
    """
    counts = np.zeros(2)
    for micro in minibatch:
        columns = (micro.tokens.action_mask_BA, micro.advantage_B, micro.trajectory_tokens_B)
        mask_BA, advantage_B, trajectory_tokens_B = jax.device_get(columns)
        weight_B = losses.row_weights(mask_BA, trajectory_tokens_B, aggregation=loss.aggregation)
        count_B = weight_B * mask_BA.sum(axis=-1)
        counts += count_B[loss.count_zero_rows | (advantage_B != 0)].sum(), count_B.sum()
    return np.where(counts > 0, counts, 1.0).astype(np.float32)  # an empty minibatch has loss 0, not 0 / 0


def check_columns(policy: PolicyBatch, loss: LossConfig) -> None:
    required = {'old_logprob_BA': 'always', 'ref_logprob_BA': 'for kl_coef > 0'}
    if not loss.kl_coef:
        del required['ref_logprob_BA']
    if loss.aggregation == 'trajectory':
        required['trajectory_tokens_B'] = "for aggregation='trajectory'"
    for name, when in required.items():
        if getattr(policy, name) is None:
            raise ValueError(f'PolicyBatch.{name} is None; the policy loss needs it {when}')


def _map_chunks(fn: Callable, window: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
    """fn on slices of `chunk` positions along axis 1, one after the other; the rows stay whole, and so their sharding."""
    rows, length = window[0].shape[:2]
    if chunk >= length:
        return fn(window)
    if length % chunk:
        raise ValueError(f'chunk={chunk} does not divide the {length} action positions')
    split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0), window)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, length), jax.lax.map(fn, split))

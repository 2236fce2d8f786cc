"""Sampling replies: a jitted prefill and decode loop with a KV cache, and the `Policy` that rollouts call.

Tokens are drawn from softmax(logits / temperature) and nothing else: no top-k, top-p or repetition penalty, whatever a
model folder's generation_config.json says. (`Bands`, off unless asked for, is the one exception.) Every row has its own PRNG key, so that a reply depends on its prompt and
its row id, not on what else is in the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from covsero_jax import model, sharding, trajectory

Array = jax.Array


@flax.struct.dataclass
class Completion:
    """Sampled replies, right-padded; `mask_BA` is the only statement of what is real (eos may equal pad).

    logprobs_BA: log-probability of each token under the distribution that it was drawn from, 0 on padding.
    """

    tokens_BA: Array  # int32
    logprobs_BA: Array  # float32
    mask_BA: Array  # bool


@dataclasses.dataclass(frozen=True)
class Bands:
    """Band-conditioned sampling: rollouts that try what the policy finds possible, but not likely (CovGPO §9.2).

    Tokens of probability >= `head` are the head band; those in [floor, head) are the mid and low bands, rarer ones are
    noise. A share `mix` of all probability is drawn from the mid and low bands alone, in the policy's proportions:

        q(v) = (1 - mix) p(v) + mix p(v) [floor <= p(v) < head] / sum of p over these;   q = p where there are none

    The paper's summary says where probability goes, not how: the formula, and that it works on tokens, are our reading.
    It is off-policy on purpose and not corrected for, so the recorded log-probabilities are the policy's own, p.
    Raises ValueError unless 0 < mix < 1 and 0 <= floor < head <= 1.
    """

    mix: float
    head: float = 0.5
    floor: float = 0.01

    def __post_init__(self):
        if not (0 < self.mix < 1 and 0 <= self.floor < self.head <= 1):
            raise ValueError(f'{self} needs 0 < mix < 1 and 0 <= floor < head <= 1')


def band_logprobs(logprob_BV: Array, bands: Bands) -> Array:
    """log q of `Bands`, from log p. [B, V]."""
    chex.assert_rank(logprob_BV, 2)
    prob_BV = jnp.exp(logprob_BV)
    rare_BV = jnp.where((prob_BV >= bands.floor) & (prob_BV < bands.head), prob_BV, 0.0)
    rare_B1 = jnp.sum(rare_BV, axis=-1, keepdims=True)
    mixed_BV = (1 - bands.mix) * prob_BV + bands.mix * rare_BV / jnp.where(rare_B1 > 0, rare_B1, 1.0)
    return jnp.where(rare_B1 > 0, jnp.log(mixed_BV), logprob_BV)


@functools.partial(jax.jit, static_argnames=('config', 'max_new_tokens', 'temperature', 'eos_ids', 'bands', 'mesh'))
def generate(
    params: model.Params,
    prompt_BP: Array,
    prompt_mask_BP: Array,
    active_B: Array,
    key_B: Array,
    *,
    config: model.QwenConfig,
    max_new_tokens: int,
    temperature: float,
    eos_ids: tuple[int, ...],
    bands: Bands | None = None,
    mesh: Mesh | None = None,
) -> Completion:
    """Sample a reply to every active row of left-padded prompts; stops as soon as all of them have ended.

    Token i of a row is drawn with key `fold_in(key_B[row], i)` from softmax(logits / temperature), in float32. A reply
    ends with one of `eos_ids`, which belongs to it, or after `max_new_tokens`. Temperature 0 takes the likeliest token
    and reports its log-probability at temperature 1. Inactive rows come back empty. `bands` changes what is drawn.
    On a `mesh` the rows are split as those of a micro-batch, and the key/value heads of the cache over `tensor`.
    """
    chex.assert_rank([prompt_BP, active_B, key_B], [2, 1, 1])
    chex.assert_equal_shape([prompt_BP, prompt_mask_BP])
    B, P = prompt_BP.shape
    A = max_new_tokens
    length_B = jnp.sum(prompt_mask_BP, axis=1, dtype=jnp.int32)
    key_mask_BS = jnp.concatenate([prompt_mask_BP, jnp.ones((B, A), bool)], axis=1)
    eos = jnp.asarray(eos_ids, jnp.int32)
    decoder = model.Qwen(config, None if mesh is None else sharding.batch_sharding(mesh))

    def draw(hidden_BD: Array, i: Array) -> tuple[Array, Array]:
        logits_BV = model.project(params, hidden_BD, config)
        logprob_BV = jax.nn.log_softmax(logits_BV / (temperature or 1.0))
        if temperature == 0.0:
            token_B = jnp.argmax(logprob_BV, axis=-1)
        else:
            token_key_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(key_B, i)
            drawn_BV = logprob_BV if bands is None else band_logprobs(logprob_BV, bands)
            token_B = jax.vmap(jax.random.categorical)(token_key_B, drawn_BV)
        token_B = token_B.astype(jnp.int32)
        return token_B, jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)[:, 0]

    def record(out: Completion, i: Array, token_B: Array, logprob_B: Array, live_B: Array) -> Completion:
        return Completion(
            tokens_BA=out.tokens_BA.at[:, i].set(jnp.where(live_B, token_B, 0)),
            logprobs_BA=out.logprobs_BA.at[:, i].set(jnp.where(live_B, logprob_B, 0.0)),
            mask_BA=out.mask_BA.at[:, i].set(live_B),
        )

    def more(state) -> Array:
        i, _, live_B, _, _ = state
        return (i < A) & jnp.any(live_B)

    def decode(state):  # feeds token i - 1, draws token i
        i, token_B, live_B, cache, out = state
        mask_BS = key_mask_BS & (jnp.arange(P + A)[None] < P + i)
        position_B = length_B + i - 1
        hidden_BLD, cache = decoder.apply(
            {'params': params}, token_B[:, None], position_B[:, None], mask_BS[:, None], cache, P + i - 1
        )
        token_B, logprob_B = draw(hidden_BLD[:, 0], i)
        out = record(out, i, token_B, logprob_B, live_B)
        return i + 1, token_B, live_B & ~jnp.isin(token_B, eos), cache, out

    position_BP, mask_BPP = model.positions_and_mask(prompt_mask_BP)
    mask_BPS = jnp.pad(mask_BPP, ((0, 0), (0, 0), (0, A)))
    cache = model.init_cache(config, B, P + A)
    if mesh is not None:
        params = sharding.gather_embeddings(mesh, params)
        prompt_BP, mask_BPS = jax.lax.with_sharding_constraint((prompt_BP, mask_BPS), sharding.batch_sharding(mesh))
        cache = jax.lax.with_sharding_constraint(cache, sharding.cache_sharding(mesh))
    hidden_BLD, cache = decoder.apply(
        {'params': params}, prompt_BP, position_BP, mask_BPS, cache, 0, window=P - 1
    )
    token_B, logprob_B = draw(hidden_BLD[:, 0], 0)
    empty = Completion(jnp.zeros((B, A), jnp.int32), jnp.zeros((B, A), jnp.float32), jnp.zeros((B, A), bool))
    out = record(empty, 0, token_B, logprob_B, active_B)
    state = (jnp.int32(1), token_B, active_B & ~jnp.isin(token_B, eos), cache, out)
    return jax.lax.while_loop(more, decode, state)[-1]


@jax.jit
def row_keys(key: Array, row_ids: Array) -> Array:
    """One PRNG key per row: `key` folded with each of the row's ids in turn. `[B, I]` -> key `[B]`."""
    chex.assert_rank(row_ids, 2)
    fold = jax.vmap(lambda ids: functools.reduce(jax.random.fold_in, ids, key))
    return fold(row_ids)


def make_policy(
    params: model.Params,
    *,
    config: model.QwenConfig,
    key: Array,
    buckets: Sequence[int],
    row_buckets: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    eos_ids: tuple[int, ...],
    bands: Bands | None = None,
    mesh: Mesh | None = None,
) -> trajectory.Policy:
    """A `Policy` that pads prompts to one of `buckets` tokens and batches to one of `row_buckets` rows.

    So `generate` compiles at most len(buckets) * len(row_buckets) times, however ragged the calls are. More rows than
    the largest row bucket go in several batches, the longest prompts together. Raises ValueError for an empty prompt or
    one longer than the largest bucket (prompts are never cut), and for row buckets that the devices of `mesh` do not divide.
    """
    params = jax.tree.map(jnp.asarray, params)  # once, not at every call
    mesh = mesh if mesh is not None and mesh.size > 1 else None
    buckets, row_buckets = sorted(buckets), sorted(row_buckets)
    if mesh is not None and any(rows % sharding.num_row_shards(mesh) for rows in row_buckets):
        raise ValueError(f'row buckets {row_buckets} cannot be split over {sharding.num_row_shards(mesh)} devices')
    run = functools.partial(
        generate, config=config, max_new_tokens=max_new_tokens, temperature=temperature, eos_ids=tuple(eos_ids), bands=bands,
        mesh=mesh)

    def sample(prompts: Sequence[np.ndarray], row_ids: np.ndarray) -> list[trajectory.SampledAction]:
        rows = _bucket(row_buckets, len(prompts))
        prompt_BP, prompt_mask_BP = _left_pad(prompts, rows, _bucket(buckets, max(len(p) for p in prompts)))
        id_BI = np.zeros((rows, row_ids.shape[1]), np.uint32)
        id_BI[: len(prompts)] = row_ids
        active_B = np.arange(rows) < len(prompts)
        out = jax.device_get(run(params, prompt_BP, prompt_mask_BP, active_B, row_keys(key, id_BI)))
        return [_sampled_action(out, row, eos_ids) for row in range(len(prompts))]

    def policy(prompts: Sequence[np.ndarray], row_ids: np.ndarray) -> list[trajectory.SampledAction]:
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        row_ids = np.asarray(row_ids, np.uint32)
        if row_ids.shape[:1] != lengths.shape:
            raise ValueError(f'{len(prompts)} prompts but row_ids of shape {row_ids.shape}')
        if lengths.size and (lengths.min() == 0 or lengths.max() > buckets[-1]):
            raise ValueError(
                f'prompts of {lengths.min()} to {lengths.max()} tokens; they must have 1 to {buckets[-1]}'
                ' (the largest prompt bucket): shorten the prompt or add a bucket'
            )
        order = np.argsort(-lengths, kind='stable')
        actions: list[trajectory.SampledAction | None] = [None] * len(prompts)
        for start in range(0, len(prompts), row_buckets[-1]):
            chunk = order[start : start + row_buckets[-1]]
            for row, action in zip(chunk, sample([prompts[row] for row in chunk], row_ids[chunk]), strict=True):
                actions[row] = action
        return actions

    return policy


def _bucket(sizes: Sequence[int], size: int) -> int:
    return next(bucket for bucket in sizes if bucket >= size)


def _left_pad(prompts: Sequence[np.ndarray], rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    prompt_BP = np.zeros((rows, length), np.int32)
    prompt_mask_BP = np.zeros((rows, length), bool)
    for row, prompt in enumerate(prompts):
        prompt_BP[row, length - len(prompt) :] = prompt
        prompt_mask_BP[row, length - len(prompt) :] = True
    return prompt_BP, prompt_mask_BP


def _sampled_action(out: Completion, row: int, eos_ids: Sequence[int]) -> trajectory.SampledAction:
    real_A = out.mask_BA[row]
    tokens = out.tokens_BA[row][real_A]
    return trajectory.SampledAction(tokens, out.logprobs_BA[row][real_A], truncated=int(tokens[-1]) not in eos_ids)

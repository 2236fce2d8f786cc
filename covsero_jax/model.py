"""The Qwen2.5 decoder in flax.linen: pure apply, scanned layers, explicit KV cache in and out.

Grouped-query attention with rotary positions and QKV biases, RMSNorm before each block, SwiGLU, tied or untied head
(Qwen2.5 Technical Report, arXiv:2412.15115, section 2). Two flags make it Qwen3 (arXiv:2505.09388: no biases, RMSNorm of
every query and key head) or a Llama (neither). `Qwen` gives hidden states; `project` turns the few that are needed into
logits. Suffix letters besides the project's: S keys, D embedding, H heads, K key/value heads, G = H / K.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import NamedSharding

Array = jax.Array
Params = dict[str, Any]

REMAT = {  # what is kept of a layer for its backward pass; the rest is computed again
    'none': None,  # everything is kept
    'full': None,  # only the layer's input: memory of one layer instead of all, a third more compute
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # the outputs of the weight matrices
}


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """Sizes and number formats. `dtype` is that of matrix products; norms, angles and softmax are always float32."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qkv_bias: bool = True  # Qwen2
    qk_norm: bool = False  # Qwen3
    dtype: str = 'float32'
    param_dtype: str = 'float32'
    remat: str = 'none'  # what the backward pass recomputes instead of keeping; see REMAT
    attention_chunk: int = 0  # > 0: queries whose scores exist at one time, where there are more; see attention
    lora_rank: int = 0  # > 0: adapters beside every matrix of the layers, and only they learn; see LoRA
    lora_alpha: float = 32.0
    max_positions: int = 32768  # only written to config.json; nothing here depends on it

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f'num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}')
        if self.head_dim % 2:
            raise ValueError(f'head_dim {self.head_dim} is odd; rotary positions need pairs')
        if self.remat not in REMAT:
            raise ValueError(f'remat {self.remat!r} is not one of {", ".join(REMAT)}')

    @property
    def model_type(self) -> str:
        """The name of this architecture in transformers."""
        return 'qwen3' if self.qk_norm else 'qwen2' if self.qkv_bias else 'llama'

    @classmethod
    def from_hf(cls, hf: dict[str, Any], **overrides) -> QwenConfig:
        """From the dict of a `config.json`; raises ValueError on what this decoder does not implement."""
        kind = hf.get('model_type')
        if kind not in ('qwen2', 'qwen3', 'llama'):
            raise ValueError(f"model_type {kind!r} is not supported, only 'qwen2', 'qwen3' and 'llama'")
        for name in ('attention_bias', 'mlp_bias'):  # Qwen2 has no such fields: its biases are fixed
            if kind != 'qwen2' and hf.get(name, False):
                raise ValueError(f'{name} is not supported for {kind}')
        # transformers 4 writes rope_theta and rope_scaling, transformers 5 one dict rope_parameters
        rope = hf.get('rope_parameters') or hf.get('rope_scaling') or {}
        rope_type = rope.get('rope_type', rope.get('type', 'default'))
        if rope_type != 'default':
            raise ValueError(f"rope type {rope_type!r} is not supported, only 'default'")
        if hf.get('hidden_act', 'silu') != 'silu':
            raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported, only 'silu'")
        if hf.get('use_sliding_window', False):
            raise ValueError('use_sliding_window is not supported')
        theta = rope.get('rope_theta', hf.get('rope_theta', 1e4 if kind == 'llama' else None))
        required = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads')
        missing = [name for name in required if name not in hf] + ([] if theta is not None else ['rope_theta'])
        if missing:
            raise ValueError(f'missing fields {missing}')
        return cls(**{
            'vocab_size': hf['vocab_size'],
            'embed_dim': hf['hidden_size'],
            'mlp_dim': hf['intermediate_size'],
            'num_layers': hf['num_hidden_layers'],
            'num_heads': hf['num_attention_heads'],
            'num_kv_heads': hf.get('num_key_value_heads') or hf['num_attention_heads'],
            'head_dim': hf.get('head_dim') or hf['hidden_size'] // hf['num_attention_heads'],
            'rope_theta': float(theta),
            'norm_eps': hf.get('rms_norm_eps', 1e-6),
            'tie_embeddings': hf.get('tie_word_embeddings', False),
            'max_positions': hf.get('max_position_embeddings', 32768),
            'qkv_bias': kind == 'qwen2',
            'qk_norm': kind == 'qwen3',
        } | overrides)  # fmt: skip

    def to_hf(self) -> dict[str, Any]:
        """The dict of a `config.json` that transformers 4 and 5 read; `from_hf` of it gives the same sizes."""
        return {
            'architectures': [f'{self.model_type.capitalize()}ForCausalLM'],
            'model_type': self.model_type,
            'vocab_size': self.vocab_size,
            'hidden_size': self.embed_dim,
            'intermediate_size': self.mlp_dim,
            'num_hidden_layers': self.num_layers,
            'num_attention_heads': self.num_heads,
            'num_key_value_heads': self.num_kv_heads,
            'head_dim': self.head_dim,
            'hidden_act': 'silu',
            'max_position_embeddings': self.max_positions,
            'rms_norm_eps': self.norm_eps,
            'rope_theta': self.rope_theta,
            'rope_parameters': {'rope_type': 'default', 'rope_theta': self.rope_theta},
            'tie_word_embeddings': self.tie_embeddings,
            **({'use_sliding_window': False} if self.model_type != 'llama' else {}),
            **({'attention_bias': False} if self.model_type != 'qwen2' else {}),
            'use_cache': True,
            'attention_dropout': 0.0,
            'initializer_range': 0.02,
        }


@flax.struct.dataclass
class KVCache:
    """Keys (already rotated) and values of every layer, `[num_layers, B, S, K, head_dim]`."""

    k: Array
    v: Array


def init_cache(config: QwenConfig, batch: int, length: int) -> KVCache:
    shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
    return KVCache(k=jnp.zeros(shape, config.dtype), v=jnp.zeros(shape, config.dtype))


def positions_and_mask(mask_BL: Array) -> tuple[Array, Array]:
    """Positions that count real tokens only, and who may look at whom: causal & key is real.

    A token always sees itself, so that no softmax row is empty: the rows of padding are finite and never read.
    """
    chex.assert_rank(mask_BL, 2)
    position_BL = jnp.maximum(jnp.cumsum(mask_BL.astype(jnp.int32), axis=1) - 1, 0)
    index_L = jnp.arange(mask_BL.shape[1])
    causal_LL = index_L[:, None] >= index_L[None, :]
    self_LL = index_L[:, None] == index_L[None, :]
    return position_BL, (causal_LL[None] & mask_BL[:, None, :]) | self_LL[None]


def rope_angles(position_BL: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """cos and sin of `position * theta^(-2i / head_dim)`, float32 `[B, L, 1, head_dim / 2]` (Su et al., 2104.09864)."""
    frequency = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = position_BL[:, :, None, None].astype(jnp.float32) * frequency[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BLHD: Array, rope: tuple[Array, Array]) -> Array:
    """Rotate the pairs (i, i + head_dim / 2): the half-split layout of the published Qwen2 weights."""
    cos, sin = rope
    a, b = jnp.split(x_BLHD.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHD.dtype)


def attention(q_BLHD: Array, k_BSKD: Array, v_BSKD: Array, mask_BLS: Array, chunk: int = 0) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v, every G query heads sharing one key head; softmax in float32. As `q_BLHD`.

    Query heads and positions are merged into one axis X, so that both products are plain batched matrix products, and
    the weights are normalised after the second one: on CPU 1.2 to 1.4 times as fast as jax.nn.dot_product_attention.
    chunk: so many queries at one time, and again in the backward pass, so that [L, S] scores never exist at once.
    """
    B, L, H, D = q_BLHD.shape
    if 0 < chunk < L:
        part = jax.checkpoint(attention, prevent_cse=False)
        causal = L == k_BSKD.shape[1]  # without a cache, later keys are seen by nobody
        ends = [min(start + chunk, L) for start in range(0, L, chunk)]
        return jnp.concatenate([
            part(q_BLHD[:, start:end], *(x[:, : end if causal else None] for x in (k_BSKD, v_BSKD)),
                 mask_BLS[:, start:end, : end if causal else None])
            for start, end in zip([0, *ends], ends, strict=False)], axis=1)
    K = k_BSKD.shape[2]
    G = H // K
    q_BKXD = q_BLHD.reshape(B, L, K, G, D).transpose(0, 2, 3, 1, 4).reshape(B, K, G * L, D)
    k_BKSD, v_BKSD = k_BSKD.transpose(0, 2, 1, 3), v_BSKD.transpose(0, 2, 1, 3)
    score_BKXS = jnp.einsum('BKXD,BKSD->BKXS', q_BKXD, k_BKSD, preferred_element_type=jnp.float32) * D**-0.5
    score_BKGLS = jnp.where(mask_BLS[:, None, None], score_BKXS.reshape(B, K, G, L, -1), jnp.finfo(jnp.float32).min)
    highest = jax.lax.stop_gradient(jnp.max(score_BKGLS, axis=-1, keepdims=True))
    weight_BKXS = jnp.exp(score_BKGLS - highest).reshape(B, K, G * L, -1)
    out_BKXD = jnp.einsum(
        'BKXS,BKSD->BKXD', weight_BKXS.astype(v_BSKD.dtype), v_BKSD, preferred_element_type=jnp.float32
    )
    out_BKXD = (out_BKXD / jnp.sum(weight_BKXS, axis=-1, keepdims=True)).astype(v_BSKD.dtype)
    return out_BKXD.reshape(B, K, G, L, D).transpose(0, 3, 1, 2, 4).reshape(B, L, H, D)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32."""

    config: QwenConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale_D = self.param('scale', nn.initializers.ones, (x.shape[-1],), self.config.param_dtype)
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + self.config.norm_eps)
        scale = jnp.expand_dims(scale_D.astype(jnp.float32), range(x.ndim - 1))
        return (x32 * scale).astype(x.dtype)


class LoRA(nn.Module):
    """x a b * alpha / rank, added to the output of a frozen matrix (Hu et al., 2106.09685, section 4.1); b starts at zero."""

    config: QwenConfig
    features: int

    @nn.compact
    def __call__(self, x_RD: Array) -> Array:
        c = self.config
        a_DR = self.param('a', nn.initializers.he_uniform(), (x_RD.shape[-1], c.lora_rank), c.param_dtype)
        b_RF = self.param('b', nn.initializers.zeros, (c.lora_rank, self.features), c.param_dtype)
        return (x_RD @ a_DR.astype(c.dtype)) @ b_RF.astype(c.dtype) * (c.lora_alpha / c.lora_rank)


class Block(nn.Module):
    """One decoder layer: x += attention(norm(x)); x += SwiGLU(norm(x)). `layer` picks its slice of the cache.

    Only the positions from `window` on come out. The earlier ones give keys and values and nothing else.
    """

    config: QwenConfig
    window: int = 0
    rows: NamedSharding | None = None

    @nn.compact
    def __call__(self, carry: tuple[Array, KVCache | None], layer: Array, rope, mask_BLS: Array, cache_index: Array):
        c = self.config
        x_BLD, cache = carry

        def dense(features: int, name: str, x_BLD: Array, use_bias: bool = False) -> Array:
            # one row axis: XLA's CPU backend computes the weight gradient of two row axes at half the speed
            x_RD = x_BLD.reshape(-1, x_BLD.shape[-1])
            y_RF = nn.Dense(features, use_bias, c.dtype, c.param_dtype, kernel_init=_INIT, name=name)(x_RD)
            if c.lora_rank:
                y_RF += LoRA(c, features, name=f'{name}_lora')(x_RD)
            return y_RF.reshape(*x_BLD.shape[:2], features)

        def heads(number: int, name: str, x_BLD: Array) -> Array:
            out = dense(number * c.head_dim, name, x_BLD, c.qkv_bias).reshape(*x_BLD.shape[:2], number, c.head_dim)
            return RMSNorm(c, name=f'{name}_norm')(out) if c.qk_norm and name != 'v' else out

        def windowed(x: Array) -> Array:
            return x[:, self.window :]

        h_BLD = RMSNorm(c, name='attn_norm')(x_BLD)
        q = rotate(heads(c.num_heads, 'q', windowed(h_BLD)), jax.tree.map(windowed, rope))
        k = rotate(heads(c.num_kv_heads, 'k', h_BLD), rope)
        v = heads(c.num_kv_heads, 'v', h_BLD)
        if cache is not None:  # one array for all layers, updated in place: a scanned one would be copied every token
            start = (layer, 0, cache_index, 0, 0)
            cache = KVCache(
                k=jax.lax.dynamic_update_slice(cache.k, k[None], start),
                v=jax.lax.dynamic_update_slice(cache.v, v[None], start),
            )
            k, v = cache.k[layer], cache.v[layer]
        out_BLHD = attention(q, k, v, windowed(mask_BLS), c.attention_chunk)
        x_BLD = windowed(x_BLD) + dense(c.embed_dim, 'o', out_BLHD.reshape(*out_BLHD.shape[:2], -1))

        h_BLD = RMSNorm(c, name='mlp_norm')(x_BLD)
        h_BLF = nn.silu(dense(c.mlp_dim, 'gate', h_BLD)) * dense(c.mlp_dim, 'up', h_BLD)
        return (_pinned(x_BLD + dense(c.embed_dim, 'down', h_BLF), self.rows), cache), None


class Qwen(nn.Module):
    """The decoder without its head. Parameters of the layers carry a leading layer axis (`nn.scan`).

    rows: where the rows of hidden states live, from layer to layer. Left to itself the compiler may cut them along the
    embedding dimension instead, as the parameters are: every device then computes all rows, and partial sums are exchanged.
    """

    config: QwenConfig
    rows: NamedSharding | None = None

    @nn.compact
    def __call__(
        self,
        token_BL: Array,
        position_BL: Array,
        mask_BLS: Array,
        cache: KVCache | None = None,
        cache_index: Array | int = 0,
        window: int = 0,
    ) -> tuple[Array, KVCache | None]:
        """Hidden states after the final norm `[B, L - window, D]`, and the cache with the new keys and values in it.

        Without a cache S = L. With one, S is its length and these tokens are written at `cache_index` (a scalar: all
        rows stand at the same index, since prompts are left-padded); `mask_BLS` says which of the S may be seen.
        Hidden states come from position `window` on: where only a reply is scored, or only the next token wanted, the
        last layer then skips most of its work. That is nearly half of a two-layer model, and 3 % of 28 layers, where
        taking the last layer out of the scan would copy the others' weights, so there the result is merely cut.
        """
        c = self.config
        chex.assert_rank([token_BL, position_BL, mask_BLS], [2, 2, 3])
        chex.assert_equal_shape([token_BL, position_BL])
        keys = token_BL.shape[1] if cache is None else cache.k.shape[2]
        chex.assert_shape(mask_BLS, (*token_BL.shape, keys))

        embed = nn.Embed(
            c.vocab_size, c.embed_dim, name='embed', dtype=c.dtype, param_dtype=c.param_dtype, embedding_init=_INIT
        )
        block = Block
        if c.remat != 'none' and cache is None:
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[c.remat])
        layers = nn.scan(
            block,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=c.num_layers,
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
        )(c, rows=self.rows, name='layers')
        rope = rope_angles(position_BL, c.head_dim, c.rope_theta)
        carry = (_pinned(embed(token_BL), self.rows), cache)
        if c.num_layers > _UNROLLED or self.is_initializing():
            (x_BLD, cache), _ = layers(carry, jnp.arange(c.num_layers), rope, mask_BLS, cache_index)
            x_BLD = x_BLD[:, window:]
        else:
            for layer in range(c.num_layers):
                one = block(c, window=window if layer == c.num_layers - 1 else 0, rows=self.rows, parent=None)
                params = jax.tree.map(lambda x, layer=layer: x[layer], self.variables['params']['layers'])
                carry, _ = one.apply({'params': params}, carry, jnp.int32(layer), rope, mask_BLS, cache_index)
            x_BLD, cache = carry
        return RMSNorm(c, name='final_norm')(x_BLD), cache


def _pinned(x_BLD: Array, rows: NamedSharding | None) -> Array:
    return x_BLD if rows is None else jax.lax.with_sharding_constraint(x_BLD, rows)


def project(params: Params, hidden: Array, config: QwenConfig) -> Array:
    """Logits `[..., V]` of hidden states `[..., D]`: product in `config.dtype`, accumulated and returned in float32."""
    kernel_DV = params['embed']['embedding'].T if config.tie_embeddings else params['lm_head']['kernel']
    return jnp.matmul(hidden.astype(config.dtype), kernel_DV.astype(config.dtype), preferred_element_type=jnp.float32)


def init_params(config: QwenConfig, key: Array) -> Params:
    """Random weights: normal(0, 0.02) matrices, zero biases, unit norms, as transformers initialises Qwen2."""
    body_key, head_key = jax.random.split(key)
    token_BL = jnp.zeros((1, 1), jnp.int32)
    params = dict(Qwen(config).init(body_key, token_BL, token_BL, jnp.ones((1, 1, 1), bool))['params'])
    if not config.tie_embeddings:
        shape = (config.embed_dim, config.vocab_size)
        params['lm_head'] = {'kernel': _INIT(head_key, shape, jnp.dtype(config.param_dtype))}
    return params


def lora_params(config: QwenConfig, key: Array) -> Params:
    """Fresh adapters for `config.lora_rank`: the tree of `init_params` reduced to them. They change nothing yet (b = 0)."""
    return split_params(init_params(config, key), config)[0]


def split_params(params: Params, config: QwenConfig) -> tuple[Params, Params]:
    """(what learns, what is frozen): everything and nothing, or with LoRA the adapters and all the rest."""
    if not config.lora_rank:
        return params, {}
    flat = flax.traverse_util.flatten_dict(params)
    adapters = {path: leaf for path, leaf in flat.items() if path[-2].endswith('_lora')}
    frozen = {path: leaf for path, leaf in flat.items() if path not in adapters}
    return flax.traverse_util.unflatten_dict(adapters), flax.traverse_util.unflatten_dict(frozen)


def join_params(learning: Params, frozen: Params) -> Params:
    """The inverse of `split_params`."""
    if not frozen:
        return learning
    flat = flax.traverse_util.flatten_dict(learning) | flax.traverse_util.flatten_dict(frozen)
    return flax.traverse_util.unflatten_dict(flat)


def round_matrices(params: Params, dtype: str) -> Params:
    """Everything but the norms in `dtype`: the model of that dtype computes the same from it. Always a copy."""
    return jax.tree_util.tree_map_with_path(lambda path, x: jnp.array(x, x.dtype if path[-1].key == 'scale' else dtype), params)


def merge_lora(params: Params, config: QwenConfig) -> tuple[QwenConfig, Params]:
    """The same model without adapters: kernel + a b * alpha / rank, computed in float32, in the kernel's number format."""
    if not config.lora_rank:
        return config, params
    layers = dict(params['layers'])
    for name in [name for name in layers if name.endswith('_lora')]:
        adapter, target = layers.pop(name), name.removesuffix('_lora')
        a, b, kernel = (x.astype(jnp.float32) for x in (adapter['a'], adapter['b'], layers[target]['kernel']))
        merged = kernel + jnp.matmul(a, b) * (config.lora_alpha / config.lora_rank)
        layers[target] = layers[target] | {'kernel': merged.astype(layers[target]['kernel'].dtype)}
    return dataclasses.replace(config, lora_rank=0), params | {'layers': layers}


_INIT = nn.initializers.normal(0.02)
_UNROLLED = 4  # layers up to which a loop beats a scan, which stacks what the backward pass needs

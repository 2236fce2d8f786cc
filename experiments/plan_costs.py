"""FLOPs and bytes of a run's programs, from the model's shapes.

The compiler's own analysis counts the body of a loop once, and both the layers and the head's chunks are loops. So the
counts here are sums over matrix products (2 FLOPs per multiply and add) of what the code does: score matrices with what is
masked in them, the head where something is scored, every recomputation. Norms, softmax and other elementwise work are left
out, and LoRA's own products, which are a few percent.

Bytes are what must pass a chip's memory at least: each product's weights, once per pass and chip (a chip computes with
whole weights, or its part by `tensor`, whatever part of them it holds); its operands and results, each once; the attention
scores in float32; parameters, gradients, moments and caches. Fusion saves some of it; padding and layout changes add to it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from covsero_jax import model


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs on all chips together; bytes of activations and caches on all together; of weights, by every copy of them."""

    flops: float
    activation_bytes: float
    weight_bytes: float
    state_bytes: float = 0.0  # of parameters, gradients and moments, each where it is held: on all chips together

    def per_chip(self, chips: int, tensor: int = 1) -> tuple[float, float]:
        """(FLOPs, bytes) of one chip, when the rows are split evenly."""
        return self.flops / chips, (self.activation_bytes + self.state_bytes) / chips + self.weight_bytes / tensor

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(times * value for value in dataclasses.astuple(self)))


NOTHING = Cost(0, 0, 0)


def product(c: model.QwenConfig, rows: float, inner: int, outer: int) -> Cost:
    """[rows, inner] x weights [inner, outer], in the model's format."""
    item = jnp.dtype(c.dtype).itemsize
    return Cost(2 * rows * inner * outer, item * rows * (inner + outer), item * inner * outer)


def down(c: model.QwenConfig, positions: float) -> Cost:
    """The last product of a layer."""
    return product(c, positions, c.mlp_dim, c.embed_dim)


def dense(c: model.QwenConfig, new: float, out: float) -> Cost:
    """The matrices of one layer: `new` positions give keys and values, the `out` of them that come out give the rest."""
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    return (product(c, out, c.embed_dim, heads) + product(c, new, c.embed_dim, kv_heads) * 2
            + product(c, out, heads, c.embed_dim) + product(c, out, c.embed_dim, c.mlp_dim) * 2 + down(c, out))


def attention(c: model.QwenConfig, rows: int, queries: int, keys: int, *, causal: bool) -> Cost:
    """Scores and their product with the values. Causal ones in chunks leave out the keys after each chunk."""
    item, chunk = jnp.dtype(c.dtype).itemsize, c.attention_chunk
    pairs = queries * keys
    if causal and 0 < chunk < queries and queries == keys:
        pairs = sum((end - start) * end for start in range(0, queries, chunk) for end in [min(start + chunk, queries)])
    scores = rows * c.num_heads * pairs  # float32: written, read for the softmax, written and read as weights
    operands = rows * c.head_dim * (2 * keys * c.num_kv_heads + 2 * queries * c.num_heads)
    return Cost(2 * 2 * scores * c.head_dim, 2 * (4 + item) * scores + item * operands, 0)


def head(c: model.QwenConfig, positions: int) -> Cost:
    """Logits of `positions` positions, in float32, and their softmax."""
    item = jnp.dtype(c.dtype).itemsize
    return dataclasses.replace(product(c, positions, c.embed_dim, c.vocab_size),
                               activation_bytes=item * positions * c.embed_dim + 2 * 4 * positions * c.vocab_size)


def body(c: model.QwenConfig, rows: int, tokens: int, keys: int, window: int, *, causal: bool) -> tuple[Cost, Cost, Cost]:
    """Forward pass of all layers: (matrices, attention, last products alone, which are part of the matrices).

    Short models are not scanned, and their last layer starts at `window` (model.Qwen).
    """
    last = tokens if c.num_layers > model._UNROLLED else tokens - window
    matrices, scores, downs = NOTHING, NOTHING, NOTHING
    for out, times in ((tokens, c.num_layers - 1), (last, 1)):
        matrices += dense(c, rows * tokens, rows * out) * times
        scores += attention(c, rows, out, keys, causal=causal) * times
        downs += down(c, rows * out) * times
    return matrices, scores, downs


def logprobs(c: model.QwenConfig, rows: int, length: int, window: int, scored: int) -> Cost:
    matrices, scores, _ = body(c, rows, length, length, window, causal=True)
    return matrices + scores + head(c, rows * scored)


def train(c: model.QwenConfig, rows: int, length: int, window: int, scored: int) -> Cost:
    """Gradient of one micro-batch, added to the sums.

    Backward, a product with weights that learn is two products, with frozen ones one; of scores and values two each.
    model.remat='full' runs the layers forward again, without their last products; 'dots' only attention. Chunks of
    attention and of the head always run forward again.
    """
    matrices, scores, downs = body(c, rows, length, length, window, causal=True)
    backward = 1 if c.lora_rank else 2
    again = matrices + downs * -1 if c.remat == 'full' else NOTHING
    attention_passes = 3 + (c.remat != 'none') + (0 < c.attention_chunk < length)
    sums = Cost(0, 0, 0, 3 * 4 * num_learning(c))  # float32 sums read and written, this gradient read
    return matrices * (1 + backward) + again + scores * attention_passes + head(c, rows * scored) * (2 + backward) + sums


def apply(c: model.QwenConfig, moment_bytes: float) -> Cost:
    """The optimizer's step: parameters and moments read and written, gradients read twice (norm, step)."""
    return Cost(24, 0, 0, 2 * 4 + 2 * moment_bytes + 2 * 4) * num_learning(c)


def prefill(c: model.QwenConfig, rows: int, prompt: int, action: int) -> Cost:
    """The prompt into the cache, whose keys are all looked at, and one token drawn."""
    matrices, scores, _ = body(c, rows, prompt, prompt + action, prompt - 1, causal=False)
    return matrices + scores + head(c, rows)


def decode(c: model.QwenConfig, rows: int, prompt: int, action: int) -> Cost:
    """One token of every row: the work does not depend on how far the reply is."""
    matrices, scores, _ = body(c, rows, 1, prompt + action, 0, causal=False)
    return matrices + scores + head(c, rows)


def num_params(c: model.QwenConfig) -> int:
    """Of the model itself, without adapters."""
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    matrices = 2 * c.embed_dim * (heads + kv_heads) + 3 * c.embed_dim * c.mlp_dim
    small = c.qkv_bias * (heads + 2 * kv_heads) + c.qk_norm * 2 * c.head_dim + 2 * c.embed_dim
    return c.num_layers * (matrices + small) + c.embed_dim + c.vocab_size * c.embed_dim * (1 if c.tie_embeddings else 2)


def num_learning(c: model.QwenConfig) -> int:
    """All parameters, or with LoRA the adapters."""
    if not c.lora_rank:
        return num_params(c)
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    ends = 2 * (c.embed_dim + heads) + 2 * (c.embed_dim + kv_heads) + 3 * (c.embed_dim + c.mlp_dim)
    return c.num_layers * c.lora_rank * ends

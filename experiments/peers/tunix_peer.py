"""google-tunix in the comparison of `experiments.bench_peers`: its sampler, its per-token log-probabilities, optax.

Prompts go to the smallest of the same buckets, so that it compiles as often as we do; its tokenizer interface gets a stand-in
that maps '12 7 9' to those ids.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen2 import model as model_lib
from tunix.models.qwen2 import params as params_lib
from tunix.rl import common as rl

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # this interpreter need not know the project
import common

MICRO_ROWS = 4


class Ids:
    """The tokenizer that tunix asks for."""

    def __init__(self, eos: int):
        self._eos = eos

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, **_) -> str:
        return ' '.join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return self._eos

    def pad_id(self) -> int:
        return 0


def load(work: common.Work):
    hf = json.loads((pathlib.Path(work.folder) / 'config.json').read_text())
    config = model_lib.ModelConfig(
        num_layers=hf['num_hidden_layers'], vocab_size=hf['vocab_size'], embed_dim=hf['hidden_size'],
        hidden_dim=hf['intermediate_size'], num_heads=hf['num_attention_heads'], head_dim=hf['head_dim'],
        num_kv_heads=hf['num_key_value_heads'], norm_eps=hf['rms_norm_eps'], rope_theta=hf['rope_theta'],
        use_tied_embedding=hf['tie_word_embeddings'])
    mesh = jax.make_mesh((1, 1), ('fsdp', 'tp'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = params_lib.create_model_from_safe_tensors(work.folder, config, mesh, dtype=jnp.float32)
    return config, model


def sample(work: common.Work) -> common.Round:
    config, model = load(work)
    sampler = sampler_lib.Sampler(model, Ids(work.eos_ids[0]), sampler_lib.CacheConfig(
        cache_size=max(work.buckets) + work.max_new + 1, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim))

    def once(round_: int) -> int:
        useful = 0
        for rows in work.batches():
            texts = [' '.join(map(str, work.prompts[row])) for row in rows]
            out = sampler(texts, max_generation_steps=work.max_new, temperature=1.0, top_p=1.0, seed=round_,
                          eos_tokens=list(work.eos_ids), max_prompt_length=common.bucket(work, max(len(work.prompts[row]) for row in rows)))
            useful += sum(len(tokens) for tokens in out.tokens)
        return useful

    return once


def train(work: common.Work) -> common.Round:
    _, model = load(work)
    graph, state = nnx.split(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.01))
    opt_state = optimizer.init(state)
    order = [row for rows in work.batches() for row in rows]
    total = sum(map(len, work.replies))
    micros = []
    for start in range(0, len(order), MICRO_ROWS):
        rows = order[start : start + MICRO_ROWS]
        prompt, _ = work.padded(rows, common.bucket(work, max(len(work.prompts[row]) for row in rows)))
        micros.append((prompt, *work.padded_replies(rows, work.max_new), work.advantages[rows]))

    def logps(state, prompt, reply, stop_gradient):
        out = rl.compute_per_token_logps(graph, state, prompt, reply, pad_id=0, eos_id=work.eos_ids[0], stop_gradient=stop_gradient)
        return out[0] if isinstance(out, tuple) else out

    @jax.jit
    def old(state, prompt, reply):
        return logps(state, prompt, reply, True)

    @jax.jit
    def gradient(state, total_grad, prompt, reply, mask_BA, advantage_B, old_BA):
        def loss(state):
            ratio_BA = jnp.exp(logps(state, prompt, reply, False) - old_BA)
            worst_BA = jnp.minimum(ratio_BA * advantage_B[:, None], jnp.clip(ratio_BA, 0.8, 1.2) * advantage_B[:, None])
            return -jnp.sum(worst_BA * mask_BA) / total

        return jax.tree.map(jnp.add, total_grad, jax.grad(loss)(state))

    @jax.jit
    def apply(state, opt_state, grad):
        changes, opt_state = optimizer.update(grad, opt_state, state)
        return optax.apply_updates(state, changes), opt_state

    def once(round_: int) -> int:
        nonlocal state, opt_state
        olds = [old(state, prompt, reply) for prompt, reply, _, _ in micros]
        grad = jax.tree.map(jnp.zeros_like, state)
        for (prompt, reply, mask_BA, advantage_B), old_BA in zip(micros, olds, strict=True):
            grad = gradient(state, grad, prompt, reply, mask_BA, advantage_B, old_BA)
        state, opt_state = jax.block_until_ready(apply(state, opt_state, grad))
        return work.num_tokens

    return once


if __name__ == '__main__':
    common.run(sys.argv, {'sample': sample, 'train': train})

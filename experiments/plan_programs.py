"""The compiled programs of a run as they would be on other devices: lowered from shapes alone, without weights or hardware."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from covsero_jax import batch, learner, model, objective, packing, pretrained, sampler, sharding
from experiments import checks, wiring

PROGRAMS = ('train', 'logprobs', 'apply', 'sample')  # in this order
_SIZES = {  # Qwen2.5: embed_dim, mlp_dim, num_layers, num_heads, num_kv_heads, head_dim, tie_embeddings, vocab_size
    '0.5B': (896, 4864, 24, 14, 2, 64, True, 151936),
    '1.5B': (1536, 8960, 28, 12, 2, 128, True, 151936),
    '3B': (2048, 11008, 36, 16, 2, 128, True, 151936),
    '7B': (3584, 18944, 28, 28, 4, 128, False, 152064),
    '14B': (5120, 13824, 48, 40, 8, 128, False, 152064),
    '32B': (5120, 27648, 64, 40, 8, 128, False, 152064),
}


def model_config(config: ConfigDict) -> model.QwenConfig:
    """Sizes of the run's model: its folder's, or, where there is none, those that go with a name like Qwen2.5-7B-Instruct.

    Raises ConfigError when the name is not known either, pretrained.PretrainedError for a folder that cannot be read.
    """
    folder, formats = wiring.model_folder(config), {
        'dtype': config.model.dtype, 'remat': config.model.remat, 'attention_chunk': config.model.attention_chunk,
        'lora_rank': config.lora.rank, 'lora_alpha': config.lora.alpha}
    if folder.is_dir():
        return pretrained.load_config(folder, **formats)
    family, _, rest = folder.name.partition('-')
    size = rest.partition('-')[0]
    if family != 'Qwen2.5' or size not in _SIZES:
        raise wiring.ConfigError(f'model.path: there is no folder {folder}, and its name is none of Qwen2.5-'
                                 f'{{{",".join(_SIZES)}}}, whose sizes are known')
    names = ('embed_dim', 'mlp_dim', 'num_layers', 'num_heads', 'num_kv_heads', 'head_dim', 'tie_embeddings', 'vocab_size')
    return model.QwenConfig(**dict(zip(names, _SIZES[size], strict=True)), **formats)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The largest shapes of a run, which its memory has to hold."""

    micro_batch: int  # sequences of the training programs
    length: int  # of each
    window: int  # first position of them that predicts something
    scored: int  # positions that reach the vocabulary
    chunk: int  # of these at one time
    rows: int  # of the sampler
    prompt: int
    action: int


def shapes_of(config: ConfigDict) -> Shapes:
    prompt, action, pack = max(config.prompt.buckets), config.prompt.max_action, wiring.pack_config(config)
    length, window, scored = (pack.length, 0, pack.max_actions(pack.length)) if pack else (prompt + action, prompt - 1, action)
    return Shapes(config.learner.micro_batch, length, window, scored, min(config.loss.chunk, scored),
                  max(config.rollout.row_buckets), prompt, action)


def check(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """What can be said without compiling. Raises ConfigError."""
    shapes, shards, sizes = shapes_of(config), sharding.num_row_shards(mesh), model_config(config)
    for name, rows in (('learner.micro_batch', shapes.micro_batch), ('rollout.row_buckets', shapes.rows)):
        if rows % shards and mesh.size > 1:
            raise wiring.ConfigError(f'{name}={rows} cannot be split over the {shards} devices that share the rows; '
                                     f'use a multiple of {shards}, or a smaller mesh.fsdp')
    if shapes.scored % shapes.chunk:
        raise wiring.ConfigError(f'loss.chunk={shapes.chunk} must divide prompt.max_action={shapes.action}')
    if pack := wiring.pack_config(config):
        checks.check_packing(config, pack)
    try:
        sharding.check_model(mesh, sizes.num_kv_heads)
        learner.abstract_state(sizes, _optimizer(config), mesh)
    except ValueError as error:
        raise wiring.ConfigError(f'mesh: {error}') from error


def lowerings(config: ConfigDict, mesh: jax.sharding.Mesh) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Program name -> function that lowers it. `train` is a micro-batch's gradient, added up; `sample` a whole reply."""
    sizes, loss, optimizer, shapes = model_config(config), wiring.loss_config(config), _optimizer(config), shapes_of(config)
    state = learner.abstract_state(sizes, optimizer, mesh)
    learning = state.replace(params=model.split_params(state.params, sizes)[0])
    step = learner.make_train_step(sizes, loss, optimizer, mesh)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.replicated(mesh))
    gradients = jax.tree.map(lambda x: x.update(dtype=jnp.float32), learning.params)
    sums = learner.Sums(gradients, dict.fromkeys(objective.METRICS, scalar))
    micro = _micro_batch(config, functools.partial(jax.ShapeDtypeStruct, sharding=sharding.batch_sharding(mesh)))

    def lower_sample() -> jax.stages.Lowered:
        # as sampler.make_policy calls it: prompts come from the host, the compiler decides where they go
        B, host = shapes.rows, jax.ShapeDtypeStruct
        key_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
        return sampler.generate.lower(
            _sampled_params(config, mesh, state), host((B, shapes.prompt), jnp.int32), host((B, shapes.prompt), bool),
            host((B,), bool), host(key_B.shape, key_B.dtype), config=sizes, max_new_tokens=shapes.action, eos_ids=(0, 1),
            temperature=config.rollout.temperature, bands=wiring.band_config(config), mesh=mesh if mesh.size > 1 else None)

    return {
        'train': lambda: step.accumulate.lower(state.params, sums, micro, jax.ShapeDtypeStruct((2,), jnp.float32)),
        'apply': lambda: step.apply.lower(learning, sums),
        'logprobs': lambda: learner.make_logprob_step(sizes, loss, mesh).lower(state.params, micro.tokens),
        'sample': lower_sample,
    }


def held_bytes(config: ConfigDict, mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Program name -> bytes on one device that are there meanwhile, though the program does not touch them.

    Parameters, the optimizer's moments and, with kl_coef, the reference policy, less what are the program's arguments. The
    tokens of an update are not counted: megabytes.
    """
    sizes = model_config(config)
    state = learner.abstract_state(sizes, _optimizer(config), mesh)
    reference = _local_bytes(_copied(sizes, state.params, sharding.shardings(mesh, state.params))) if config.loss.kl_coef else 0
    moments = _local_bytes(state.opt_state)
    return {'train': moments + reference, 'logprobs': moments + reference,
            'apply': reference + _local_bytes(model.split_params(state.params, sizes)[1]),
            'sample': moments + reference + (_local_bytes(state.params) if config.rollout.gather_weights else 0)}


def moment_bytes(config: ConfigDict) -> float:
    """Of the optimizer, for each parameter that learns."""
    o = wiring.optimizer_config(config)
    return 0.0 if o.name == 'adafactor' else 4.0 + jnp.dtype(o.first_moment).itemsize


def _sampled_params(config: ConfigDict, mesh: jax.sharding.Mesh, state: learner.TrainState):
    """The parameters that wiring.make_act gives to the sampler."""
    if not config.rollout.gather_weights:
        return state.params
    return _copied(model_config(config), state.params, sharding.without_fsdp(mesh, state.params))


def _copied(sizes: model.QwenConfig, params, places):
    """What sharding.copy_params makes of parameters."""
    shapes = jax.eval_shape(lambda params: model.round_matrices(params, sizes.dtype), params)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def _micro_batch(config: ConfigDict, array: Callable[..., jax.ShapeDtypeStruct]) -> batch.PolicyBatch:
    shapes, pack = shapes_of(config), wiring.pack_config(config)
    B, L, P, A = shapes.micro_batch, shapes.length, shapes.prompt, shapes.action
    if pack:
        T, R = shapes.scored, pack.rows
        tokens = packing.PackedTokens(
            token_BL=array((B, L), jnp.int32), segment_BL=array((B, L), jnp.int32), position_BL=array((B, L), jnp.int32),
            target_BT=array((B, T), jnp.int32), action_BT=array((B, T), jnp.int32), slot_BRA=array((B, R, A), jnp.int32),
            action_mask_BA=array((B * R, A), bool))
    else:
        tokens = batch.TokenBatch(prompt_BP=array((B, P), jnp.int32), prompt_mask_BP=array((B, P), bool),
                                  action_BA=array((B, A), jnp.int32), action_mask_BA=array((B, A), bool))
    rows = tokens.action_mask_BA.shape[0]
    row, logprob = array((rows,), jnp.float32), array((rows, A), jnp.float32)
    return batch.PolicyBatch(tokens=tokens, advantage_B=row, trajectory_tokens_B=row, old_logprob_BA=logprob,
                             ref_logprob_BA=logprob if config.loss.kl_coef else None)


def _optimizer(config: ConfigDict) -> optax.GradientTransformation:
    return learner.make_optimizer(wiring.optimizer_config(config))


def _local_bytes(tree) -> int:
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))

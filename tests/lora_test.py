"""Adapters: they start as nothing, only they learn, and merged they are the same model."""

from __future__ import annotations

import dataclasses
import functools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import packing_test
import pytest

from covsero_jax import learner, model, pretrained, sharding

BASE = dataclasses.replace(packing_test.CONFIG, lora_alpha=6.0)
LORA = dataclasses.replace(BASE, lora_rank=3)
LOSS = dataclasses.replace(packing_test.LOSS, kl_coef=0.0)


@functools.partial(jax.jit, static_argnames='config')
def hidden(params, config):
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    return model.Qwen(config).apply({'params': params}, tokens, *model.positions_and_mask(tokens >= 0))[0]


def with_adapters(seed=0, trained=False):
    adapters = model.lora_params(LORA, jax.random.key(seed))
    if trained:
        rng = np.random.default_rng(seed)
        adapters = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), adapters)
    return model.join_params(adapters, packing_test.PARAMS)


def test_fresh_adapters_change_nothing_and_trained_ones_do():
    plain = hidden(packing_test.PARAMS, BASE)
    np.testing.assert_array_equal(hidden(with_adapters(), LORA), plain)
    assert np.abs(hidden(with_adapters(trained=True), LORA) - plain).max() > 0.1


def test_merged_adapters_are_the_same_model_and_go_into_a_folder(tmp_path):
    params = jax.tree.map(lambda x: x / 4 if x.ndim > 1 else x, with_adapters(trained=True))  # less to amplify (x a) b - x (a b)
    config, merged = model.merge_lora(params, LORA)
    assert config == BASE
    np.testing.assert_allclose(hidden(merged, BASE), hidden(params, LORA), atol=2e-5)
    pretrained.save_folder(tmp_path / 'out', LORA, params)
    config, loaded = pretrained.load_folder(tmp_path / 'out')
    chex.assert_trees_all_equal(loaded, jax.device_get(merged))
    assert config.lora_rank == 0


def test_split_and_join_are_inverse():
    params = with_adapters()
    adapters, frozen = model.split_params(params, LORA)
    chex.assert_trees_all_equal(model.join_params(adapters, frozen), params)
    assert {path[-2] for path in flax.traverse_util.flatten_dict(adapters)} == {
        f'{name}_lora' for name in ('q', 'k', 'v', 'o', 'gate', 'up', 'down')}
    assert model.split_params(params, BASE) == (params, {})


@pytest.mark.parametrize(('fsdp', 'dtype'), [(1, 'float32'), (4, 'float32'), (1, 'bfloat16')])
def test_only_adapters_learn_and_only_they_have_moments(fsdp, dtype):
    config = dataclasses.replace(LORA, dtype=dtype)
    mesh, optimizer = sharding.make_mesh(data=1, fsdp=fsdp), learner.make_optimizer(learner.OptimizerConfig(learning_rate=1e-2))
    step = learner.make_train_step(config, LOSS, optimizer, mesh)
    before = learner.create_state(with_adapters(), optimizer, mesh, config)
    frozen = jax.tree.map(np.asarray, model.split_params(before.params, config)[1])
    assert {x.dtype for path, x in flax.traverse_util.flatten_dict(frozen).items() if path[-1] != 'scale'} == {jnp.dtype(dtype)}
    start = jax.tree.map(np.asarray, before.params)
    state = before
    for seed in range(2):
        minibatch = packing_test.build(packing_test.make_rows(24, seed), packing_test.PACK)[0]
        finished = [sharding.put_batch(mesh, micro.replace(
            old_logprob_BA=np.where(micro.tokens.action_mask_BA, -2.0, 0.0).astype(np.float32), sampler_logprob_BA=None))
            for micro in minibatch]
        state, metrics = step(state, finished)
        assert metrics['update/grad_norm'] > 0
    adapters, rest = model.split_params(state.params, config)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, rest), frozen)
    first = model.split_params(start, config)[0]
    assert all(np.abs(np.asarray(a) - b).max() > 1e-3 for a, b in zip(*map(jax.tree.leaves, (adapters, first)), strict=True))
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
    assert moments < 2.1 * sum(x.size for x in jax.tree.leaves(adapters))


def test_gradients_of_adapters_are_those_of_the_whole_tree():
    params = with_adapters(trained=True)
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(hidden(p, LORA))))(params)
    adapters, frozen = model.split_params(params, LORA)
    only = jax.grad(lambda a: jnp.sum(jnp.sin(hidden(model.join_params(a, frozen), LORA))))(adapters)
    chex.assert_trees_all_close(only, model.split_params(grads, LORA)[0], rtol=1e-5, atol=1e-6)

"""On any mesh the same: updates, replies, loaded folders; and nothing is whole where it should be cut."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys

import chex
import jax
import learner_test
import numpy as np
import packing_test
import pytest
import sampler_test

from covsero_jax import learner, model, pretrained, sampler, sharding

MESHES = [{'fsdp': 4}, {'fsdp': 1, 'tensor': 2}, {'data': 2, 'fsdp': 2, 'tensor': 2}]


@pytest.mark.parametrize('axes', MESHES[1:], ids=str)
def test_an_update_does_not_depend_on_the_mesh(axes):
    single, split = learner_test.update(learner_test.make_batch()), learner_test.update(learner_test.make_batch(), **axes)
    learner_test.assert_same_update(split, single)
    gate = split[0].params['layers']['gate']['kernel']
    assert {shard.data.shape for shard in gate.addressable_shards} == {(2, 16 // axes['fsdp'], 24 // axes['tensor'])}


def test_packed_sequences_on_a_mesh():
    axes = {'data': 1, 'fsdp': 2, 'tensor': 2}
    mesh = sharding.make_mesh(**axes)
    params = sharding.put_params(mesh, packing_test.PARAMS)
    micro, *_ = packing_test.build(packing_test.make_rows(24), packing_test.PACK)[0]
    mask_BA = micro.tokens.action_mask_BA
    expected = np.asarray(packing_test.logprobs(micro.tokens)[0])
    options = dataclasses.replace(packing_test.LOSS, temperature=0.8)
    logprobs = learner.make_logprob_step(packing_test.CONFIG, options, mesh)
    found = np.asarray(logprobs(params, sharding.put_batch(mesh, micro.tokens)))
    np.testing.assert_allclose(found[mask_BA], expected[mask_BA], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('gather', [False, True])
@pytest.mark.parametrize('axes', MESHES, ids=str)
def test_replies_do_not_depend_on_the_mesh(axes, gather):
    """Uneven rows (the last batch is a quarter full), greedy and drawn, from shards and from a gathered copy."""
    prompts, ids = sampler_test.make_prompts([3, 16, 7, 1, 8, 12, 5, 2, 9]), sampler_test.make_ids(9)
    mesh = sharding.make_mesh(**axes)
    params = sharding.put_params(mesh, sampler_test.PARAMS)
    if gather:
        params = sharding.copy_params(mesh, params, 'float32', gather=True)
        assert not any('fsdp' in str(x.sharding.spec) for x in jax.tree.leaves(params))
    for temperature in (0.0, 1.0):
        on_mesh = sampler_test.make_policy(params, temperature=temperature, mesh=mesh)(prompts, ids)
        sampler_test.assert_same(on_mesh, sampler_test.make_policy(temperature=temperature)(prompts, ids))


def test_the_rows_of_a_sampler_are_split():
    """No device decodes another's rows: the cache on each has its share of them, and of the heads."""
    mesh = sharding.make_mesh(data=1, fsdp=4, tensor=2)
    params = sharding.put_params(mesh, sampler_test.PARAMS)
    shapes = (np.zeros((8, 16), np.int32), np.ones((8, 16), bool), np.ones(8, bool), jax.random.split(jax.random.key(0), 8))
    text = sampler.generate.lower(params, *shapes, mesh=mesh, **sampler_test.OPTIONS).compile().as_text()
    assert 'f32[2,2,22,1,4]' in text  # layers, rows / 4, prompt + reply, heads / 2, head_dim
    assert 'f32[2,8,22' not in text


def test_a_copy_for_sampling_computes_the_same_bit_for_bit():
    config = dataclasses.replace(learner_test.CONFIG, dtype='bfloat16')
    mesh = sharding.make_mesh(data=1, fsdp=2)
    params = sharding.put_params(mesh, learner_test.make_params())
    copy = sharding.copy_params(mesh, params, 'bfloat16', gather=True)
    tokens = learner_test.joined(learner_test.make_batch()).tokens
    logprobs = learner.make_logprob_step(config, learner_test.LOSS, mesh)
    np.testing.assert_array_equal(logprobs(params, tokens), logprobs(copy, tokens))
    assert copy['layers']['q']['kernel'].dtype == 'bfloat16' and copy['final_norm']['scale'].dtype == 'float32'


@pytest.mark.parametrize('tie_embeddings', [True, False])
def test_a_folder_goes_straight_to_its_shards(tmp_path, tie_embeddings):
    config = dataclasses.replace(learner_test.CONFIG, tie_embeddings=tie_embeddings)
    params = learner_test.make_params(config)
    pretrained.save_folder(tmp_path / 'model', config, params, max_shard_bytes=4000)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    loaded_config, loaded = pretrained.load_folder(tmp_path / 'model', mesh)
    assert dataclasses.replace(loaded_config, max_positions=config.max_positions) == config
    chex.assert_trees_all_equal(jax.device_get(loaded), params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == sharding.shardings(mesh, params)


@pytest.mark.slow
def test_loading_needs_the_memory_of_the_parameters_and_little_more(tmp_path):
    """Peak of the host over the parameters (which live in the same memory here): at most 1.5 of the largest weights file."""
    config = model.QwenConfig(32_000, 1024, 4096, 12, 8, 2, 128)
    mesh = sharding.make_mesh(data=1, fsdp=1)
    params = learner.init_state(jax.random.key(0), config, learner.make_optimizer(learner.OptimizerConfig()), mesh).params
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    pretrained.save_folder(tmp_path / 'model', config, params, max_shard_bytes=size // 4, dtype='bfloat16')
    largest = max(path.stat().st_size for path in (tmp_path / 'model').glob('*.safetensors'))
    del params
    code = r'''
import pathlib, re, sys, jax
from covsero_jax import pretrained, sharding
mesh = sharding.make_mesh()
jax.block_until_ready(jax.numpy.zeros(3) + 1)
pretrained.load_folder(sys.argv[2], mesh)  # imports and compiled programs
memory = lambda what: int(re.search(what + r':\s+(\d+) kB', pathlib.Path('/proc/self/status').read_text())[1]) * 1024
before = memory('VmRSS')
pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak starts anew
config, params = pretrained.load_folder(sys.argv[1], mesh, param_dtype='bfloat16')
jax.block_until_ready(params)
size = sum(x.nbytes for x in jax.tree.leaves(params))
print(memory('VmHWM') - before - size)
'''
    small = dataclasses.replace(config, vocab_size=64, embed_dim=16, mlp_dim=16, num_layers=2)
    tiny = jax.eval_shape(functools.partial(model.init_params, small), jax.random.key(0))
    pretrained.save_folder(tmp_path / 'tiny', small, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tiny))
    out = subprocess.run([sys.executable, '-c', code, str(tmp_path / 'model'), str(tmp_path / 'tiny')],
                         capture_output=True, text=True, check=True)
    extra = int(out.stdout)
    print(f'{extra / 2**20:.0f} MiB over the parameters; the largest file has {largest / 2**20:.0f} MiB')
    assert 2**20 < extra < 1.5 * largest


def test_factored_moments_are_small_and_learn():
    optimizer = learner.OptimizerConfig(name='adafactor', learning_rate=1e-2)
    config = dataclasses.replace(learner_test.CONFIG, embed_dim=128, mlp_dim=256, head_dim=128)
    mesh, tx = sharding.make_mesh(data=1, fsdp=4), learner.make_optimizer(optimizer)
    state = learner.init_state(jax.random.key(0), config, tx, mesh)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) < 0.1 * parameters
    single, split = (learner_test.update(learner_test.make_batch(), optimizer=optimizer, **axes) for axes in ({}, {'fsdp': 4}))
    learner_test.assert_same_update(split, single)
    assert learner_test.params_moved(single[0]) > 1e-3


def test_half_precision_first_moments():
    optimizer = dataclasses.replace(learner_test.OPTIMIZER, first_moment='bfloat16')
    full, half = (learner_test.update(learner_test.make_batch(), optimizer=o)[0] for o in (learner_test.OPTIMIZER, optimizer))
    moments = half.opt_state[1][0]
    assert {x.dtype.name for x in jax.tree.leaves(moments.mu)} == {'bfloat16'}
    assert {x.dtype.name for x in jax.tree.leaves(moments.nu)} == {'float32'}
    chex.assert_trees_all_close(half.params, full.params, atol=1e-4)


def test_bad_meshes_and_optimizers_are_named():
    with pytest.raises(ValueError, match='tensor=4 does not divide the 2 key/value heads'):
        sharding.check_model(sharding.make_mesh(data=1, fsdp=1, tensor=4), 2)
    mesh = sharding.make_mesh(data=1, fsdp=8)
    with pytest.raises(ValueError, match=r'row buckets \[4, 8\] cannot be split over 8 devices'):
        sampler_test.make_policy(mesh=mesh)
    with pytest.raises(ValueError, match="optimizer 'sgd' is not one of"):
        learner.OptimizerConfig(name='sgd')
    with pytest.raises(ValueError, match="remat 'some' is not one of none, full, dots"):
        dataclasses.replace(learner_test.CONFIG, remat='some')

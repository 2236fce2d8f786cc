"""The decoder against transformers' logits, against itself with a cache, and against its invariances."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from covsero_jax import model, pretrained

DATA = pathlib.Path(__file__).parent / 'data'
TINY = pathlib.Path(__file__).parent.parent / 'covsero_jax' / 'assets' / 'tiny'
CONFIG = model.QwenConfig(
    vocab_size=40, embed_dim=24, mlp_dim=40, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, rope_theta=1e4
)


def random_params(config: model.QwenConfig, seed: int = 0) -> model.Params:
    """Every leaf visibly random, so that biases and norm scales matter. NumPy, so that nothing compiles."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))
    return jax.tree.map(lambda x: rng.normal(0.0, 0.3, x.shape).astype(x.dtype), shapes)


@functools.partial(jax.jit, static_argnames='config')
def forward(params, tokens, mask, config=CONFIG):
    position_BL, mask_BLL = model.positions_and_mask(mask)
    return model.Qwen(config).apply({'params': params}, tokens, position_BL, mask_BLL)[0]


@pytest.mark.parametrize('name', ['tied', 'untied'])
def test_matches_hf_golden(name, tmp_path):
    golden = np.load(DATA / f'qwen_{name}.npz')
    tensors = {key.removeprefix('tensor/'): golden[key] for key in golden if key.startswith('tensor/')}
    (tmp_path / 'config.json').write_text(str(golden['config']))
    safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors')
    config, params = pretrained.load_folder(tmp_path)

    assert config.tie_embeddings == (name == 'tied')
    assert config.num_heads > config.num_kv_heads
    hidden = forward(params, golden['tokens'].astype(np.int32), golden['mask'], config)
    logits = np.asarray(model.project(params, hidden, config))
    real = golden['mask']
    assert np.abs(golden['logits'][real]).max() > 3.0  # logits of ordinary size
    assert np.abs(logits - golden['logits'])[real].max() <= 2e-5


def test_the_packaged_policy_is_the_same_in_transformers():
    """If this fails after `make_tiny`, run tests/make_qwen_golden.py; else the model or the tokenizer changed."""
    golden, folder = np.load(DATA / 'qwen_tiny.npz'), TINY
    config, params = pretrained.load_folder(folder)
    tokens = golden['tokens']
    assert pretrained.load_tokenizer(folder).encode(str(golden['text']), add_special_tokens=False) == tokens.tolist()
    hidden = forward(params, tokens[None].astype(np.int32), np.ones((1, len(tokens)), bool), config)
    logits = np.asarray(model.project(params, hidden, config))[0, -len(golden['logits']):]
    assert np.abs(golden['logits']).max() > 3.0
    assert np.abs(logits - golden['logits']).max() <= 1e-4


@pytest.mark.parametrize('num_layers', [2, 5])  # unrolled, and a loop over layers
def test_decode_matches_forward(num_layers):
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    params = random_params(config)
    rng = np.random.default_rng(0)
    prompt, total = 7, 12
    tokens = rng.integers(0, 40, (3, total)).astype(np.int32)
    mask = np.arange(total)[None] >= np.array([0, 3, 6])[:, None]
    position_BL, mask_BLL = model.positions_and_mask(jnp.asarray(mask))

    @jax.jit
    def extend(tokens, position, mask, cache, start):
        return model.Qwen(config).apply({'params': params}, tokens, position, mask, cache, start)

    cache = model.init_cache(config, 3, total)
    pieces = []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, total))]:
        span = slice(start, end)
        hidden, cache = extend(tokens[:, span], position_BL[:, span], mask_BLL[:, span], cache, start)
        pieces.append(hidden)
    full = forward(params, tokens, mask, config)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1)[mask], full[mask], atol=2e-5, rtol=0)


@pytest.mark.parametrize('num_layers', [1, 2, 5])
@pytest.mark.parametrize('with_cache', [False, True])
def test_a_window_is_a_slice_in_value_gradient_and_cache(num_layers, with_cache):
    config = dataclasses.replace(CONFIG, num_layers=num_layers)
    tokens = np.random.default_rng(0).integers(0, 40, (3, 9)).astype(np.int32)
    position_BL, mask_BLL = model.positions_and_mask(np.arange(9)[None] >= np.array([0, 3, 6])[:, None])

    @functools.partial(jax.jit, static_argnums=1)
    @functools.partial(jax.value_and_grad, has_aux=True)
    def last_two(params, window):
        cache = model.init_cache(config, 3, 9) if with_cache else None
        hidden, cache = model.Qwen(config).apply({'params': params}, tokens, position_BL, mask_BLL, cache, 0, window)
        return jnp.sum(jnp.sin(hidden[:, -2:])), (hidden.shape[1], cache)

    params = random_params(config)
    (full, (full_length, full_cache)), full_grad = last_two(params, 0)
    (part, (length, cache)), grad = last_two(params, 6)
    assert (full_length, length) == (9, 3)
    chex.assert_trees_all_close((part, cache, grad), (full, full_cache, full_grad), atol=2e-5, rtol=0)


def test_causal_by_gradient():
    params = random_params(CONFIG)
    tokens = np.arange(8, dtype=np.int32)[None]  # every position its own embedding row
    mask = np.arange(8)[None] >= 2

    @jax.grad
    def gradient_at_5(embedding):
        hidden = forward(params | {'embed': {'embedding': embedding}}, tokens, mask)
        return jnp.sum(jnp.sin(hidden[0, 5]))

    gradient = np.abs(gradient_at_5(params['embed']['embedding'])).sum(axis=1)
    assert (gradient[2:6] > 1e-3).all()  # itself and the past
    assert (gradient[:2] == 0).all()  # padding
    assert (gradient[6:] == 0).all()  # the future


def test_padding_changes_nothing():
    params = random_params(CONFIG)
    rng = np.random.default_rng(1)
    row = rng.integers(0, 40, (1, 6)).astype(np.int32)
    alone = forward(params, row, np.ones((1, 6), bool))
    for left, right in [(5, 0), (0, 5), (3, 2)]:
        mask = np.pad(np.ones((1, 6), bool), ((0, 0), (left, right)))
        padded = [
            forward(params, np.pad(row, ((0, 0), (left, right)), constant_values=fill), mask)[:, left : left + 6]
            for fill in (0, 17)
        ]
        np.testing.assert_array_equal(padded[0], padded[1])  # what stands in the padding is never seen
        np.testing.assert_allclose(padded[0], alone, atol=1e-5, rtol=0)


def test_padding_only_rows_are_finite():
    params = random_params(CONFIG)
    tokens, mask = jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 5), bool)
    chex.assert_tree_all_finite(jax.grad(lambda p: jnp.sum(forward(p, tokens, mask) ** 2))(params))


def test_attention_matches_jax_nn():
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (3, 5, 6, 8))
    k, v = (jax.random.normal(key, (3, 9, 2, 8)) for key in keys[1:3])
    mask = jax.random.bernoulli(keys[3], 0.4, (3, 5, 9)).at[:, :, 4].set(True)

    def value_and_grad(attention):
        loss = lambda *qkv: jnp.sum(jnp.sin(attention(*qkv)))
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(q, k, v)

    ours = value_and_grad(lambda q, k, v: model.attention(q, k, v, mask))
    theirs = value_and_grad(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask[:, None]))
    chex.assert_trees_all_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_remat_changes_no_gradient():
    params = random_params(CONFIG)
    tokens = np.random.default_rng(2).integers(0, 40, (2, 6)).astype(np.int32)
    mask = np.ones((2, 6), bool)

    def gradient(remat):
        config = dataclasses.replace(CONFIG, remat=remat)
        return jax.grad(lambda p: jnp.sum(forward(p, tokens, mask, config) ** 3))(params)

    chex.assert_trees_all_close(gradient('none'), gradient('full'), rtol=1e-4, atol=1e-4)


def test_bfloat16_keeps_float32_logits():
    config = dataclasses.replace(CONFIG, dtype='bfloat16')
    params = random_params(CONFIG)
    tokens = np.random.default_rng(3).integers(0, 40, (2, 6)).astype(np.int32)
    mask = np.ones((2, 6), bool)
    hidden = forward(params, tokens, mask, config)
    logits = model.project(params, hidden, config)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    exact = model.project(params, forward(params, tokens, mask), CONFIG)
    error = np.abs(logits - exact).max() / np.abs(exact).max()
    assert 0 < error < 0.03  # bfloat16 has 8 bits


def test_initial_weights():
    config = dataclasses.replace(CONFIG, tie_embeddings=False, param_dtype='bfloat16')
    params = jax.jit(model.init_params, static_argnums=0)(config, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert leaf.dtype == jnp.bfloat16
        x = np.asarray(leaf, np.float32)
        name = path[-1].key
        if name in ('kernel', 'embedding'):
            assert abs(x.std() / 0.02 - 1) < 0.15 and abs(x.mean()) < 0.005, path
        else:
            assert (x == (1.0 if name == 'scale' else 0.0)).all(), path
    q = np.asarray(params['layers']['q']['kernel'], np.float32)
    assert (q[0] != q[1]).mean() > 0.9  # layers differ


@pytest.mark.parametrize(
    ('sizes', 'count'),  # the published numbers of parameters of Qwen2.5 1.5B and 7B
    [
        ((151936, 1536, 8960, 28, 12, 2, 128), 1_543_714_304),
        ((152064, 3584, 18944, 28, 28, 4, 128), 7_615_616_512),
    ],
)
def test_published_sizes(sizes, count):
    config = model.QwenConfig(*sizes, tie_embeddings=count < 2e9)
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == count


@pytest.mark.parametrize('tied', [True, False])
def test_config_round_trip(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied, rope_theta=12345.0, norm_eps=1e-5, max_positions=64)
    hf = json.loads(json.dumps(config.to_hf()))
    assert model.QwenConfig.from_hf(hf) == config
    old = {key: value for key, value in hf.items() if key != 'rope_parameters'}  # as transformers 4 writes it
    new = {key: value for key, value in hf.items() if key != 'rope_theta'}  # as transformers 5 writes it
    assert model.QwenConfig.from_hf(old) == model.QwenConfig.from_hf(new) == config
    assert model.QwenConfig.from_hf(hf, dtype='bfloat16').dtype == 'bfloat16'


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'model_type': 'gemma'}, 'gemma'),
        ({'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1e6}}, 'yarn'),
        ({'rope_parameters': None, 'rope_scaling': {'type': 'linear', 'factor': 2.0}}, 'linear'),
        ({'hidden_act': 'gelu'}, 'gelu'),
        ({'use_sliding_window': True}, 'sliding'),
        ({'num_key_value_heads': 4}, 'multiple'),
        ({'head_dim': 7}, 'odd'),
    ],
)
def test_unsupported_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        model.QwenConfig.from_hf(CONFIG.to_hf() | change)


@pytest.mark.parametrize('field', ['vocab_size', 'hidden_size', 'rope_theta'])
def test_missing_config_fields_are_named(field):
    hf = {key: value for key, value in CONFIG.to_hf().items() if key not in (field, 'rope_parameters')}
    with pytest.raises(ValueError, match=field):
        model.QwenConfig.from_hf(hf)

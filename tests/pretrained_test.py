"""Hugging Face folders: lossless both ways, and every way of being broken has a message that names the file."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from covsero_jax import model, pretrained

TIED = model.QwenConfig(
    vocab_size=30, embed_dim=12, mlp_dim=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, max_positions=64
)
UNTIED = dataclasses.replace(TIED, tie_embeddings=False, num_kv_heads=1, rope_theta=1e4)


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))
    return jax.tree.map(lambda x: rng.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)


def assert_same_bytes(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.fixture
def folder(tmp_path):
    pretrained.save_folder(tmp_path / 'model', UNTIED, random_params(UNTIED))
    return tmp_path / 'model'


def edit_weights(folder, change):
    tensors = safetensors.numpy.load_file(folder / 'model.safetensors')
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / 'model.safetensors')


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
@pytest.mark.parametrize('max_shard_bytes', [2**30, 4000], ids=['single', 'sharded'])
def test_round_trip_keeps_every_bit(config, max_shard_bytes, tmp_path):
    params = random_params(config)
    pretrained.save_folder(tmp_path / 'a', config, jax.tree.map(jnp.asarray, params), max_shard_bytes=max_shard_bytes)
    loaded_config, loaded = pretrained.load_folder(tmp_path / 'a')
    assert loaded_config == config
    assert_same_bytes(loaded, params)

    pretrained.save_folder(tmp_path / 'b', loaded_config, loaded, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in (tmp_path / 'a').iterdir())
    assert sum(name.endswith('.safetensors') for name in files) == (1 if max_shard_bytes > 4000 else len(files) - 3)
    assert ('model.safetensors.index.json' in files) == (max_shard_bytes == 4000)
    for name in files:
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()
        assert (tmp_path / 'a' / name).stat().st_size < 4000 + 4096 or max_shard_bytes > 4000


@pytest.mark.parametrize('config', [TIED, UNTIED], ids=['tied', 'untied'])
def test_checkpoint_has_the_names_and_layout_of_torch(config, tmp_path):
    """The names and shapes of the golden files are those of transformers' own state_dict."""
    golden = np.load(pathlib.Path(__file__).parent / 'data' / f'qwen_{"" if config.tie_embeddings else "un"}tied.npz')
    size = model.QwenConfig.from_hf(json.loads(str(golden['config'])))
    expected = {key.removeprefix('tensor/'): golden[key] for key in golden if key.startswith('tensor/')}
    source = tmp_path / 'source'
    source.mkdir()
    (source / 'config.json').write_text(str(golden['config']))
    safetensors.numpy.save_file(expected, source / 'model.safetensors')
    pretrained.save_folder(tmp_path / 'model', size, pretrained.load_folder(source)[1])
    written = safetensors.numpy.load_file(tmp_path / 'model' / 'model.safetensors')
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)


@pytest.mark.parametrize(('dtype', 'bits'), [('bfloat16', 8), ('float16', 11)])
def test_half_precision_weights(dtype, bits, tmp_path):
    params = random_params(TIED)
    pretrained.save_folder(tmp_path / 'a', TIED, params, dtype=dtype)
    _, loaded = pretrained.load_folder(tmp_path / 'a')
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
        assert b.dtype == np.float32
        assert 0 < np.max(np.abs(a - b) / (np.abs(a) + 1e-3)) <= 2.0**-bits
    pretrained.save_folder(tmp_path / 'b', TIED, loaded, dtype=dtype)  # the second rounding changes nothing
    assert_same_bytes(pretrained.load_folder(tmp_path / 'b')[1], loaded)
    config, half = pretrained.load_folder(tmp_path / 'a', param_dtype=dtype, remat='full')
    assert config.remat == 'full' and {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(dtype)}


def test_extra_head_of_a_tied_checkpoint(tmp_path):
    folder = tmp_path / 'model'
    pretrained.save_folder(folder, TIED, random_params(TIED))
    edit_weights(folder, lambda t: t.update({'lm_head.weight': t['model.embed_tokens.weight'].copy()}))
    assert_same_bytes(pretrained.load_folder(folder)[1], random_params(TIED))
    edit_weights(folder, lambda t: t.update({'lm_head.weight': t['lm_head.weight'] + 1}))
    with pytest.raises(pretrained.PretrainedError, match='lm_head.weight differs'):
        pretrained.load_folder(folder)


def test_missing_folder(tmp_path):
    with pytest.raises(pretrained.PretrainedError, match='nowhere: no such model folder'):
        pretrained.load_folder(tmp_path / 'nowhere')


@pytest.mark.parametrize('file', ['config.json', 'model.safetensors'])
def test_missing_file(folder, file):
    (folder / file).unlink()
    with pytest.raises(pretrained.PretrainedError, match=f'{file}: no such'):
        pretrained.load_folder(folder)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('{', 'not readable as JSON'),
        ('[]', 'not a JSON object'),
        ('{"model_type": "gemma"}', "'gemma' is not supported"),
    ],
)
def test_bad_config(folder, text, message):
    (folder / 'config.json').write_text(text)
    with pytest.raises(pretrained.PretrainedError, match=f'config.json: .*{message}'):
        pretrained.load_folder(folder)


@pytest.mark.parametrize('kept', [0, 5, 200, -4], ids=lambda n: f'first {n} bytes')
def test_truncated_weights(folder, kept):
    path = folder / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(pretrained.PretrainedError, match='model.safetensors: truncated or not a safetensors file'):
        pretrained.load_folder(folder)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda t: t.pop('model.layers.1.mlp.up_proj.weight'), 'lack model.layers.1.mlp.up_proj.weight'),
        (lambda t: t.pop('lm_head.weight'), 'lack lm_head.weight'),
        (lambda t: t.update(strange=np.zeros(3, np.float32)), 'hold strange'),
        (lambda t: t.update({'model.norm.weight': np.zeros(13, np.float32)}), r'norm.weight has shape \[13\].*\[12\]'),
        (lambda t: t.update({'model.norm.weight': np.zeros(12, np.int32)}), 'norm.weight is I32'),
        (lambda t: t.update({'model.norm.weight': np.full(12, np.nan, np.float32)}), 'norm.weight holds NaN'),
        (lambda t: t.clear(), r'embed_tokens.weight, .* and \d+ more'),
    ],
    ids=['missing', 'missing head', 'unexpected', 'shape', 'type', 'nan', 'empty'],
)
def test_weights_that_do_not_fit(folder, change, message):
    edit_weights(folder, change)
    with pytest.raises(pretrained.PretrainedError, match=message):
        pretrained.load_folder(folder)


def test_config_of_another_size(folder):
    edit_json(folder / 'config.json', vocab_size=31)
    with pytest.raises(pretrained.PretrainedError, match=r'weight has shape \[30, 12\].*\[31, 12\]'):
        pretrained.load_folder(folder)


def test_broken_shards(tmp_path):
    folder = tmp_path / 'model'
    pretrained.save_folder(folder, TIED, random_params(TIED), max_shard_bytes=4000)
    index = folder / 'model.safetensors.index.json'
    whole = index.read_text()
    weight_map = json.loads(whole)['weight_map']
    shard = weight_map['model.norm.weight']

    edit_json(index, weight_map=weight_map | {'made.up': shard})
    with pytest.raises(pretrained.PretrainedError, match=f'{shard}: lacks made.up'):
        pretrained.load_folder(folder)
    edit_json(index, weight_map=None)
    with pytest.raises(pretrained.PretrainedError, match='index.json: no weight_map'):
        pretrained.load_folder(folder)
    index.write_text(whole)
    (folder / shard).write_bytes((folder / shard).read_bytes()[:-1])
    with pytest.raises(pretrained.PretrainedError, match=f'{shard}: truncated'):
        pretrained.load_folder(folder)
    (folder / shard).unlink()
    with pytest.raises(pretrained.PretrainedError, match=f'{shard}: no such weights file'):
        pretrained.load_folder(folder)


def test_existing_folder_is_not_touched(folder):
    before = (folder / 'model.safetensors').read_bytes()
    with pytest.raises(pretrained.PretrainedError, match='exists already'):
        pretrained.save_folder(folder, UNTIED, random_params(UNTIED, seed=1))
    assert (folder / 'model.safetensors').read_bytes() == before


@pytest.mark.parametrize(
    ('spoil', 'dtype', 'message'),
    [
        (lambda p: p.pop('lm_head'), 'float32', 'lack lm_head/kernel'),
        (lambda p: p['layers']['q'].update(bias=np.zeros((3, 5))), 'float32', 'layers/q/bias: shape'),
        (lambda p: p['layers']['q'].update(bias=np.zeros((2, 16))), 'float32', r'layers/q/bias \(layer 2\)'),
        (lambda p: p['final_norm'].update(scale=np.full(12, np.inf)), 'float32', 'final_norm/scale: NaN or infinity'),
        (lambda p: p['final_norm'].update(scale=np.full(12, 1e6)), 'float16', 'NaN or infinity in float16'),
    ],
)
def test_params_that_do_not_fit(spoil, dtype, message, tmp_path):
    params = random_params(UNTIED)
    spoil(params)
    with pytest.raises(pretrained.PretrainedError, match=message):
        pretrained.save_folder(tmp_path / 'model', UNTIED, params, dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_full_disk_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # writing beyond fails, as on a full disk
        with pytest.raises(pretrained.PretrainedError, match='model: cannot be written'):
            pretrained.save_folder(tmp_path / 'model', UNTIED, random_params(UNTIED))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A 12-token WordLevel tokenizer, saved by transformers."""
    import tokenizers
    import transformers

    words = ['<pad>', '<eos>', '<unk>', *(f'word{i}' for i in range(9))]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token='<unk>'))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token='<eos>', pad_token='<pad>', unk_token='<unk>'
    )
    tokenizer.save_pretrained(tmp_path / 'tokenizer')
    return tmp_path / 'tokenizer'


def test_tokenizer_travels_with_the_weights(tokenizer_folder, tmp_path):
    pretrained.save_folder(tmp_path / 'a', TIED, random_params(TIED), tokenizer_from=tokenizer_folder)
    tokenizer = pretrained.load_tokenizer(tmp_path / 'a')
    # as before the weights came: config.json must not change what tokenizer.json says
    before = pretrained.load_tokenizer(tokenizer_folder)
    for each in (before, tokenizer):
        assert each('word3 word0 word8 other').input_ids == [6, 3, 11, 2]
        assert (each.eos_token_id, each.pad_token_id) == (1, 0)
    generation = json.loads((tmp_path / 'a' / 'generation_config.json').read_text())
    assert (generation['eos_token_id'], generation['pad_token_id']) == (1, 0)
    assert (generation['top_k'], generation['top_p'], generation['repetition_penalty']) == (0, 1.0, 1.0)

    edit_json(tmp_path / 'a' / 'generation_config.json', eos_token_id=[1, 2], top_k=20, repetition_penalty=1.1)
    pretrained.save_folder(tmp_path / 'b', TIED, random_params(TIED), tokenizer_from=tmp_path / 'a')
    generation = json.loads((tmp_path / 'b' / 'generation_config.json').read_text())
    assert generation['eos_token_id'] == [1, 2]  # Qwen2.5 has two
    assert (generation['top_k'], generation['repetition_penalty']) == (0, 1.0)


def test_tokenizer_larger_than_the_vocabulary(tokenizer_folder, tmp_path):
    small = dataclasses.replace(TIED, vocab_size=11)
    with pytest.raises(pretrained.PretrainedError, match='12 tokens, but the model only 11'):
        pretrained.save_folder(tmp_path / 'a', small, random_params(small), tokenizer_from=tokenizer_folder)
    pretrained.save_folder(tmp_path / 'b', small, random_params(small))
    for file in tokenizer_folder.iterdir():
        (tmp_path / 'b' / file.name).write_bytes(file.read_bytes())
    for load in (pretrained.load_folder, pretrained.load_tokenizer):
        with pytest.raises(pretrained.PretrainedError, match='12 tokens, but the model only 11'):
            load(tmp_path / 'b')


def test_missing_or_broken_tokenizer(folder, tmp_path):
    with pytest.raises(pretrained.PretrainedError, match='no tokenizer.json here'):
        pretrained.load_tokenizer(folder)
    with pytest.raises(pretrained.PretrainedError, match='no tokenizer.json to take over'):
        pretrained.save_folder(tmp_path / 'other', UNTIED, random_params(UNTIED), tokenizer_from=folder)
    assert not (tmp_path / 'other').exists()
    (folder / 'tokenizer.json').write_text('{}')
    with pytest.raises(pretrained.PretrainedError, match='tokenizer cannot be read'):
        pretrained.load_tokenizer(folder)


def test_only_the_tokenizer_needs_transformers(folder):
    code = f'import sys; from covsero_jax import pretrained; pretrained.load_folder({str(folder)!r});'
    subprocess.run([sys.executable, '-c', code + "assert 'transformers' not in sys.modules"], check=True)

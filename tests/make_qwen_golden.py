"""Regenerates tests/data/qwen_*.npz: weights, inputs and logits of transformers' own Qwen2ForCausalLM.

qwen_tied, qwen_untied: random models. qwen_tiny: the packaged policy, loaded as a user of transformers would. wide_*: the
published widths (see wide_models), with the error of transformers' own bfloat16 beside its float32 logits.

python tests/make_qwen_golden.py        (needs torch and transformers; the tests themselves need only the result)
"""

from __future__ import annotations

import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers
import wide_models

SIZES = {
    'tied': {'num_attention_heads': 4, 'num_key_value_heads': 2, 'num_hidden_layers': 3, 'rope_theta': 1e6},
    'untied': {'num_attention_heads': 6, 'num_key_value_heads': 2, 'num_hidden_layers': 2, 'rope_theta': 1e4},
}

TINY_PROMPT = (
    'put a clean plate in cabinet\nYou arrive at countertop 12. On the countertop 12, you see a plate 2, and a mug 1.\n'
    'go to cabinet 1\ngo to sinkbasin 1\ninventory\nlook\ntake plate 2 from countertop 12'
)


def make_golden(name: str, seed: int) -> dict[str, np.ndarray]:
    """A random model with weights of visible size (norm scales and biases too) on a left-padded batch."""
    config = transformers.Qwen2Config(
        vocab_size=97,
        hidden_size=8 * SIZES[name]['num_attention_heads'],
        intermediate_size=56,
        tie_word_embeddings=name == 'tied',
        attn_implementation='eager',
        **SIZES[name],
    )
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    rng = np.random.default_rng(seed)
    mask = np.arange(20)[None] >= np.array([0, 5, 13, 19])[:, None]
    tokens = rng.integers(0, 97, mask.shape) * mask
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.tensor(mask.astype(np.int64)),
            position_ids=torch.tensor(positions),
        ).logits
    tensors = {f'tensor/{key}': value.numpy() for key, value in model.state_dict().items()}
    if name == 'tied':
        tensors.pop('tensor/lm_head.weight')  # the same memory as the embedding: not in a published checkpoint
    config_json = json.dumps(config.to_dict())
    return tensors | {'config': np.array(config_json), 'tokens': tokens, 'mask': mask, 'logits': logits.numpy()}


def make_tiny_golden() -> dict[str, np.ndarray]:
    """Token ids and logits of the packaged policy on one of its own prompts, through the Auto classes."""
    folder = pathlib.Path(__file__).parent.parent / 'covsero_jax' / 'assets' / 'tiny'
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    message = {'role': 'user', 'content': TINY_PROMPT}
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens[None])).logits[0].numpy()
    return {'text': np.array(text), 'tokens': tokens, 'logits': logits.astype(np.float32)[-24:]}


def make_wide_golden(name: str) -> dict[str, np.ndarray]:
    """The last positions' float32 logits, and the largest error that transformers makes in bfloat16, relative to them."""
    tokens, mask = wide_models.make_inputs()
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    inputs = {'input_ids': tokens, 'attention_mask': mask.astype(np.int64), 'position_ids': positions}
    logits = {}
    with tempfile.TemporaryDirectory() as folder:
        wide_models.write_folder(name, pathlib.Path(folder))
        for dtype in (torch.float32, torch.bfloat16):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
            with torch.no_grad():
                logits[dtype] = model(**{key: torch.tensor(x) for key, x in inputs.items()}).logits.float().numpy()[mask]
    exact = logits[torch.float32]
    error = np.abs(logits[torch.bfloat16] - exact)
    return {'logits': exact[-24:].astype(np.float32), 'bfloat16_max': error.max() / np.abs(exact).max(),
            'bfloat16_mean': error.mean() / np.abs(exact).mean()}


if __name__ == '__main__':
    data = pathlib.Path(__file__).parent / 'data'
    for seed, name in enumerate(SIZES):
        np.savez_compressed(data / f'qwen_{name}.npz', **make_golden(name, seed))
        print(f'wrote qwen_{name}.npz, {(data / f"qwen_{name}.npz").stat().st_size / 1024:.0f} KiB')
    np.savez_compressed(data / 'qwen_tiny.npz', **make_tiny_golden())
    for name in wide_models.WIDTHS:
        np.savez_compressed(data / f'wide_{name}.npz', **make_wide_golden(name))
        print(f'wrote wide_{name}.npz, {(data / f"wide_{name}.npz").stat().st_size / 1024:.0f} KiB')

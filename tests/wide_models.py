"""Random models of the published widths, cut to one or two layers and a small vocabulary: the same weights everywhere.

Their weights come from NumPy's generator, so that the goldens hold logits only.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import safetensors.numpy

from covsero_jax import model, pretrained

VOCABULARY = 512
WIDTHS = {  # embed, mlp, layers, heads, key/value heads, head_dim
    'qwen2.5-0.5b': ((896, 4864, 2, 14, 2, 64), {'tie_embeddings': True}),
    'qwen2.5-1.5b': ((1536, 8960, 2, 12, 2, 128), {'tie_embeddings': True}),
    'qwen2.5-7b': ((3584, 18944, 1, 28, 4, 128), {'tie_embeddings': False}),
    'qwen3-0.6b': ((1024, 3072, 2, 16, 8, 128), {'tie_embeddings': True, 'qkv_bias': False, 'qk_norm': True}),
    'llama-3b': ((3072, 8192, 1, 24, 8, 128), {'tie_embeddings': False, 'qkv_bias': False}),
}


def make_config(name: str) -> model.QwenConfig:
    sizes, flags = WIDTHS[name]
    return model.QwenConfig(VOCABULARY, *sizes, **flags)


def write_folder(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Matrices keep the size of what goes through them; norms, biases and logits are of visible size."""
    config = make_config(name)
    rng = np.random.default_rng(list(WIDTHS).index(name))
    tensors = {}
    for key, place in pretrained.hf_layout(config).items():
        size = 3 / config.embed_dim**0.5 if place.path[0] in ('embed', 'lm_head') else place.shape[-1] ** -0.5
        drawn = rng.standard_normal(place.shape, np.float32)
        tensors[key] = drawn * np.float32(size) if len(place.shape) > 1 else 0.2 * drawn + ('norm' in key)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config.to_hf()))
    safetensors.numpy.save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    return folder


def make_inputs() -> tuple[np.ndarray, np.ndarray]:
    """Left-padded tokens [3, 48] and their mask."""
    mask = np.arange(48)[None] >= np.array([0, 11, 37])[:, None]
    return np.random.default_rng(9).integers(0, VOCABULARY, mask.shape) * mask, mask

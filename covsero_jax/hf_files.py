"""What lies in a Hugging Face folder: names and shapes of tensors, weights files, vocabulary, JSON.

`hf_layout` is the one table of tensor names that loading, saving and checking (pretrained.py) share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import safetensors

from covsero_jax import model

_TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json', 'vocab.json',
    'merges.txt', 'chat_template.jinja',
)  # fmt: skip
_TOKEN_IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')


class PretrainedError(ValueError):
    """A model folder that cannot be read or written; the message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class HFTensor:
    """Where one checkpoint tensor of shape `shape` lives in `params`: leaf `path`, its layer, transposed or not."""

    path: tuple[str, str] | tuple[str, str, str]
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def transposed(self) -> bool:
        return self.path[-1] == 'kernel'  # torch stores [out, in], flax [in, out]


def hf_layout(config: model.QwenConfig) -> dict[str, HFTensor]:
    """Checkpoint tensor name -> place in `params`, in file order."""
    c = config
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    block = {'input_layernorm.weight': (('attn_norm', 'scale'), (c.embed_dim,))}
    for name, size in (('q', heads), ('k', kv_heads), ('v', kv_heads)):
        block[f'self_attn.{name}_proj.weight'] = ((name, 'kernel'), (size, c.embed_dim))
        if c.qkv_bias:
            block[f'self_attn.{name}_proj.bias'] = ((name, 'bias'), (size,))
        if c.qk_norm and name != 'v':
            block[f'self_attn.{name}_norm.weight'] = ((f'{name}_norm', 'scale'), (c.head_dim,))
    block |= {
        'self_attn.o_proj.weight': (('o', 'kernel'), (c.embed_dim, heads)),
        'post_attention_layernorm.weight': (('mlp_norm', 'scale'), (c.embed_dim,)),
        'mlp.gate_proj.weight': (('gate', 'kernel'), (c.mlp_dim, c.embed_dim)),
        'mlp.up_proj.weight': (('up', 'kernel'), (c.mlp_dim, c.embed_dim)),
        'mlp.down_proj.weight': (('down', 'kernel'), (c.embed_dim, c.mlp_dim)),
    }
    layout = {'model.embed_tokens.weight': HFTensor(('embed', 'embedding'), (c.vocab_size, c.embed_dim))}
    for layer in range(c.num_layers):
        for name, (path, shape) in block.items():
            layout[f'model.layers.{layer}.{name}'] = HFTensor(('layers', *path), shape, layer)
    layout['model.norm.weight'] = HFTensor(('final_norm', 'scale'), (c.embed_dim,))
    if not c.tie_embeddings:
        layout['lm_head.weight'] = HFTensor(('lm_head', 'kernel'), (c.vocab_size, c.embed_dim))
    return layout


def list_tensors(folder: pathlib.Path) -> dict[pathlib.Path, list[str]]:
    """Weights file -> names of its tensors, by the index if there is one; the single file wins as in transformers."""
    single, index = folder / 'model.safetensors', folder / 'model.safetensors.index.json'
    with contextlib.ExitStack() as stack:
        if single.is_file() or not index.is_file():
            return {single: list(open_file(single, stack).keys())}
        weight_map = read_json(index).get('weight_map')
        if not isinstance(weight_map, dict):
            raise PretrainedError(f'{index}: no weight_map')
        files = sorted(set(weight_map.values()))
        held = {name: set(open_file(folder / name, stack).keys()) for name in files}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            raise PretrainedError(f'{folder / name}: lacks {tensor}, which {index.name} promises')
    return {folder / name: [tensor for tensor, file in weight_map.items() if file == name] for name in files}


def open_file(path: pathlib.Path, stack: contextlib.ExitStack) -> Any:
    try:
        return stack.enter_context(safetensors.safe_open(path, framework='numpy'))
    except FileNotFoundError as error:
        raise PretrainedError(f'{path}: no such weights file') from error
    except (safetensors.SafetensorError, OSError) as error:
        raise PretrainedError(f'{path}: truncated or not a safetensors file ({error}); copy it again') from error


def read_tensor(file: Any, path: pathlib.Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    found = file.get_slice(name)
    if tuple(found.get_shape()) != shape:
        raise PretrainedError(f'{path}: {name} has shape {found.get_shape()}, config.json says {list(shape)}')
    if found.get_dtype() not in ('F32', 'F16', 'BF16'):
        raise PretrainedError(f'{path}: {name} is {found.get_dtype()}; only F32, F16 and BF16 can be read')
    tensor = file.get_tensor(name)
    if not np.isfinite(tensor).all():
        raise PretrainedError(f'{path}: {name} holds NaN or infinity')
    return tensor


def copy_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
    """Copy the tokenizer files; give the special token ids, as the source's model files or its tokenizer say."""
    if not (source / 'tokenizer.json').is_file():
        raise PretrainedError(f'{source}: no tokenizer.json to take over')
    for file in (source / name for name in _TOKENIZER_FILES):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    for name in ('generation_config.json', 'config.json'):
        if (source / name).is_file():
            stated = read_json(source / name)
            if stated.get('eos_token_id') is not None:
                return {key: stated[key] for key in _TOKEN_IDS if stated.get(key) is not None}
    if not (source / 'tokenizer_config.json').is_file():
        return {}
    stated, vocabulary = read_json(source / 'tokenizer_config.json'), _vocabulary(source)
    named = {key: stated.get(key.removesuffix('_id')) for key in _TOKEN_IDS}
    named = {key: token['content'] if isinstance(token, dict) else token for key, token in named.items()}
    return {key: vocabulary[token] for key, token in named.items() if token in vocabulary}


def _vocabulary(folder: pathlib.Path) -> dict[str, int]:
    stated = read_json(folder / 'tokenizer.json')
    vocabulary = stated.get('model', {}).get('vocab', {})
    if isinstance(vocabulary, list):  # Unigram: [[token, score], ...]
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    return vocabulary | {token['content']: token['id'] for token in stated.get('added_tokens', [])}


def check_vocabulary(folder: pathlib.Path, config: model.QwenConfig) -> None:
    if (folder / 'tokenizer.json').is_file():
        check_size(folder, max(_vocabulary(folder).values(), default=-1) + 1, config)


def check_size(folder: pathlib.Path, tokens: int, config: model.QwenConfig) -> None:
    # fewer tokens than embeddings is normal: published vocabularies are padded (151,665 tokens in 151,936 rows)
    if tokens > config.vocab_size:
        raise PretrainedError(
            f'{folder}: the tokenizer has {tokens} tokens, but the model only {config.vocab_size} embeddings'
            ' (vocab_size); they do not belong together'
        )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError as error:
        raise PretrainedError(f'{path}: no such file; is this a Hugging Face model folder?') from error
    except (OSError, ValueError) as error:
        raise PretrainedError(f'{path}: not readable as JSON ({error})') from error
    if not isinstance(value, dict):
        raise PretrainedError(f'{path}: not a JSON object')
    return value


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')


def some(names: list[str]) -> str:
    return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')

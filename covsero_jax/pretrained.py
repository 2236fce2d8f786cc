"""Hugging Face folders of Qwen2, Qwen3 and Llama models <-> (QwenConfig, params), and their tokenizer.

A folder holds `config.json`, the weights (`model.safetensors`, or shards listed in `model.safetensors.index.json`) and
usually a tokenizer; what is in it, hf_files.py knows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh

from covsero_jax import hf_files, model, sharding
from covsero_jax.hf_files import HFTensor, PretrainedError, hf_layout

# ---- loading


def load_folder(path: str | os.PathLike, mesh: Mesh | None = None, **overrides) -> tuple[model.QwenConfig, model.Params]:
    """Config and parameters of a model folder; `overrides` are config fields such as dtype, remat or lora_rank.

    The parameters are host arrays in `param_dtype` (float32 unless overridden); with a mesh they go to their shards tensor
    by tensor, so that the host never holds more than one weights file and one tensor. LoRA adapters are not in a
    folder: `model.lora_params` makes them. Raises PretrainedError unless every tensor is there, has the shape that the
    config says, is finite, and nothing is left over.
    """
    folder = pathlib.Path(path)
    config = load_config(folder, **overrides)
    layout, files = hf_layout(config), hf_files.list_tensors(folder)
    tensors = [name for names in files.values() for name in names]
    extra_head = config.tie_embeddings and 'lm_head.weight' in tensors
    missing = [name for name in layout if name not in tensors]
    unexpected = [name for name in tensors if name not in layout and not (extra_head and name == 'lm_head.weight')]
    if missing:
        raise PretrainedError(f'{folder}: the weights lack {hf_files.some(missing)}, which config.json requires')
    if unexpected:
        raise PretrainedError(
            f'{folder}: the weights hold {hf_files.some(unexpected)}, which a {config.model_type} of this size has not')
    leaves = _HostLeaves(config) if mesh is None else _DeviceLeaves(config, mesh)
    head = HFTensor(('embed', 'embedding'), (config.vocab_size, config.embed_dim))  # only compared
    for file, names in files.items():
        with contextlib.ExitStack() as stack:
            opened = hf_files.open_file(file, stack)
            for name in names:
                place = layout.get(name, head)
                tensor = hf_files.read_tensor(opened, file, name, place.shape).astype(config.param_dtype)
                leaves.put(place, tensor, only_compare=name not in layout)
    if extra_head and not leaves.tied():
        raise PretrainedError(
            f'{folder}: tie_word_embeddings is true, but lm_head.weight differs from the embeddings;'
            ' set tie_word_embeddings to false in config.json')
    return config, leaves.params


class _HostLeaves:
    """Parameters that fill up tensor by tensor; leaves of layers are allocated once, at full size."""

    def __init__(self, config: model.QwenConfig):
        self._config, self.params, self._head = config, {}, None

    def put(self, place: HFTensor, tensor: np.ndarray, only_compare: bool = False) -> None:
        if only_compare:
            self._head = tensor
            return
        tensor = tensor.T if place.transposed else tensor
        parent = self.params
        for name in place.path[:-1]:
            parent = parent.setdefault(name, {})
        parent[place.path[-1]] = self._written(parent.get(place.path[-1]), place, tensor)

    def _written(self, leaf: Any, place: HFTensor, tensor: np.ndarray) -> Any:
        if place.layer is None:
            return np.ascontiguousarray(tensor)
        if leaf is None:
            leaf = np.empty((self._config.num_layers, *tensor.shape), tensor.dtype)
        leaf[place.layer] = tensor
        return leaf

    def tied(self) -> bool:
        """Whether an lm_head.weight that a tied model does not need equals its embeddings."""
        return np.array_equal(self._head, np.asarray(self.params['embed']['embedding']))


class _DeviceLeaves(_HostLeaves):
    """The same on a mesh: every tensor is cut on the host and written into its place on the devices."""

    def __init__(self, config: model.QwenConfig, mesh: Mesh):
        super().__init__(config)
        shapes = jax.eval_shape(functools.partial(model.init_params, dataclasses.replace(config, lora_rank=0)), jax.random.key(0))
        self._shardings = sharding.shardings(mesh, shapes)

    def _written(self, leaf: Any, place: HFTensor, tensor: np.ndarray) -> Any:
        where = self._shardings
        for name in place.path:
            where = where[name]
        if place.layer is None:
            return jax.make_array_from_callback(tensor.shape, where, lambda index: tensor[index])
        if leaf is None:
            shape = (self._config.num_layers, *tensor.shape)
            leaf = jax.jit(lambda: jnp.zeros(shape, tensor.dtype), out_shardings=where)()
        slice_sharding = jax.sharding.NamedSharding(where.mesh, jax.sharding.PartitionSpec(*where.spec[1:]))
        part = jax.make_array_from_callback(tensor.shape, slice_sharding, lambda index: tensor[index])
        return jax.block_until_ready(_set_layer(leaf, part, place.layer))  # else the host runs ahead and holds them all


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(leaf: jax.Array, tensor: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, tensor, layer, 0)


def load_config(path: str | os.PathLike, **overrides) -> model.QwenConfig:
    """The sizes in `config.json`, checked against the tokenizer of the same folder if it has one."""
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise PretrainedError(f'{folder}: no such model folder')
    try:
        config = model.QwenConfig.from_hf(hf_files.read_json(folder / 'config.json'), **overrides)
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        if isinstance(error, PretrainedError):
            raise
        raise PretrainedError(f'{folder / "config.json"}: {error}') from error
    hf_files.check_vocabulary(folder, config)
    return config


def load_tokenizer(path: str | os.PathLike) -> Any:
    """The tokenizer that the folder's `tokenizer.json` describes, with its chat template (transformers' fast class).

    Not AutoTokenizer: transformers 5 sees model_type qwen2 in config.json and then replaces the file's pre-tokenizer by
    Qwen's own, which gives other ids for a folder with its own tokenizer. Qwen's own folders read the same either way.
    """
    folder = pathlib.Path(path)
    if not (folder / 'tokenizer.json').is_file():
        raise PretrainedError(f'{folder}: no tokenizer.json here')
    import transformers  # here, not above: importing it takes seconds and only this function needs it

    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise whatever their parsers raise
        raise PretrainedError(f'{folder}: the tokenizer cannot be read ({type(error).__name__}: {error})') from error
    if (folder / 'config.json').is_file():
        hf_files.check_size(folder, len(tokenizer), load_config(folder))
    return tokenizer


def eos_ids(path: str | os.PathLike, tokenizer: Any) -> tuple[int, ...]:
    """What ends a reply: the tokenizer's eos first, then those of generation_config.json (Qwen2.5-Instruct has two)."""
    file = pathlib.Path(path) / 'generation_config.json'
    settings = hf_files.read_json(file) if file.is_file() else {}
    more = settings.get('eos_token_id', [])  # transformers leaves it out when there is none
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])]))


# ---- saving


def save_folder(
    path: str | os.PathLike,
    config: model.QwenConfig,
    params: model.Params,
    *,
    tokenizer_from: str | os.PathLike | None = None,
    dtype: str = 'float32',
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write a folder that transformers' AutoModelForCausalLM loads unchanged; tensors are stored in `dtype`.

    LoRA adapters are merged into their matrices. `tokenizer_from` is a folder whose tokenizer files and special token ids
    are taken over. The folder is written under a temporary name and renamed when complete; an existing one is never touched.
    Raises PretrainedError on parameters that do not fit the config, values that overflow `dtype`, and failed writes.
    """
    folder = pathlib.Path(path).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PretrainedError(f'{folder}: exists already; choose another folder or remove it')
    source = None if tokenizer_from is None else pathlib.Path(tokenizer_from)
    config, params = model.merge_lora(params, config)
    if source is not None:
        hf_files.check_vocabulary(source, config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f'.{folder.name}.', dir=folder.parent) as temporary:
            complete = pathlib.Path(temporary) / folder.name
            complete.mkdir()
            _write_weights(complete, config, jax.device_get(params), jnp.dtype(dtype), max_shard_bytes)
            token_ids = {} if source is None else hf_files.copy_tokenizer(source, complete)
            hf_files.write_json(complete / 'config.json', config.to_hf() | token_ids | {'torch_dtype': dtype})
            # the policy as it was trained: nothing filters or penalises its distribution
            sampling = {'do_sample': True, 'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, 'repetition_penalty': 1.0}
            hf_files.write_json(complete / 'generation_config.json', token_ids | sampling)
            os.rename(complete, folder)
    except (OSError, safetensors.SafetensorError) as error:
        raise PretrainedError(f'{folder}: cannot be written ({error}); nothing was left there') from error


def _write_weights(
    folder: pathlib.Path, config: model.QwenConfig, params: model.Params, dtype: np.dtype, max_shard_bytes: int
) -> None:
    shards, size = [{}], 0
    for name, place in hf_layout(config).items():
        nbytes = int(np.prod(place.shape)) * dtype.itemsize
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards, size = [*shards, {}], 0
        shards[-1][name] = place
        size += nbytes
    weight_map, total = {}, 0
    for i, shard in enumerate(shards):
        file = 'model.safetensors' if len(shards) == 1 else f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
        tensors = {name: _get(params, place, name, dtype) for name, place in shard.items()}
        safetensors.numpy.save_file(tensors, folder / file, metadata={'format': 'pt'})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
        hf_files.write_json(folder / 'model.safetensors.index.json', index)


def _get(params: model.Params, place: HFTensor, name: str, dtype: np.dtype) -> np.ndarray:
    try:
        for key in place.path:
            params = params[key]
        tensor = np.asarray(params) if place.layer is None else np.asarray(params)[place.layer]
    except (KeyError, IndexError) as error:
        raise PretrainedError(f'params lack {"/".join(place.path)} (layer {place.layer}) for {name}') from error
    tensor = np.ascontiguousarray(tensor.T if place.transposed else tensor)
    if tensor.shape != place.shape:
        raise PretrainedError(f'params {"/".join(place.path)}: shape {tensor.shape}, the config says {place.shape}')
    with np.errstate(over='ignore'):
        tensor = tensor.astype(dtype)
    if not np.isfinite(tensor.astype(np.float32)).all():
        raise PretrainedError(f'params {"/".join(place.path)}: NaN or infinity in {dtype}')
    return tensor

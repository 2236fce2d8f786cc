"""The device mesh, and where each array lives on it: one table of (regex, PartitionSpec).

Mesh axes: `data` holds copies of the parameters, `fsdp` splits them and gathers each layer when it is used, `tensor` splits
them and the work of each layer (heads and hidden units; Megatron-LM, 1909.08053, section 3). A batch is split over the
first two. The table cuts every matrix along its embedding dimension by fsdp and along the other one by tensor (the leading
axis of layer parameters is the layer); norms and adapters are too small to cut. Optimizer moments have their parameter's
path, so its rule too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from covsero_jax import model

PyTree = Any

AXES = ('data', 'fsdp', 'tensor')
ROWS = P(('data', 'fsdp'))  # of a batch
PARAM_RULES = (
    (r'/v_(row|col)/', P()),  # of a factored optimizer: vectors
    (r'embed/embedding$', P('tensor', 'fsdp')),
    (r'lm_head/kernel$', P('fsdp', 'tensor')),
    (r'layers/(q|k|v|gate|up)/kernel$', P(None, 'fsdp', 'tensor')),
    (r'layers/(o|down)/kernel$', P(None, 'tensor', 'fsdp')),
    (r'layers/(q|k|v)/bias$', P(None, 'tensor')),
    (r'(bias|scale|_lora/a|_lora/b)$', P()),
)


def make_mesh(*, data: int = 1, fsdp: int | None = None, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data x fsdp x tensor of the devices; fsdp=None takes all that are left. ValueError when there are too few."""
    devices = jax.devices() if devices is None else devices
    fsdp = max(len(devices) // (data * tensor), 1) if fsdp is None else fsdp
    size = data * fsdp * tensor
    if size > len(devices):
        raise ValueError(f'mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {size} devices, there are {len(devices)}')
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:size])


def check_model(mesh: Mesh, num_kv_heads: int) -> None:
    """ValueError unless `tensor` divides the key/value heads: a head is never cut."""
    if num_kv_heads % mesh.shape['tensor']:
        raise ValueError(f'tensor={mesh.shape["tensor"]} does not divide the {num_kv_heads} key/value heads of this model; '
                         'use fewer, and more fsdp')


def shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """The NamedSharding of every leaf of a tree of parameters (or TrainState), by path; scalars are on every device.

    ValueError names a parameter that no rule matches, or that `fsdp` or `tensor` do not divide.
    """

    def leaf_sharding(path, leaf) -> NamedSharding:
        if leaf.size == 1:
            return NamedSharding(mesh, P())
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        spec = next((spec for pattern, spec in PARAM_RULES if re.search(pattern, name)), None)
        if spec is None:
            raise ValueError(f'parameter {name!r} matches no rule of sharding.PARAM_RULES')
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis and size % mesh.shape[axis]:
                need = f'{size} is not divisible by {axis}={mesh.shape[axis]}'
                raise ValueError(f'parameter {name!r} {leaf.shape}: {need}')
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def gather_embeddings(mesh: Mesh, params: PyTree) -> PyTree:
    """Inside jit: have the embedding and the head uncut by fsdp on every device before a forward pass (its all-gather).

    Looking tokens up in a table that is cut along the embedding dimension would leave all activations cut that way, and
    every device would compute all rows. From a whole table they are split by rows, and XLA gathers layer by layer.
    """
    ends = {name: params[name] for name in ('embed', 'lm_head') if name in params}
    return params | jax.lax.with_sharding_constraint(ends, without_fsdp(mesh, ends))


def put_params(mesh: Mesh, params: PyTree) -> PyTree:
    """Place loaded parameters (NumPy or JAX) on the mesh, each device receiving its part only."""
    where = shardings(mesh, params)
    if replicated(mesh).is_fully_addressable or isinstance(jax.tree.leaves(params)[0], jax.Array):
        return jax.device_put(params, where)
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: np.asarray(x)[index]), params, where)


def copy_params(mesh: Mesh, params: PyTree, dtype: str, *, gather: bool = False) -> PyTree:
    """A copy with every matrix in `dtype`, in which the model would round it anyway; gather: uncut by fsdp.

    A model of that dtype computes the same with it, bit for bit. As reference policy it takes half the memory of float32
    masters; gathered, a sampler need not gather the parameters again for every token.
    """
    where = without_fsdp(mesh, params) if gather else shardings(mesh, params)
    return jax.jit(lambda params: model.round_matrices(params, dtype), out_shardings=where)(params)


def without_fsdp(mesh: Mesh, params: PyTree) -> PyTree:
    """The NamedSharding of every parameter when fsdp does not cut it."""
    def uncut(where: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, P(*(None if axis == 'fsdp' else axis for axis in where.spec)))

    return jax.tree.map(uncut, shardings(mesh, params))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For leaves [B, ...] of a micro-batch: rows over all devices, copies over `tensor`."""
    return NamedSharding(mesh, ROWS)


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """For a sampler's keys and values [layers, B, S, heads, head_dim]."""
    return NamedSharding(mesh, P(None, *ROWS, None, 'tensor'))


def num_row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are cut."""
    return mesh.shape['data'] * mesh.shape['fsdp']


def put_batch(mesh: Mesh, batch: PyTree) -> PyTree:
    """Place a micro-batch [B, ...] on the mesh. ValueError when the devices do not divide its B rows."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % num_row_shards(mesh):
        raise ValueError(f'a micro-batch of {rows} rows cannot be split over {num_row_shards(mesh)} devices')
    where = batch_sharding(mesh)
    if where.is_fully_addressable:
        return jax.device_put(batch, where)
    # several hosts: each has the whole batch and puts its own rows on its own devices
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, where, lambda index: np.asarray(x)[index]), batch)

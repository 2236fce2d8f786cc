"""The device mesh, and where each array lives on it: one table of (regex, PartitionSpec).

Mesh axes: `data` holds copies of the parameters, `fsdp` splits them. A batch is split over both. The table cuts every
matrix along its embedding dimension (the leading axis of layer parameters is the layer), so that `fsdp` has to divide only
that one number; biases and norms are too small to cut. Optimizer moments have their parameter's path, so its rule too.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PyTree = Any

PARAM_RULES = (
    (r'embed/embedding$', P(None, 'fsdp')),
    (r'lm_head/kernel$', P('fsdp', None)),
    (r'layers/(q|k|v|gate|up)/kernel$', P(None, 'fsdp', None)),
    (r'layers/(o|down)/kernel$', P(None, None, 'fsdp')),
    (r'(bias|scale)$', P()),
)


def make_mesh(*, data: int = 1, fsdp: int | None = None) -> Mesh:
    """A mesh of data x fsdp devices; fsdp=None takes all that are left. ValueError when there are too few devices."""
    devices = jax.devices()
    fsdp = max(len(devices) // data, 1) if fsdp is None else fsdp
    if data * fsdp > len(devices):
        raise ValueError(f'mesh data={data} x fsdp={fsdp} needs {data * fsdp} devices, there are {len(devices)}')
    devices = devices[: data * fsdp]
    return jax.make_mesh((data, fsdp), ('data', 'fsdp'), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices)


def shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """The NamedSharding of every leaf of a tree of parameters (or TrainState), by path; scalars are on every device.

    ValueError names a parameter that no rule matches, or whose embedding dimension `fsdp` does not divide.
    """

    def leaf_sharding(path, leaf) -> NamedSharding:
        if not leaf.shape:
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
    """Inside jit: have the embedding and the head whole on every device before a forward pass (FSDP's all-gather).

    Looking tokens up in a table that is cut along the embedding dimension would leave all activations cut that way, and
    every device would compute all rows. From a whole table they are split by rows, and XLA gathers layer by layer.
    """
    gathered = {name: params[name] for name in ('embed', 'lm_head') if name in params}
    return params | jax.lax.with_sharding_constraint(gathered, replicated(mesh))


def put_params(mesh: Mesh, params: PyTree) -> PyTree:
    """Place loaded parameters (NumPy or JAX) on the mesh, each device receiving its part only."""
    return jax.device_put(params, shardings(mesh, params))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """For leaves [B, ...] of a micro-batch: rows over all devices."""
    return NamedSharding(mesh, P(('data', 'fsdp')))


def put_batch(mesh: Mesh, batch: PyTree) -> PyTree:
    """Place a micro-batch [B, ...] on the mesh. ValueError when the devices do not divide its B rows."""
    rows = jax.tree.leaves(batch)[0].shape[0]
    if rows % mesh.size:
        raise ValueError(f'a micro-batch of {rows} rows cannot be split over {mesh.size} devices')
    return jax.device_put(batch, batch_sharding(mesh))

"""One run on several hosts: each plays its share of the groups, all learn from all of them.

Every host runs the same program (JAX's multi-controller model). Its environment workers play every H-th group; the episodes
are then exchanged, so that all hosts hold the same groups in the same order and build the same batches, of which each puts
its rows on its devices. Rollouts need no lock-step: each host samples from its own copy of the parameters (parameters /
devices of one host on each device); a model that does not fit one host's devices would need a sampler in lock-step instead.
With one host, nothing here does anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from covsero_jax import rollout, sharding
from covsero_jax.trajectory import Group, OracleBranch, Root

PyTree = Any


class HostError(RuntimeError):
    """The hosts of a run did not find each other, or one of them is gone."""


def connect(coordinator: str = '', num_processes: int = 0, process_id: int = -1, timeout_s: int = 60) -> None:
    """Join the other hosts; without a coordinator, as the cluster's environment says (TPU pods, SLURM, GKE).

    timeout_s: how long to wait for the others at the start, and for signs of life from each later. Must run before JAX
    is used. Raises HostError.
    """
    if bool(coordinator) != (num_processes > 0 and process_id >= 0) or process_id >= max(num_processes, 1):
        raise HostError('--coordinator=HOST:PORT, --num_processes=N and --process_id=0..N-1 belong together')
    given = {'coordinator_address': coordinator, 'num_processes': num_processes, 'process_id': process_id} if coordinator else {}
    try:
        jax.distributed.initialize(
            **given, initialization_timeout=timeout_s, heartbeat_timeout_seconds=timeout_s, shutdown_timeout_seconds=timeout_s)
    except (RuntimeError, ValueError) as error:
        raise HostError(f'the hosts did not find each other within {timeout_s} s ({str(error).splitlines()[0]}); every host must '
                        'be started with the same command and its own --process_id') from error


@contextlib.contextmanager
def ending_together(workdir: os.PathLike) -> Iterator[None]:
    """With several hosts: an error of one ends all, soon and with one line, however the others wait for it."""
    try:
        yield
    except Exception as error:
        if count() == 1:
            raise
        lost = isinstance(error, jax.errors.JaxRuntimeError)
        what = 'another host of this run is gone' if lost else 'this host failed, and with it the run'
        if not lost:
            traceback.print_exc()
        print(f'error: {what} ({type(error).__name__}: {str(error).splitlines()[0][:300]}). Start the same command on all hosts '
              f'again: the run in {workdir} continues after its last checkpoint.', file=sys.stderr, flush=True)
        os._exit(1)  # an ordinary end would wait for the others


def count() -> int:
    return jax.process_count()


def is_main() -> bool:
    """Whether this host writes logs, metrics and trajectories."""
    return jax.process_index() == 0


def my_share(num: int) -> range:
    """Which of `num` things are this host's: every H-th."""
    return range(jax.process_index(), num, count())


def exchange(value: Any) -> list[Any]:
    """Every host's value (anything that pickles), in the order of hosts. All hosts must call this together."""
    if count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([len(data)], np.int64)).ravel()
    padded = np.pad(data, (0, int(lengths.max()) - len(data)))
    rows = multihost_utils.process_allgather(padded).reshape(count(), -1)
    return [pickle.loads(rows[host, :length].tobytes()) for host, length in enumerate(lengths)]


def collect_groups(pool, policy, prompts, task_ids: Sequence[int], *, group_ids: Sequence[int] | None = None, **kwargs) -> list[Group]:
    """`rollout.collect_groups`, each host playing its share: the groups that one host would get, on every host.

    A snapshot of an environment stays on the host that made it.
    """
    if count() == 1:
        return rollout.collect_groups(pool, policy, prompts, task_ids, group_ids=group_ids, **kwargs)
    group_ids = range(len(task_ids)) if group_ids is None else group_ids
    mine = my_share(len(task_ids))
    played = rollout.collect_groups(pool, policy, prompts, [task_ids[i] for i in mine], group_ids=[group_ids[i] for i in mine],
                                    **kwargs) if len(mine) else []
    shares = exchange([_without_snapshots(group) for group in played])
    shares[jax.process_index()] = played
    return [shares[i % count()][i // count()] for i in range(len(task_ids))]


def my_roots(roots: Sequence[Root]) -> list[int]:
    """Positions of the roots from which this host's oracle starts: those it has a snapshot of, else every H-th."""
    if count() > 1 and any(exchange(any(root.snapshot is not None for root in roots))):
        return [i for i, root in enumerate(roots) if root.snapshot is not None]
    return list(my_share(len(roots)))


def merge_branches(mine: Sequence[int], branches: Sequence[OracleBranch], num_roots: int) -> list[OracleBranch]:
    """All hosts' branches in the order of the roots."""
    if count() == 1:
        return list(branches)
    bare = [dataclasses.replace(branch, root=dataclasses.replace(branch.root, snapshot=None)) for branch in branches]
    found = dict(pair for share in exchange(list(zip(mine, bare, strict=True))) for pair in share)
    return [found[i] for i in range(num_roots)]


def local_copy(mesh: Mesh, params: PyTree) -> tuple[Mesh, PyTree]:
    """This host's devices as a mesh, and its own copy of the parameters there; with one host, what was given."""
    if count() == 1:
        return mesh, params
    tensor = mesh.shape['tensor']
    by_host = sorted(mesh.devices.flat, key=lambda device: device.process_index)
    copies = sharding.make_mesh(data=count(), fsdp=len(by_host) // count() // tensor, tensor=tensor, devices=by_host)
    own = [device for device in by_host if device.process_index == jax.process_index()]
    local = sharding.make_mesh(data=1, fsdp=len(own) // tensor, tensor=tensor, devices=own)

    def to_local(x: jax.Array) -> jax.Array:
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        where = NamedSharding(local, x.sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, where, [shards[device] for device in where.mesh.devices.flat])

    copied = jax.jit(lambda x: x, out_shardings=sharding.shardings(copies, params))(params)
    return local, jax.tree.map(to_local, copied)


def fetch(tree: PyTree) -> PyTree:
    """Arrays to the host, whole, wherever their shards are. All hosts must call this together."""
    if count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)


def _without_snapshots(group: Group) -> Group:
    return dataclasses.replace(group, trajectories=tuple(
        dataclasses.replace(trajectory, steps=tuple(dataclasses.replace(step, snapshot=None) for step in trajectory.steps))
        for trajectory in group.trajectories))

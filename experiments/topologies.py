"""Slices of TPUs that programs can be compiled for without having one, and what their chips can do.

libtpu compiles for a topology by its name (`v5e:4x4`) on a machine that has only CPUs. `cpu:N` is N devices of the host
itself: it shows how a program is partitioned, but not what a TPU's compiler would make of it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import jax

from experiments import environments

# libtpu asks the cloud's metadata server which machine this is; there is none. The values do not limit what is compiled for.
_ENVIRONMENT = {'TPU_SKIP_MDS_QUERY': '1', 'TPU_ACCELERATOR_TYPE': 'v5litepod-8', 'TPU_WORKER_HOSTNAMES': 'localhost',
                'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'}  # two plans at a time: no chip is touched


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip, and the memory that the compiler says it has when a program is too large."""

    hbm_gib: float
    usable_gib: float
    flops: float  # per second, bfloat16
    bandwidth: float  # bytes of HBM per second


CHIPS = {
    'v5e': Chip(16, 15.75, 197e12, 819e9),
    'v5p': Chip(95, 95.74, 459e12, 2765e9),
    'v6e': Chip(32, 31.25, 918e12, 1640e9),
}
_SQUARE = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
LAYOUTS = {'v5e': _SQUARE, 'v6e': _SQUARE, 'v5p': ('2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4', '4x4x8', '4x8x8', '8x8x8')}


def check(name: str) -> tuple[Chip | None, int]:
    """(chip, None for the host's CPU; number of chips) of a topology. Raises ConfigError with the known ones."""
    kind, _, layout = name.partition(':')
    if kind == 'cpu' and layout.isdecimal() and int(layout):
        return None, int(layout)
    if layout not in LAYOUTS.get(kind, ()):
        known = '; '.join(f'{kind}:{{{",".join(layouts)}}}' for kind, layouts in LAYOUTS.items())
        raise environments.ConfigError(f'--topology={name}: there are {known}; cpu:N (N devices of this machine)')
    return CHIPS[kind], math.prod(map(int, layout.split('x')))


def devices(name: str) -> Sequence[jax.Device]:
    """The devices of a topology, to make a mesh of. ConfigError when libtpu, or enough CPU devices, are missing.

    Must run before JAX starts its backend: this process then computes on its CPU, whatever accelerator it has.
    """
    chip, number = check(name)
    jax.config.update('jax_platforms', 'cpu')
    if chip is None:
        if jax.device_count() < number:
            raise environments.ConfigError(f'--topology={name}: JAX sees {jax.device_count()} CPU device(s); start again with '
                                           f'XLA_FLAGS=--xla_force_host_platform_device_count={number}')
        return jax.devices()[:number]
    libtpu_version()
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform='tpu', topology_name=name).devices


def libtpu_version() -> str:
    """The version of the compiler. Raises ConfigError that says how to install it."""
    try:
        import libtpu
    except ImportError as error:
        raise environments.ConfigError('compiling for a TPU needs its compiler, libtpu (it runs on any x86-64 Linux machine); '
                                       'run  pip install "jax[tpu]"') from error
    return libtpu.__version__

"""Eight fake CPU devices for every test; strict broadcasting; no compilation cache shared between runs."""

from __future__ import annotations

import os

_USER_FLAGS = os.environ.get('XLA_FLAGS')
os.environ['XLA_FLAGS'] = f'{_USER_FLAGS or ""} --xla_force_host_platform_device_count=8'  # read when the backend starts

import jax  # noqa: E402

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_enable_compilation_cache', False)
assert jax.device_count() == 8  # starts the backend, so the variable can go: child processes see one device, as users do

if _USER_FLAGS is None:
    del os.environ['XLA_FLAGS']
else:
    os.environ['XLA_FLAGS'] = _USER_FLAGS

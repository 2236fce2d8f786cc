"""Eight fake CPU devices for every test; strict broadcasting; no compilation cache shared between runs.

Tests spend their time compiling, so LLVM's optimisations are off: XLA's own passes, and with them the compiled program's
structure and rounding, stay as users have them.
"""

from __future__ import annotations

import os

_USER_FLAGS = os.environ.get('XLA_FLAGS')
_TEST_FLAGS = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
os.environ['XLA_FLAGS'] = f'{_USER_FLAGS or ""} {_TEST_FLAGS}'  # read when the backend starts

import jax

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_enable_compilation_cache', False)

# Counting starts the backend, which reads the variable. It can go then: child processes see one device, as users do.
assert jax.device_count() == 8

if _USER_FLAGS is None:
    del os.environ['XLA_FLAGS']
else:
    os.environ['XLA_FLAGS'] = _USER_FLAGS

"""Where generated and compiled data is kept between runs."""

from __future__ import annotations

import os
import pathlib


def folder() -> pathlib.Path:
    """Where caches and generated games are written: the variable COVSERO_CACHE, or ~/.cache/covsero_jax."""
    return pathlib.Path(os.environ.get('COVSERO_CACHE') or '~/.cache/covsero_jax').expanduser()

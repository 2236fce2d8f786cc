"""Where generated and compiled data is kept between runs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator


def folder() -> pathlib.Path:
    """Where caches and generated games are written: the variable COVSERO_CACHE, or ~/.cache/covsero_jax."""
    return pathlib.Path(os.environ.get('COVSERO_CACHE') or '~/.cache/covsero_jax').expanduser()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file to write beside `path`, which then takes its place: whole or not at all, also when several write at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'{path.name}.{os.getpid()}-{threading.get_ident()}.part')
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

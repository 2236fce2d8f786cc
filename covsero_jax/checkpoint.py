"""Checkpoints that hold everything a run needs to go on as if it had never stopped.

Two folders: `checkpoints/` with the last few updates, `best/` with the best by validation success. Every random draw of
a run is a function of (seed, update, ...), so parameters, optimizer state and the number of finished updates are all
there is to save. Orbax writes to a temporary name and renames: a crash leaves the previous checkpoint in place.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or does not fit; the message says where, and what is still there."""


class Checkpoints:
    """`folder` is the run's; keep: how many recent checkpoints stay."""

    def __init__(self, folder: str | pathlib.Path, *, keep: int = 2):
        self._folder = pathlib.Path(folder).resolve()
        self._recent = self._manager('checkpoints', keep)
        self._best = self._manager('best', 1)

    def _manager(self, name: str, keep: int) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        return ocp.CheckpointManager(self._folder / name, options=options)

    def save(self, update: int, state: Any, loop: dict[str, Any], *, best: bool = False) -> None:
        """Write `state` (a pytree) and `loop` (JSON values) after `update` finished updates. Raises CheckpointError."""
        manager = self._best if best else self._recent
        if update in manager.all_steps():
            return
        try:
            manager.save(update, args=ocp.args.Composite(state=ocp.args.StandardSave(state),
                                                         loop=ocp.args.JsonSave(loop)), force=True)
            manager.wait_until_finished()
        except Exception as error:  # a full disk surfaces as OSError, ValueError or a tensorstore error
            raise CheckpointError(
                f'checkpoint {manager.directory / str(update)} could not be written ({type(error).__name__}: {error}). '
                f'The last whole one is {self.latest()}; free some space and start the same command again.') from error

    def latest(self) -> int | None:
        """Number of finished updates in the newest whole checkpoint."""
        return self._recent.latest_step()

    def loop(self, update: int, *, best: bool = False) -> dict[str, Any]:
        """The JSON part alone: cheap, to check that a checkpoint fits before restoring it."""
        manager = self._best if best else self._recent
        return dict(manager.restore(update, args=ocp.args.Composite(loop=ocp.args.JsonRestore()))['loop'])

    def restore(self, update: int, like: Any, *, best: bool = False) -> Any:
        """The state of `update`, with the shapes, dtypes and shardings of `like` (arrays or ShapeDtypeStructs)."""
        manager = self._best if best else self._recent
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            return manager.restore(update, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))['state']
        except Exception as error:
            raise CheckpointError(
                f'checkpoint {manager.directory / str(update)} does not fit this model or is damaged '
                f'({type(error).__name__}: {error})') from error

    def best_update(self) -> int | None:
        return self._best.latest_step()

    def close(self) -> None:
        self._recent.close()
        self._best.close()

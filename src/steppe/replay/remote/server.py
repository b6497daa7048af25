"""A replay shard: one buffer of a pool, in its own role, that serves the learner's RemoteReplayPool (client.py)."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.array_checks import as_column, require_below, require_finite, require_shape
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import SteppeError
from steppe.core.io import codec
from steppe.core.io.atomic_files import raising_disk_full
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.sequence_windows import SequenceReplay
from steppe.replay.store.files import FORMAT, PoolDescription, read_save, write_save


class ReplayShard:
    """Own the rows of one buffer and serve requests; with `sequences`, sampled rows are sequence starts."""

    def __init__(self, pool: ReplayBufferPool, sequences: SequenceReplay | None) -> None:
        self.pool, self.store, self.sequences = pool, pool.store, sequences
        self._handlers: dict[str, Callable[..., Tree]] = {
            "write": self._write,
            "draw": self._draw,
            "prioritize": self._prioritize,
            "state": self._state,
            "save": self._save,
            "restore": self._restore,
        }
        self.store.load()

    def handle(self, request: codec.Buffer) -> bytes:
        """Handle a packed request and return the packed reply.

        The reply includes the priority sum and size that sampling depends on, or the error, which the client raises.
        """
        arguments = codec.unpack(request, sealed=False)
        try:
            reply = self._handlers[arguments.pop("do")](**arguments)
        except Exception as error:  # noqa: BLE001 - the client raises it
            message = str(error) if isinstance(error, SteppeError) else "".join(traceback.format_exception(error))
            return codec.pack({"error": type(error).__name__, "message": message}, sealed=False)
        store = self.store
        total = 0.0 if store.tree is None else float(store.tree.totals[0])
        return codec.pack({**reply, "total": total, "size": len(store), "stale": store.stale}, sealed=False)

    def _write(self, rows: Tree, priorities: np.ndarray | None, largest: float) -> Tree:
        if largest != self.store.max_priority:
            self.store.set_max_priority(largest)
        self.store.write(0, rows, priorities)
        return {}

    def _draw(self, at: np.ndarray) -> Tree:
        if self.store.tree is None:
            at = as_column(at, "at", "int64")
            require_below(at, "at", (max(1, len(self.store)),))
        else:
            at = as_column(at, "at", "float64")
            require_finite(at, "at")
        require_shape(at, "at", (at.size,))
        slots, leaves = self.store.find(at)
        reply: Tree = {"indices": self.store.describe(slots, leaves, 0.0)[0], "leaves": leaves}
        if self.sequences is None:
            return {**reply, "columns": self.store.gather(slots)}
        into = self.sequences.batch_buffer(len(slots))
        return {**reply, "states": self.sequences.fill_windows(slots, into), "columns": into.columns}

    def _prioritize(self, indices: np.ndarray, priorities: np.ndarray) -> Tree:
        self.store.update_priorities(indices, priorities)
        return {}

    def _state(self) -> Tree:
        return {"state": self.store.state()}

    def _save(self, save: str, before: str | None) -> Tree:
        description = PoolDescription(FORMAT, 1, self.pool.buffer_capacity, self.pool.use_prioritized)
        with raising_disk_full(Path(save)):
            write_save(
                Path(save),
                {"store": self.store.live_state()},
                description,
                Path(before) if before is not None else None,
            )
        return {}

    def _restore(self, save: str | None = None, state: Any = None) -> Tree:
        self.store.restore(read_save(Path(save))[0]["store"] if save is not None else state)
        return {}

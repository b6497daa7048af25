"""Snapshots of a store: its rings, written without a copy, and their validation when they are read back.

core/io/row_chunks.py maps rows to files; files.py and checkpoints add the rest of a save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.specs import FieldSpec
from steppe.core.io.rings import Ring
from steppe.core.io.row_chunks import SavedRing

if TYPE_CHECKING:
    from steppe.replay.store.store import ReplayStore

MAX_ROWS_WRITTEN = 1 << 62  # limit for counts of rows ever written, far below an int64 overflow


def live_state(store: ReplayStore) -> Tree:
    """Return a ring per buffer, one for its leaves and one for all frames; they share the store's memory."""
    parts = range(store.num_parts)
    fill = zip(store.size.tolist(), store.cursor.tolist(), store.added.tolist(), store.histories, strict=True)
    tree: Tree = {
        "rings": [Ring(f"buffer {part}", part_rows(store, part), *numbers) for part, numbers in enumerate(fill)],
        "lap": store.lap.copy(),
        "max_priority": store.max_priority,
    }
    if store.tree is not None:
        leaves = [{"leaf": store.tree.leaves[part, : store.capacity]} for part in parts]
        tree["leaves"] = [Ring(f"the tree of buffer {part}", leaves[part], store.size.item(part)) for part in parts]
    if store.frames is not None:
        kept = store.frames
        rows = {"frame": kept.data}
        tree["frames"] = Ring("frames", rows, kept.high, 0, kept.count, kept.history, stamps=kept.written)
        tree["stacked"] = list(store.stacked)
    return tree


def part_rows(store: ReplayStore, part: int) -> dict[str, np.ndarray]:
    """Return views of the columns of one part."""
    own = slice(part * store.capacity, (part + 1) * store.capacity)
    return {name: column[own] for name, column in store.columns.items()}


class SavedStore:
    """A saved `live_state`, read back except for its rows; everything but the rows is validated."""

    def __init__(self, state: Tree) -> None:
        self.rings: list[SavedRing] = state["rings"]
        self.frames: SavedRing | None = state.get("frames")
        self.stacked: list[str] = state.get("stacked", [])
        self.max_priority = float(state["max_priority"])
        self.lap = np.asarray(state["lap"], np.int64)
        self.leaves: list[np.ndarray] | None = None
        self._require_consistent()
        if "leaves" in state:
            self.leaves = [_read_leaves(*pair) for pair in zip(self.rings, state["leaves"], strict=True)]

    @property
    def capacity(self) -> int:
        return self.rings[0].record.capacity

    def fields(self) -> tuple[FieldSpec, ...]:
        """Return the fields of the saved store."""
        return tuple(self._field(name, dtype, shape) for name, dtype, shape in self.rings[0].record.columns)

    def check(self) -> None:
        """Read and verify all rows without keeping them."""
        for ring in self.rings:
            ring.check()
        if self.frames is not None:
            self.frames.check()

    def read_into(self, store: ReplayStore) -> None:
        """Read the rows into an empty store with the same fields; the store stays empty if they are corrupt."""
        for part, ring in enumerate(self.rings):
            ring.read_into(part_rows(store, part))
        if self.frames is None or store.frames is None:
            return
        high = self.frames.record.size
        for part, ring in enumerate(self.rings):
            for name in self.stacked:
                ids = part_rows(store, part)[name][: ring.record.size]
                if ids.size and not (ids.min() >= 0 and ids.max() < high):
                    raise DamagedFile(
                        f"{ring.directory} is damaged: column {name!r} of {ring.record.name} names no frames"
                    )
        store.frames.history.reset()  # must happen even if the reads below fail
        self.frames.read_into({"frame": store.frames.data})
        store.frames.restore_counts(high, self.frames.record.added)
        store.frames.history.record_save(self.frames.save, self.frames.record.added)

    def _field(self, name: str, dtype: str, shape: tuple[int, ...]) -> FieldSpec:
        if self.frames is None or name not in self.stacked:
            return FieldSpec(name, shape, dtype)
        ((_, kind, (unit, *rest)),) = self.frames.record.columns
        return FieldSpec(name, (unit * shape[0], *rest), kind, shape[0])

    def _require_consistent(self) -> None:
        """Raise DamagedFile if the metadata is inconsistent."""
        rings = self.rings
        consistent = bool(rings) and all(isinstance(ring, SavedRing) for ring in rings)
        if not consistent or not all(ring.record.columns == rings[0].record.columns for ring in rings):
            raise DamagedFile(f"{self._location()} is damaged: its buffers are not alike")
        capacity = self.capacity
        for ring in rings:
            saved = ring.record
            if saved.capacity != capacity or (saved.cursor != saved.size and saved.size < capacity):
                raise DamagedFile(f"{self._location()} contradicts itself about the fill of {saved.name}")
        numbers = [ring.record.added for ring in rings]
        laps = (
            self.lap.shape == (len(rings),)
            and (self.lap >= 0).all()
            and (self.lap < MAX_ROWS_WRITTEN // capacity).all()
        )
        if max(numbers) >= MAX_ROWS_WRITTEN or not laps or not 0 < self.max_priority < np.inf:
            raise DamagedFile(f"{self._location()} is damaged: it does not say how many rows were ever written")
        if self.frames is not None:
            self._require_frames(self.frames)

    def _require_frames(self, frames: SavedRing) -> None:
        ids = {name: (dtype, shape) for name, dtype, shape in self.rings[0].record.columns}
        stacks = [ids.get(name, ("", ())) for name in self.stacked]
        whole = isinstance(frames, SavedRing) and len(frames.record.columns) == 1 and frames.record.columns[0][2]
        if not whole or not stacks or any(dtype != "int32" or len(shape) != 1 for dtype, shape in stacks):
            raise DamagedFile(f"{self._location()} is damaged: its columns of frames are not such")

    def _location(self) -> str:
        first = next((ring for ring in self.rings if isinstance(ring, SavedRing)), None)
        return str(first.directory) if first is not None else "what was saved"


def _read_leaves(ring: SavedRing, saved: SavedRing) -> np.ndarray:
    """Return the validated leaves of a saved ring."""
    values = np.empty(ring.record.size, np.float32)
    if saved.record.columns != (("leaf", "float32", ()),) or saved.record.size != len(values):
        raise DamagedFile(f"{saved.directory} is damaged: it has not one priority for each row of {ring.record.name}")
    saved.read_into({"leaf": values})
    if not (np.isfinite(values) & (values >= 0)).all():
        raise DamagedFile(f"{saved.directory} is damaged: {saved.record.name} holds something else than priorities")
    return values


def restore_counters(store: ReplayStore, saved: SavedStore) -> None:
    """Restore fill, laps and leaves of a store whose rows have been read."""
    store.rings[...] = [[getattr(r.record, key) for r in saved.rings] for key in ("size", "cursor", "added")] + [
        saved.lap.tolist()
    ]
    for part, ring in enumerate(saved.rings):
        store.histories[part].record_save(ring.save, ring.record.added)
        if store.tree is not None and saved.leaves is not None and len(saved.leaves[part]):
            store.tree.fill_all(part, 0, len(saved.leaves[part]), saved.leaves[part])
    if store.frames is not None:
        for part, ring in enumerate(saved.rings):
            for name in store.stacked:
                store.frames.add_references(part_rows(store, part)[name][: ring.record.size])
        store.frames.rebuild_free_list()

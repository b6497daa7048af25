"""Storage of experience: columns preallocated from field specs, written as rings, sampled uniformly or by priority.

All buffers, the pool and the learner's memories use a ReplayStore, so there is one way to write and one to sample. A
store has `num_parts` rings over one set of columns. Row `part * capacity + position` is called a slot. Sampling from
all parts samples over all their rows, whatever their fill. Callers refer to a row by its index (see `describe`), which
is never reused. The store is thread-safe: each call holds one lock. Dictionaries, files and rate limits are handled
elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter, setitem
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.array_checks import as_column
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import FieldSpec
from steppe.core.io.rings import SaveHistory
from steppe.replay.kernels.priority_draw import sample_by_priority, update_leaves
from steppe.replay.kernels.ring_index import compute_indices_and_weights, resolve_priority_update, sample_uniform
from steppe.replay.kernels.sumtree import SumTree
from steppe.replay.store import snapshot
from steppe.replay.store.columns import make_columns
from steppe.replay.store.frames import FrameStore, find_frame_stacks, frame_shape
from steppe.replay.store.gather import BatchBuffer, BatchGatherer

Block = Mapping[str, np.ndarray]  # columns of equal length
ArrayLike = Any  # one number per row: an array, a list or a tensor
_put: Callable[[np.ndarray, slice, np.ndarray], None] = setitem  # type: ignore[assignment]  # typed for sequences only
NO_LEAVES = np.empty(0, np.float32)
NO_POSITIVE_PRIORITY = "every priority is 0, so nothing can be drawn: give one that is positive"
STACK_CHUNK_ROWS = 128  # rows whose frames are stored before the frames of the replaced rows are released


class ReplayStore:
    """`num_parts` rings of `capacity` rows each; with `alpha`, rows are sampled in proportion to priority ** alpha.

    With `disk`, a directory, the columns are files there and the page cache decides which rows are in memory.
    """

    def __init__(
        self, capacity: int, num_parts: int = 1, *, alpha: float | None = None, disk: Path | None = None
    ) -> None:
        if capacity < 1 or num_parts < 1:
            raise UsageError(f"a buffer needs room for at least one experience, not {capacity} × {num_parts}")
        self.capacity, self.num_parts, self.alpha, self.disk = capacity, num_parts, alpha, disk
        self.shift = (num_parts - 1).bit_length()  # an index is row number << shift | part
        self.lock = threading.RLock()
        self.tree = None if alpha is None else SumTree(capacity, num_parts)
        self.fields: tuple[FieldSpec, ...] = ()
        self.columns: dict[str, np.ndarray] = {}
        self.frames: FrameStore | None = None
        self.histories = [SaveHistory() for _ in range(num_parts)]  # reset by any change other than appending
        self.stale = 0  # priority updates ignored because their rows had been overwritten
        self.rings = np.zeros((4, num_parts), np.int64)
        self.size, self.cursor, self.added, self.lap = self.rings  # views; cursor: position of the next row
        self._counts = self.size.data, self.cursor.data, self.added.data  # memoryviews: faster access from Python
        self.lap.fill(-1)  # clear() below starts lap 0, in which a row number equals its position
        self.stacked: tuple[str, ...] = ()  # columns that hold frame ids
        self._filled = 0
        self.clear()

    def __len__(self) -> int:
        return self._filled

    def clear(self, part: int | None = None) -> None:
        """Remove all rows, or those of one part; the columns stay, and indices of removed rows are never reused."""
        with self.lock:
            for cleared in range(self.num_parts) if part is None else (part,):
                if self.frames is not None:
                    self._release_frames(self._filled_slots(cleared))
                self.histories[cleared].reset()
                self.size[cleared] = self.cursor[cleared] = self.added[cleared] = 0
                self.lap[cleared] += 1
                if self.tree is not None:
                    self.tree.fill_all(cleared, 0, self.capacity, np.zeros(1, np.float32))
            if part is None:
                self.set_max_priority(1.0)
            self._filled = int(self.size.sum())  # cached: the learner reads it several times per update

    def allocate(self, fields: Sequence[FieldSpec]) -> None:
        """Allocate the columns; memory pages are touched only when rows are written."""
        rows = self.capacity * self.num_parts
        frame, stacked = find_frame_stacks(fields)
        try:
            self.columns = make_columns(fields, rows, interleaved=self.tree is not None, disk=self.disk)
        except (MemoryError, ValueError):  # ValueError: more bytes than the address space
            need = rows * sum(f.nbytes for f in fields)
            raise ConfigError(
                f"{rows:,} experiences need {need:,} bytes, which cannot be had: lower the size"
            ) from None
        if frame is not None:
            self.frames = FrameStore(rows, frame.frames * len(stacked), frame_shape(frame), frame.dtype, self.disk)
        self.fields, self.stacked = tuple(fields), stacked
        self._bind()

    def _bind(self) -> None:
        """Prepare what depends on the addresses of the columns, which must not move from now on."""
        names = tuple(self.columns)
        self.select_columns = itemgetter(*names) if len(names) > 1 else lambda block: (block[names[0]],)
        self._arrays = tuple(self.columns.values())
        self._gatherer = BatchGatherer(self.fields, self.columns, self.stacked, self.frames)

    def write(self, part: int, block: Block, priorities: np.ndarray | None = None) -> int:
        """Append rows to one part, overwriting its oldest ones if it is full; return their number.

        `block` must match the fields.
        """
        return self.append(part, self.select_columns(block), priorities)

    def append(self, part: int, rows: Sequence[np.ndarray], priorities: np.ndarray | None = None) -> int:
        """Append rows given as a sequence of columns in field order; return their number.

        Without priorities, rows get the largest one seen so far, so that each is sampled soon.
        """
        count = len(rows[0])
        with self.lock:
            leaves = self._initial_leaf if priorities is None else self._leaves(priorities, count)
            if self.stacked:
                self._append_stacks(part, rows, count, leaves)
            else:
                self._write_rows(part, rows, count, leaves)
        return count

    def _append_stacks(self, part: int, rows: Sequence[np.ndarray], count: int, leaves: np.ndarray) -> None:
        assert self.frames is not None
        step = min(STACK_CHUNK_ROWS, self.capacity)
        for first in range(0, count, step):
            length = min(step, count - first)
            chunk = [values[first : first + length] for values in rows]
            taken: list[np.ndarray] = []
            stacks = [(index, f.frames) for index, f in enumerate(self.fields) if f.name in self.stacked]
            try:
                for index, frames in stacks:
                    chunk[index] = self.frames.put(chunk[index], frames)
                    taken.append(chunk[index])
            except UsageError as error:
                for ids in taken:
                    self.frames.drop(ids)
                if not first:
                    raise
                raise UsageError(f"{error}; the first {first} of these experiences are stored") from None
            self._write_rows(part, chunk, length, leaves if len(leaves) <= 1 else leaves[first : first + length])

    def _write_rows(self, part: int, rows: Sequence[np.ndarray], count: int, leaves: np.ndarray) -> None:
        """Write rows in stored form (frame ids in place of stacks), and their leaves: one per row, or one for all."""
        (size, cursor, added), capacity = self._counts, self.capacity
        start = cursor[part]
        end = start + count
        if end > capacity:
            self._write_wrapped(part, rows, count, leaves)
            return
        filled, first = size[part], part * capacity + start
        if self.frames is not None:
            self._release_frames(slice(first, part * capacity + min(end, filled)))
        # `column[slots] = values` for all columns, without a Python loop.
        any(map(_put, self._arrays, repeat(slice(first, first + count)), rows))
        if self.tree is not None:
            self.tree.extend(part, start, end, leaves)
        cursor[part] = end
        if end == capacity:
            cursor[part] = 0
            self.lap[part] += 1
        added[part] += count
        if filled < capacity:
            size[part] = grown = min(capacity, filled + count)
            self._filled += grown - filled

    def _write_wrapped(self, part: int, rows: Sequence[np.ndarray], count: int, leaves: np.ndarray) -> None:
        """Write rows in chunks that end at the end of the ring."""
        first, free_rows = 0, self.capacity - self.cursor.item(part)
        while first < count:
            chunk = slice(first, min(first + free_rows, count))
            own = leaves if len(leaves) <= 1 else leaves[chunk]
            self._write_rows(part, [values[chunk] for values in rows], chunk.stop - first, own)
            first, free_rows = chunk.stop, self.capacity

    def _release_frames(self, slots: slice | np.ndarray) -> None:
        assert self.frames is not None
        for name in self.stacked:
            self.frames.drop(self.columns[name][slots])

    def draw(self, stream: np.random.Generator, count: int, part: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sample `count` slots with replacement; return them and their leaves (empty without alpha).

        The store, or that part of it, must not be empty.
        """
        first, last = (0, self.num_parts) if part is None else (part, part + 1)
        with self.lock:
            if self.tree is not None:
                drawn = self.tree.descend(stream.random(count), first, last, self._gatherer.sources)
                if drawn is None:
                    raise UsageError(NO_POSITIVE_PRIORITY)
                return drawn
            slots = np.empty(count, np.int64)
            sample_uniform(self.rings, self.capacity, first, last, stream.random(count), self._gatherer.sources, slots)
            return slots, NO_LEAVES

    def find(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return slots and leaves of the first part, like `draw`, for positions that the caller sampled.

        `at` holds offsets into the sum of its leaves or, without priorities, row numbers.
        """
        return (at, NO_LEAVES) if self.tree is None else self.tree.find(0, at, self._gatherer.sources)

    @property
    def can_sample(self) -> bool:
        """Whether any row has a priority above 0."""
        return self.tree is not None and bool(self.tree.totals.any())

    def take(
        self,
        stream: np.random.Generator,
        count: int,
        beta: float,
        part: int | None = None,
        batch_buffer: BatchBuffer | None = None,
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None, np.ndarray | None]:
        """Sample `count` rows; with priorities, also return their importance weights and indices, else None.

        Combines `draw`, `gather` and `describe`. The store, or that part of it, must have at least `count` rows.
        """
        with self.lock:
            _require_enough(count, self._filled if part is None else self._counts[0][part])
            if self.tree is None:
                return self.gather(self.draw(stream, count, part)[0], batch_buffer), None, None
            gathering, parts = self._gatherer, (0, self.num_parts) if part is None else (part, part + 1)
            layout, block = gathering.allocate(count, batch_buffer)
            slots, indices, weights = layout.slots, np.empty(count, np.int64), np.empty(count, np.float32)
            draws, plans = stream.random(out=layout.draws), (gathering.sources, layout.plan)
            tree = self.tree.unsettled
            if not sample_by_priority(
                *tree, self.rings, self.shift, parts, draws, beta, *plans, block, slots, indices, weights
            ):
                raise UsageError(NO_POSITIVE_PRIORITY)
            return gathering.finished(slots, layout, block, batch_buffer), weights, indices

    def batch(self, stream: np.random.Generator, count: int, batch_buffer: BatchBuffer, beta: float) -> Batch:
        """Sample `count` rows into the arrays of `batch_buffer`."""
        columns, weights, indices = self.take(stream, count, beta, batch_buffer=batch_buffer)
        return Batch(columns, weights=weights, indices=indices)

    def batch_buffer(self, count: int) -> BatchBuffer:
        """Return reusable memory for `count` rows, to be filled by `gather`."""
        return self._gatherer.batch_buffer(count)

    def gather(self, slots: np.ndarray, batch_buffer: BatchBuffer | None = None) -> dict[str, np.ndarray]:
        """Return the rows at `slots`, with frame stacks rebuilt, in unshared arrays or in those of `batch_buffer`."""
        with self.lock:
            return self._gatherer(slots, batch_buffer)

    def describe(self, slots: np.ndarray, leaves: np.ndarray, beta: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices and importance weights of sampled slots.

        An index is (lap · capacity + position) · 2 ** shift + part. The lap counts how often the ring wrapped around or
        was cleared, so an index shows whether its row has been overwritten since it was sampled.
        """
        indices, weights = np.empty(len(slots), np.int64), np.empty(len(slots), np.float32)
        compute_indices_and_weights(self.rings, self.capacity, self.shift, beta, slots, leaves, indices, weights)
        return indices, weights

    def slots_of(self, indices: np.ndarray) -> np.ndarray:
        """Return the slots of rows by their indices (int64, one axis); -1 if a row is overwritten or never existed."""
        slots = np.full(len(indices), -1)
        resolve_priority_update(
            self.rings, self.capacity, self.shift, 1.0, indices, np.empty(0), slots, np.empty(0, np.float32)
        )
        return slots

    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike, part: int | None = None) -> None:
        """Set the priorities of rows by their indices or, with `part`, by their row numbers within that part.

        Priorities must be finite and not negative; with 0 a row is never sampled. Updates of rows that were overwritten
        are ignored and counted in `stale`.
        """
        if self.tree is None or self.alpha is None:
            raise UsageError("this buffer draws uniformly and has no priorities: make a prioritized one")
        indices, priorities = as_column(indices, "indices", np.int64), as_column(priorities, "priorities", np.float64)
        if indices.ndim != 1:
            raise UsageError(f"indices are a list or an array with one axis, not of shape {indices.shape}")
        if part is not None and self.shift:
            indices = (indices << self.shift) + part
        count = len(indices)
        if priorities.shape != (count,):
            raise UsageError(f"{count} indices need {count} priorities, not an array of shape {priorities.shape}")
        with self.lock:
            tree = self.tree.unsettled
            unknown, largest, stale = update_leaves(*tree, self.rings, self.shift, self.alpha, indices, priorities)
            if unknown >= 0:
                raise UsageError(f"index {indices[unknown]} was never sampled: use the indices that came with a sample")
            self._require_valid_priority(largest)
            self.stale += stale
            if largest > self.max_priority:
                self.set_max_priority(largest)

    def load(self) -> None:
        """Load the compiled kernels now, not with the first batch: loading takes as long as thousands of batches."""
        nothing = np.empty(0, np.int64)
        self.gather(nothing)
        if self.tree is None:
            sample_uniform(self.rings, self.capacity, 0, 1, np.empty(0), self._gatherer.sources, nothing)
        else:
            self.tree.descend(np.empty(0), 0, 1)
            self.describe(nothing, NO_LEAVES, 1.0)
            self.update_priorities(nothing, np.empty(0))
            layout, block = self._gatherer.allocate(0, None)
            gather_arguments = self._gatherer.sources, layout.plan, block, nothing, nothing, NO_LEAVES
            sample_by_priority(
                *self.tree.unsettled, self.rings, self.shift, (0, 1), np.empty(0), 1.0, *gather_arguments
            )

    def slots_oldest_first(self, part: int) -> np.ndarray:
        """Return the slots of one part, oldest first."""
        size, cursor = int(self.size[part]), int(self.cursor[part])
        oldest = cursor if size == self.capacity else 0
        return part * self.capacity + (oldest + np.arange(size)) % self.capacity

    def rows(self, slots: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Return copies of rows in stored form (frame ids in place of stacks) and their leaves, for `exchange`."""
        block = {name: column[slots] for name, column in self.columns.items()}
        if self.tree is None:
            return block, None
        return block, self.tree.leaves[slots // self.capacity, slots % self.capacity]

    def exchange(self, content: Mapping[int, tuple[Block, np.ndarray | None]]) -> None:
        """Replace the content of parts by blocks of at most `capacity` rows, oldest first; `added` does not change."""
        with self.lock:
            for block, _ in content.values():  # hold first: rows may move between parts
                for name in self.stacked:
                    assert self.frames is not None
                    self.frames.add_references(block[name])
            for part, (block, leaves) in content.items():
                added, rows = int(self.added[part]), self.select_columns(block)
                self.clear(part)
                if len(rows[0]):
                    self._write_rows(part, rows, len(rows[0]), np.zeros(1, np.float32) if leaves is None else leaves)
                self.added[part] = added

    def state(self) -> Tree:
        """Return copies of all filled rows and everything else that `restore` needs."""
        with self.lock:
            slots = np.concatenate([self._filled_slots(part) for part in range(self.num_parts)])
            block, leaves = self.rows(slots)
            tree: Tree = {
                "columns": block,
                "size": self.size.copy(),
                "cursor": self.cursor.copy(),
                "added": self.added.copy(),
                "lap": self.lap.copy(),
                "max_priority": self.max_priority,
            }
            if leaves is not None:
                tree["leaves"] = leaves
            if self.frames is not None:
                used = np.flatnonzero(self.frames.refs[: self.frames.high] > 0)
                for name in self.stacked:
                    block[name] = np.searchsorted(used, block[name]).astype(np.int32)
                tree["frames"] = {"rows": self.frames.data[used], "columns": list(self.stacked)}
            return tree

    def live_state(self) -> Tree:
        """Return the state without copying rows; the caller must save it before the next row is written."""
        with self.lock:
            return snapshot.live_state(self)

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned, or a saved `live_state`.

        The columns must match those of this store, if it has any. If saved rows are corrupt, an error is raised and
        this store keeps its content.
        """
        if "rings" in state:
            self._restore_saved(snapshot.SavedStore(state))
            return
        columns: dict[str, np.ndarray] = state["columns"]
        fields = tuple(_field(name, rows, state.get("frames")) for name, rows in columns.items())
        fits = len(state["size"]) == self.num_parts and max(state["size"]) <= self.capacity
        self._require_like(fields, fits=fits, prioritized="leaves" in state)
        with self.lock:
            self.clear()
            if self.frames is not None:
                self.frames.restore(state["frames"]["rows"])
            ends = np.cumsum(state["size"]).tolist()
            spans = [slice(end - size, end) for size, end in zip(state["size"], ends, strict=True)]
            leaves = state.get("leaves")
            self.exchange(
                {
                    part: (
                        {name: rows[span] for name, rows in columns.items()},
                        None if leaves is None else leaves[span],
                    )
                    for part, span in enumerate(spans)
                }
            )
            if self.frames is not None:
                self.frames.rebuild_free_list()
            self.cursor[...], self.added[...] = state["cursor"], state["added"]
            self.lap[...] = state.get("lap", np.maximum(self.added, self.size) // self.capacity)
            self.set_max_priority(float(state["max_priority"]))

    def _restore_saved(self, saved: snapshot.SavedStore) -> None:
        fits = len(saved.rings) == self.num_parts and saved.capacity == self.capacity
        self._require_like(saved.fields(), fits=fits, prioritized=saved.leaves is not None)
        with self.lock:
            if self._filled:  # keep the present content unless all saved rows are intact
                saved.check()
            self.clear()
            saved.read_into(self)
            snapshot.restore_counters(self, saved)
            self._filled = int(self.size.sum())
            self.set_max_priority(saved.max_priority)

    def _require_like(self, fields: Sequence[FieldSpec], *, fits: bool, prioritized: bool) -> None:
        """Raise UsageError unless saved content matches this store; without columns, allocate the saved ones."""
        if not fits:
            raise UsageError("the saved buffers do not fit: use the same number of buffers and the same capacity")
        if (self.tree is not None) != prioritized:
            raise UsageError("a prioritized buffer and a uniform one cannot take over each other's content")
        if not self.fields:
            self.allocate(fields)
        if {f.name: f for f in fields} != {f.name: _stored_field(f, self.stacked) for f in self.fields}:
            raise UsageError(
                f"the saved columns {_format_fields(fields)} are not those of this buffer, {_format_fields(self.fields)}"
            )

    def _filled_slots(self, part: int) -> np.ndarray:
        slots: np.ndarray = part * self.capacity + np.arange(self.size[part])
        return slots

    def _leaves(self, priorities: np.ndarray, count: int) -> np.ndarray:
        """Return one leaf per row."""
        if self.alpha is None:
            raise UsageError("this buffer draws uniformly and has no priorities: make a prioritized one")
        priorities = np.asarray(priorities, np.float64)
        if priorities.shape != (count,):
            raise UsageError(f"{count} experiences need {count} priorities, not an array of shape {priorities.shape}")
        leaves = np.empty(count, np.float32)
        nothing = np.empty(0, np.int64)
        _, largest, _ = resolve_priority_update(
            self.rings, self.capacity, self.shift, self.alpha, nothing, priorities, nothing, leaves
        )
        self._require_valid_priority(largest)
        self.set_max_priority(max(self.max_priority, largest))
        return leaves

    def _require_valid_priority(self, largest: float) -> None:
        if largest < 0:
            raise UsageError("a priority must be a finite number that is not negative")

    def set_max_priority(self, largest: float) -> None:
        """Set the priority that new rows get by default."""
        self.max_priority = largest
        self._initial_leaf = np.empty(1, np.float32)  # leaf of rows without an explicit priority
        if self.alpha is not None:
            nothing = np.empty(0, np.int64)
            resolve_priority_update(
                self.rings, 1, 0, self.alpha, nothing, np.array([largest]), nothing, self._initial_leaf
            )


def _require_enough(count: int, size: int) -> None:
    """Raise UsageError unless `count` experiences can be sampled from `size`."""
    if not isinstance(count, int) or count < 1:
        raise UsageError(f"batch_size must be a whole number, at least 1, not {count!r}")
    if size < count:
        raise UsageError(f"cannot draw {count} experiences from {size}: add more first, or ask for fewer")


def _field(name: str, rows: np.ndarray, frames: Any) -> FieldSpec:
    """Return the field of a saved column."""
    if frames is None or name not in frames["columns"]:
        return FieldSpec(name, rows.shape[1:], rows.dtype.name)
    unit, *rest = frames["rows"].shape[1:]
    return FieldSpec(name, (unit * rows.shape[1], *rest), frames["rows"].dtype.name, rows.shape[1])


def _stored_field(field: FieldSpec, stacked: tuple[str, ...]) -> FieldSpec:
    """Return the field as it is stored: a stack that is too small to deduplicate is a plain array."""
    return field if field.name in stacked else FieldSpec(field.name, field.shape, field.dtype)


def _format_fields(fields: Sequence[FieldSpec]) -> str:
    return ", ".join(f"{f.name} {f.dtype}{list(f.shape)}" for f in fields) or "none"

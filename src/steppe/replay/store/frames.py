"""Deduplicated frames of stacked images: each frame is stored once, however many stacks contain it.

    stacks [n, 4, 84, 84]  ──put──▶  ids int32 [n, 4]   what a ReplayStore stores in place of the stacks
                                      │
    data   [F, 84, 84]     ◀──────────┘   refs: number of ids that refer to a frame; 0: its position is free

Frames are recognised by content, among recent ones. Episode boundaries, the interleaving of environments and the
padding of stacks at the start of an episode therefore do not matter: a stack is returned exactly as it was stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.specs import FieldSpec
from steppe.core.io.rings import SaveHistory
from steppe.replay.kernels.copy import compiled, copy_bytes
from steppe.replay.store.disk_columns import zeros

SLACK = 2048  # frames beyond two per row, for parallel streams and for a block that is being written
HASH_TABLE_SIZE = 1 << 18  # entries for recent frames; a collision costs memory (a duplicate frame), never correctness
MIN_FRAME_BYTES = 256  # smaller frames are stored in their stacks: their ids would take as much memory
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


class FrameStore:
    """Storage for the frames of `num_rows` rows with `per_row` frames each, where adjacent rows share most frames."""

    def __init__(
        self, num_rows: int, per_row: int, shape: tuple[int, ...], dtype: str, disk: Path | None = None
    ) -> None:
        capacity = min(per_row, 2) * num_rows + SLACK
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.frame_bytes = math.prod(shape) * self.dtype.itemsize
        try:
            self.data = zeros((capacity, *shape), dtype, disk)
        except (MemoryError, ValueError):
            need = capacity * self.frame_bytes
            raise ConfigError(
                f"{capacity:,} frames need {need:,} bytes, which cannot be allocated: lower the size"
            ) from None
        self.refs = np.zeros(capacity, np.int32)
        self.written = np.zeros(capacity, np.int64)  # value of `count` when a position was last written
        self.history = SaveHistory()
        self._word = np.uint64 if self.frame_bytes % 8 == 0 else np.uint8
        self._words = self.data.reshape(capacity, -1).view(self._word)
        self.clear()

    def __len__(self) -> int:
        """Return the number of stored frames."""
        return int(self._heads[1] - self._heads[0])

    @property
    def high(self) -> int:
        """Number of positions ever used; those beyond were never touched."""
        return int(self._heads[1])

    @property
    def count(self) -> int:
        """Number of frames ever written."""
        return int(self._heads[2])

    def clear(self) -> None:
        """Remove all frames."""
        self.history.reset()
        self.refs.fill(0)
        self._free = np.empty(len(self.refs), np.int32)
        self._heads = np.zeros(3, np.int64)  # length of the free list, `high`, `count`
        self._table = np.full(HASH_TABLE_SIZE, -1, np.int32)

    def put(self, stacks: np.ndarray, frames: int) -> np.ndarray:
        """Store the frames of `stacks` [n, frames * unit, …], or add references; return their ids [n, frames]."""
        words = np.ascontiguousarray(stacks, self.dtype).reshape(len(stacks) * frames, -1).view(self._word)
        ids = np.empty(len(words), np.int32)
        stored = _put(
            self._words, self.refs, self._free, self._heads, self.written, self._table, words, ids, self.frame_bytes
        )
        if stored < len(words):
            self.drop(ids[:stored])
            raise UsageError(
                f"these stacks share too few frames to be kept once each ({len(self):,} are kept already): successive "
                "experiences must have frames in common, or make the buffer with frame_stack=1"
            )
        return ids.reshape(len(stacks), frames)

    def add_references(self, ids: np.ndarray) -> None:
        """Add a reference to each id."""
        np.add.at(self.refs, ids.ravel(), 1)

    def drop(self, ids: np.ndarray) -> None:
        """Release a reference to each id; frames without references are freed."""
        _drop(self.refs, self._free, self._heads, np.ascontiguousarray(ids).reshape(-1))

    def restore(self, rows: np.ndarray) -> None:
        """Replace the content by `rows` at positions 0, 1, …, without references.

        Call `add_references` for the frames in use afterwards, then `rebuild_free_list`.
        """
        self.clear()
        self.data[: len(rows)] = rows
        self.written[: len(rows)] = np.arange(1, len(rows) + 1)
        self._heads[1:] = len(rows)

    def restore_counts(self, high: int, count: int) -> None:
        """Adopt the frames that were read into the first `high` positions of `data`; `count` were ever written."""
        self.clear()
        self.written[:high] = 0
        self._heads[1:] = high, count

    def rebuild_free_list(self) -> None:
        """Free all positions without references."""
        unused = np.flatnonzero(self.refs[: self.high] == 0)[::-1]
        self._free[: len(unused)] = unused
        self._heads[0] = len(unused)


def frame_shape(field: FieldSpec) -> tuple[int, ...]:
    """Return the shape of one frame of a stack."""
    return (field.shape[0] // field.frames, *field.shape[1:])


def find_frame_stacks(fields: Sequence[FieldSpec]) -> tuple[FieldSpec | None, tuple[str, ...]]:
    """Return the first field whose frames are worth deduplicating (or None), and the names of all fields like it."""
    first = next((f for f in fields if f.frames > 1 and f.nbytes >= MIN_FRAME_BYTES * f.frames), None)
    if first is None:
        return None, ()
    alike = (first.shape, first.dtype, first.frames)
    return first, tuple(f.name for f in fields if (f.shape, f.dtype, f.frames) == alike)


@compiled
def _hash_frame(words: np.ndarray, row: int) -> np.uint64:
    a, b = np.uint64(0), np.uint64(1)
    last = words.shape[1] - 1
    for i in range(0, last, 2):
        a = ((a ^ np.uint64(words[row, i])) * _MULTIPLIER) ^ (a >> _SHIFT)
        b = ((b ^ np.uint64(words[row, i + 1])) * _MULTIPLIER) ^ (b >> _SHIFT)
    a = (a ^ np.uint64(words[row, last])) * _MULTIPLIER
    mixed = (a ^ (b >> _SHIFT) ^ b) * _MULTIPLIER
    return mixed >> np.uint64(40)


@compiled
def _frames_equal(data: np.ndarray, position: np.int64, words: np.ndarray, row: int) -> bool:
    equal, i = True, 0
    while equal and i < words.shape[1]:
        equal = data[position, i] == words[row, i]
        i += 1
    return equal


@compiled
def _put(
    data: np.ndarray,
    refs: np.ndarray,
    free: np.ndarray,
    heads: np.ndarray,
    written: np.ndarray,
    table: np.ndarray,
    words: np.ndarray,
    ids: np.ndarray,
    frame_bytes: int,
) -> int:
    """Write the ids of the frames in `words`; return how many frames could be stored."""
    target, source = np.int64(data.ctypes.data), np.int64(words.ctypes.data)
    for row in range(len(words)):
        bucket = np.int64(_hash_frame(words, row)) % len(table)
        position = np.int64(table[bucket])
        if position >= 0 and refs[position] > 0 and _frames_equal(data, position, words, row):
            refs[position] += 1
            ids[row] = position
            continue
        if heads[0] > 0:
            heads[0] -= 1
            position = np.int64(free[heads[0]])
        elif heads[1] < len(data):
            position = heads[1]
            heads[1] += 1
        else:
            return row
        copy_bytes(target + position * frame_bytes, source + row * frame_bytes, frame_bytes)
        heads[2] += 1
        refs[position], written[position], table[bucket], ids[row] = 1, heads[2], position, position
    return len(words)


@compiled
def _drop(refs: np.ndarray, free: np.ndarray, heads: np.ndarray, ids: np.ndarray) -> None:
    for i in range(len(ids)):
        refs[ids[i]] -= 1
        if refs[ids[i]] == 0:
            free[heads[0]] = ids[i]
            heads[0] += 1

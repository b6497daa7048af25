"""Gather batches from columns: one compiled call fills one block of memory, which holds all columns of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any

import numpy as np

from steppe.core.contracts.specs import FieldSpec
from steppe.replay.kernels.copy import gather, gather_stacks
from steppe.replay.store.disk_columns import CACHE_LINE
from steppe.replay.store.frames import FrameStore

REUSED_BYTES = 1 << 17  # larger blocks are reused: faulting in new pages takes longer than the copy
MAX_SPARE_BLOCKS = 3
UNREFERENCED = 3  # reference count of an unused block: the list, the loop variable and getrefcount's argument
MAX_CACHED_LAYOUTS = 64
MAX_DTYPE_BYTES = 2**31 - 1  # largest itemsize of a dtype


@dataclass(frozen=True)
class BatchBuffer:
    """Memory for one batch: `columns` are views of `block`."""

    block: np.ndarray
    columns: dict[str, np.ndarray]


@dataclass(frozen=True)
class BatchLayout:
    """Memory layout of batches of one size within a block."""

    views: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...]  # name, shape, dtype, offset
    whole: np.dtype[Any] | None  # the same as one dtype: five views of it take as long as two separate arrays
    plan: np.ndarray  # for kernels/copy.gather
    stacks: np.ndarray  # offsets of stacked columns
    ids_plan: np.ndarray
    nbytes: int
    slots: np.ndarray  # reused for each batch, like `draws`, the random numbers
    draws: np.ndarray
    spare: list[np.ndarray] = field(default_factory=list)


class BatchGatherer:
    """Gather rows of fixed columns into batches. Not thread-safe: the store's lock protects it."""

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        columns: Mapping[str, np.ndarray],
        stacked: Sequence[str],
        frames: FrameStore | None,
    ) -> None:
        self._fields, self._columns, self._stacked, self._frames = tuple(fields), columns, tuple(stacked), frames
        self._num_rows = len(next(iter(columns.values())))
        self._layouts: dict[int, BatchLayout] = {}
        self.sources = _cache_line_addresses(columns.values())

    def batch_buffer(self, count: int) -> BatchBuffer:
        """Return new memory for `count` rows."""
        layout = self._layout(count)
        block = np.empty(layout.nbytes, np.uint8)
        return BatchBuffer(block, _columns(layout, block))

    def __call__(self, slots: np.ndarray, batch_buffer: BatchBuffer | None = None) -> dict[str, np.ndarray]:
        """Return the rows at `slots`, in `batch_buffer` if given."""
        layout, block = self.allocate(len(slots), batch_buffer)
        if not gather(layout.plan, self._num_rows, slots, block):
            raise IndexError(f"slots lie in [0, {self._num_rows})")
        return self.finished(slots, layout, block, batch_buffer)

    def allocate(self, count: int, batch_buffer: BatchBuffer | None) -> tuple[BatchLayout, np.ndarray]:
        """Return the layout of `count` rows and a block for them: that of `batch_buffer`, or an unused one."""
        layout = self._layout(count)
        return layout, batch_buffer.block if batch_buffer is not None else _reusable_block(layout)

    def finished(
        self, slots: np.ndarray, layout: BatchLayout, block: np.ndarray, batch_buffer: BatchBuffer | None
    ) -> dict[str, np.ndarray]:
        """Return the columns of a block whose plain columns are filled; frame stacks are rebuilt here."""
        if self._frames is not None and self._stacked:
            frames = self._frames
            ids = np.empty((len(self._stacked), len(slots), self._columns[self._stacked[0]].shape[1]), np.int32)
            gather(layout.ids_plan, self._num_rows, slots, ids.reshape(-1).view(np.uint8))
            gather_stacks(frames.data.ctypes.data, frames.frame_bytes, ids, layout.stacks, block)
        return batch_buffer.columns if batch_buffer is not None else _columns(layout, block)

    def _layout(self, count: int) -> BatchLayout:
        layout = self._layouts.get(count)
        if layout is None:
            if len(self._layouts) >= MAX_CACHED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[count] = self._make_layout(count)
        return layout

    def _make_layout(self, count: int) -> BatchLayout:
        views, plan, ids_plan, end = [], [], [], 0
        stacks: list[int] = []
        for column_field in self._fields:
            column = self._columns[column_field.name]
            dtype = np.dtype(column_field.dtype)
            views.append((column_field.name, (count, *column_field.shape), dtype, end))
            row_bytes = math.prod(column.shape[1:]) * column.dtype.itemsize
            if column_field.name in self._stacked:
                ids_plan.append((column.ctypes.data, row_bytes, row_bytes, len(stacks) * count * row_bytes))
                stacks.append(end)
            else:
                plan.append((column.ctypes.data, column.strides[0], row_bytes, end))
            end += -(-count * column_field.nbytes // CACHE_LINE) * CACHE_LINE  # columns do not share cache lines
        plans = _plan(plan), np.array(stacks, np.int64), _plan(ids_plan)
        return BatchLayout(
            tuple(views), _block_dtype(views, end), *plans, end, np.empty(count, np.int64), np.empty(count)
        )


def _cache_line_addresses(columns: Iterable[np.ndarray]) -> np.ndarray:
    """Return what to prefetch for a row: an address in each cache line of the first row, and the row stride."""
    lines = {(column.ctypes.data // CACHE_LINE, column.strides[0]): column.ctypes.data for column in columns}
    return np.array([(address, step) for (_, step), address in lines.items()], np.int64).reshape(-1, 2)


def _plan(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    return np.array(rows, np.int64).reshape(-1, 4)


def _block_dtype(views: Iterable[tuple[str, tuple[int, ...], np.dtype[Any], int]], nbytes: int) -> np.dtype[Any] | None:
    if nbytes > MAX_DTYPE_BYTES:
        return None
    names, shapes, dtypes, offsets = zip(*views, strict=True)
    formats = list(zip(dtypes, shapes, strict=True))
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": nbytes})


def _columns(layout: BatchLayout, block: np.ndarray) -> dict[str, np.ndarray]:
    if layout.whole is None:
        return {name: np.ndarray(shape, dtype, block, offset) for name, shape, dtype, offset in layout.views}
    whole: np.ndarray = np.ndarray((), layout.whole, block)
    return {name: whole[name] for name, _, _, _ in layout.views}


def _reusable_block(layout: BatchLayout) -> np.ndarray:
    """Return a block for a batch: that of an earlier batch without remaining references or views, or a new one."""
    for block in layout.spare:
        if getrefcount(block) == UNREFERENCED:
            return block
    block = np.empty(layout.nbytes, np.uint8)
    if layout.nbytes >= REUSED_BYTES and len(layout.spare) < MAX_SPARE_BLOCKS:
        layout.spare.append(block)
    return block

"""Memory layout of a store's columns: each in its own array, or all scalar columns interleaved in one array.

With interleaving, reading a sampled row loads one cache line instead of one per scalar column (a cycle of a million
prioritized rows takes 10 % less time), while writing a block of 1,024 rows takes 1 µs longer. Stores with priorities
interleave, others do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.specs import FieldSpec
from steppe.replay.store.disk_columns import zeros
from steppe.replay.store.frames import find_frame_stacks


def make_columns(
    fields: Sequence[FieldSpec], rows: int, *, interleaved: bool, disk: Path | None
) -> dict[str, np.ndarray]:
    """Return a zero-filled column per field, in order; deduplicated frame stacks get a column of int32 frame ids."""
    _, stacked = find_frame_stacks(fields)
    numbers = _scalar_fields(fields) if interleaved else []
    together = zeros((rows,), _row_dtype(numbers), disk) if numbers else None
    columns = {}
    for f in fields:
        if together is not None and f in numbers:
            columns[f.name] = together[f.name]
        elif f.name in stacked:
            columns[f.name] = zeros((rows, f.frames), "int32", disk)
        else:
            columns[f.name] = zeros((rows, *f.shape), f.dtype, disk)
    return columns


def bytes_per_row(fields: Sequence[FieldSpec], *, interleaved: bool) -> int:
    """Return the bytes of a stored row.

    Frame stacks count with their ids and 1.25 frames per row; the quarter covers the starts of episodes.
    """
    frame, stacked = find_frame_stacks(fields)
    numbers = _scalar_fields(fields) if interleaved else []
    plain = _row_dtype(numbers).itemsize + sum(f.nbytes for f in fields if f not in numbers and f.name not in stacked)
    if frame is None:
        return plain
    return plain + 4 * frame.frames * len(stacked) + 5 * frame.nbytes // (4 * frame.frames)


def _scalar_fields(fields: Sequence[FieldSpec]) -> list[FieldSpec]:
    """Return the scalar fields, largest first to minimize padding."""
    return sorted((f for f in fields if not f.shape), key=lambda f: -f.nbytes)


def _row_dtype(numbers: Sequence[FieldSpec]) -> np.dtype[Any]:
    return np.dtype({"names": [f.name for f in numbers], "formats": [f.dtype for f in numbers]}, align=True)

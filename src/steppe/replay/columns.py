"""How the columns of a store lie in memory: numbers side by side, so that one cache line has all of a row; the rest apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.specs import FieldSpec
from steppe.replay.frames import stacks_of
from steppe.replay.mapped import zeros


def make_columns(fields: Sequence[FieldSpec], rows: int, disk: Path | None) -> dict[str, np.ndarray]:
    """Zeros for each field, in order; stacks whose frames are kept apart have int32 ids instead."""
    _, stacked = stacks_of(fields)
    numbers = number_row(fields)
    side_by_side = zeros((rows,), numbers, disk) if numbers.names else np.empty(0, numbers)
    columns = {}
    for f in fields:
        if f.name in stacked:
            columns[f.name] = zeros((rows, f.frames), "int32", disk)
        else:
            columns[f.name] = zeros((rows, *f.shape), f.dtype, disk) if f.shape else side_by_side[f.name]
    return columns


def number_row(fields: Sequence[FieldSpec]) -> np.dtype[Any]:
    """The numbers of one row, the longest first, so that little is lost to alignment."""
    numbers = sorted((f for f in fields if not f.shape), key=lambda f: -f.nbytes)
    return np.dtype({"names": [f.name for f in numbers], "formats": [f.dtype for f in numbers]}, align=True)


def bytes_per_row(fields: Sequence[FieldSpec]) -> int:
    """What a row takes in a store: of stacks, their ids and a frame, with a quarter of one for the starts of episodes."""
    frame, stacked = stacks_of(fields)
    plain = number_row(fields).itemsize + sum(f.nbytes for f in fields if f.shape and f.name not in stacked)
    if frame is None:
        return plain
    return plain + 4 * frame.frames * len(stacked) + 5 * frame.nbytes // (4 * frame.frames)

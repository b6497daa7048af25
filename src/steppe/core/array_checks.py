"""Checks of arrays from outside, made once where they enter, because compiled code checks no bounds.

A batch is checked when it is passed to an agent, a segment when the learner receives it; data derived from them is not
checked again. All checks are vectorized. A caller's mistake is a UsageError, NaN or infinity is NotFinite; both name
the column, the first bad value and its index.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from steppe.core import arrays
from steppe.core.contracts.errors import NotFinite, UsageError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import FieldSpec

# Columns that built-in agents record beside their actions and compute with; user-defined agents check their own.
_POLICY_COLUMNS = frozenset({"logp", "value", "hidden"})
_FEW = 8192  # up to this many elements, BLAS stays in the calling thread


def as_numeric_array(values: Any, name: str) -> np.ndarray:
    """Return `values` as an array of floats, integers or booleans; UsageError for anything else."""
    given = arrays.to_numpy(values, repr(name))
    if given.dtype.kind not in "biuf":
        raise UsageError(f"{name!r} holds {given.dtype} values, where numbers are needed")
    return given


def as_column(values: Any, name: str, dtype: npt.DTypeLike) -> np.ndarray:
    """Return `values` as a contiguous, aligned, writable array of `dtype`, without a copy if it already is one.

    Other dtypes are converted if no integer value changes: 1.0 is an action, 1.5 is not.
    """
    wanted = np.dtype(dtype)
    # Fast path for the usual case.
    if type(values) is np.ndarray and values.dtype == wanted and values.flags.carray:
        return values
    given = as_numeric_array(values, name)
    if given.dtype == wanted and given.flags.carray:
        return given
    with np.errstate(invalid="ignore", over="ignore"):
        column = np.array(given, wanted, order="C")
        if wanted.kind in "biu" and given.dtype != wanted and not np.array_equal(column, given):
            bad = given[column != given].flat[0]
            raise UsageError(f"{name!r} has the value {bad}, which is no {wanted}")
    return column


def require_shape(column: np.ndarray, name: str, shape: tuple[int, ...]) -> None:
    """Raise UsageError unless the column has this shape."""
    if column.shape != shape:
        raise UsageError(f"{name!r} has shape {column.shape}, where {shape} is needed")


def require_below(column: np.ndarray, name: str, below: tuple[int, ...]) -> None:
    """Raise UsageError unless every element of a contiguous int64 column is at least 0 and below its bound.

    The bounds repeat over the column in memory order (FieldSpec.below).
    """
    if not column.size:
        return
    numbers = column.reshape(-1).view(np.uint64)  # negative values become very large
    if np.maximum.reduce(numbers) < min(below):
        return
    bounds = np.array(below, np.uint64)
    if numbers.size % len(bounds):
        raise UsageError(
            f"{name!r} has {numbers.size} numbers, which are not those of {len(bounds)} components or agents"
        )
    beyond = numbers.reshape(-1, len(bounds)) >= bounds
    if beyond.any():
        first = int(beyond.argmax())
        most, index_text = below[first % len(below)] - 1, _format_index(column, first)
        raise UsageError(
            f"{name!r} is {column.flat[first]}{index_text}, where whole numbers from 0 to {most} are allowed"
        )


def is_finite(column: np.ndarray) -> bool:
    """Return whether a float column has neither NaN nor infinity; one pass if it has none."""
    if column.dtype != np.float16 and column.flags.c_contiguous:
        flat, total = column.reshape(-1), 0.0
        for start in range(0, column.size, _FEW):
            part = flat[start : start + _FEW]
            total += float(np.vdot(part, part))  # unlike `dot`, `vdot` does not warn of an overflow
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.add.reduce(column, axis=None)
    return math.isfinite(total) or bool(np.isfinite(column).all())  # a sum of large finite numbers can overflow


def require_finite(column: np.ndarray, name: str) -> None:
    """Raise NotFinite if a float column has NaN or infinity."""
    if not is_finite(column):
        first = int((~np.isfinite(column)).argmax())
        raise NotFinite(
            f"{name!r} is {column.flat[first]}{_format_index(column, first)}: only finite numbers can be learned from"
        )


def require_flags(column: np.ndarray, name: str) -> None:
    """Raise UsageError if a contiguous bool column has bytes other than 0 and 1.

    Selecting rows by such a column would access memory outside the array.
    """
    if column.size and np.maximum.reduce(column.view(np.uint8), axis=None) > 1:
        raise UsageError(f"{name!r} has bytes that are neither 0 nor 1, which are no truth values")


def require_values(column: np.ndarray, name: str, field: FieldSpec) -> None:
    """Check a contiguous column against its field: bounds where it has them, finite floats, valid booleans."""
    if field.below:
        require_below(column, name, field.below)
    elif column.dtype.kind == "f":
        require_finite(column, name)
    elif column.dtype.kind == "b":
        require_flags(column, name)


def require_segment(segment: Segment) -> None:
    """Check that a segment from any transport has the columns of its spec, and that their values are valid.

    `final_obs` is checked only where an episode was cut: elsewhere it is uninitialized.
    """
    spec, num_own = segment.spec, len(segment.spec.fields) - len(segment.spec.extras)
    for index, (field, shape, dtype) in enumerate(spec.layout):
        name, column = field.name, segment.columns.get(field.name)
        if column is None or column.shape != shape or column.dtype != dtype or not column.flags.c_contiguous:
            found = "absent" if column is None else f"{column.dtype}{list(column.shape)}"
            raise UsageError(f"the segment's {name!r} is {found}, not contiguous {dtype}{list(shape)}")
        if name != "final_obs" and (index < num_own or name in _POLICY_COLUMNS or dtype.kind == "b"):
            require_values(column, name, field)
    _require_final_obs(segment)


def _require_final_obs(segment: Segment) -> None:
    """Check `final_obs`; call only after the flags were checked, because they select the rows."""
    obs, final_obs = segment.spec.obs, segment["final_obs"]
    is_real = final_obs.dtype.kind == "f"
    if is_real and not obs.below and is_finite(final_obs):  # then the selected rows are finite too
        return
    if obs.below or is_real:
        cut = segment.cut
        if cut.any():
            require_values(final_obs[cut], "final_obs", obs)


def clear_segment(segment: Segment) -> None:
    """Make a segment empty: no row is valid and every number is 0."""
    for column in segment.columns.values():
        column.fill(0)


def _format_index(column: np.ndarray, first: int) -> str:
    """Describe the index of a bad value."""
    where = np.unravel_index(first, column.shape)
    return (
        f" at {tuple(int(axis) for axis in where)}" if len(where) > 1 else f" in row {int(where[0])}" if where else ""
    )

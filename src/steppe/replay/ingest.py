"""Convert experience dictionaries to columns, validate them and write them to a store.

The first experiences define shapes and dtypes. A later block that does not match is rejected as a whole; the error
names the column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from steppe.core.arrays import to_numpy
from steppe.core.contracts.errors import UsageError, did_you_mean
from steppe.core.contracts.specs import FieldSpec
from steppe.replay.store.store import ArrayLike, ReplayStore

Experience = Mapping[str, Any]
Experiences = Sequence[Experience] | Mapping[str, Any]  # a dictionary per step, or a dictionary of equally long arrays
_dtype_and_shape = attrgetter("dtype", "shape")


class ExperienceWriter:
    """Write experiences to one store. A block with exactly the expected layout skips validation and conversion."""

    def __init__(self, store: ReplayStore, keys: Iterable[str] | None, frame_stack: int = 1) -> None:
        if frame_stack < 1:
            raise UsageError(f"frame_stack must be at least 1, not {frame_stack}")
        self.store, self.frame_stack = store, frame_stack
        self.keys = None if keys is None else tuple(keys)
        self._expected_layout: list[tuple[Any, ...]] = []  # dtypes and shapes of a block that needs no conversion

    def write(self, part: int, experiences: Experiences, priorities: ArrayLike | None = None) -> int:
        """Append experiences to one part, all or none; return their number."""
        store = self.store
        if priorities is not None:
            priorities = _numbers(priorities)
        try:  # fast path: most blocks have the layout of the previous one, which takes about 1 µs to check
            rows = store.select_columns(experiences)
            fits = list(map(_dtype_and_shape, rows)) == self._expected_layout and len(experiences) == len(rows)
        except (KeyError, AttributeError, TypeError):
            fits = False
        if fits:
            return store.append(part, rows, priorities)
        block = as_block(experiences, self.keys)
        if not block:
            return 0
        self._require_fit(block)
        self._expected_layout = [(np.dtype(f.dtype), (len(block[f.name]), *f.shape)) for f in store.fields]
        return store.write(part, block, priorities)

    def _require_fit(self, block: dict[str, np.ndarray]) -> None:
        """Raise UsageError unless the columns match the store's fields; the first block defines them."""
        with self.store.lock:
            if not self.store.fields:
                self.store.allocate([self._field(key, rows) for key, rows in block.items()])
        fit_block(block, self.store.fields)

    def _field(self, key: str, rows: np.ndarray) -> FieldSpec:
        frames = self.frame_stack if rows.ndim >= 4 and rows.shape[1] % self.frame_stack == 0 else 1
        return FieldSpec(key, rows.shape[1:], _dtype(key, rows).name, frames)


def fit_block(block: dict[str, np.ndarray], fields: Sequence[FieldSpec]) -> None:
    """Raise UsageError unless the columns match the fields; scalar columns are reshaped in `block` if necessary."""
    require_keys(block, tuple(field.name for field in fields))
    for field in fields:
        rows = block[field.name]
        if {rows.shape[1:], field.shape} == {(), (1,)}:  # a scalar per row may have either shape
            rows = block[field.name] = rows.reshape(len(rows), *field.shape)
        _require_fit(field, rows)


def as_block(experiences: Experiences, keys: tuple[str, ...] | None) -> dict[str, np.ndarray]:
    """Return experiences as columns of equal length, or an empty dictionary if there are none."""
    if isinstance(experiences, Mapping):
        require_keys(experiences, keys or tuple(experiences))
        block = {key: _column(key, experiences[key]) for key in keys or experiences}
        lengths = {key: len(rows) if rows.ndim else -1 for key, rows in block.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise UsageError(
                f"columns of experiences need one common length, not {lengths}; wrap a single one in a list"
            )
        return block if next(iter(lengths.values())) else {}
    if not isinstance(experiences, Sequence):
        kind = type(experiences).__name__
        raise UsageError(f"experiences are a list of dictionaries, or a dictionary of arrays, not a {kind}")
    if not experiences:
        return {}
    if keys is None and isinstance(experiences[0], Mapping):
        keys = tuple(experiences[0])
    keys = keys or ()
    for experience in experiences:
        require_keys(experience, keys)
    return {key: _column(key, [experience[key] for experience in experiences]) for key in keys}


def require_keys(experience: Experience, keys: tuple[str, ...]) -> None:
    """Raise UsageError unless an experience has exactly these keys."""
    if not isinstance(experience, Mapping):
        raise UsageError(f"an experience is a dictionary with {', '.join(keys)}, not a {type(experience).__name__}")
    missing = [key for key in keys if key not in experience]
    unknown = [str(key) for key in experience if key not in keys]
    if missing or unknown:
        hint = did_you_mean(unknown[0], missing) if missing and unknown else ""
        parts = [
            f"{word} {', '.join(names)}" for word, names in (("lacks", missing), ("has unknown", unknown)) if names
        ]
        raise UsageError(f"an experience {' and '.join(parts)}; this buffer's keys are {', '.join(keys)}.{hint}")


def _numbers(priorities: ArrayLike) -> np.ndarray:
    try:
        return np.asarray(to_numpy(priorities), np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"priorities are numbers, one for each experience, not {priorities!r:.60}") from None


def _column(key: str, values: Any) -> np.ndarray:
    try:
        rows = to_numpy(values) if isinstance(values, np.ndarray) or hasattr(values, "detach") else _stacked(values)
    except ValueError:
        shapes = sorted({np.shape(value) for value in values})
        raise UsageError(f"{key!r} comes in different shapes: {', '.join(map(str, shapes))}") from None
    if rows.dtype.kind not in "biuf":
        raise UsageError(f"{key!r} holds {rows.dtype} values; a buffer keeps numbers and arrays of numbers")
    return rows


def _stacked(values: Any) -> np.ndarray:
    """Return values as one array; a list may contain tensors."""
    tensors = isinstance(values, list) and any(hasattr(value, "detach") for value in values)
    return np.asarray([to_numpy(value) for value in values] if tensors else values)


def _dtype(key: str, rows: np.ndarray) -> np.dtype[Any]:
    # If the first reward is the integer 0, later rewards must still be floats.
    return np.dtype(np.float64) if key == "reward" and rows.dtype.kind in "biu" else rows.dtype


def _require_fit(field: FieldSpec, rows: np.ndarray) -> None:
    if rows.shape[1:] != field.shape:
        raise UsageError(f"{field.name!r} has shape {rows.shape[1:]}, but this buffer's column has {field.shape}")
    fits = np.can_cast(rows.dtype, field.dtype, "same_kind")
    if fits and field.dtype != rows.dtype and np.dtype(field.dtype).kind in "iu":
        fits = np.array_equal(rows.astype(field.dtype), rows)
    if not fits:
        raise UsageError(f"{field.name!r} is {rows.dtype}, which does not fit this buffer's {field.dtype} column")

"""Named arrays ↔ one flat float32 vector: updates are validated here once and are flat rows from then on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from steppe.core.arrays import to_numpy
from steppe.core.contracts.errors import ConfigError, UsageError, did_you_mean
from steppe.core.contracts.weights import Weights, WeightsLayout
from steppe.params.kernels import all_finite, copy_finite, run_threaded

# Reasons that depend only on the update, so that a client can detect them.
INVALID_UPDATE_REASONS = (
    "wrong_shape",
    "wrong_dtype",
    "unknown_parameter",
    "not_finite",
)


class Refusal(NamedTuple):
    """Why a push is refused: a reason code for the statistics, and a sentence."""

    reason: str
    message: str


def as_update(update: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Convert lists and tensors of an update to arrays; other values stay as they are, and the server refuses them."""
    if all(type(value) is np.ndarray for value in update.values()):
        return update
    return {name: _to_array(value) for name, value in update.items()}


def _to_array(value: Any) -> Any:
    try:
        found = to_numpy(value)
    except UsageError:
        return value
    return found.astype(np.float32) if isinstance(value, list | tuple) and found.dtype.kind in "iu" else found


class ParameterLayout:
    """The parameters' names, shapes and dtypes. Floating-point entries are trained, in float32; others are constant."""

    def __init__(self, params: Mapping[str, np.ndarray]) -> None:
        arrays = {name: np.asarray(array) for name, array in params.items()}
        wrong = [name for name, array in arrays.items() if array.dtype.kind not in "fiub"]
        if wrong:
            raise ConfigError(f"parameter {wrong[0]!r} has dtype {arrays[wrong[0]].dtype}: numbers only")
        self._set((name, array.shape, array.dtype.name) for name, array in arrays.items())
        self.carried = {name: array.copy() for name, array in arrays.items() if array.dtype.kind != "f"}
        if not self.size:
            raise ConfigError("initial_params has no floating-point numbers to train")

    @classmethod
    def described(cls, fields: Iterable[Any], carried: Mapping[str, np.ndarray] | None = None) -> ParameterLayout:
        """Build a layout from the `fields` of another one; `carried` holds the untrained parameters, if needed."""
        space = cls.__new__(cls)
        space._set((str(name), tuple(shape), str(dtype)) for name, shape, dtype in fields)
        space.carried = dict(carried or {})
        return space

    def _set(self, fields: Iterable[tuple[str, tuple[int, ...], str]]) -> None:
        self.whole = WeightsLayout.of(fields)  # all parameters, with their original dtypes
        trained = [entry for entry in self.whole.entries if np.dtype(entry.dtype).kind == "f"]
        self.layout = WeightsLayout.of((entry.name, entry.shape, "float32") for entry in trained)
        self.size = self.layout.nbytes // 4
        self._plain = self.whole == self.layout
        self._shapes = {entry.name: entry.shape for entry in trained}
        self._others = {entry.name: entry.dtype for entry in self.whole.entries if entry.name not in self._shapes}

    @property
    def fields(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of every parameter, in order."""
        return [(entry.name, entry.shape, entry.dtype) for entry in self.whole.entries]

    def flat(self, params: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return all trained parameters as one vector; raise ConfigError unless all are present and valid."""
        row = np.empty(self.size, np.float32)
        refusal = self.fill(row, params, whole=True)
        if refusal is not None:
            raise ConfigError(f"these are not the server's parameters: {refusal.message}")
        return row

    def fill(self, row: np.ndarray, update: Mapping[str, np.ndarray], *, whole: bool = False) -> Refusal | None:
        """Write an update into `row`, with zeros for parameters that it does not name.

        Returns why the update is invalid, or None. `whole`: the update holds parameters, so none may be missing, and
        untrained ones are ignored.
        """
        if whole:
            update = {name: array for name, array in update.items() if name not in self._others}
        refusal = self._validate_update(update, whole=whole)
        if refusal is not None:
            return refusal
        for name, view in self.layout.views(row.view(np.uint8)).items():
            if not _copy_entry(view.reshape(-1), update.get(name)):
                return _not_finite(name)
        return None

    def view_as_row(self, update: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Return the update as a row without copying, or None.

        This is possible if there is one trained parameter and the update is one contiguous float32 array for it.
        """
        if len(update) != 1 or len(self._shapes) != 1:
            return None
        (array,) = update.values()
        if self._validate_update(update) is not None or array.dtype != np.float32 or not array.flags.c_contiguous:
            return None
        return array.reshape(-1)

    def validate_row(self, row: np.ndarray) -> Refusal | None:
        """Validate dtype, rank and length of a row; return why it is invalid, or None."""
        if row.dtype != np.float32 or row.ndim != 1:
            return Refusal("wrong_dtype", f"a row is flat float32, not {row.dtype}{list(row.shape)}")
        if len(row) != self.size:
            return Refusal("wrong_shape", f"the row has {len(row)} numbers, not {self.size}")
        return None

    def copy_row(self, row: np.ndarray, into: np.ndarray) -> Refusal | None:
        """Copy and validate a row; return why it is invalid, or None."""
        refusal = self.validate_row(row)
        return refusal or (None if run_threaded(copy_finite, np.ascontiguousarray(row), into) else self.not_finite(row))

    def not_finite(self, row: np.ndarray) -> Refusal:
        """Return the refusal of a row with NaN or infinity, which names the parameter."""
        views = self.layout.views(row.view(np.uint8))
        return _not_finite(next((name for name, view in views.items() if not np.isfinite(view).all()), "the update"))

    def weights(self, flat: np.ndarray, version: int, updates: int) -> Weights:
        """Return a copy of all parameters, in their original order and with their original dtypes."""
        if self._plain:
            buffer = flat.view(np.uint8).copy()
        else:
            buffer = np.zeros(self.whole.nbytes, np.uint8)
            trained = self.layout.views(flat.view(np.uint8))
            for name, view in self.whole.views(buffer).items():
                view[...] = trained[name] if name in trained else self.carried[name]
        return Weights(self.whole, buffer, version, updates)

    def named(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """Return an aggregated update by name, as float32 views of `flat`."""
        return self.layout.views(flat.view(np.uint8))

    def _validate_update(self, update: Mapping[str, np.ndarray], *, whole: bool = False) -> Refusal | None:
        for name, array in update.items():
            refusal = self._validate_entry(name, array)
            if refusal is not None:
                return refusal
        missing = [name for name in self._shapes if name not in update] if whole else []
        return Refusal("wrong_shape", f"{missing[0]!r} is missing: push all parameters") if missing else None

    def _validate_entry(self, name: str, array: np.ndarray) -> Refusal | None:
        if name in self._others:
            return Refusal("wrong_dtype", f"{name!r} is {self._others[name]} and is not trained: leave it out")
        if name not in self._shapes:
            return Refusal(
                "unknown_parameter", f"there is no parameter {name!r}.{did_you_mean(str(name), self._shapes)}"
            )
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            return Refusal("wrong_dtype", f"{name!r} is {found}: give floating-point numbers")
        if array.shape != self._shapes[name]:
            return Refusal("wrong_shape", f"{name!r} has shape {list(array.shape)}, not {list(self._shapes[name])}")
        return None


def _not_finite(name: str) -> Refusal:
    return Refusal("not_finite", f"{name!r} has NaN or infinity: leave this update out")


def _copy_entry(view: np.ndarray, array: np.ndarray | None) -> bool:
    """Copy an entry of an update, or zeros for None; return whether it is finite."""
    if array is None:
        view[:] = 0.0
        return True
    if array.dtype == np.float32 and array.flags.c_contiguous:
        return run_threaded(copy_finite, array.reshape(-1), view)
    with np.errstate(over="ignore"):  # values too large for float32 become infinite and are refused
        view[:] = array.reshape(-1)
    return bool(all_finite(view))

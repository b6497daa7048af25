"""Named arrays ↔ one flat float32 vector: what is pushed is checked here, once, and is a row of numbers from then on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from steppe.core.errors import ConfigError, nearest
from steppe.core.weights import Layout
from steppe.params.kernels import all_finite, copy_finite


class Refusal(NamedTuple):
    """Why a push does not count: a word that is counted, and a sentence."""

    reason: str
    message: str


class Space:
    """The parameters' names, shapes and dtypes. Floating-point entries are trained, in float32; others are only carried."""

    def __init__(self, params: Mapping[str, np.ndarray]) -> None:
        arrays = {name: np.asarray(array) for name, array in params.items()}
        wrong = [name for name, array in arrays.items() if array.dtype.kind not in "fiub"]
        if wrong:
            raise ConfigError(f"parameter {wrong[0]!r} has dtype {arrays[wrong[0]].dtype}: numbers only")
        self.dtypes = {name: array.dtype for name, array in arrays.items()}
        self.carried = {name: array.copy() for name, array in arrays.items() if array.dtype.kind != "f"}
        trained = {name: array for name, array in arrays.items() if array.dtype.kind == "f"}
        self.layout = Layout.of((name, array.shape, "float32") for name, array in trained.items())
        self.size = self.layout.nbytes // 4
        if not self.size:
            raise ConfigError("initial_params has no floating-point numbers to train")

    def flat(self, params: Mapping[str, np.ndarray]) -> np.ndarray:
        """All trained parameters as one vector; ConfigError unless every one is there and fits."""
        row = np.empty(self.size, np.float32)
        missing = [name for name in self._shapes() if name not in params]
        known = {name: array for name, array in params.items() if name not in self.carried}
        refusal = Refusal("missing", f"{missing[0]!r} is missing") if missing else self.fill(row, known)
        if refusal is not None:
            raise ConfigError(f"these are not the server's parameters: {refusal.message}")
        return row

    def fill(self, row: np.ndarray, update: Mapping[str, np.ndarray]) -> Refusal | None:
        """Write an update into `row`; a parameter that it does not name gets no change. What is wrong, if anything is."""
        shapes = self._shapes()
        for name, array in update.items():
            refusal = self._misfit(name, array, shapes)
            if refusal is not None:
                return refusal
        for name, view in self.layout.views(row.view(np.uint8)).items():
            if not _write(view.reshape(-1), update.get(name)):
                return Refusal("not_finite", f"{name!r} has NaN or infinity: leave this update out")
        return None

    def arrays(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """New arrays by name, in the order and with the dtypes that the parameters were given in."""
        views = self.layout.views(flat.view(np.uint8))
        return {
            name: views[name].astype(dtype) if name in views else self.carried[name].copy()
            for name, dtype in self.dtypes.items()
        }

    def named(self, flat: np.ndarray) -> dict[str, np.ndarray]:
        """An aggregated update by name, in float32, sharing `flat`."""
        return self.layout.views(flat.view(np.uint8))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {entry.name: entry.shape for entry in self.layout.entries}

    def _misfit(self, name: str, array: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> Refusal | None:
        if name in self.carried:
            return Refusal("wrong_dtype", f"{name!r} is {self.dtypes[name]} and is not trained: leave it out")
        if name not in shapes:
            return Refusal("unknown_parameter", f"there is no parameter {name!r}.{nearest(str(name), shapes)}")
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            return Refusal("wrong_dtype", f"{name!r} is {found}: give floating-point numbers")
        if array.shape != shapes[name]:
            return Refusal("wrong_shape", f"{name!r} has shape {list(array.shape)}, not {list(shapes[name])}")
        return None


def _write(view: np.ndarray, array: np.ndarray | None) -> bool:
    """Copy an update's entry, or zeros for none; whether it is finite."""
    if array is None:
        view[:] = 0.0
        return True
    if array.dtype == np.float32 and array.flags.c_contiguous:
        return bool(copy_finite(array.reshape(-1), view))
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused as such
        view[:] = array.reshape(-1)
    return bool(all_finite(view))

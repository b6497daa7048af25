"""The parameters' values and versions: a ring of rows, and the optimizer step from one row to the next."""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.core.contracts.weights import Weights
from steppe.params.optimizers import Optimizer, OptimizerState
from steppe.params.parameter_layout import ParameterLayout


class VersionedParameters:
    """A ring of rows: a version is computed in the row after the newest, so a non-finite step leaves the newest intact.

    The rows are in this process's memory or, after `move`, in memory that other processes read.
    """

    def __init__(self, space: ParameterLayout, initial: np.ndarray, optimizer: Optimizer) -> None:
        self.space = space
        self.version = self.updates = 0
        self._optimizer_state = OptimizerState(optimizer, space.size)
        self._rows = np.empty((2, space.size), np.float32)
        self._at = 0
        self._rows[0] = initial

    @property
    def newest(self) -> np.ndarray:
        """The current parameters as a flat row; do not write to it."""
        row: np.ndarray = self._rows[self._at]
        return row

    def move(self, rows: np.ndarray) -> None:
        """Copy the newest parameters to the first of these rows and use the rows from now on."""
        rows[0] = self.newest
        self._rows, self._at = rows, 0

    def step(self, update: np.ndarray, learning_rate: float | None = None) -> bool:
        """Compute the next version from an aggregated update; return False, and keep the newest, if not finite."""
        after = self._rows[(self._at + 1) % len(self._rows)]
        if not self._optimizer_state.step(self.newest, update, after, learning_rate):
            return False
        self._advance(1)
        return True

    def undo(self) -> None:
        """Roll back the last version before it is published. The optimizer's moments are not rolled back."""
        self._advance(-1)

    def weights(self) -> Weights:
        """Return a copy of the newest parameters."""
        return self.space.weights(self.newest, self.version, self.updates)

    def state(self) -> dict[str, Any]:
        """Return everything that `load` needs except the counters, as plain values and arrays."""
        return {
            "parameters": self.weights().arrays(),
            "carried": sorted(self.space.carried),
            "optimizer": self._optimizer_state.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, all or nothing: a mismatch raises ConfigError before anything changes."""
        values = self.space.flat(state["parameters"])
        stepper = OptimizerState(self._optimizer_state.settings, self.space.size)
        stepper.load(state["optimizer"])
        self._optimizer_state = stepper
        self.space.carried = {name: state["parameters"][name] for name in state["carried"]}
        self._rows = np.empty((2, self.space.size), np.float32)  # other processes may still read the old rows
        self._rows[0], self._at = values, 0

    def _advance(self, step: int) -> None:
        self._at = (self._at + step) % len(self._rows)
        self.version += step
        self.updates += step

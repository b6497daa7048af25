"""The parameters' numbers and their versions: the newest row, rows for what comes next, and the optimizer between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.core.contracts.weights import Weights
from steppe.params.optimizers import Optimizer, OptimizerState
from steppe.params.parameter_layout import ParameterLayout


class VersionedParameters:
    """Rows in a ring: a version is made in the row after the newest, so that a step into infinity leaves all as it was.

    The rows lie in this process's memory, or in memory that others read once `move` was called.
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
        """The parameters as they are, flat; not to be written to."""
        row: np.ndarray = self._rows[self._at]
        return row

    def move(self, rows: np.ndarray) -> None:
        """Go on in these rows, beginning with the first."""
        rows[0] = self.newest
        self._rows, self._at = rows, 0

    def step(self, update: np.ndarray, learning_rate: float | None = None) -> bool:
        """Make the next version of one aggregated update; False, and nothing changed, if it would not be finite."""
        after = self._rows[(self._at + 1) % len(self._rows)]
        if not self._optimizer_state.step(self.newest, update, after, learning_rate):
            return False
        self._advance(1)
        return True

    def undo(self) -> None:
        """Take the last step's version back, before anyone saw it. The optimizer's moments keep it."""
        self._advance(-1)

    def weights(self) -> Weights:
        """The newest parameters in a buffer of their own."""
        return self.space.weights(self.newest, self.version, self.updates)

    def state(self) -> dict[str, Any]:
        """Everything that `load` needs but the counters, as plain values and arrays."""
        return {
            "parameters": self.weights().arrays(),
            "carried": sorted(self.space.carried),
            "optimizer": self._optimizer_state.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there, all or nothing: what does not fit is a ConfigError before anything changes."""
        values = self.space.flat(state["parameters"])
        stepper = OptimizerState(self._optimizer_state.settings, self.space.size)
        stepper.load(state["optimizer"])
        self._optimizer_state = stepper
        self.space.carried = {name: state["parameters"][name] for name in state["carried"]}
        self._rows = np.empty((2, self.space.size), np.float32)  # readers elsewhere keep what they had
        self._rows[0], self._at = values, 0

    def _advance(self, step: int) -> None:
        self._at = (self._at + step) % len(self._rows)
        self.version += step
        self.updates += step

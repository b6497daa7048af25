"""What a parameter server and its clients elsewhere have in common: handing in updates, and reading as a WeightStore does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from steppe.core.arrays import to_numpy
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.system.typecheck import typechecked
from steppe.params.rounds import Receipt

POLICY = "policy"


class Push(NamedTuple):
    """What comes with an update's numbers."""

    worker: str
    weight: float = 1.0
    number: int | None = None  # the round, or the worker's own count
    version: int | None = None  # that it was made with


def as_update(update: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """An update with lists and tensors as arrays; what cannot be one is left for the server to refuse."""
    if all(type(value) is np.ndarray for value in update.values()):
        return update
    return {name: _array(value) for name, value in update.items()}


def _array(value: Any) -> Any:
    try:
        found = to_numpy(value)
    except UsageError:
        return value
    return found.astype(np.float32) if isinstance(value, list | tuple) and found.dtype.kind in "iu" else found


class ParameterServerApi:
    """The calls that mean the same here and there."""

    def pull(self, worker_id: str) -> Weights:
        """The newest parameters as one flat buffer with its version; the worker's next push is taken to be made with them."""
        raise NotImplementedError

    def _push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> Receipt:
        """By name, or as a flat row."""
        raise NotImplementedError

    def _newer_than(self, version: int) -> Weights | None:
        raise NotImplementedError

    @typechecked
    def get_parameters(self, worker_id: str) -> dict[str, np.ndarray]:
        """Copies of the newest parameters by name; the worker's next push is taken to be made with them."""
        return self.pull(worker_id).arrays()

    @typechecked
    def push_gradients(
        self,
        worker_id: str,
        gradients: Mapping[str, Any],
        weight: float = 1.0,
        *,
        round_number: int | None = None,
        version: int | None = None,
    ) -> Receipt:
        """Hand in one update; the receipt is false, with the reason, when it does not count.

        `round_number` makes repeating a push harmless: the round in synchronous use, the worker's own count otherwise; a
        client counts by itself. `version`: the weights that it was made with, by default those that the worker was given last.
        """
        return self._push(Push(worker_id, weight, round_number, version), as_update(gradients))

    @typechecked
    def push_row(
        self,
        worker_id: str,
        row: np.ndarray,
        weight: float = 1.0,
        *,
        round_number: int | None = None,
        version: int | None = None,
    ) -> Receipt:
        """The same for an update that is one flat float32 vector of all trained parameters, in their order."""
        return self._push(Push(worker_id, weight, round_number, version), row)

    @typechecked
    def newer_than(self, policy: str, version: int) -> Weights | None:
        """The newest parameters if they are newer than `version`: reads like any WeightStore, with one policy."""
        if policy != POLICY:
            raise UsageError(f"a parameter server has one policy, {POLICY!r}, not {policy!r}")
        return self._newer_than(version)

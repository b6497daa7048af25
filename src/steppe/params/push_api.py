"""The interface that a parameter server shares with its remote clients: push updates, and read like a WeightStore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from steppe.core.arrays import to_numpy
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.system.typecheck import to_python_number, typechecked
from steppe.params.rounds import Receipt

POLICY = "policy"
MAX_METRICS = 64


class Push(NamedTuple):
    """Metadata of an update."""

    worker: str
    weight: float = 1.0
    number: int | None = None  # the round if synchronous, else the worker's own count of pushes
    version: int | None = None  # of the weights that it was computed with


def as_update(update: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Convert lists and tensors of an update to arrays; other values stay as they are, and the server refuses them."""
    if all(type(value) is np.ndarray for value in update.values()):
        return update
    return {name: _array(value) for name, value in update.items()}


def _array(value: Any) -> Any:
    try:
        found = to_numpy(value)
    except UsageError:
        return value
    return found.astype(np.float32) if isinstance(value, list | tuple) and found.dtype.kind in "iu" else found


def as_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to floats; raise UsageError unless they are at most MAX_METRICS numbers with short names."""
    found = {name: to_python_number(value) for name, value in metrics.items()}
    plain = all(isinstance(name, str) and isinstance(value, float | int) for name, value in found.items())
    if not plain or len(found) > MAX_METRICS or any(len(name) > MAX_METRICS for name in found):
        raise UsageError(f"metrics are at most {MAX_METRICS} numbers, with names of at most {MAX_METRICS} letters")
    try:
        return {name: float(value) for name, value in found.items()}
    except OverflowError as error:
        raise UsageError(f"a metric is beyond the range of a float: {error}") from None


class ParameterServerApi:
    """Calls with the same meaning on a local server and on a remote client."""

    def pull(self, worker_id: str) -> Weights:
        """Return the newest parameters as one flat buffer with its version.

        The worker's next push is assumed to be computed with them.
        """
        raise NotImplementedError

    def _push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> Receipt:
        """Push an update given by name or as a flat row."""
        raise NotImplementedError

    def _newer_than(self, version: int) -> Weights | None:
        raise NotImplementedError

    @typechecked
    def get_parameters(self, worker_id: str) -> dict[str, np.ndarray]:
        """Return copies of the newest parameters by name; see `pull`."""
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
        """Push one update; the receipt is false, with the reason, if it is refused.

        `round_number` makes pushes idempotent: the round if synchronous, the worker's own count of pushes otherwise; a
        client sets it automatically. `version`: the weights that the update was computed with; default: those last
        pulled.
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
        """Push an update given as one flat float32 vector of all trained parameters, in order; see `push_gradients`."""
        return self._push(Push(worker_id, weight, round_number, version), row)

    @typechecked
    def newer_than(self, policy: str, version: int) -> Weights | None:
        """Return the newest parameters if newer than `version`, else None, as a WeightStore with one policy does."""
        if policy != POLICY:
            raise UsageError(f"a parameter server has one policy, {POLICY!r}, not {policy!r}")
        return self._newer_than(version)

"""Sum small vectors over the workers of a round before they push.

Each worker can then use statistics of all workers' rows: counts, sums, sums of squares. One vector per worker and
round; all workers receive the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from steppe.core.contracts.errors import UsageError

MAX_NUMBERS = 64


class RoundSum:
    """The current round: each worker's vector, and their sum once it is complete."""

    def __init__(self) -> None:
        self.number = -1
        self.total: np.ndarray | None = None
        self.opened_at = 0.0
        self._vectors: dict[str, np.ndarray] = {}

    def open(self, number: int, now: float) -> None:
        """Start with no vectors if `number` is a new round."""
        if number != self.number:
            self.number, self.total, self.opened_at, self._vectors = number, None, now, {}

    def add(self, worker: str, values: np.ndarray) -> None:
        """Add a worker's vector; repeating the same one has no effect, and one that comes after the sum is ignored."""
        known = self._vectors.get(worker)
        if known is not None and not np.array_equal(known, values):
            raise UsageError(f"worker {worker!r} has added other numbers in round {self.number} already")
        shapes = {found.shape for found in (*self._vectors.values(), values)}
        if len(shapes) > 1:
            raise UsageError(f"all workers add as many numbers: some have {sorted(shape[0] for shape in shapes)}")
        if self.total is None:
            self._vectors[worker] = values

    def close(self) -> None:
        """Sum the vectors, in an order that does not depend on arrival."""
        self.total = np.sum([self._vectors[worker] for worker in sorted(self._vectors)], axis=0)

    @property
    def workers(self) -> set[str]:
        return set(self._vectors)


def validate_numbers(values: Sequence[float]) -> np.ndarray:
    """Return numbers as a float64 vector; raise UsageError unless they are 1 to MAX_NUMBERS finite numbers."""
    plain = 0 < len(values) <= MAX_NUMBERS and all(type(number) in (float, int) for number in values)
    if not plain or not all(map(math.isfinite, values)):
        raise UsageError(f"a sum over workers is of 1 to {MAX_NUMBERS} finite numbers")
    return np.array(values, np.float64)

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
        self._counted: dict[str, np.ndarray] = {}

    def open(self, number: int, now: float) -> None:
        """Start with no vectors if `number` is a new round."""
        if number != self.number:
            self.number, self.total, self.opened_at, self._counted = number, None, now, {}

    def add(self, worker: str, counted: np.ndarray) -> None:
        """Add a worker's vector; repeating the same one has no effect, and one that comes after the sum is ignored."""
        known = self._counted.get(worker)
        if known is not None and not np.array_equal(known, counted):
            raise UsageError(f"worker {worker!r} has counted in round {self.number} already, and other numbers")
        shapes = {found.shape for found in (*self._counted.values(), counted)}
        if len(shapes) > 1:
            raise UsageError(f"all workers count as many numbers: some say {sorted(shape[0] for shape in shapes)}")
        if self.total is None:
            self._counted[worker] = counted

    def close(self) -> None:
        """Sum the vectors, in an order that does not depend on arrival."""
        self.total = np.sum([self._counted[worker] for worker in sorted(self._counted)], axis=0)

    @property
    def workers(self) -> set[str]:
        return set(self._counted)


def validate_counts(counted: Sequence[float]) -> np.ndarray:
    """Return numbers as a float64 vector; raise UsageError unless they are 1 to MAX_NUMBERS finite numbers."""
    plain = 0 < len(counted) <= MAX_NUMBERS and all(type(number) in (float, int) for number in counted)
    if not plain or not all(map(math.isfinite, counted)):
        raise UsageError(f"what is counted is 1 to {MAX_NUMBERS} finite numbers")
    return np.array(counted, np.float64)

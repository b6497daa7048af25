"""Numbers that the workers of a round add up before they push, so that each can use what is true of all their rows together:
counts, sums, sums of squares. One small vector per worker and round; everyone gets the same sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from steppe.core.contracts.errors import UsageError

MAX_NUMBERS = 64


class RoundSum:
    """The round under way: who counted what, and their sum once there is one."""

    def __init__(self) -> None:
        self.number = -1
        self.total: np.ndarray | None = None
        self.opened_at = 0.0
        self._counted: dict[str, np.ndarray] = {}

    def open(self, number: int, now: float) -> None:
        """Begin anew where a new round has."""
        if number != self.number:
            self.number, self.total, self.opened_at, self._counted = number, None, now, {}

    def add(self, worker: str, counted: np.ndarray) -> None:
        """Take a worker's numbers; to give them again changes nothing, and after the sum they come too late for it."""
        known = self._counted.get(worker)
        if known is not None and not np.array_equal(known, counted):
            raise UsageError(f"worker {worker!r} has counted in round {self.number} already, and other numbers")
        shapes = {found.shape for found in (*self._counted.values(), counted)}
        if len(shapes) > 1:
            raise UsageError(f"all workers count as many numbers: some say {sorted(shape[0] for shape in shapes)}")
        if self.total is None:
            self._counted[worker] = counted

    def close(self) -> None:
        """Add up what is there, in an order that does not depend on who was first."""
        self.total = np.sum([self._counted[worker] for worker in sorted(self._counted)], axis=0)

    @property
    def workers(self) -> set[str]:
        return set(self._counted)


def validate_counts(counted: Sequence[float]) -> np.ndarray:
    """Numbers that can be added up; UsageError for others."""
    plain = 0 < len(counted) <= MAX_NUMBERS and all(type(number) in (float, int) for number in counted)
    if not plain or not all(map(math.isfinite, counted)):
        raise UsageError(f"what is counted is 1 to {MAX_NUMBERS} finite numbers")
    return np.array(counted, np.float64)

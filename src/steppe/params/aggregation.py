"""Combine workers' updates into one: sums, means, robust statistics, Krum. Pure functions of `[workers, parameters]`.

The server decides who may push, when a round closes and how the result is applied; private sums are in privacy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from steppe.core.array_checks import as_column, as_numeric_array
from steppe.core.contracts.errors import ConfigError, UsageError, did_you_mean
from steppe.params import kernels


@dataclass(frozen=True)
class Aggregation:
    """A method and its settings. The order of the updates affects only rounding.

    `byzantine`: how many updates may be arbitrary; the default for krum and multi_krum is the most they tolerate, f
    with n ≥ 2f + 3. `trim`: the fraction that trimmed_mean cuts off at each end of every coordinate, unless `byzantine`
    is given.
    """

    method: str = "average"
    byzantine: int | None = None
    trim: float = 0.1

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"there is no aggregation {self.method!r}: choose from {', '.join(METHODS)}.{did_you_mean(self.method, METHODS)}"
            )
        if self.byzantine is not None and (self.byzantine < 0 or self.method not in (*_KRUM, "trimmed_mean")):
            raise ConfigError(f"byzantine={self.byzantine}: at least 0, and only for krum, multi_krum and trimmed_mean")
        if not 0.0 <= self.trim < 0.5:
            raise ConfigError(f"trim={self.trim} must be from 0 up to, not including, 0.5")

    @property
    def uses_weights(self) -> bool:
        """Whether the method uses the workers' weights."""
        return self.method in ("weighted", "federated")

    @property
    def linear(self) -> bool:
        """Whether the result is a linear combination of the updates.

        A combined gradient is then the gradient over all workers' rows together.
        """
        return self.method in ("average", "sum", "weighted")

    @property
    def at_least(self) -> int:
        """Minimum number of updates that the method needs."""
        if self.method in _KRUM:
            return 2 * (self.byzantine or 0) + 3
        return 2 * self.byzantine + 1 if self.method == "trimmed_mean" and self.byzantine else 1

    def combine(self, updates: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Combine float32 `[n, parameters]` into one update; raise UsageError if too few or not finite."""
        updates, given = validate_updates(updates, weights)
        if weights is not None and not self.uses_weights and np.any(given != 1.0):
            raise UsageError(f"aggregation {self.method!r} counts every update alike: leave the weights at 1")
        if len(updates) < self.at_least:
            raise UsageError(f"{self.method} needs at least {self.at_least} updates, there are {len(updates)}")
        return METHODS[self.method](self, updates, given)


def validate_updates(updates: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the updates and float64 weights; raise UsageError if they are invalid for every method."""
    updates = as_numeric_array(updates, "updates")
    if updates.ndim != 2 or updates.dtype != np.float32 or not len(updates):
        raise UsageError(f"updates are float32 [workers, parameters], not {updates.dtype}{list(updates.shape)}")
    given = np.ones(len(updates)) if weights is None else as_column(weights, "weights", np.float64)
    if given.shape != (len(updates),) or not np.isfinite(given).all() or (given < 0).any() or not given.sum() > 0:
        raise UsageError("weights are one number per update, finite, none below 0 and not all 0")
    return np.ascontiguousarray(updates), given


def _total(updates: np.ndarray, weights: np.ndarray, divisor: float) -> np.ndarray:
    out = np.empty(updates.shape[1], np.float32)
    kernels.weighted_sum(updates, weights, divisor, out)
    return _finite(out)


def _sum(_: Aggregation, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _total(updates, weights, 1.0)


def _average(_: Aggregation, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _total(updates, weights, float(len(updates)))


def _weighted(_: Aggregation, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return _total(updates, weights / weights.sum(), 1.0)


def _median(_: Aggregation, updates: np.ndarray, __: np.ndarray) -> np.ndarray:
    count = len(updates)
    return _mean_of_ranks(updates, (count - 1) // 2, count // 2 + 1)


def _trimmed_mean(settings: Aggregation, updates: np.ndarray, _: np.ndarray) -> np.ndarray:
    count = len(updates)
    cut = int(settings.trim * count) if settings.byzantine is None else settings.byzantine
    return _mean_of_ranks(updates, cut, count - cut)


def _mean_of_ranks(updates: np.ndarray, first: int, last: int) -> np.ndarray:
    out = np.empty(updates.shape[1], np.float32)
    if not kernels.middle_mean(updates, sorting_network(len(updates), first, last), first, last, out):
        raise _not_finite()
    return out


def _krum(settings: Aggregation, updates: np.ndarray, _: np.ndarray) -> np.ndarray:
    best: np.ndarray = updates[krum_order(updates, _faults(settings, len(updates)))[0]]
    return best.copy()


def _multi_krum(settings: Aggregation, updates: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean of the n − f − 2 updates with the best scores."""
    faults = _faults(settings, len(updates))
    kept = np.zeros(len(updates))
    kept[krum_order(updates, faults)[: len(updates) - faults - 2]] = 1.0
    return _total(updates, kept, float(kept.sum()))


def _faults(settings: Aggregation, count: int) -> int:
    return (count - 3) // 2 if settings.byzantine is None else settings.byzantine


def krum_order(updates: np.ndarray, faults: int) -> np.ndarray:
    """Rank updates from best to worst by the sum of squared distances to the n − f − 2 nearest others."""
    distances = kernels.squared_distances(updates)
    if not np.isfinite(distances).all():
        raise _not_finite()
    np.fill_diagonal(distances, np.inf)
    nearest_ones = np.sort(distances, axis=1)[:, : len(updates) - faults - 2]
    return np.argsort(nearest_ones.sum(axis=1), kind="stable")


def _finite(out: np.ndarray) -> np.ndarray:
    if not kernels.all_finite(out):
        raise _not_finite()
    return out


def _not_finite() -> UsageError:
    return UsageError("an update has NaN or infinity, or their sum is too large for float32: leave that update out")


@lru_cache(maxsize=64)
def sorting_network(count: int, first: int, last: int) -> np.ndarray:
    """Return comparators (low, high), in order, that sort ranks `first` up to `last` of `count` values into place.

    Batcher's merge exchange (Knuth, 5.2.2, algorithm M), without comparators that do not affect these ranks.
    """
    wanted, kept = set(range(first, last)), []
    for low, high in reversed(_merge_exchange(count)):
        if low in wanted or high in wanted:
            wanted |= {low, high}
            kept.append((low, high))
    return np.array(kept[::-1], np.int64).reshape(-1, 2)


def _merge_exchange(count: int) -> list[tuple[int, int]]:
    found = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            found += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return found


_KRUM = ("krum", "multi_krum")
METHODS: dict[str, Callable[[Aggregation, np.ndarray, np.ndarray], np.ndarray]] = {
    "average": _average,
    "sum": _sum,
    "weighted": _weighted,
    "federated": _weighted,
    "median": _median,
    "trimmed_mean": _trimmed_mean,
    "krum": _krum,
    "multi_krum": _multi_krum,
}

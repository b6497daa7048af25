"""Compiled kernels over flat float32 updates `[workers, parameters]`, for aggregation, clipping and optimizers.

Columns are processed in tiles that stay in the cache across all workers' rows, sums are float64, and kernels release
the GIL. Callers decide on weights and refusals.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

SUM_TILE = 1024  # float64 totals of 8 KiB, which leave space in the L1 cache for eight rows
SORT_TILE = 128  # columns sorted side by side: 64 workers' rows take 32 KiB
PAIR_TILE = 1024
MIN_PARALLEL_SIZE = 1 << 20  # numbers; for shorter vectors a thread costs more than it saves
MAX_THREADS = 4  # enough to saturate memory bandwidth
_LARGEST = np.finfo(np.float32).max
_UNIT = 2.0**-53


def run_threaded(kernel: Callable[..., bool], *arguments: Any) -> bool:
    """Run an element-wise kernel over slices of its flat arrays in threads; return whether every slice returned True.

    One thread cannot saturate memory bandwidth. The results are the same.
    """
    size = next(len(given) for given in arguments if isinstance(given, np.ndarray))
    count = min(MAX_THREADS, _cores()) if size >= MIN_PARALLEL_SIZE else 1
    if count == 1:
        return bool(kernel(*arguments))
    ends = [size * index // count for index in range(count + 1)]
    found = [False] * count

    def run_slice(index: int) -> None:
        part = slice(ends[index], ends[index + 1])
        found[index] = kernel(*(given[part] if isinstance(given, np.ndarray) else given for given in arguments))

    others = [threading.Thread(target=run_slice, args=(index,), name="params-kernel") for index in range(1, count)]
    for other in others:
        other.start()
    run_slice(0)
    for other in others:
        other.join()
    return all(found)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@numba.njit(cache=True, nogil=True)
def all_finite(values: np.ndarray) -> bool:
    """Return whether a flat float32 array has neither NaN nor infinity."""
    bad = False
    for k in range(len(values)):
        bad |= not (abs(values[k]) <= _LARGEST)
    return not bad


@numba.njit(cache=True, nogil=True, inline="always")
def _add_rows(updates: np.ndarray, weights: np.ndarray, start: int, width: int, total: np.ndarray) -> None:
    """Compute total = Σ weightᵢ · updateᵢ over one tile.

    Eight rows at a time keep eight memory streams in flight, which is twice as fast as four.
    """
    count, end = updates.shape[0], start + width
    total[:width] = 0.0
    first = 0
    while first + 8 <= count:  # slices, because an index that might be negative would prevent vectorization
        i, f = first, first + 4
        a, b, c, d = (
            updates[i, start:end],
            updates[i + 1, start:end],
            updates[i + 2, start:end],
            updates[i + 3, start:end],
        )
        p, q, r, s = (
            updates[f, start:end],
            updates[f + 1, start:end],
            updates[f + 2, start:end],
            updates[f + 3, start:end],
        )
        t, u, v, w = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        x, y, z, o = weights[f], weights[f + 1], weights[f + 2], weights[f + 3]
        for k in range(width):
            left = (t * a[k] + u * b[k]) + (v * c[k] + w * d[k])
            total[k] += left + ((x * p[k] + y * q[k]) + (z * r[k] + o * s[k]))
        first += 8
    for row in range(first, count):
        a, u = updates[row, start:end], weights[row]
        for k in range(width):
            total[k] += u * a[k]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def weighted_sum(updates: np.ndarray, weights: np.ndarray, divisor: float, out: np.ndarray) -> None:
    """Compute out = Σ weightᵢ · updateᵢ / divisor. NaN or infinity in a weighted update propagates to `out`."""
    size = updates.shape[1]
    total = np.empty(SUM_TILE, np.float64)
    for start in range(0, size, SUM_TILE):
        width = min(SUM_TILE, size - start)
        _add_rows(updates, weights, start, width, total)
        into = out[start : start + width]
        for k in range(width):
            into[k] = total[k] / divisor


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def squared_norm(values: np.ndarray) -> float:
    """Return Σ x² in float64; NaN and infinity propagate."""
    total = 0.0
    for k in range(len(values)):
        x = np.float64(values[k])
        total += x * x
    return total


@numba.njit(cache=True, nogil=True)
def normal_numbers(words: np.ndarray, sigma: float, out: np.ndarray) -> None:
    """Write samples of N(0, sigma²), one per uniform uint64 of `words`, whose number must be even (Box and Muller)."""
    for k in range(0, len(words), 2):
        # Uniform in (0, 1], so that the logarithm is finite.
        radius = sigma * math.sqrt(-2.0 * math.log(((words[k] >> np.uint64(11)) + 1.0) * _UNIT))
        angle = 2.0 * math.pi * ((words[k + 1] >> np.uint64(11)) * _UNIT)
        out[k] = radius * math.cos(angle)
        out[k + 1] = radius * math.sin(angle)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def noisy_sum(
    updates: np.ndarray, scales: np.ndarray, noise: np.ndarray, first: int, divisor: float, out: np.ndarray
) -> None:
    """Compute out = (Σ scaleᵢ · updateᵢ + noise) / divisor for len(noise) columns from `first` on; noise is float64."""
    last = min(first + len(noise), updates.shape[1])
    total = np.empty(SUM_TILE, np.float64)
    for start in range(first, last, SUM_TILE):
        width = min(SUM_TILE, last - start)
        _add_rows(updates, scales, start, width, total)
        drawn, into = noise[start - first : start - first + width], out[start : start + width]
        for k in range(width):
            into[k] = (total[k] + drawn[k]) / divisor


@numba.njit(cache=True, nogil=True)
def _load(updates: np.ndarray, start: int, width: int, block: np.ndarray) -> bool:
    """Copy one tile's columns into `block`; return whether all of it is finite."""
    bad = False
    for row in range(updates.shape[0]):
        source, into = updates[row, start : start + width], block[row]
        for k in range(width):
            value = source[k]
            into[k] = value
            bad |= not (abs(value) <= _LARGEST)
    return not bad


@numba.njit(cache=True, nogil=True)
def _sort_columns(block: np.ndarray, pairs: np.ndarray) -> None:
    """Run a sorting network over the rows of all columns of the tile at once; a comparator is two vector operations."""
    for number in range(len(pairs)):
        low, high = block[pairs[number, 0]], block[pairs[number, 1]]
        for k in range(SORT_TILE):
            x, y = low[k], high[k]
            low[k] = x if x < y else y
            high[k] = y if x < y else x


@numba.njit(cache=True, nogil=True)
def middle_mean(updates: np.ndarray, pairs: np.ndarray, first: int, last: int, out: np.ndarray) -> bool:
    """Write the mean of each column's values from rank `first` up to, not including, `last`.

    Returns False if any value is not finite. `pairs` are the comparators of a network that sorts at least these ranks
    into place.
    """
    count, size = updates.shape
    block = np.zeros((count, SORT_TILE), np.float32)
    total = np.empty(SORT_TILE, np.float64)
    for start in range(0, size, SORT_TILE):
        width = min(SORT_TILE, size - start)
        if not _load(updates, start, width, block):
            return False
        _sort_columns(block, pairs)
        total[:] = 0.0
        for rank in range(first, last):
            row = block[rank]
            for k in range(SORT_TILE):
                total[k] += row[k]
        into = out[start : start + width]
        for k in range(width):
            into[k] = total[k] / (last - first)
    return True


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _squared_distance(a: np.ndarray, b: np.ndarray) -> float:
    total = 0.0
    for k in range(len(a)):
        x = np.float64(a[k]) - np.float64(b[k])
        total += x * x
    return total


@numba.njit(cache=True, nogil=True)
def squared_distances(updates: np.ndarray) -> np.ndarray:
    """Return squared distances of all pairs of updates.

    Computed from differences: a matrix product would lose precision for updates that are close to each other.
    """
    count, size = updates.shape
    found = np.zeros((count, count), np.float64)
    for start in range(0, size, PAIR_TILE):
        end = min(start + PAIR_TILE, size)
        for i in range(count):
            for j in range(i + 1, count):
                found[i, j] += _squared_distance(updates[i, start:end], updates[j, start:end])
    for i in range(count):
        for j in range(i):
            found[i, j] = found[j, i]
    return found


@numba.njit(cache=True, nogil=True)
def copy_finite(source: np.ndarray, into: np.ndarray) -> bool:
    """Copy flat float32 numbers; return whether all of them are finite. As fast as copying alone."""
    bad = False
    for k in range(len(source)):
        value = source[k]
        into[k] = value
        bad |= not (abs(value) <= _LARGEST)
    return not bad


@numba.njit(cache=True, nogil=True)
def sgd_step(values: np.ndarray, gradient: np.ndarray, rate: float, out: np.ndarray) -> bool:
    """Compute out = values − rate · gradient; return whether all of it is finite."""
    bad = False
    for k in range(len(out)):
        moved = np.float32(values[k] - rate * gradient[k])
        out[k] = moved
        bad |= not (abs(moved) <= _LARGEST)
    return not bad


@numba.njit(cache=True, nogil=True)
def momentum_step(
    values: np.ndarray, gradient: np.ndarray, velocity: np.ndarray, rates: tuple[float, float], out: np.ndarray
) -> bool:
    """Compute velocity = momentum · velocity + gradient and out = values − rate · velocity.

    Returns whether all of `out` is finite.
    """
    rate, momentum = rates
    bad = False
    for k in range(len(out)):
        speed = np.float32(momentum * velocity[k] + gradient[k])
        velocity[k] = speed
        moved = np.float32(values[k] - rate * speed)
        out[k] = moved
        bad |= not (abs(moved) <= _LARGEST)
    return not bad


@numba.njit(cache=True, nogil=True, error_model="numpy")
def adaptive_step(
    values: np.ndarray,
    gradient: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rates: tuple[float, float, float, float],
    yogi: bool,
    out: np.ndarray,
) -> bool:
    """Compute out = values − rate · m / (√v + eps); return whether all of it is finite.

    `rates` = (rate, beta1, beta2, eps), m = `first`, v = `second`. Yogi changes v by at most (1 − beta2) · g² (Zaheer
    et al., 2018), so that v does not decay quickly when gradients become small.
    """
    rate, beta1, beta2, eps = rates
    bad = False
    for k in range(len(out)):
        g = np.float64(gradient[k])
        m = beta1 * first[k] + (1.0 - beta1) * g
        v, square = np.float64(second[k]), g * g
        if yogi:
            v = v - (1.0 - beta2) * square * np.sign(v - square)
        else:
            v = beta2 * v + (1.0 - beta2) * square
        first[k] = m
        second[k] = v
        moved = np.float32(values[k] - rate * m / (math.sqrt(v) + eps))
        out[k] = moved
        bad |= not (abs(moved) <= _LARGEST)
    return not bad

"""A sum tree over priorities: draw a slot with probability leaf / total, in batches, in compiled code that releases the GIL.

    leaves  float32 [parts, 16 · blocks]   one per slot; a leaf of 0 is never drawn
    nodes   float64 [parts, …]             level 0 sums blocks of 16 leaves, each level above sums 4 nodes, the last is the root

Parents are recomputed from their children and never adjusted by differences, so every sum is a pure function of the leaves:
no drift, and a tree rebuilt from its leaves is the same bit for bit. What a priority means is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

BLOCK = 16
FAN = 4

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile on first use and cache on disk; no fastmath, since results must be the same bit for bit everywhere."""
    return cast(F, numba.njit(cache=True, nogil=True)(function))


class SumTree:
    """One tree for each of `num_parts` rings of `capacity` slots; slot = part * capacity + position."""

    def __init__(self, capacity: int, num_parts: int = 1) -> None:
        blocks = -(-capacity // BLOCK)
        widths = [blocks]
        while widths[-1] > 1:
            widths[-1] = -(-widths[-1] // FAN) * FAN  # padding nodes stay 0, so no bound is ever checked
            widths.append(widths[-1] // FAN)
        self.capacity = capacity
        self.levels = np.cumsum([0, *widths[:-1]])
        self.leaves = np.zeros((num_parts, blocks * BLOCK), np.float32)
        self.nodes = np.zeros((num_parts, sum(widths)), np.float64)

    @property
    def totals(self) -> np.ndarray:
        """The sum of each part's leaves."""
        roots: np.ndarray = self.nodes[:, -1]
        return roots

    def assign(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Set leaves (int64 slots, float32 values); of duplicates the last one counts."""
        _assign(self.leaves, self.nodes, self.levels, self.capacity, slots, values)

    def fill(self, part: int, start: int, values: np.ndarray) -> None:
        """Set the leaves of one part from position `start` on, without wrapping around."""
        if len(values):
            _fill(self.leaves[part], self.nodes[part], self.levels, start, values)

    def rebuild(self) -> None:
        """Recompute every sum from the leaves."""
        for part in range(len(self.leaves)):
            self.fill(part, 0, self.leaves[part].copy())

    def descend(self, draws: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots, and their leaves, at `draws` (uniform in [0, 1)) of the cumulated leaves of parts first … last - 1.

        At least one of those leaves must be positive.
        """
        slots = np.empty(len(draws), np.int64)
        drawn = np.empty(len(draws), np.float32)
        _descend(self.leaves, self.nodes, self.levels, self.capacity, first, last, draws, slots, drawn)
        return slots, drawn


@compiled
def _block_sum(leaves: np.ndarray, block: int) -> float:
    a = b = c = d = 0.0  # four chains in a fixed order: faster than one, and always the same result
    for i in range(block * BLOCK, (block + 1) * BLOCK, 4):
        a += leaves[i]
        b += leaves[i + 1]
        c += leaves[i + 2]
        d += leaves[i + 3]
    return (a + b) + (c + d)


@compiled
def _node_sum(nodes: np.ndarray, at: int) -> float:
    return float((nodes[at] + nodes[at + 1]) + (nodes[at + 2] + nodes[at + 3]))


@compiled
def _fill(leaves: np.ndarray, nodes: np.ndarray, levels: np.ndarray, start: int, values: np.ndarray) -> None:
    leaves[start : start + len(values)] = values
    low, high = start // BLOCK, (start + len(values) - 1) // BLOCK
    for block in range(low, high + 1):
        nodes[block] = _block_sum(leaves, block)
    for level in range(1, len(levels)):
        low, high = low // FAN, high // FAN
        for node in range(low, high + 1):
            nodes[levels[level] + node] = _node_sum(nodes, levels[level - 1] + node * FAN)


@compiled
def _assign(
    leaves: np.ndarray, nodes: np.ndarray, levels: np.ndarray, capacity: int, slots: np.ndarray, values: np.ndarray
) -> None:
    count = len(slots)
    parts = np.empty(count, np.int64)
    at = np.empty(count, np.int64)
    for i in range(count):
        parts[i] = slots[i] // capacity
        at[i] = slots[i] - parts[i] * capacity
        leaves[parts[i], at[i]] = values[i]
    for i in range(count):
        at[i] //= BLOCK
        nodes[parts[i], at[i]] = _block_sum(leaves[parts[i]], at[i])
    for level in range(1, len(levels)):
        for i in range(count):
            at[i] //= FAN
            row = nodes[parts[i]]
            row[levels[level] + at[i]] = _node_sum(row, levels[level - 1] + at[i] * FAN)


@compiled
def _descend(
    leaves: np.ndarray,
    nodes: np.ndarray,
    levels: np.ndarray,
    capacity: int,
    first: int,
    last: int,
    draws: np.ndarray,
    slots: np.ndarray,
    drawn: np.ndarray,
) -> None:
    # Rounding may leave `rest` at or above the sum of all children: then the last child that is not empty is taken, and
    # `rest` is kept at its whole sum so that the same happens below. An empty child is never taken, as rest >= 0.
    count, top = len(draws), levels[-1]
    total = 0.0
    for part in range(first, last):
        total += nodes[part, top]
    parts = np.empty(count, np.int64)
    rests = np.empty(count, np.float64)
    for i in range(count):
        rest = draws[i] * total
        chosen, found = first, False
        for part in range(first, last):
            share = nodes[part, top]
            if share > 0.0 and not found:
                chosen = part
                found = rest < share
                rest = rest if found else rest - share
        parts[i] = chosen
        rests[i] = rest if found else nodes[chosen, top]
        slots[i] = 0
    for level in range(len(levels) - 2, -1, -1):  # level by level for the whole batch, so that cache misses overlap
        for i in range(count):
            row, begin = nodes[parts[i]], slots[i] * FAN
            rest, chosen, found = rests[i], begin, False
            for child in range(begin, begin + FAN):
                share = row[levels[level] + child]
                if share > 0.0 and not found:
                    chosen = child
                    found = rest < share
                    rest = rest if found else rest - share
            rests[i] = rest if found else row[levels[level] + chosen]
            slots[i] = chosen
    for i in range(count):
        row32, begin = leaves[parts[i]], slots[i] * BLOCK
        rest, chosen, found = rests[i], begin, False
        for child in range(begin, begin + BLOCK):
            share = np.float64(row32[child])
            if share > 0.0 and not found:
                chosen = child
                found = rest < share
                rest = rest if found else rest - share
        slots[i] = parts[i] * capacity + chosen
        drawn[i] = row32[chosen]

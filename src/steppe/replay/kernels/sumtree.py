"""A sum tree over priorities: sample slots with probability leaf / total, in batches, in compiled code without the GIL.

    leaves  float32 [parts, 16 · blocks]   one per slot; a leaf of 0 is never sampled
    nodes   float64 [parts, …]             level 0 sums blocks of 16 leaves, higher levels sum 8 nodes, up to the root
    starts  float64 [parts, …]             for each node, the sum of those before it in its group of 8: one cache line,
                                           one comparison. Infinite past the total: an empty node is never chosen

Parents are recomputed from their children and never adjusted by differences, so every sum is a pure function of the
leaves: no drift, and a tree rebuilt from its leaves is bit-identical. Callers compute leaves from priorities.
"""

from __future__ import annotations

import numpy as np

from steppe.replay.kernels.copy import (
    block_sum,
    compiled,
    count_not_above,
    group_sum,
    load_float32,
    load_float64,
    prefetch,
)
from steppe.replay.store.disk_columns import zeros

BLOCK = 16
FANOUT = 8
NO_PREFETCH = np.empty((0, 2), np.int64)


class SumTree:
    """A sum tree for each of `num_parts` rings of `capacity` slots; slot = part * capacity + position."""

    def __init__(self, capacity: int, num_parts: int = 1) -> None:
        widths = [_round_up_to_fanout(-(-capacity // BLOCK))]  # padding nodes stay 0 and need no bounds checks
        while widths[-1] > FANOUT:
            widths.append(_round_up_to_fanout(widths[-1] // FANOUT))
        self.capacity = capacity
        self.levels = np.cumsum([0, *widths])
        self._leaves = zeros((num_parts, widths[0] * BLOCK), "float32", None)
        self._nodes = zeros((num_parts, sum(widths) + FANOUT), "float64", None)
        self._starts = zeros(self._nodes.shape, "float64", None)
        self._waiting, self._value = np.zeros(3, np.int64), np.zeros(1, np.float32)  # pending: part, start, end; value
        self._numbers = self._waiting.data  # a memoryview: faster access from Python
        self._given = self._value  # the array that the pending value came from
        # Leading arguments of the compiled functions that flush pending leaves themselves.
        self.unsettled = (
            self._leaves, self._nodes, self._starts, self.levels, self._waiting, self._value, capacity,
        )  # fmt: skip
        self.rebuild()

    @property
    def leaves(self) -> np.ndarray:
        self.settle()
        return self._leaves

    @property
    def nodes(self) -> np.ndarray:
        self.settle()
        return self._nodes

    @property
    def starts(self) -> np.ndarray:
        self.settle()
        return self._starts

    @property
    def totals(self) -> np.ndarray:
        """The sum of each part's leaves."""
        roots: np.ndarray = self.nodes[:, self.levels[-1]]
        return roots

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
        """Return the leading arguments of compiled functions: leaves, nodes, starts, level offsets, slots per part."""
        self.settle()
        return self._leaves, self._nodes, self._starts, self.levels, self.capacity

    def assign(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Set leaves (int64 slots, float32 values); the last duplicate wins, and negative slots are skipped."""
        assign(*self.arrays(), slots, values)

    def fill(self, part: int, start: int, values: np.ndarray) -> None:
        """Set the leaves of one part from position `start` on, without wraparound."""
        self.fill_all(part, start, start + len(values), values)

    def fill_all(self, part: int, start: int, end: int, values: np.ndarray) -> None:
        """Set the leaves of one part from position `start` to `end`; a single value is used for all of them."""
        self.settle()
        self._fill(part, start, end, values)

    def extend(self, part: int, start: int, end: int, values: np.ndarray) -> None:
        """Set leaves like `fill_all`, but defer a single value until the tree is read.

        Adjacent ranges with the same value are then summed once.
        """
        waiting = self._numbers
        if values is self._given and waiting[2] == start and waiting[0] == part:
            waiting[2] = end
        elif len(values) == 1:
            self.settle()
            waiting[0], waiting[1], waiting[2] = part, start, end
            self._given, self._value[0] = values, values[0]
        else:
            self.fill_all(part, start, end, values)

    def settle(self) -> None:
        """Set the pending leaves."""
        if self._numbers[1] < self._numbers[2]:
            flush_pending(self._leaves, self._nodes, self._starts, self.levels, self._waiting, self._value)

    def rebuild(self) -> None:
        """Recompute every sum from the leaves."""
        for part in range(len(self.leaves)):
            self.fill(part, 0, self._leaves[part].copy())

    def descend(
        self, draws: np.ndarray, first: int, last: int, plan: np.ndarray = NO_PREFETCH
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the slots, and their leaves, at `draws` (uniform in [0, 1)) of the leaves of parts first … last - 1.

        Each draw is a fraction of the cumulative sum. Returns None if all of those leaves are 0. Prefetches the sampled
        rows of the columns in `plan`.
        """
        slots, drawn = np.empty(len(draws), np.int64), np.empty(len(draws), np.float32)
        return (slots, drawn) if descend(*self.arrays(), first, last, draws, plan, slots, drawn) else None

    def find(self, part: int, rests: np.ndarray, plan: np.ndarray = NO_PREFETCH) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots, and their leaves, at offsets `rests` into the sum of one part, which must not be 0."""
        slots, drawn = np.empty(len(rests), np.int64), np.empty(len(rests), np.float32)
        find(*self.arrays(), np.full(len(rests), part), np.array(rests, np.float64), plan, slots, drawn)
        return slots, drawn

    def _fill(self, part: int, start: int, end: int, values: np.ndarray) -> None:
        if end > start:
            _fill(self._leaves, self._nodes, self._starts, self.levels, part, start, end, values)


def _round_up_to_fanout(count: int) -> int:
    """Round a number of nodes up to a multiple of FANOUT."""
    return -(-count // FANOUT) * FANOUT


@compiled
def _sum_group(nodes: np.ndarray, starts: np.ndarray, part: int, below: int, level: int, node: int) -> None:
    """Recompute a node of the level that begins at `level`, and the starts of its children in the level below."""
    group = (part * nodes.shape[1] + below + node * FANOUT) * 8
    nodes[part, level + node] = group_sum(np.int64(nodes.ctypes.data) + group, np.int64(starts.ctypes.data) + group)


@compiled
def _fill(
    leaves: np.ndarray,
    nodes: np.ndarray,
    starts: np.ndarray,
    levels: np.ndarray,
    part: int,
    start: int,
    end: int,
    values: np.ndarray,
) -> None:
    if len(values) == 1:
        leaves[part, start:end] = values[0]
    else:
        leaves[part, start:end] = values
    begin = np.int64(leaves.ctypes.data) + part * leaves.shape[1] * 4
    low, high = start // BLOCK, (end - 1) // BLOCK
    for block in range(low, high + 1):
        nodes[part, block] = block_sum(begin + block * (BLOCK * 4))
    for level in range(1, len(levels)):
        low, high = low // FANOUT, high // FANOUT
        for node in range(low, high + 1):
            _sum_group(nodes, starts, part, levels[level - 1], levels[level], node)


@compiled
def flush_pending(
    leaves: np.ndarray,
    nodes: np.ndarray,
    starts: np.ndarray,
    levels: np.ndarray,
    waiting: np.ndarray,
    value: np.ndarray,
) -> None:
    """Set the pending leaves, if any: those of part waiting[0] from waiting[1] to waiting[2]."""
    if waiting[1] < waiting[2]:
        _fill(leaves, nodes, starts, levels, waiting[0], waiting[1], waiting[2], value)
        waiting[1] = waiting[2]


@compiled
def assign(
    leaves: np.ndarray,
    nodes: np.ndarray,
    starts: np.ndarray,
    levels: np.ndarray,
    capacity: int,
    slots: np.ndarray,
    values: np.ndarray,
) -> None:
    num_parts, count = len(leaves), 0
    begin, stride = np.int64(leaves.ctypes.data), np.int64(leaves.shape[1] - capacity) * 4
    for i in range(len(slots)):
        prefetch(begin + slots[i] * 4 + (slots[i] // capacity * stride if num_parts > 1 else 0))
    parts = np.empty(len(slots), np.int64)
    at = np.empty(len(slots), np.int64)
    for i in range(len(slots)):
        if slots[i] < 0:
            continue
        part = slots[i] // capacity if num_parts > 1 else 0
        position = slots[i] - part * capacity
        leaves[part, position] = values[i]
        parts[count], at[count] = part, position // BLOCK
        count += 1
    for i in range(count):
        nodes[parts[i], at[i]] = block_sum(begin + (parts[i] * leaves.shape[1] + at[i] * BLOCK) * 4)
    for level in range(1, len(levels)):
        below = levels[level - 1]
        width = (levels[level] - below) // FANOUT
        if width * num_parts <= count:  # recomputing the whole level once is less work
            for part in range(num_parts):
                for node in range(width):
                    _sum_group(nodes, starts, part, below, levels[level], node)
            continue
        for i in range(count):
            at[i] //= FANOUT
            _sum_group(nodes, starts, parts[i], below, levels[level], at[i])


@compiled
def choose_parts(
    nodes: np.ndarray, top: int, first: int, last: int, draws: np.ndarray, parts: np.ndarray, rests: np.ndarray
) -> bool:
    """Write the part of each draw (uniform in [0, 1)) and the offset into its sum; return False if all are empty."""
    ends = np.empty(last - first, np.float64)
    total = 0.0
    for part in range(first, last):
        total += nodes[part, top]
        ends[part - first] = total
    for i in range(len(draws)):
        rest = draws[i] * total
        if rest < total:
            chosen = 0
            for part in range(last - first - 1):
                chosen += rest >= ends[part]
            rests[i] = rest - ends[chosen - 1] if chosen else rest
        else:
            chosen = last - first - 1
            while chosen > 0 and nodes[first + chosen, top] == 0.0:
                chosen -= 1
            rests[i] = nodes[first + chosen, top]
        parts[i] = first + chosen
    return total > 0.0


@compiled
def descend(
    leaves: np.ndarray,
    nodes: np.ndarray,
    starts: np.ndarray,
    levels: np.ndarray,
    capacity: int,
    first: int,
    last: int,
    draws: np.ndarray,
    plan: np.ndarray,
    slots: np.ndarray,
    drawn: np.ndarray,
) -> bool:
    """Write slots and their leaves, and prefetch their rows; return False if all leaves are 0.

    Each row of `plan` is the address and the row stride, in bytes, of a column to prefetch.
    """
    parts = np.empty(len(draws), np.int64)
    rests = np.empty(len(draws), np.float64)
    if not choose_parts(nodes, levels[-1], first, last, draws, parts, rests):
        return False
    find(leaves, nodes, starts, levels, capacity, parts, rests, plan, slots, drawn)
    return True


@compiled
def find(
    leaves: np.ndarray,
    nodes: np.ndarray,
    starts: np.ndarray,
    levels: np.ndarray,
    capacity: int,
    parts: np.ndarray,
    rests: np.ndarray,
    plan: np.ndarray,
    slots: np.ndarray,
    drawn: np.ndarray,
) -> None:
    """Write the slots, and their leaves, at offsets `rests` into the sums of `parts`; `rests` is overwritten.

    The chosen child is the last one whose start is not above `rest`, which needs no branches. It is never empty: the
    start of the child after an empty one equals its own, or its own start is infinite. If rounding leaves `rest` at or
    above the sum of a group, its last non-empty child is chosen.
    """
    count = len(rests)
    stride = np.int64(starts.shape[1]) * 8
    for i in range(count):
        slots[i] = 0
    for level in range(len(levels) - 2, -1, -1):  # whole batch per level, so that cache misses overlap
        begin = np.int64(starts.ctypes.data) + levels[level] * 8
        for i in range(count):
            at = begin + parts[i] * stride + slots[i] * (FANOUT * 8)
            child = count_not_above(at, rests[i]) - 1
            rests[i] -= load_float64(at + child * 8)
            slots[i] = slots[i] * FANOUT + child
    _choose_leaves(leaves, capacity, parts, rests, plan, slots, drawn)


@compiled
def _choose_leaves(
    leaves: np.ndarray,
    capacity: int,
    parts: np.ndarray,
    rests: np.ndarray,
    plan: np.ndarray,
    slots: np.ndarray,
    drawn: np.ndarray,
) -> None:
    begin, stride = np.int64(leaves.ctypes.data), np.int64(leaves.shape[1]) * 4
    for i in range(len(slots)):
        prefetch(begin + parts[i] * stride + slots[i] * (BLOCK * 4))
    for i in range(len(slots)):
        position, rest = slots[i] * BLOCK, rests[i]
        at = begin + parts[i] * stride + position * 4
        child, total = 0, 0.0
        for leaf in range(BLOCK):
            total += np.float64(load_float32(at + leaf * 4))
            child += rest >= total
        if child == BLOCK:
            child -= 1
            while load_float32(at + child * 4) == 0.0:
                child -= 1
        slot = parts[i] * capacity + position + child
        for column in range(len(plan)):
            prefetch(plan[column, 0] + slot * plan[column, 1])
        slots[i] = slot
        drawn[i] = load_float32(at + child * 4)

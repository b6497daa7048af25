"""Compiled arithmetic on rings and priorities: indices of rows and back, leaves from priorities, importance weights.

`rings` is int64 [4, parts]: size, cursor, added, lap. A row before the cursor was written in this lap, one behind it in the
lap before. An index is (lap · capacity + position) · 2 ** shift + part.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from steppe.replay.kernels import compiled
from steppe.replay.powers import power

SMALLEST = float(np.finfo(np.float32).tiny)  # a positive priority never becomes a leaf of 0
LARGEST = float(np.finfo(np.float32).max)
LEAST = 1e-300  # of a priority: below it numbers have fewer digits
SIZE, CURSOR, LAP = 0, 1, 3


@compiled
def number(rings: np.ndarray, capacity: int, shift: int, slots: np.ndarray, indices: np.ndarray) -> None:
    """Write the indices of the rows at `slots`."""
    num_parts = rings.shape[1]
    for i in range(len(slots)):
        part = slots[i] // capacity if num_parts > 1 else 0
        position = slots[i] - part * capacity
        lap = rings[LAP, part] - (position >= rings[CURSOR, part])
        indices[i] = ((lap * capacity + position) << shift) + part


@compiled
def _slot(rings: Any, capacity: int, shift: int, index: int) -> Any:
    """The slot of an index; -1 if its row is gone, -2 if there never was one."""
    part = index & ((1 << shift) - 1)
    if index < 0 or part >= rings.shape[1]:
        return -2
    # Serial numbers of this lap's first row and of the next row to come: no division, which takes long.
    first = rings[LAP, part] * capacity
    position = (index >> shift) - first
    if position >= rings[CURSOR, part]:
        return -2
    if position >= 0:
        return part * capacity + position
    position += capacity
    if position < rings[CURSOR, part] or rings[SIZE, part] < capacity:
        return -1
    return part * capacity + position


@compiled
def prepare(
    rings: np.ndarray,
    capacity: int,
    shift: int,
    alpha: float,
    indices: np.ndarray,
    priorities: np.ndarray,
    slots: np.ndarray,
    leaves: np.ndarray,
) -> tuple[int, float, int]:
    """Write slots (-1 where the row is gone) and leaves; which index is unknown or -1, the largest priority, rows gone.

    The largest priority is -1 if one of them is negative, infinite or not a number.
    """
    unknown, stale, largest = -1, 0, 0.0
    for i in range(len(indices)):
        slots[i] = _slot(rings, capacity, shift, indices[i])
        stale += slots[i] == -1
        if slots[i] == -2:
            unknown = i
    raised = np.empty(len(priorities), np.float64)
    sound = True
    for i in range(len(priorities)):
        sound = sound and priorities[i] >= 0.0 and priorities[i] < math.inf
        largest = max(largest, priorities[i])
        raised[i] = max(priorities[i], LEAST)
    if not sound:
        return unknown, -1.0, stale
    power(raised, alpha)
    for i in range(len(priorities)):
        leaves[i] = 0.0 if priorities[i] == 0.0 else min(max(raised[i], SMALLEST), LARGEST)
    return unknown, largest, stale


@compiled
def _weigh(leaves: np.ndarray, beta: float, weights: np.ndarray) -> None:
    least = np.float64(leaves.min())
    raised = np.empty(len(leaves), np.float64)
    for i in range(len(leaves)):
        raised[i] = least / np.float64(leaves[i])
    power(raised, beta)
    for i in range(len(leaves)):
        weights[i] = raised[i]


def importance(leaves: np.ndarray, beta: float) -> np.ndarray:
    """(N · P) ** -beta over its maximum in the batch (Schaul et al. 2016, 3.4); N and the total cancel out."""
    weights = np.empty(len(leaves), np.float32)
    _weigh(leaves, beta, weights)
    return weights

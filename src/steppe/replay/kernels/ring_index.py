"""Compiled arithmetic on rings and priorities: slots to indices and back, priorities to leaves, importance weights.

`rings` is int64 [4, parts]: size, cursor, added, lap. Rows before the cursor were written in the current lap, rows at
or after it in the previous one. An index is (lap · capacity + position) · 2 ** shift + part.
"""

from __future__ import annotations

import math

import numpy as np

from steppe.replay.kernels.copy import compiled, prefetch
from steppe.replay.kernels.pow import power

MIN_LEAF = float(np.finfo(np.float32).tiny)  # keeps a positive priority from becoming a leaf of 0
MAX_LEAF = float(np.finfo(np.float32).max)
MIN_NORMAL_PRIORITY = 1e-300  # smallest priority passed to `power`, which needs normal numbers
SIZE, CURSOR, LAP = 0, 1, 3


@compiled
def sample_uniform(
    rings: np.ndarray, capacity: int, first: int, last: int, draws: np.ndarray, plan: np.ndarray, slots: np.ndarray
) -> None:
    """Map `draws` (uniform in [0, 1)) to slots over all rows of parts first … last - 1, and prefetch those rows."""
    total = 0
    for part in range(first, last):
        total += rings[SIZE, part]
    for i in range(len(draws)):
        row, part = int(draws[i] * total), first
        while row >= rings[SIZE, part]:
            row -= rings[SIZE, part]
            part += 1
        slots[i] = part * capacity + row
        for column in range(len(plan)):
            prefetch(plan[column, 0] + slots[i] * plan[column, 1])


@compiled
def compute_indices_and_weights(
    rings: np.ndarray,
    capacity: int,
    shift: int,
    beta: float,
    slots: np.ndarray,
    leaves: np.ndarray,
    indices: np.ndarray,
    weights: np.ndarray,
) -> None:
    """Write the indices of the rows at `slots`, and their importance weights computed from their leaves."""
    num_parts = rings.shape[1]
    for i in range(len(slots)):
        part = slots[i] // capacity if num_parts > 1 else 0
        position = slots[i] - part * capacity
        lap = rings[LAP, part] - (position >= rings[CURSOR, part])
        indices[i] = ((lap * capacity + position) << shift) + part
    compute_importance_weights(leaves, beta, weights)


@compiled
def compute_importance_weights(leaves: np.ndarray, beta: float, weights: np.ndarray) -> None:
    """Write (N · P) ** -beta over its maximum in the batch (Schaul et al. 2016, 3.4); N and the total cancel out."""
    if not len(leaves):
        return
    least = np.float64(leaves.min())
    raised = np.empty(len(leaves), np.float64)
    for i in range(len(leaves)):
        raised[i] = least / np.float64(leaves[i])
    power(raised, beta)
    for i in range(len(leaves)):
        weights[i] = raised[i]


@compiled
def _find_slots(
    rings: np.ndarray, capacity: int, shift: int, indices: np.ndarray, slots: np.ndarray
) -> tuple[int, int]:
    """Write the slots of indices, -1 for overwritten rows.

    Returns the position of an index that was never issued (-1 if there is none), and the number of overwritten rows.
    """
    unknown, stale = -1, 0
    mask = (1 << shift) - 1
    for i in range(len(indices)):
        part = indices[i] & mask
        if indices[i] < 0 or part >= rings.shape[1]:
            unknown = i
            continue
        cursor = rings[CURSOR, part]
        position = (indices[i] >> shift) - rings[LAP, part] * capacity  # within this lap; negative: an earlier lap
        if position >= cursor:
            unknown = i
        elif position >= 0:
            slots[i] = part * capacity + position
        elif position + capacity >= cursor and rings[SIZE, part] == capacity:
            slots[i] = part * capacity + position + capacity
        else:
            slots[i] = -1
            stale += 1
    return unknown, stale


@compiled
def resolve_priority_update(
    rings: np.ndarray,
    capacity: int,
    shift: int,
    alpha: float,
    indices: np.ndarray,
    priorities: np.ndarray,
    slots: np.ndarray,
    leaves: np.ndarray,
) -> tuple[int, float, int]:
    """Write slots (-1 for overwritten rows) and leaves.

    Returns the position of an unknown index (-1 if there is none), the largest priority (-1 if any is negative,
    infinite or NaN), and the number of overwritten rows.
    """
    unknown, stale = _find_slots(rings, capacity, shift, indices, slots)
    raised = np.empty(len(priorities), np.float64)
    sound, largest = True, 0.0
    for i in range(len(priorities)):
        sound = sound and priorities[i] >= 0.0 and priorities[i] < math.inf
        largest = max(largest, priorities[i])
        raised[i] = max(priorities[i], MIN_NORMAL_PRIORITY)
    if not sound:
        return unknown, -1.0, stale
    power(raised, alpha)
    for i in range(len(priorities)):
        leaves[i] = 0.0 if priorities[i] == 0.0 else min(max(raised[i], MIN_LEAF), MAX_LEAF)
    return unknown, largest, stale

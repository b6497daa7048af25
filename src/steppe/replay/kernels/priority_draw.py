"""Compiled: a batch by priority, and new priorities, each in one call. What a call of compiled code costs with all its arrays
is a tenth of what a batch of 256 takes; what is done here is said in sumtree.py, ring_index.py and copy.py.
"""

from __future__ import annotations

import numpy as np

from steppe.replay.kernels.copy import compiled, gather
from steppe.replay.kernels.ring_index import compute_indices_and_weights, resolve_priority_update
from steppe.replay.kernels.sumtree import assign, descend, flush_pending


@compiled
def sample_by_priority(
    leaves: np.ndarray,
    nodes: np.ndarray,
    starts: np.ndarray,
    levels: np.ndarray,
    waiting: np.ndarray,
    value: np.ndarray,
    capacity: int,
    rings: np.ndarray,
    shift: int,
    parts: tuple[int, int],
    draws: np.ndarray,
    beta: float,
    sources: np.ndarray,
    plan: np.ndarray,
    block: np.ndarray,
    slots: np.ndarray,
    indices: np.ndarray,
    weights: np.ndarray,
) -> bool:
    """Draw slots of parts first … last - 1, describe them, and copy their rows into `block`; False if all leaves are 0."""
    flush_pending(leaves, nodes, starts, levels, waiting, value)
    drawn = np.empty(len(draws), np.float32)
    if not descend(leaves, nodes, starts, levels, capacity, parts[0], parts[1], draws, sources, slots, drawn):
        return False
    compute_indices_and_weights(rings, capacity, shift, beta, slots, drawn, indices, weights)
    return gather(plan, capacity * rings.shape[1], slots, block)


@compiled
def update_leaves(
    leaves: np.ndarray,
    nodes: np.ndarray,
    starts: np.ndarray,
    levels: np.ndarray,
    waiting: np.ndarray,
    value: np.ndarray,
    capacity: int,
    rings: np.ndarray,
    shift: int,
    alpha: float,
    indices: np.ndarray,
    priorities: np.ndarray,
) -> tuple[int, float, int]:
    """Set leaves by the indices of rows, unless an index is unknown or a priority unsound: what `prepare` says of them."""
    flush_pending(leaves, nodes, starts, levels, waiting, value)
    slots, values = np.empty(len(indices), np.int64), np.empty(len(indices), np.float32)
    unknown, largest, stale = resolve_priority_update(rings, capacity, shift, alpha, indices, priorities, slots, values)
    if unknown < 0 and largest >= 0.0:
        assign(leaves, nodes, starts, levels, capacity, slots, values)
    return unknown, largest, stale

"""Sample a batch by priority, or update priorities, in a single compiled call.

Passing all arrays to one compiled function costs a tenth of the time of a batch of 256, so the steps of sumtree.py,
ring_index.py and copy.py are fused here.
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
    """Sample slots of parts first … last - 1, compute their indices and weights, and copy their rows into `block`.

    Returns False if all leaves are 0.
    """
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
    """Set the leaves of rows by their indices, unless an index is unknown or a priority invalid.

    Returns what `resolve_priority_update` returns.
    """
    flush_pending(leaves, nodes, starts, levels, waiting, value)
    slots, values = np.empty(len(indices), np.int64), np.empty(len(indices), np.float32)
    unknown, largest, stale = resolve_priority_update(rings, capacity, shift, alpha, indices, priorities, slots, values)
    if unknown < 0 and largest >= 0.0:
        assign(leaves, nodes, starts, levels, capacity, slots, values)
    return unknown, largest, stale

"""The priority of a sequence in replay.

Replay estimates it when a sequence is stored, and a learner computes it again after each update, by the same formula.
"""

from __future__ import annotations

import numpy as np

# Sequence priority: eta · max |TD error| + (1 − eta) · mean |TD error| (Kapturowski et al. 2019).
PRIORITY_ETA = 0.9


def sequence_priority(errors: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return one priority per sequence from the TD errors [T, N] of the counted steps; 0 where none is counted."""
    size = np.abs(np.where(counted, errors, 0.0))
    number = np.maximum(counted.sum(axis=0), 1)
    priorities: np.ndarray = PRIORITY_ETA * size.max(axis=0) + (1.0 - PRIORITY_ETA) * size.sum(axis=0) / number
    return priorities

"""Shared by replay and recurrent agents: the priority of a sequence, and value rescaling.

Plain arithmetic, usable both in numba kernels and in NumPy code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Sequence priority: eta · max |TD error| + (1 − eta) · mean |TD error| (Kapturowski et al. 2019).
PRIORITY_ETA = 0.9
RESCALE_EPS = 1e-3  # slope of rescaled values far from 0, which keeps the rescaling invertible


def rescale_value(value: Any) -> Any:
    """Compress large values: sign(v) (√(|v| + 1) − 1) + 0.001 v (Pohlen et al. 2018)."""
    return np.sign(value) * (np.sqrt(np.abs(value) + 1.0) - 1.0) + RESCALE_EPS * value


def inverse_rescale_value(value: Any) -> Any:
    """Invert `rescale_value`."""
    root = (np.sqrt(1.0 + 4.0 * RESCALE_EPS * (np.abs(value) + 1.0 + RESCALE_EPS)) - 1.0) / (2.0 * RESCALE_EPS)
    return np.sign(value) * (root * root - 1.0)


def sequence_priority(errors: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return one priority per sequence from the TD errors [T, N] of the counted steps; 0 where none is counted."""
    size = np.abs(np.where(counted, errors, 0.0))
    number = np.maximum(counted.sum(axis=0), 1)
    priorities: np.ndarray = PRIORITY_ETA * size.max(axis=0) + (1.0 - PRIORITY_ETA) * size.sum(axis=0) / number
    return priorities

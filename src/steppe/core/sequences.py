"""What replay and recurrent agents agree on: a sequence's priority, and the scale that values may be learned in.

Plain arithmetic, so that kernels of numba can contain it as well as NumPy code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PRIORITY_ETA = (
    0.9  # a sequence's priority: this share of its largest error, the rest of its mean (Kapturowski et al. 2019)
)
RESCALE_EPS = 1e-3  # what is left of the slope of rescaled values far from 0, so that the scale can be undone


def rescale_value(value: Any) -> Any:
    """sign(v) (√(|v| + 1) − 1) + 0.001 v: large values come near each other (Pohlen et al. 2018)."""
    return np.sign(value) * (np.sqrt(np.abs(value) + 1.0) - 1.0) + RESCALE_EPS * value


def inverse_rescale_value(value: Any) -> Any:
    """The value whose `rescaled` this is."""
    root = (np.sqrt(1.0 + 4.0 * RESCALE_EPS * (np.abs(value) + 1.0 + RESCALE_EPS)) - 1.0) / (2.0 * RESCALE_EPS)
    return np.sign(value) * (root * root - 1.0)


def sequence_priority(errors: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """One priority per sequence from errors [T, N] of the steps that count; 0 where none does."""
    size = np.abs(np.where(counted, errors, 0.0))
    number = np.maximum(counted.sum(axis=0), 1)
    priorities: np.ndarray = PRIORITY_ETA * size.max(axis=0) + (1.0 - PRIORITY_ETA) * size.sum(axis=0) / number
    return priorities

"""An invertible scaling that compresses large action values.

Replay and learner share it: values that an actor recorded are rescaled if those of the learner are. Plain arithmetic,
usable both in numba kernels and in NumPy code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

RESCALE_EPS = 1e-3  # slope of rescaled values far from 0, which keeps the rescaling invertible


def rescale_value(value: Any) -> Any:
    """Compress large values: sign(v) (√(|v| + 1) − 1) + 0.001 v (Pohlen et al. 2018)."""
    return np.sign(value) * (np.sqrt(np.abs(value) + 1.0) - 1.0) + RESCALE_EPS * value


def inverse_rescale_value(value: Any) -> Any:
    """Invert `rescale_value`."""
    root = (np.sqrt(1.0 + 4.0 * RESCALE_EPS * (np.abs(value) + 1.0 + RESCALE_EPS)) - 1.0) / (2.0 * RESCALE_EPS)
    return np.sign(value) * (root * root - 1.0)

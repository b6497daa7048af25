"""What callers have in place of NumPy arrays: lists, numbers, and torch's tensors on any device."""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.core.contracts.errors import UsageError


def to_numpy(value: Any, name: str = "a value") -> np.ndarray:
    """The same numbers as a NumPy array, sharing memory where that is possible."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{name} is not an array of numbers: {error}") from None
    return found

"""Conversion to NumPy arrays from lists, numbers, and torch tensors on any device."""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.core.contracts.errors import UsageError


def to_numpy(value: Any, name: str = "a value") -> np.ndarray:
    """Return the same values as a NumPy array, sharing memory where possible; UsageError if they are not an array."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{name} is not an array of numbers: {error}") from None
    return found

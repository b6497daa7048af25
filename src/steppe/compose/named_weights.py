"""Weights and gradients as dictionaries of named arrays; validates names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from steppe.core.array_checks import as_column, as_numeric_array, require_finite
from steppe.core.contracts.errors import ConfigError, UsageError, did_you_mean
from steppe.core.contracts.weights import Weights, WeightsEntry


def with_arrays(weights: Weights, arrays: Mapping[str, Any]) -> Weights:
    """Return a copy of `weights` with these values. All of them must be given and finite."""
    _require(weights.layout.entries, arrays, "parameters")
    changed = replace(weights, buffer=weights.buffer.copy())
    for name, view in changed.arrays().items():
        view[...] = as_column(arrays[name], name, view.dtype)
        if view.dtype.kind == "f":
            require_finite(view, name)
    return changed


def named_gradient(weights: Weights, gradient: np.ndarray) -> dict[str, np.ndarray]:
    """Return a flat gradient as arrays by parameter, sharing its memory."""
    entries = weights.layout.first(len(gradient))
    ends = np.cumsum([entry.nbytes // 4 for entry in entries])
    parts = np.split(gradient, ends[:-1])
    return {entry.name: part.reshape(entry.shape) for entry, part in zip(entries, parts, strict=True)}


def flat_gradient(weights: Weights, gradients: Mapping[str, Any]) -> np.ndarray:
    """Return named gradients as the flat vector that an agent applies; every trainable parameter must be given."""
    if not gradients:
        raise UsageError("there are no gradients to apply: give what compute_gradients returned")
    entries = list(weights.layout.entries)
    last = max((index for index, entry in enumerate(entries) if entry.name in gradients), default=-1)
    _require(entries[: last + 1], gradients, "gradients")
    parts = {entry.name: as_column(gradients[entry.name], entry.name, "float32") for entry in entries[: last + 1]}
    for name, part in parts.items():
        require_finite(part, name)
    return np.concatenate([part.ravel() for part in parts.values()])


def _require(entries: Iterable[WeightsEntry], arrays: Mapping[str, Any], what: str) -> None:
    known = {entry.name: entry for entry in entries}
    for name in arrays:
        if name not in known:
            raise ConfigError(f"there is no parameter {name!r} among these {what}.{did_you_mean(str(name), known)}")
    for name, entry in known.items():
        if name not in arrays:
            raise ConfigError(f"the {what} lack {name!r}: give all {len(known)} of them")
        value = as_numeric_array(arrays[name], name)
        if value.shape != entry.shape or not np.can_cast(value.dtype, entry.dtype, "same_kind"):
            raise ConfigError(f"{name!r} is {value.dtype}{list(value.shape)}, not {entry.dtype}{list(entry.shape)}")

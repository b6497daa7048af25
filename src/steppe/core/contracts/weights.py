"""Weights: a version and one flat buffer with a layout.

Publishing, sending and hashing are therefore one vector operation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from steppe.core.contracts.errors import ConfigError, UsageError


class WeightsEntry(msgspec.Struct, frozen=True):
    """One named array inside the flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class WeightsLayout:
    """The entries of a flat buffer, in order. Consecutive float32 entries leave no gap."""

    entries: tuple[WeightsEntry, ...]

    @classmethod
    def of(cls, fields: Iterable[tuple[str, tuple[int, ...], str]]) -> WeightsLayout:
        """Place (name, shape, dtype) entries consecutively, each aligned to its own item size."""
        entries, end = [], 0
        for name, shape, dtype in fields:
            item = np.dtype(dtype).itemsize
            start = -(-end // item) * item
            entries.append(WeightsEntry(name, tuple(shape), dtype, start))
            end = start + entries[-1].nbytes
        return cls(tuple(entries))

    @cached_property
    def nbytes(self) -> int:
        return max((entry.offset + entry.nbytes for entry in self.entries), default=0)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Return the entries as arrays that share `buffer` (uint8, one-dimensional, contiguous)."""
        return {
            entry.name: buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def first(self, count: int) -> tuple[WeightsEntry, ...]:
        """Return the entries of the first `count` numbers: the trainable parameters, float32 and without gaps.

        Raises UsageError when `count` numbers are not a whole number of float32 entries.
        """
        entries = tuple(entry for entry in self.entries if entry.offset + entry.nbytes <= 4 * count)
        if sum(entry.nbytes for entry in entries) != 4 * count or any(entry.dtype != "float32" for entry in entries):
            raise UsageError(f"{count} numbers are not the gradient of whole parameters: give one array per parameter")
        return entries

    def differences(self, other: WeightsLayout) -> list[str]:
        """Describe how another layout differs, one string per difference; empty when they are the same."""
        own = {entry.name: (entry.shape, entry.dtype) for entry in self.entries}
        others = {entry.name: (entry.shape, entry.dtype) for entry in other.entries}
        words = [
            f"{name}: {own.get(name, 'absent')} here, {others.get(name, 'absent')} there"
            for name in sorted(own.keys() | others.keys())
            if own.get(name) != others.get(name)
        ]
        if not words and list(own) != list(others):
            words.append("the same entries in another order")
        return words


@dataclass(frozen=True)
class Weights:
    """Weights with counters: `version` counts publications from 0; the others are training totals at that version."""

    layout: WeightsLayout
    buffer: np.ndarray  # uint8, one-dimensional, contiguous; padding bytes are zero
    version: int = 0
    updates: int = 0
    env_steps: int = 0
    episodes: int = 0
    train_s: float = 0.0

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Weights:
        """Copy named arrays into a new flat buffer, in their order."""
        layout = WeightsLayout.of((name, array.shape, array.dtype.name) for name, array in arrays.items())
        buffer = np.zeros(layout.nbytes, np.uint8)
        for name, view in layout.views(buffer).items():
            view[...] = arrays[name]
        return cls(layout, buffer)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the named arrays, sharing the buffer."""
        return self.layout.views(self.buffer)

    def stamped(
        self, *, version: int, updates: int, env_steps: int, episodes: int = 0, train_s: float = 0.0
    ) -> Weights:
        """Return the same buffer with new counters."""
        return replace(self, version=version, updates=updates, env_steps=env_steps, episodes=episodes, train_s=train_s)

    def copy(self) -> Weights:
        """Return the same weights in a new buffer."""
        return replace(self, buffer=self.buffer.copy())

    def sha256(self) -> str:
        """Hash the raw bytes of the entries in layout order, without padding, so that offsets do not matter."""
        digest = hashlib.sha256()
        for entry in self.layout.entries:
            digest.update(self.buffer[entry.offset : entry.offset + entry.nbytes].data)
        return digest.hexdigest()

    def require(self, layout: WeightsLayout, whose: str) -> None:
        """Raise ConfigError naming the differences unless these weights fit `layout`."""
        words = layout.differences(self.layout)
        if words:
            raise ConfigError(f"the weights do not fit {whose}: " + "; ".join(words[:5]))

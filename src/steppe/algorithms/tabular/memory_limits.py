"""Memory for tables: a check of what is available before allocating, and a pool that reuses arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def free_memory_bytes() -> int | None:
    """Return the bytes that this process may still use without swapping, by machine and container; None if unknown."""
    found = [free for free in (_machine_bytes(), _container_bytes()) if free is not None]
    return min(found, default=None)


def require_memory(num_states: int, num_actions: int, entry_bytes: int, num_tables: int = 1) -> None:
    """Raise ConfigError, naming the size, unless tables of these dimensions fit into memory."""
    needed = num_states * num_actions * entry_bytes * num_tables
    free = free_memory_bytes()
    if needed >= 1 << 62 or (free is not None and needed > free):
        tables = "a table" if num_tables == 1 else f"{num_tables} tables"
        have = "no machine has" if free is None else f"{format_bytes(free)} are free"
        raise ConfigError(
            f"{tables} of {num_states} states × {num_actions} actions would take {format_bytes(needed)}, but {have}: "
            "use fewer states (coarser bins) or an agent with a network"
        )


def format_bytes(num_bytes: int) -> str:
    """Format a size with a binary unit."""
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def _machine_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _container_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        limit, used = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return None if limit == "max" else max(0, int(limit) - int(used))
    return None


class MemoryPool:
    """Lends arrays and takes them back; it allocates only when no released array has the requested shape and dtype."""

    def __init__(self) -> None:
        self.num_made = 0  # arrays allocated so far
        self._free: dict[tuple[tuple[int, ...], str], list[np.ndarray]] = {}
        self._lent: dict[int, np.ndarray] = {}

    def acquire(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return an uninitialized array, reserved until `release`."""
        key = ((shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype).str)
        waiting = self._free.get(key)
        if waiting:
            array = waiting.pop()
        else:
            array = np.empty(*key)
            self.num_made += 1
        self._lent[id(array)] = array
        return array

    def release(self, array: np.ndarray) -> None:
        """Return an array to the pool; it must come from `acquire`, and must not be used afterwards."""
        if self._lent.pop(id(array), None) is None:
            raise ConfigError("this array is not on loan from the pool: release what acquire returned, once")
        self._free.setdefault((array.shape, array.dtype.str), []).append(array)

    @contextlib.contextmanager
    def borrow(self, *arrays: tuple[int | tuple[int, ...], Any]) -> Iterator[list[np.ndarray]]:
        """Lend arrays of these (shape, dtype) for the duration of a `with` block."""
        taken = [self.acquire(shape, dtype) for shape, dtype in arrays]
        try:
            yield taken
        finally:
            for array in taken:
                self.release(array)

    def clear(self) -> None:
        """Free every array that is not lent."""
        self._free.clear()

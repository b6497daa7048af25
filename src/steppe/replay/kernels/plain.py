"""The intrinsics of copy.py in plain Python, for processes that disable numba's compilation (NUMBA_DISABLE_JIT=1).

They are slow but return the same numbers, so kernels can be debugged, tested and measured for coverage as Python.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy `count` bytes from one address to another."""
    ctypes.memmove(int(target), int(source), int(count))


def prefetch(address: int) -> None:
    """Do nothing: Python cannot prefetch."""


def load_float64(address: int) -> float:
    """Return the float64 at an address."""
    return ctypes.c_double.from_address(int(address)).value


def load_float32(address: int) -> np.float32:
    """Return the float32 at an address."""
    return np.float32(ctypes.c_float.from_address(int(address)).value)


def count_not_above(address: int, number: float) -> int:
    """Return how many of the 8 float64 at an address are not above a number."""
    return sum(number >= one for one in (ctypes.c_double * 8).from_address(int(address)))


def block_sum(address: int) -> float:
    """Return the sum of the 16 float32 at an address, in float64: first four lanes, then the lanes in pairs."""
    leaves = list((ctypes.c_float * 16).from_address(int(address)))
    a, b, c, d = (leaves[i] + leaves[4 + i] + leaves[8 + i] + leaves[12 + i] for i in range(4))
    return float((a + b) + (c + d))


def group_sum(nodes: int, starts: int) -> float:
    """Return the sum of the 8 float64 at `nodes`; write their exclusive prefix sums to `starts`, inf past the total."""
    total, running = 0.0, []
    for node in (ctypes.c_double * 8).from_address(int(nodes)):
        running.append(total)
        total += node
    found = (ctypes.c_double * 8).from_address(int(starts))
    found[:] = [start if start < total else math.inf for start in running]
    return total

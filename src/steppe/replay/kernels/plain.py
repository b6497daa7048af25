"""The instructions of copy.py in plain Python, for a process in which numba's compilation is off (NUMBA_DISABLE_JIT=1).

They are slow and give the same numbers: kernels can be debugged, measured for coverage and tested as Python.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy `count` bytes from one address to another."""
    ctypes.memmove(int(target), int(source), int(count))


def prefetch(address: int) -> None:
    """Do nothing: there is no cache to ask."""


def load_float64(address: int) -> float:
    """The float64 at an address."""
    return ctypes.c_double.from_address(int(address)).value


def load_float32(address: int) -> np.float32:
    """The float32 at an address."""
    return np.float32(ctypes.c_float.from_address(int(address)).value)


def count_not_above(address: int, number: float) -> int:
    """How many of the 8 float64 at an address are not above a number."""
    return sum(number >= one for one in (ctypes.c_double * 8).from_address(int(address)))


def block_sum(address: int) -> float:
    """The sum of the 16 float32 at an address, in float64: four lanes first, then the lanes by pairs."""
    leaves = list((ctypes.c_float * 16).from_address(int(address)))
    a, b, c, d = (leaves[i] + leaves[4 + i] + leaves[8 + i] + leaves[12 + i] for i in range(4))
    return float((a + b) + (c + d))


def group_sum(nodes: int, starts: int) -> float:
    """The sum of the 8 float64 at `nodes`; writes where each begins to `starts`, infinite where nothing is left."""
    total, running = 0.0, []
    for node in (ctypes.c_double * 8).from_address(int(nodes)):
        running.append(total)
        total += node
    found = (ctypes.c_double * 8).from_address(int(starts))
    found[:] = [start if start < total else math.inf for start in running]
    return total

"""Random integers from 64-bit words, compiled: every function is a pure function of the words passed in.

All integers are int64 except the words: numba promotes an int64 combined with a uint64 to a float.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

NumbaInt = Any  # an int64, or a uint64 if named `word`: for a type checker, numba's scalars are not ints

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


@numba.njit(cache=True, nogil=True, inline="always")
def splitmix64(word: NumbaInt) -> NumbaInt:
    """Return the next random word after `word` (SplitMix64, Steele et al. 2014)."""
    word = np.uint64(word + _GOLDEN_GAMMA)
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@numba.njit(cache=True, nogil=True, inline="always")
def random_below(word: NumbaInt, count: NumbaInt) -> NumbaInt:
    """Return a random integer below `count` < 2³², from the upper half of a word."""
    return np.int64(((np.uint64(word) >> _HALF) * np.uint64(count)) >> _HALF)


@numba.njit(cache=True, nogil=True, inline="always")
def popcount(bits: NumbaInt) -> NumbaInt:
    """Count the set bits of the lower 32; compiles to one instruction where the CPU has one."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) & 0xFFFFFFFF) >> 24

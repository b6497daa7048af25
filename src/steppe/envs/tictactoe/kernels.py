"""Compiled moves of the games in games.py, shared by environments and learners: random moves and random start states.

Randomness is passed in as 64-bit words, so every kernel is a pure function of its arguments. All integers are int64
except the words: numba promotes an int64 combined with a uint64 to a float.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from steppe.core.games import MOVER_BIT, OUTCOME_BIT, GameTables, StartDistribution

NumbaInt = Any  # an int64, or a uint64 if named `word`: for a type checker, numba's scalars are not ints

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)


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


@numba.njit(cache=True, nogil=True, inline="always")
def unpack_moves(facts: NumbaInt) -> NumbaInt:
    """Return the legal moves from a state's bits."""
    return np.int64(facts) & 0xFFFF


@numba.njit(cache=True, nogil=True, inline="always")
def unpack_mover(facts: NumbaInt) -> NumbaInt:
    """Return the player to move from a state's bits."""
    return (np.int64(facts) >> MOVER_BIT) & 1


@numba.njit(cache=True, nogil=True, inline="always")
def unpack_outcome(facts: NumbaInt) -> NumbaInt:
    """Return the outcome from a state's bits; 0 if the game is not finished."""
    return np.int64(facts) >> OUTCOME_BIT


@numba.njit(cache=True, nogil=True, inline="always")
def random_move(rules: GameTables, moves: NumbaInt, word: NumbaInt) -> NumbaInt:
    """Return one of the set bits with equal probability; 0 if there is none."""
    bits = np.int64(moves)
    return np.int64(rules.nth[np.uint64(bits), np.uint64(random_below(word, popcount(bits)))])


@numba.njit(cache=True, nogil=True, inline="always")
def random_start(starts: StartDistribution, word: NumbaInt) -> NumbaInt:
    """Sample a start state from both halves of a word."""
    place = np.uint64(random_below(word, len(starts.states)))
    own, other = starts.states[place], starts.others[place]
    return own if np.int64(np.uint64(word) & _LOWER) < starts.shares[place] else other

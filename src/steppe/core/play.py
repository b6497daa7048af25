"""Compiled moves of the games in games.py: picking one of several, beginning a game. Shared by worlds and learners.

Chance comes in as 64-bit words, so every kernel is a pure function of what it is given. All integers are int64 here but
for the words: numba makes a float of an int64 with a uint64.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from steppe.core.games import MOVER_BIT, OUTCOME_BIT, GameTables, StartDistribution

NumbaInt = Any  # an int64, or a uint64 where it is called a word: numba's scalars are no ints to a type checker

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LOWER = np.uint64(0xFFFFFFFF)


@numba.njit(cache=True, nogil=True, inline="always")
def splitmix64(word: NumbaInt) -> NumbaInt:
    """The next word after `word` (SplitMix64, Steele et al. 2014)."""
    word = np.uint64(word + _GOLDEN_GAMMA)
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@numba.njit(cache=True, nogil=True, inline="always")
def random_below(word: NumbaInt, count: NumbaInt) -> NumbaInt:
    """A number below `count` < 2³², from the upper half of a word."""
    return np.int64(((np.uint64(word) >> _HALF) * np.uint64(count)) >> _HALF)


@numba.njit(cache=True, nogil=True, inline="always")
def popcount(bits: NumbaInt) -> NumbaInt:
    """How many of the lower 32 bits are set; the compiler makes one instruction of it where there is one."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) & 0xFFFFFFFF) >> 24


@numba.njit(cache=True, nogil=True, inline="always")
def unpack_moves(facts: NumbaInt) -> NumbaInt:
    """The legal moves."""
    return np.int64(facts) & 0xFFFF


@numba.njit(cache=True, nogil=True, inline="always")
def unpack_mover(facts: NumbaInt) -> NumbaInt:
    """Whose turn it is."""
    return (np.int64(facts) >> MOVER_BIT) & 1


@numba.njit(cache=True, nogil=True, inline="always")
def unpack_outcome(facts: NumbaInt) -> NumbaInt:
    """How it ended, if it did."""
    return np.int64(facts) >> OUTCOME_BIT


@numba.njit(cache=True, nogil=True, inline="always")
def random_move(rules: GameTables, moves: NumbaInt, word: NumbaInt) -> NumbaInt:
    """One of the set bits, each with the same chance; 0 where there is none."""
    bits = np.int64(moves)
    return np.int64(rules.nth[np.uint64(bits), np.uint64(random_below(word, popcount(bits)))])


@numba.njit(cache=True, nogil=True, inline="always")
def random_start(starts: StartDistribution, word: NumbaInt) -> NumbaInt:
    """A state to begin from, by both halves of a word."""
    place = np.uint64(random_below(word, len(starts.states)))
    own, other = starts.states[place], starts.others[place]
    return own if np.int64(np.uint64(word) & _LOWER) < starts.shares[place] else other

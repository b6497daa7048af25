"""Compiled moves of the games in games.py: picking one of several, beginning a game. Shared by worlds and learners.

Chance comes in as 64-bit words, so every kernel is a pure function of what it is given. All integers are int64 here but
for the words: numba makes a float of an int64 with a uint64.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from steppe.core.games import Rules

Whole = Any  # an int64, or a uint64 where it is called a word: numba's scalars are no ints to a type checker

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


@numba.njit(cache=True, nogil=True, inline="always")
def another(word: Whole) -> Whole:
    """The next word after `word` (SplitMix64, Steele et al. 2014)."""
    word = np.uint64(word + _GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@numba.njit(cache=True, nogil=True, inline="always")
def below(word: Whole, count: Whole) -> Whole:
    """A number below `count` < 2³², from the upper half of a word."""
    return np.int64(((np.uint64(word) >> _HALF) * np.uint64(count)) >> _HALF)


@numba.njit(cache=True, nogil=True, inline="always")
def num_bits(bits: Whole) -> Whole:
    """How many of the lower 32 bits are set; the compiler makes one instruction of it where there is one."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) & 0xFFFFFFFF) >> 24


@numba.njit(cache=True, nogil=True, inline="always")
def pick(rules: Rules, moves: Whole, word: Whole) -> Whole:
    """One of the set bits, each with the same chance; `moves` must not be 0."""
    bits = np.int64(moves)
    return np.int64(rules.nth[bits, below(word, num_bits(bits))])


@numba.njit(cache=True, nogil=True)
def begin(rules: Rules, opponent: np.ndarray, opening: int, word: Whole) -> Whole:
    """A state in which a player meets a new game: in either seat, after 0 to `opening` moves at random.

    Without an opponent (an empty table) it is whoever's turn it is.
    """
    while True:
        word = another(word)
        state, seat = 0, np.int64(word & np.uint64(1))
        for _ in range(below(word, opening + 1)):
            if rules.legal[state] == 0:
                break
            word = another(word)
            state += rules.placed[rules.mover[state], pick(rules, rules.legal[state], word)]
        if len(opponent) > 0 and rules.legal[state] != 0 and rules.mover[state] != seat:
            word = another(word)
            state += rules.placed[rules.mover[state], pick(rules, opponent[state], word)]
        if rules.legal[state] != 0:
            return state

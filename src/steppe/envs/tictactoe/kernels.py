"""Compiled moves of the games in rules.py, shared by environments and learners: random moves and random start states.

Randomness is passed in as 64-bit words, so every kernel is a pure function of its arguments.
"""

from __future__ import annotations

import numba
import numpy as np

from steppe.core.system.random_words import NumbaInt, popcount, random_below
from steppe.envs.tictactoe.rules import MOVER_BIT, OUTCOME_BIT, GameTables, StartDistribution

_LOWER = np.uint64(0xFFFFFFFF)


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
    column = np.uint64(random_below(word, len(starts.states)))
    own, other = starts.states[column], starts.others[column]
    return own if np.int64(np.uint64(word) & _LOWER) < starts.shares[column] else other

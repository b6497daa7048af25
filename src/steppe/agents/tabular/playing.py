"""Compiled training in the games of core/games.py: the game, the ε-greedy choice and the update in one pass, many games at
once, each game's step learned before the next game's begins.

One 64-bit word of chance per game and step; more, where a step needs more, is mixed from it. Rows of the table are read
whole and masked afterwards: a branch per legal move cannot be predicted, and costs a third of the speed.
"""

from __future__ import annotations

import numba
import numpy as np

from steppe.agents.tabular.kernels import explores
from steppe.core.games import DRAW, Rules
from steppe.core.play import Whole, another, begin, pick

LEAST = np.float32(-np.inf)


@numba.njit(cache=True, nogil=True, inline="always")
def best_move(q: np.ndarray, state: Whole, moves: Whole) -> Whole:
    """The first of the best moves among the set bits, of which there is one."""
    best, action = LEAST, -1
    for candidate in range(q.shape[1]):
        value = q[state, candidate]
        better = (((moves >> candidate) & 1) != 0) & (value > best)
        best = value if better else best
        action = candidate if better else action
    return action


@numba.njit(cache=True, nogil=True, inline="always")
def best_worth(q: np.ndarray, state: Whole, moves: Whole) -> float:
    """The largest value among the set bits."""
    best = LEAST
    for candidate in range(q.shape[1]):
        value = q[state, candidate]
        better = (((moves >> candidate) & 1) != 0) & (value > best)
        best = value if better else best
    return np.float64(best)


@numba.njit(cache=True, nogil=True)
def play_against(
    q: np.ndarray,
    rules: Rules,
    opponent: np.ndarray,
    opening: int,
    states: np.ndarray,
    words: np.ndarray,
    rates: np.ndarray,
    epsilons: np.ndarray,
    discount: float,
    tally: np.ndarray,
) -> None:
    """`len(words)` steps of every game against an opponent that belongs to the world: a step is a move and its reply.

    Ends are counted in `tally`: won, drawn, lost.
    """
    for t in range(len(words)):
        rate, epsilon = rates[t], epsilons[t]
        for b in range(len(states)):
            state, word = states[b], words[t, b]
            moves, seat = np.int64(rules.legal[state]), rules.mover[state]
            action = pick(rules, moves, word) if explores(word, epsilon) else best_move(q, state, moves)
            after = state + rules.placed[seat, action]
            if rules.legal[after] != 0:
                word = another(word)
                after += rules.placed[1 - seat, pick(rules, opponent[after], word)]
            moves = np.int64(rules.legal[after])
            if moves != 0:
                target = discount * best_worth(q, after, moves)
                states[b] = after
            else:
                result = rules.outcome[after]
                target = 0.0 if result == DRAW else (1.0 if result == seat + 1 else -1.0)
                tally[1 - np.int64(target)] += 1
                states[b] = begin(rules, opponent, opening, word)
            value = np.float64(q[state, action])
            q[state, action] = value + rate * (target - value)


@numba.njit(cache=True, nogil=True)
def play_self(
    q: np.ndarray,
    rules: Rules,
    opening: int,
    states: np.ndarray,
    words: np.ndarray,
    rates: np.ndarray,
    epsilons: np.ndarray,
    discount: float,
    tally: np.ndarray,
) -> None:
    """The same with both seats played from one table: a step is one move, and what follows is worth −γ max to the mover.

    Ends are counted as the first player's.
    """
    nobody = np.empty(0, rules.legal.dtype)
    for t in range(len(words)):
        rate, epsilon = rates[t], epsilons[t]
        for b in range(len(states)):
            state, word = states[b], words[t, b]
            moves, seat = np.int64(rules.legal[state]), rules.mover[state]
            action = pick(rules, moves, word) if explores(word, epsilon) else best_move(q, state, moves)
            after = state + rules.placed[seat, action]
            moves = np.int64(rules.legal[after])
            if moves != 0:
                target = -discount * best_worth(q, after, moves)
                states[b] = after
            else:
                won = rules.outcome[after] != DRAW
                target = 1.0 if won else 0.0  # nobody loses by a move of their own
                tally[1 if not won else 2 * seat] += 1
                states[b] = begin(rules, nobody, opening, word)
            value = np.float64(q[state, action])
            q[state, action] = value + rate * (target - value)


@numba.njit(cache=True, nogil=True)
def begin_all(rules: Rules, opponent: np.ndarray, opening: int, words: np.ndarray) -> np.ndarray:
    """The first states of as many games as there are words."""
    states = np.empty(len(words), np.int64)
    for b in range(len(words)):
        states[b] = begin(rules, opponent, opening, words[b])
    return states

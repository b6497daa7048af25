"""Compiled training in the games of envs/tictactoe/rules.py: game step, ε-greedy choice and update in one pass over many games.

Each game's step is learned before the next game's begins. Every game uses one 64-bit random word per step: the word
itself selects the move, a word mixed from it the reply, and the word mixed from that one the start of a new game.

Nothing here branches on random outcomes, which no processor can predict: table rows are read whole and masked
afterwards, and both alternatives (random or best move, reply or none, next state or new game) are always computed and
one is selected.
"""

from __future__ import annotations

import numba
import numpy as np

from steppe.algorithms.tabular.batch_kernels import move_towards, should_explore
from steppe.core.system.random_words import NumbaInt, splitmix64
from steppe.envs.tictactoe.kernels import random_move, random_start, unpack_mover, unpack_moves, unpack_outcome
from steppe.envs.tictactoe.rules import DRAW, GameTables, StartDistribution

NEG_INF = np.float32(-np.inf)


@numba.njit(cache=True, nogil=True, inline="always")
def best_move(q: np.ndarray, state: NumbaInt, moves: NumbaInt) -> NumbaInt:
    """Return the first of the best moves among the set bits, of which there must be one."""
    best, action = NEG_INF, -1
    for candidate in range(q.shape[1]):
        value = q[np.uint64(state), candidate]
        better = (((moves >> candidate) & 1) != 0) & (value > best)
        best = value if better else best
        action = candidate if better else action
    return action


@numba.njit(cache=True, nogil=True, inline="always")
def best_move_value(q: np.ndarray, state: NumbaInt, moves: NumbaInt) -> float:
    """Return the largest value among the set bits."""
    best = NEG_INF
    for candidate in range(q.shape[1]):
        value = q[np.uint64(state), candidate]
        better = (((moves >> candidate) & 1) != 0) & (value > best)
        best = value if better else best
    return np.float64(best)


@numba.njit(cache=True, nogil=True, inline="always")
def epsilon_greedy_move(
    q: np.ndarray, rules: GameTables, state: NumbaInt, moves: NumbaInt, epsilon: float, word: NumbaInt
) -> NumbaInt:
    """Return an ε-greedy move."""
    random, best = random_move(rules, moves, word), best_move(q, state, moves)
    return random if should_explore(word, epsilon) else best


@numba.njit(cache=True, nogil=True)
def train_against(
    q: np.ndarray,
    rules: GameTables,
    opponent: np.ndarray,
    starts: StartDistribution,
    states: np.ndarray,
    words: np.ndarray,
    rates: np.ndarray,
    epsilons: np.ndarray,
    discount: float,
    results: np.ndarray,
) -> None:
    """Train `len(words)` steps of every game against an opponent in the environment: a step is a move and its reply.

    Results of finished games are added to `tally`: won, drawn, lost.
    """
    placed, won, drawn, lost = rules.placed, np.int64(0), np.int64(0), np.int64(0)
    for t in range(len(words)):
        rate, epsilon = rates[t], epsilons[t]
        for b in range(len(states)):
            state, word = states[b], words[t, b]
            facts = rules.state_bits[np.uint64(state)]
            player = unpack_mover(facts)
            action = epsilon_greedy_move(q, rules, state, unpack_moves(facts), epsilon, word)
            after = state + placed[np.uint64(player), np.uint64(action)]
            word = splitmix64(word)
            replies = np.int64(opponent[np.uint64(after)])
            reply = placed[np.uint64(1 - player), np.uint64(random_move(rules, replies, word))]
            after += reply if replies != 0 else np.int64(0)
            facts = rules.state_bits[np.uint64(after)]
            moves, outcome = unpack_moves(facts), unpack_outcome(facts)
            wins, draws = np.int64(outcome == player + 1), np.int64(outcome == DRAW)
            loses = np.int64(outcome == 2 - player)
            won, drawn, lost = won + wins, drawn + draws, lost + loses
            worth = discount * best_move_value(q, after, moves)
            target = worth if moves != 0 else np.float64(wins - loses)
            fresh = random_start(starts, splitmix64(word))
            states[b] = after if moves != 0 else fresh
            move_towards(q, state, action, target, rate)
    results[0] += won
    results[1] += drawn
    results[2] += lost


@numba.njit(cache=True, nogil=True)
def train_self_play(
    q: np.ndarray,
    rules: GameTables,
    starts: StartDistribution,
    states: np.ndarray,
    words: np.ndarray,
    rates: np.ndarray,
    epsilons: np.ndarray,
    discount: float,
    results: np.ndarray,
) -> None:
    """Train in self-play from one table: a step is one move, and the next state is worth −γ max to the mover.

    Results are counted from the first player's side.
    """
    won, drawn, lost = np.int64(0), np.int64(0), np.int64(0)
    for t in range(len(words)):
        rate, epsilon = rates[t], epsilons[t]
        for b in range(len(states)):
            state, word = states[b], words[t, b]
            facts = rules.state_bits[np.uint64(state)]
            player = unpack_mover(facts)
            action = epsilon_greedy_move(q, rules, state, unpack_moves(facts), epsilon, word)
            after = state + rules.placed[np.uint64(player), np.uint64(action)]
            facts = rules.state_bits[np.uint64(after)]
            moves, outcome = unpack_moves(facts), unpack_outcome(facts)
            wins, draws, loses = np.int64(outcome == 1), np.int64(outcome == DRAW), np.int64(outcome == 2)
            won, drawn, lost = won + wins, drawn + draws, lost + loses
            worth = -discount * best_move_value(q, after, moves)
            target = worth if moves != 0 else np.float64(wins + loses)  # a move never loses the game for its mover
            fresh = random_start(starts, splitmix64(word))
            states[b] = after if moves != 0 else fresh
            move_towards(q, state, action, target, rate)
    results[0] += won
    results[1] += drawn
    results[2] += lost


@numba.njit(cache=True, nogil=True)
def start_games(starts: StartDistribution, words: np.ndarray) -> np.ndarray:
    """Return the start states of as many games as there are words."""
    states = np.empty(len(words), np.int64)
    for b in range(len(words)):
        states[b] = random_start(starts, words[b])
    return states

"""Finite two-player games as plain tables, their players, and exact values of play.

A move adds a fixed number to the state's index, like placing a stone; so a state never recurs, and one pass per move of
the longest game determines every value. The moves that a player may choose are bits: bit a of `moves[state]` is
action a, and the player takes one of the set bits with equal probability. Compiled moves are in kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from steppe.core.contracts.errors import ConfigError, did_you_mean

DRAW = 3
MAX_ACTIONS = 16
MOVER_BIT, OUTCOME_BIT = 16, 17  # lowest bit of each field in `GameTables.state_bits`
OPPONENTS = ("random", "perfect", "self")


@runtime_checkable
class HasTable(Protocol):
    """A player defined by its action values, one row per state."""

    q_table: Any


class GameTables(NamedTuple):
    """A game's tables for compiled code."""

    placed: np.ndarray  # int64 [2, A]: what action a of player p adds to the state index
    state_bits: np.ndarray  # uint32 [S]: bits 0–15 the legal moves, 16 the player to move, 17–18 the outcome
    nth: np.ndarray  # int8 [2^A, A]: position of the k-th set bit of a number, k counted from 0


class StartDistribution(NamedTuple):
    """Alias table of start states (Walker 1977): a uniform column, then one of its two states, from one random word."""

    states: np.ndarray  # int64 [n]
    others: np.ndarray  # int64 [n]
    shares: np.ndarray  # int64 [n]: probability of `states` in this column, in units of 2⁻³²


@dataclass(frozen=True, eq=False)
class TurnGame:
    """A two-player game: state 0 is the start, player 0 moves first, a state without legal moves is terminal.

    `placed` is as in `GameTables`.
    """

    name: str
    placed: np.ndarray
    legal: np.ndarray  # uint16 [S]: the legal moves as bits
    mover: np.ndarray  # int64 [S]: the player to move
    outcome: np.ndarray  # int8 [S]: 0 not finished, 1 and 2 won by player 0 and 1, 3 a draw

    @property
    def num_states(self) -> int:
        """Number of state indices, reachable or not."""
        return len(self.legal)

    @property
    def num_actions(self) -> int:
        """Number of actions, legal or not."""
        return int(self.placed.shape[1])

    @cached_property
    def rules(self) -> GameTables:
        """The tables for compiled code.

        The k-th set bit is looked up because computing it takes unpredictable branches.
        """
        if self.num_actions > MAX_ACTIONS:
            raise ConfigError(
                f"{self.name} has {self.num_actions} moves; compiled play knows games of up to {MAX_ACTIONS}"
            )
        bits = moves_to_mask(np.arange(1 << self.num_actions), self.num_actions)
        nth = np.argsort(~bits, axis=1, kind="stable").astype(np.int8)
        facts = self.legal.astype(np.int64) | self.mover << MOVER_BIT | self.outcome.astype(np.int64) << OUTCOME_BIT
        return GameTables(self.placed, facts.astype(np.uint32), nth)

    def starts(self, replies: np.ndarray, opening: int) -> StartDistribution:
        """Return the exact distribution of a player's first state, as either side, after 0 to `opening` random moves.

        `replies` are the opponent's moves as bits. If empty, the opponent does not reply, and either player may be to
        move.
        """
        live, chances = self.legal > 0, _move_probabilities(self, self.legal)
        reached, met = np.eye(1, self.num_states)[0], np.zeros(self.num_states)
        for _ in range(opening + 1):
            met += reached
            reached = self._propagate(reached, chances) + np.where(live, 0.0, reached)
        if len(replies):
            met = met + self._propagate(met, _move_probabilities(self, replies))
        return _build_alias_table(np.where(live, met, 0.0))

    def _propagate(self, mass: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """Return the probability mass of each state after one move with these probabilities [S, A]."""
        following: np.ndarray = np.bincount(
            self.following.ravel(), (mass[:, None] * chances).ravel(), minlength=self.num_states
        )
        return following

    @cached_property
    def legal_table(self) -> np.ndarray:
        """The legal moves as booleans [S, A]."""
        return moves_to_mask(self.legal, self.num_actions)

    @cached_property
    def following(self) -> np.ndarray:
        """The state after each move [S, A]; 0 where the move is illegal."""
        after = np.arange(self.num_states)[:, None] + self.placed[self.mover]
        return np.where(self.legal_table, after, 0)

    @cached_property
    def reachable(self) -> np.ndarray:
        """Which states are reachable [S], terminal ones included."""
        found = np.zeros(self.num_states, np.bool_)
        frontier = np.zeros(1, np.int64)
        while len(frontier):
            found[frontier] = True
            frontier = np.unique(self.following[frontier][self.legal_table[frontier]])
        return found

    @cached_property
    def reward(self) -> np.ndarray:
        """Immediate reward of the mover for each move [S, A]: 1 for a win, else 0."""
        won = self.outcome[self.following] == self.mover[:, None] + 1
        return np.where(won & self.legal_table, 1.0, 0.0)

    @cached_property
    def perfect(self) -> np.ndarray:
        """The minimax-optimal moves, as bits [S]."""
        value = np.zeros(self.num_states)
        while True:
            worth = np.where(self.legal_table, self.reward - value[self.following], -np.inf)
            best = np.where(self.legal > 0, worth.max(axis=1), 0.0)
            if np.array_equal(best, value):
                return mask_to_moves(worth == best[:, None], self.legal)
            value = best


def moves_to_mask(moves: np.ndarray, num_actions: int) -> np.ndarray:
    """Convert bits [S] to booleans [S, A]."""
    table: np.ndarray = (moves[:, None].astype(np.int64) >> np.arange(num_actions)) & 1 == 1
    return table


def mask_to_moves(table: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """Convert booleans [S, A] to bits [S], legal moves only."""
    bits = (table * (1 << np.arange(table.shape[1]))).sum(axis=1)
    moves: np.ndarray = (bits & legal).astype(legal.dtype)
    return moves


def greedy_moves(game: TurnGame, q_table: Any) -> np.ndarray:
    """Return the first of the best legal moves by a table of action values, as bits [S]."""
    values = np.asarray(q_table, np.float64)
    if values.shape != (game.num_states, game.num_actions):
        raise ConfigError(
            f"a player of {game.name} needs a table of {game.num_states} × {game.num_actions}, not {values.shape}"
        )
    best = np.where(game.legal_table, values, -np.inf).argmax(axis=1)
    return mask_to_moves(np.arange(game.num_actions) == best[:, None], game.legal)


def player_moves(game: TurnGame, player: Any) -> np.ndarray:
    """Return the moves of `player` as bits [S].

    A player is "random", "perfect", or an object with a `q_table`, of which the current values are used.
    """
    if isinstance(player, str):
        if player == "random":
            return game.legal
        if player == "perfect":
            return game.perfect
        raise ConfigError(
            f"there is no opponent {player!r}: {', '.join(OPPONENTS)}, or an agent.{did_you_mean(player, OPPONENTS)}"
        )
    if isinstance(player, HasTable):
        return greedy_moves(game, player.q_table)
    raise ConfigError(f"a {type(player).__name__} cannot play {game.name} here: it has no q_table")


def exact_return(game: TurnGame, player: Any, opponent: Any = "random") -> tuple[float, float]:
    """Return the expected undiscounted return of `player`, moving first and moving second, over the whole game tree."""
    mine, theirs = (_move_probabilities(game, player_moves(game, who)) for who in (player, opponent))
    return _solve_game(game, lambda worth: (mine * worth).sum(axis=1), lambda worth: (theirs * worth).sum(axis=1))


def worst_return(game: TurnGame, player: Any) -> tuple[float, float]:
    """Return the worst result of `player`, moving first and moving second, over all moves that either side may choose.

    −1 is a loss.
    """
    chosen = moves_to_mask(player_moves(game, player), game.num_actions)
    return _solve_game(
        game,
        lambda worth: np.where(chosen, worth, np.inf).min(axis=1),
        lambda worth: np.where(game.legal_table, worth, np.inf).min(axis=1),
    )


def _build_alias_table(weights: np.ndarray) -> StartDistribution:
    """Build an alias table of states in proportion to their weights, in integers so that the sum is exact."""
    states = np.flatnonzero(weights)
    count, full = len(states), 1 << 32
    shares = np.rint(weights[states] / weights.sum() * (count * full)).astype(np.int64)
    shares[shares.argmax()] += count * full - shares.sum()
    others = states.copy()
    small, large = ([i for i in range(count) if (shares[i] < full) == less] for less in (True, False))
    while small and large:
        poor, rich = small.pop(), large[-1]
        others[poor] = states[rich]
        shares[rich] -= full - shares[poor]
        if shares[rich] < full:
            small.append(large.pop())
    return StartDistribution(states, others, shares)


def _move_probabilities(game: TurnGame, moves: np.ndarray) -> np.ndarray:
    table = moves_to_mask(moves, game.num_actions)
    chances: np.ndarray = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    return chances


def _solve_game(game: TurnGame, mine: Any, theirs: Any) -> tuple[float, float]:
    """Return the player's value at the start, moving first and moving second.

    `mine` and `theirs` reduce action values [S, A], from the player's view, to state values for either side's moves.
    """
    live = game.legal > 0
    value, waiting = np.zeros(game.num_states), np.zeros(game.num_states)  # on the player's, on the opponent's turn
    while True:
        moved = np.where(live, mine(game.reward + waiting[game.following]), 0.0)
        replied = np.where(live, theirs(value[game.following] - game.reward), 0.0)
        if np.array_equal(moved, value) and np.array_equal(replied, waiting):
            return float(value[0]), float(waiting[0])
        value, waiting = moved, replied

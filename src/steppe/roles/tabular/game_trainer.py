"""GameTrainer: a Q-learner and many copies of a turn-based game, trained by one compiled call per block of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from steppe.algorithms.tabular.q_learning import OptimalQLearning
from steppe.algorithms.tabular.rng import WordStream
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError
from steppe.envs.tictactoe.rules import TurnGame, player_moves
from steppe.roles.tabular import game_kernels


@dataclass(frozen=True)
class GameTally:
    """Steps of all games together, and the results of finished games from the learner's side.

    In self-play, results are from the side of the player who moved first.
    """

    num_steps: int
    won: int
    drawn: int
    lost: int

    @property
    def num_games(self) -> int:
        """Number of finished games."""
        return self.won + self.drawn + self.lost


class GameTrainer:
    """Trains `agent` in `num_games` parallel games, against an opponent or, with "self", on both sides.

    `opponent` is "random", "perfect", "self" or an agent with a q_table, which plays its current best moves. Games
    begin after 0 to `opening_moves` random moves, default 0. A perfect opponent never shows what follows a mistake, so
    against it every position must come up at random: there the default is all moves but one.
    """

    def __init__(
        self,
        agent: OptimalQLearning,
        game: TurnGame,
        opponent: Any = "random",
        *,
        num_games: int = 1024,
        opening_moves: int | None = None,
        block_steps: int = 32,
        seed: int | None = None,
    ) -> None:
        if not isinstance(agent, OptimalQLearning):
            raise ConfigError(
                f"compiled games train Q-learning; step a {type(agent).__name__} in the vector environment"
            )
        if (agent.state_size, agent.action_size) != (game.num_states, game.num_actions):
            need = f"state_size={game.num_states}, action_size={game.num_actions}"
            raise ConfigError(f"{game.name} needs {need}, not {agent.state_size} and {agent.action_size}")
        if num_games < 1 or block_steps < 1:
            raise ConfigError(f"num_games={num_games} and block_steps={block_steps} must be at least 1")
        self.agent = agent
        self.game = game
        self.num_games = num_games
        self.block_steps = block_steps
        self.words = WordStream(seed)
        self._moves = game.legal[:0] if opponent == "self" else player_moves(game, opponent)
        hard = opponent == "perfect"
        self.opening_moves = (game.num_actions - 1 if hard else 0) if opening_moves is None else opening_moves
        if not 0 <= self.opening_moves < game.num_actions:
            raise ConfigError(f"opening_moves={self.opening_moves} must be from 0 to {game.num_actions - 1}")
        self._starts = game.starts(self._moves, self.opening_moves)
        self.states = game_kernels.start_games(self._starts, self.words.take(num_games))

    def run(self, num_steps: int, most_games: int | None = None) -> GameTally:
        """Train for `num_steps` steps over all games, rounded up to whole steps of every game.

        At most `most_games` games end: when fewer than `num_games` are left, only that many continue.
        """
        waiting, results = -(-num_steps // self.num_games), np.zeros(3, np.int64)
        taken, playing_games = 0, self.num_games
        while waiting > 0:
            block = min(waiting, self.block_steps)
            if most_games is not None:
                left = most_games - int(results.sum())
                playing_games = min(self.num_games, left)
                if playing_games == 0:
                    break
                block = min(block, left // playing_games)  # a step ends at most one game
            self._block(block, playing_games, results)
            taken += block * playing_games
            waiting -= block
        return GameTally(taken, *(int(count) for count in results))

    def state(self) -> Tree:
        """Return the games' states and the random stream, as copies; the learner is saved separately."""
        return {"states": self.states.copy(), "words": self.words.state()}

    def restore(self, state: Tree) -> None:
        """Restore the state of a trainer with the same number of games."""
        states = np.asarray(state["states"])
        if states.shape != self.states.shape or not (self.game.legal[states] > 0).all():
            raise ConfigError(f"these are not the states of {self.num_games} games of {self.game.name} under way")
        self.words.restore(state["words"])
        self.states[...] = states

    def _block(self, steps: int, num_games: int, results: np.ndarray) -> None:
        """Play this many steps of the first `num_games` games."""
        agent, ended = self.agent, int(results.sum())
        words = self.words.take(steps * num_games).reshape(steps, num_games)
        q, rules, gamma = agent.storage, self.game.rules, agent.discount_factor
        games = (self._starts, self.states[:num_games], words, *agent.rates(steps, num_games), gamma, results)
        if len(self._moves):
            game_kernels.train_against(q, rules, self._moves, *games)
        else:
            game_kernels.train_self_play(q, rules, *games)
        agent.count_steps(steps * num_games)
        agent.count_episodes(int(results.sum()) - ended)

"""TicTacToe as a Gymnasium vector environment: many games stepped by one compiled call."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from steppe.core.contracts.errors import ConfigError
from steppe.core.system.random_words import splitmix64
from steppe.envs.tictactoe.env import NUM_BOARDS, NUM_CELLS, tictactoe
from steppe.envs.tictactoe.kernels import random_move, random_start, unpack_mover, unpack_moves, unpack_outcome
from steppe.envs.tictactoe.rules import DRAW, GameTables, StartDistribution, TurnGame, moves_to_mask, player_moves

_LARGEST = 2**64 - 1


class TicTacToeVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Vector version of TicTacToeEnv; an agent as opponent plays the greedy moves that it had at construction.

    A game that ended is reset in the next step, which ignores its action, or with AutoresetMode.SAME_STEP within the
    same step: then `info["final_obs"]` holds the last boards. `info["action_mask"]` [B, 9] holds the legal moves.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        *,
        opponent: Any = "self",
        opening_moves: int = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs} must be at least 1")
        if not 0 <= opening_moves < NUM_CELLS:
            raise ConfigError(f"opening_moves={opening_moves} must be from 0 to {NUM_CELLS - 1}")
        if autoreset_mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise ConfigError(f"autoreset_mode={autoreset_mode}: games begin anew in the same step or in the next")
        self.num_envs = num_envs
        self.single_observation_space = spaces.Discrete(NUM_BOARDS)
        self.single_action_space = spaces.Discrete(NUM_CELLS)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {**type(self).metadata, "autoreset_mode": autoreset_mode}
        self.num_agents = 2 if opponent == "self" else 1
        self.opponent = opponent
        self.opening_moves = opening_moves
        self.opponent_moves = tictactoe().legal[:0] if opponent == "self" else player_moves(tictactoe(), opponent)
        self.starts = tictactoe().starts(self.opponent_moves, opening_moves)
        self.states = np.zeros(num_envs, np.int64)
        self.ended = np.zeros(num_envs, np.bool_)
        self._at_once = autoreset_mode == AutoresetMode.SAME_STEP

    @property
    def game(self) -> TurnGame:
        """The game's tables, for learners that train on them directly."""
        return tictactoe()

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start new games everywhere; one integer seeds all. Without a seed, the random stream continues."""
        if isinstance(seed, list):
            raise ConfigError("one stream of chance serves all games: seed it with one number, not a list")
        super().reset(seed=seed, options=options)
        self.ended.fill(False)
        start_games(self.starts, self._words(), self.states)
        return self.states.copy(), self._info()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Play one move in every game."""
        moves = np.ascontiguousarray(actions, np.int64)
        if moves.shape != (self.num_envs,):
            raise ConfigError(f"{self.num_envs} games need as many actions, not {moves.shape}")
        rewards, final = np.empty(self.num_envs), np.empty(self.num_envs, np.int64)
        terminated, invalid = np.empty(self.num_envs, np.bool_), np.empty(self.num_envs, np.bool_)
        step_games(
            self.game.rules, self.opponent_moves, self.starts, self._at_once, self._words(),
            moves, self.states, self.ended, rewards, terminated, invalid, final,
        )  # fmt: skip
        info = self._info()
        if invalid.any():
            info |= {"invalid_move": invalid, "_invalid_move": invalid}
        if self._at_once and terminated.any():
            info |= {"final_obs": final, "_final_obs": terminated}
        return self.states.copy(), rewards, terminated, np.zeros(self.num_envs, np.bool_), info

    def _info(self) -> dict[str, Any]:
        game, every = self.game, np.ones(self.num_envs, np.bool_)
        masks = moves_to_mask(game.legal[self.states], NUM_CELLS) & ~self.ended[:, None]
        player = game.mover[self.states] + 1
        return {"action_mask": masks, "_action_mask": every, "current_player": player, "_current_player": every}

    def _words(self) -> np.ndarray:
        return self.np_random.integers(0, _LARGEST, self.num_envs, np.uint64, endpoint=True)


@numba.njit(cache=True, nogil=True)
def start_games(starts: StartDistribution, words: np.ndarray, states: np.ndarray) -> None:
    """Write the initial state of each game."""
    for b in range(len(states)):
        states[b] = random_start(starts, words[b])


@numba.njit(cache=True, nogil=True)
def step_games(
    rules: GameTables,
    opponent: np.ndarray,
    starts: StartDistribution,
    at_once: bool,
    words: np.ndarray,
    actions: np.ndarray,
    states: np.ndarray,
    ended: np.ndarray,
    rewards: np.ndarray,
    terminated: np.ndarray,
    invalid: np.ndarray,
    final: np.ndarray,
) -> None:
    """Play one move in every game and the opponent's reply, if any; reset ended games at once or in the next call."""
    for b in range(len(states)):
        state, action = states[b], actions[b]
        rewards[b], terminated[b], invalid[b], final[b] = 0.0, False, False, state
        if ended[b]:
            states[b], ended[b] = random_start(starts, words[b]), False
            continue
        facts = rules.state_bits[state]
        if not 0 <= action < rules.placed.shape[1] or not (unpack_moves(facts) >> action) & 1:
            rewards[b], terminated[b], invalid[b] = -1.0, True, True
        else:
            player = unpack_mover(facts)
            state += rules.placed[player, action]
            if len(opponent) > 0 and opponent[state] != 0:
                state += rules.placed[1 - player, random_move(rules, opponent[state], words[b])]
            states[b] = final[b] = state
            facts = rules.state_bits[state]
            if unpack_moves(facts) == 0:
                terminated[b] = True
                if unpack_outcome(facts) != DRAW:
                    rewards[b] = 1.0 if unpack_outcome(facts) == player + 1 else -1.0
        if terminated[b] and at_once:
            states[b] = random_start(starts, splitmix64(words[b]))
        elif terminated[b]:
            ended[b] = True

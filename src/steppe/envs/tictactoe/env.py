"""TicTacToe: the rules as tables, and a Gymnasium environment that observes state indices.

The index of a board is Σ cell · 3^i with 0 for an empty cell, 1 for the first player's and 2 for the second's: 19,683
indices, of which 5,478 are reachable.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import numpy as np

from steppe.core.contracts.errors import ConfigError
from steppe.envs.tictactoe.rules import DRAW, TurnGame, player_moves
from steppe.envs.toy.base import DistClassicRLEnv, Info

NUM_CELLS, NUM_BOARDS = 9, 3**9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
POWERS = 3 ** np.arange(NUM_CELLS)  # int64: an index does not fit into the cells' int8


@cache
def tictactoe() -> TurnGame:
    """Return the game's tables, which cover every board index."""
    boards = np.arange(NUM_BOARDS)[:, None] // POWERS % 3
    first, second = ((boards[:, LINES] == player).all(axis=2).any(axis=1) for player in (1, 2))
    full = (boards != 0).all(axis=1)
    outcome = np.select([first, second, full], [1, 2, DRAW], 0).astype(np.int8)
    free = ((boards == 0) << np.arange(NUM_CELLS)).sum(axis=1)
    return TurnGame(
        name="TicTacToe",
        placed=np.stack([POWERS, 2 * POWERS]),
        legal=np.where(outcome == 0, free, 0).astype(np.uint16),
        mover=(boards != 0).sum(axis=1) % 2,
        outcome=outcome,
    )


class TicTacToeEnv(DistClassicRLEnv):
    """Play TicTacToe against an opponent, or both sides with `opponent="self"`.

    In self-play two agents take turns: every step is one move, and the reward belongs to the player that moved. With
    the opponent "random", "perfect" or an agent, a step is a move and the opponent's reply. Which side the agent plays
    is random in each game unless `agent_starts` is given. Games start after 0 to `opening_moves` random moves. `info`
    holds `current_player` and `action_mask`. An illegal move gives reward −1 and ends the game.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "human"]}  # type: ignore[misc]

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        opponent: Any = "self",
        agent_starts: bool | None = None,
        opening_moves: int = 0,
    ) -> None:
        super().__init__()
        if render_mode not in (None, "ansi", "human"):
            raise ConfigError(f"render_mode={render_mode!r}: TicTacToe is drawn as 'ansi' or for a 'human'")
        if opponent == "self" and agent_starts is not None:
            raise ConfigError("agent_starts means nothing where the agent plays both sides: leave it out")
        if not 0 <= opening_moves < NUM_CELLS:
            raise ConfigError(f"opening_moves={opening_moves} must be from 0 to {NUM_CELLS - 1}")
        if isinstance(opponent, str) and opponent != "self":
            player_moves(tictactoe(), opponent)  # raises ConfigError for an unknown opponent
        elif not isinstance(opponent, str) and not hasattr(opponent, "select_action"):
            player_moves(tictactoe(), opponent)
        self.render_mode = render_mode
        self.opponent = opponent
        self.agent_starts = agent_starts
        self.opening_moves = opening_moves
        self.num_agents = 2 if opponent == "self" else 1
        self.board = np.zeros(NUM_CELLS, np.int8)
        self.current_player = 1
        self.game_over = False
        self.winning_conditions = [list(line) for line in LINES]

    @property
    def observation_space_size(self) -> int:
        """The number of board indices: 19,683."""
        return NUM_BOARDS

    @property
    def action_space_size(self) -> int:
        """The number of cells: 9."""
        return NUM_CELLS

    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        """Start a game: clear the board, then play the opening moves and the opponent's first move, if any."""
        super().reset(seed=seed)
        self._clear()
        while self.num_agents == 1 or self.opening_moves:
            for _ in range(int(self.np_random.integers(self.opening_moves + 1)) if self.opening_moves else 0):
                if not self.game_over:
                    self._place(self._random_move(int(tictactoe().legal[self._get_observation()])))
            if not self.game_over and self.num_agents == 1 and not self._agent_first():
                self._reply()
            if not self.game_over:
                break
            self._clear()
        self.current_step = 0
        self._show()
        return self._get_observation(), self._info()

    def step(self, action: Any) -> tuple[int, float, bool, bool, Info]:
        """Play a move and, unless in self-play, the opponent's reply; after the end of a game, do nothing."""
        if self.game_over:
            return self._get_observation(), 0, True, False, {}
        if not self._is_valid_action(action):
            self.game_over = True
            return self._get_observation(), -1, True, False, {"invalid_move": True}
        self.current_step += 1
        reward = self._place(int(action))
        if not self.game_over and self.num_agents == 1:
            reward = -self._reply()
        self._show()
        return self._get_observation(), reward, self.game_over, False, self._info()

    def render(self, mode: str | None = None) -> str | None:
        """Render the board as text: print it in mode "human", else return it."""
        cells = ["." if cell == 0 else " XO"[cell] for cell in self.board]
        text = "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))
        if (mode or self.render_mode or "human") == "human":
            print(text)
            return None
        return text

    def _show(self) -> None:
        if self.render_mode == "human":
            self.render()

    def _clear(self) -> None:
        self.board.fill(0)
        self.current_player, self.game_over = 1, False

    def _get_observation(self) -> int:
        return int(self.board @ POWERS)

    def _info(self) -> Info:
        mask = (self.board == 0) & (not self.game_over)
        return {"current_player": self.current_player, "action_mask": mask.astype(np.int8)}

    def _is_valid_action(self, action: Any) -> bool:
        return bool(0 <= action < NUM_CELLS and self.board[action] == 0)

    def _place(self, action: int) -> float:
        """Play the current player's move and switch players; return 1 if the move wins, else 0."""
        self.board[action] = self.current_player
        reward, self.game_over = self._check_game_end()
        self.current_player = 3 - self.current_player
        return reward

    def _check_game_end(self) -> tuple[float, bool]:
        outcome = tictactoe().outcome[self._get_observation()]
        return (1.0 if outcome == self.current_player else 0.0), bool(outcome)

    def _agent_first(self) -> bool:
        """Return whether the agent moves next in a new game; sample the starting side unless it is given."""
        starts = bool(self.np_random.integers(2)) if self.agent_starts is None else self.agent_starts
        return starts == (self.current_player == 1)

    def _reply(self) -> float:
        """Play the opponent's move; return its reward: 1 if it wins, −1 if it is illegal, else 0."""
        action = self._opponent_action()
        if self._is_valid_action(action):
            return self._place(action)
        self.game_over = True
        return -1.0

    def _opponent_action(self) -> int:
        observation = self._get_observation()
        choose = getattr(self.opponent, "select_action", None)
        if choose is None:
            return self._random_move(int(player_moves(tictactoe(), self.opponent)[observation]))
        if getattr(self.opponent, "takes_masks", False):
            return int(choose(observation, self._info()["action_mask"], deterministic=True))
        return int(choose(observation))

    def _random_move(self, moves: int) -> int:
        choices = [cell for cell in range(NUM_CELLS) if moves >> cell & 1]
        return choices[int(self.np_random.integers(len(choices)))] if len(choices) > 1 else choices[0]

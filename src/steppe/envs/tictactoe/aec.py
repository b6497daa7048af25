"""TicTacToe as a PettingZoo AEC environment: `env()` adds PettingZoo's checks, `TicTacToeAEC` has none."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from steppe.core.contracts.errors import ConfigError, MissingExtra
from steppe.envs.tictactoe.env import NUM_BOARDS, NUM_CELLS, TicTacToeEnv

try:
    from pettingzoo import AECEnv
    from pettingzoo.utils import wrappers
except ImportError as error:
    raise MissingExtra("TicTacToe for PettingZoo", "multiagent") from error


class TicTacToeAEC(AECEnv):  # type: ignore[misc]  # PettingZoo has no types
    """Two agents take turns; each observes the board's index and which cells are free."""

    metadata: ClassVar[dict[str, Any]] = {
        "name": "steppe_tictactoe_v0", "render_modes": ["ansi", "human"], "is_parallelizable": False,
    }  # fmt: skip

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode
        self.game = TicTacToeEnv("ansi" if render_mode else None)
        self.possible_agents = ["player_1", "player_2"]
        obs_space = spaces.Dict(
            {"observation": spaces.Discrete(NUM_BOARDS), "action_mask": spaces.Box(0, 1, (NUM_CELLS,), np.int8)}
        )
        self._observations = dict.fromkeys(self.possible_agents, obs_space)
        self._actions = {agent: spaces.Discrete(NUM_CELLS) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of the board's index and a mask of the free cells."""
        return self._observations[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of the nine cells."""
        return self._actions[agent]

    def observe(self, agent: str) -> dict[str, Any]:
        """Return the board's index and action mask; the mask is empty unless it is the agent's turn."""
        own_turn = agent == self.agent_selection and not self.game.game_over
        mask = (self.game.board == 0) if own_turn else np.zeros(NUM_CELLS, np.bool_)
        return {"observation": np.int64(self.game._get_observation()), "action_mask": mask.astype(np.int8)}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a game with an empty board; the first player moves first."""
        self.game.reset(seed=seed)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action: int | None) -> None:
        """Play the selected agent's move; the other agent gets the negative reward. An illegal move loses."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if action is None:
            raise ConfigError(f"{agent} is to move: None is only for agents whose game has ended")
        _, reward, terminated, _, info = self.game.step(action)
        other = self.possible_agents[1 - self.possible_agents.index(agent)]
        self._cumulative_rewards[agent] = 0.0
        self.rewards = {agent: float(reward), other: -float(reward)}
        self.infos[agent] = {"invalid_move": True} if info.get("invalid_move") else {}
        self.terminations = dict.fromkeys(self.agents, terminated)
        self.agent_selection = other
        self._accumulate_rewards()
        if self.render_mode == "human":
            self.render()

    def render(self) -> str | None:
        """Render the board as text: print it in mode "human", else return it."""
        return self.game.render(self.render_mode or "human")

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def env(render_mode: str | None = None) -> AECEnv:
    """Return the environment with PettingZoo's checks of call order and action bounds."""
    return wrappers.OrderEnforcingWrapper(wrappers.AssertOutOfBoundsWrapper(TicTacToeAEC(render_mode)))

"""Minimal multi-agent tasks with known best returns: to agree, and to divide the work."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from steppe.core.contracts.errors import ConfigError, MissingExtra

try:
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise MissingExtra("steppe/Teamwork-v0", "multiagent") from error

AgentDict = dict[str, Any]
_TASKS = ("agree", "divide")


class TeamworkEnv(ParallelEnv):  # type: ignore[misc]  # PettingZoo has no types
    """Choose numbers as a team: all agents observe the same random number at each step, and each chooses one.

    Numbers are from 0 to num_agents − 1.

    `agree`: every agent gets reward 1 at a step at which all choose the observed number.
    `divide`: every agent gets reward 1 at a step at which no two choose the same number. All observations are equal, so
    agents with the same deterministic policy and no agent id choose the same number and never get a reward.

    The best return is num_agents · length, summed over agents.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "steppe_teamwork_v0", "render_modes": [], "is_parallelizable": True}

    def __init__(self, task: str = "agree", num_agents: int = 2, length: int = 16) -> None:
        if task not in _TASKS:
            raise ConfigError(f"task={task!r} must be one of {', '.join(_TASKS)}")
        if num_agents < 2 or length < 1:
            raise ConfigError(f"num_agents={num_agents} must be at least 2, length={length} at least 1")
        self.task, self.length = task, length
        self.possible_agents = [f"agent_{index}" for index in range(num_agents)]
        self.agents: list[str] = []
        self._spaces = {agent: spaces.Discrete(num_agents) for agent in self.possible_agents}
        self._stream = np.random.default_rng(0)
        self._number = self._steps = 0
        self.render_mode = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of the observed number."""
        return self._spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of the chosen number."""
        return self._spaces[agent]

    def reset(self, seed: int | None = None, options: AgentDict | None = None) -> tuple[AgentDict, AgentDict]:
        """Start an episode; without a seed, the random stream continues."""
        if seed is not None:
            self._stream = np.random.default_rng(seed)
        self.agents, self._steps = list(self.possible_agents), 0
        return self._observe(), {agent: {} for agent in self.agents}

    def step(self, actions: AgentDict) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        """Apply the numbers that all agents chose."""
        named = [int(actions[agent]) for agent in self.agents]
        done = set(named) == {self._number} if self.task == "agree" else len(set(named)) == len(named)
        playing, self._steps = self.agents, self._steps + 1
        over = self._steps >= self.length
        result: tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict] = (
            self._observe(),
            dict.fromkeys(playing, float(done)),
            dict.fromkeys(playing, over),
            dict.fromkeys(playing, False),
            {agent: {} for agent in playing},
        )
        self.agents = [] if over else playing
        return result

    def _observe(self) -> AgentDict:
        self._number = int(self._stream.integers(len(self.possible_agents)))
        return dict.fromkeys(self.agents, self._number)

"""DistClassicRLEnv: base class of environments with discrete states and actions, compatible with Gymnasium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import gymnasium as gym
from gymnasium import spaces

Info = dict[str, Any]


class DistClassicRLEnv(gym.Env[Any, Any], ABC):
    """Base class: a subclass defines the numbers of states and actions, `reset` and `step`.

    Tabular learners truncate an episode after `max_episode_steps`. With `num_agents` = 2, the agents take turns, and a
    reward belongs to the agent that moved.
    """

    def __init__(self) -> None:
        self.num_agents = 1
        self.current_step = 0
        self.max_episode_steps = 1000

    @abstractmethod
    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode; subclasses call `super().reset(seed=seed)`. Without a seed, the random stream continues."""
        super().reset(seed=seed, options=options)
        self.current_step = 0
        return 0, {}

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Apply an action; return observation, reward, terminated, truncated and info."""

    @property
    @abstractmethod
    def observation_space_size(self) -> int:
        """The number of states."""

    @property
    @abstractmethod
    def action_space_size(self) -> int:
        """The number of actions."""

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """The states as a Gymnasium space; assign another if observations are not plain integers."""
        return spaces.Discrete(self.observation_space_size)

    @cached_property
    def action_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """The actions as a Gymnasium space."""
        return spaces.Discrete(self.action_space_size)

    def render(self, mode: str = "human") -> Any:
        """Return None; a subclass may override this."""
        return None

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

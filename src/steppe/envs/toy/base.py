"""DistClassicRLEnv: the small base of environments with numbered states and actions. It is a Gymnasium environment, so
whatever takes one of those takes these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import gymnasium as gym
from gymnasium import spaces

Info = dict[str, Any]


class DistClassicRLEnv(gym.Env[Any, Any], ABC):
    """Subclass it, say how many states and actions there are, and write `reset` and `step`.

    Classic learners cut an episode after `max_episode_steps`. Two agents (`num_agents`) take turns; a reward is the mover's.
    """

    def __init__(self) -> None:
        self.num_agents = 1
        self.current_step = 0
        self.max_episode_steps = 1000

    @abstractmethod
    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Begin an episode; without a seed, chance goes on from where it was. Call `super().reset(seed=seed)` for it."""
        super().reset(seed=seed, options=options)
        self.current_step = 0
        return 0, {}

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Act once: observation, reward, terminated, truncated, info."""

    @property
    @abstractmethod
    def observation_space_size(self) -> int:
        """How many states there are."""

    @property
    @abstractmethod
    def action_space_size(self) -> int:
        """How many actions there are."""

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """The states as a Gymnasium space; assign another if observations are no plain numbers."""
        return spaces.Discrete(self.observation_space_size)

    @cached_property
    def action_space(self) -> spaces.Space[Any]:  # type: ignore[override]
        """The actions as a Gymnasium space."""
        return spaces.Discrete(self.action_space_size)

    def render(self, mode: str = "human") -> Any:
        """Nothing to see unless a subclass draws it."""
        return None

    def close(self) -> None:
        """Nothing to let go of."""

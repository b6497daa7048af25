"""A two-armed bandit: one state and two arms, each with its own probability of reward 1."""

from __future__ import annotations

from typing import Any

from steppe.core.contracts.errors import ConfigError
from steppe.envs.toy.base import DistClassicRLEnv, Info


class TwoArmedBanditEnv(DistClassicRLEnv):
    """Pull one of two arms: arm k gives reward 1 with probability `chances[k]`, else 0.

    An episode terminates after `length` pulls. With discount γ, always pulling the best arm has the value
    (1 − γ^length) / (1 − γ) times its probability.
    """

    def __init__(self, chances: tuple[float, float] = (0.4, 0.6), length: int = 10) -> None:
        super().__init__()
        if len(chances) != 2 or not all(0.0 <= chance <= 1.0 for chance in chances):
            raise ConfigError(f"chances={chances} must be two numbers between 0 and 1")
        if length < 1:
            raise ConfigError(f"length={length} must be at least 1")
        self.chances = (float(chances[0]), float(chances[1]))
        self.length = length

    @property
    def observation_space_size(self) -> int:
        """The number of states: 1."""
        return 1

    @property
    def action_space_size(self) -> int:
        """The number of arms: 2."""
        return 2

    def reset(self, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        """Start an episode; without a seed, the random stream continues."""
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, Info]:
        """Pull an arm."""
        if action not in (0, 1):
            raise ConfigError(f"there is no arm {action}: they are 0 and 1")
        self.current_step += 1
        reward = float(self.np_random.random() < self.chances[int(action)])
        return 0, reward, self.current_step >= self.length, False, {}

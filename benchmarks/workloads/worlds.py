"""Environments that cost next to nothing, so that what is left is what Steppe itself costs: used by scaling.py."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Wide(gym.Env[np.ndarray, np.int64]):
    """Shows one of a few fixed observations of `size` float32; episodes are cut after 200 steps."""

    def __init__(self, size: int = 4) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._shown = np.random.default_rng(0).uniform(-1.0, 1.0, (8, size)).astype(np.float32)
        self._elapsed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._elapsed = 0
        return self._shown[0], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._elapsed += 1
        return self._shown[self._elapsed % 8], float(action), False, self._elapsed >= 200, {}

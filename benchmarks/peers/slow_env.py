"""An environment whose every step sleeps 10 ms: it costs no CPU, so what is lost is lost by who drives it."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np

SLEEP_S = 0.01
EPISODE_STEPS = 100


class SlowEnv(gym.Env):
    """One float to see, two actions to take, episodes of 100 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int):
        time.sleep(SLEEP_S)
        self._step += 1
        return np.zeros(1, np.float32), float(action), False, self._step >= EPISODE_STEPS, {}

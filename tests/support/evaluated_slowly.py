"""An environment that is slow only where it is evaluated: in the manager's process."""

from __future__ import annotations

import os
import time

import gymnasium as gym
import numpy as np

STEP_S = 0.01


class EvaluatedSlowly(gym.Env):
    """Shows random numbers for eight steps; the reward is the first of them times the sign of the action."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, *, slow: bool = False) -> None:
        in_manager = os.path.basename(os.readlink("/proc/self/fd/1")) == "manager.log"  # redirected there
        self.wait_s = STEP_S if slow and in_manager else 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 8
        return self._look(), {}

    def step(self, action):
        time.sleep(self.wait_s)
        reward = float(self.seen[0]) * (1 if action else -1)
        self.left -= 1
        return self._look(), reward, self.left == 0, False, {}

    def _look(self):
        self.seen = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.seen

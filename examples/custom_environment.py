"""An environment of your own: any gymnasium.Env, given as the class or a function that makes it.

python custom_environment.py [STEPS]
"""

import sys

import gymnasium as gym
import numpy as np

import steppe


class Corridor(gym.Env):
    """Walk to the right end of a corridor; every step costs a tenth."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 6) -> None:
        self.length, self.place = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(self.length))
        return self._seen(), {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        return self._seen(), -0.1, self.place >= self.length, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.place / self.length], np.float32)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30_000
    limits = {"environment.time_limit": 50, "environment.kwargs": {"length": 5}}
    result = steppe.train(Corridor, algo="ppo", actors=2, steps=steps, **limits)
    print(f"mean return {result.eval_return_mean:.2f}; the best possible is about -0.3")

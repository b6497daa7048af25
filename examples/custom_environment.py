"""Train in your own environment: any gymnasium.Env, given as a class or as a function that returns one.

python custom_environment.py [STEPS]
"""

import sys

import gymnasium as gym
import numpy as np

import steppe


class Corridor(gym.Env):
    """Walk to the right end of a corridor; the reward of every step is -0.1."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 6) -> None:
        self.length, self.position = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = int(self.np_random.integers(self.length))
        return self._observation(), {}

    def step(self, action):
        self.position = max(0, self.position + (1 if action else -1))
        return self._observation(), -0.1, self.position >= self.length, False, {}

    def _observation(self) -> np.ndarray:
        return np.array([self.position / self.length], np.float32)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30_000
    limits = {"environment.time_limit": 50, "environment.kwargs": {"length": 5}}
    result = steppe.train(Corridor, algo="ppo", actors=2, steps=steps, **limits)
    print(f"mean return {result.eval_return_mean:.2f}; the best possible is about -0.3")

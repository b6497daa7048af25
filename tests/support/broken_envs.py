"""Environments that break, for tests of what is written down then. Children of a run import this by its name."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Unlucky(gym.Env):
    """Raises when a random number of its own, drawn at each step with an odd action, falls below `chance`."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, chance: float = 0.004) -> None:
        self.chance = chance

    def _look(self):
        return self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action):
        if action == 1 and self.np_random.random() < self.chance:
            raise ArithmeticError("out of luck")
        return self._look(), 1.0, bool(self.np_random.random() < 0.05), False, {}


class Opaque(Unlucky):
    """The same with random numbers that nobody can read or write: they come from an open generator."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._numbers = self._stream(seed)
        return self._look(), {}

    @staticmethod
    def _stream(seed):
        random = np.random.default_rng(seed)
        while True:
            yield random.random()

    def _look(self):
        return np.array([next(self._numbers) for _ in range(3)], np.float32)

    def step(self, action):
        if action == 1 and next(self._numbers) < self.chance:
            raise ArithmeticError("out of luck")
        return self._look(), 1.0, next(self._numbers) < 0.05, False, {}


class Moody(Opaque):
    """Its luck comes from outside any seed: what it does cannot be seen again."""

    def reset(self, *, seed=None, options=None):
        self._numbers = self._stream(None)
        return self._look(), {}


class UnluckyVector(VectorEnv):
    """Many of the first kind in one, resetting on the next step, with one stream for all."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, chance: float = 0.001, **_: object) -> None:
        self.num_envs, self.chance = num_envs, chance
        self.single_observation_space, self.single_action_space = Unlucky.observation_space, Unlucky.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _look(self):
        return self.np_random.uniform(-1.0, 1.0, (self.num_envs, 3)).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, actions):
        if (self.np_random.random(self.num_envs) < self.chance * actions).any():
            raise ArithmeticError("out of luck")
        ended = self.np_random.random(self.num_envs) < 0.05
        return self._look(), np.ones(self.num_envs), ended, np.zeros(self.num_envs, bool), {}


class ClosedVector(UnluckyVector):
    """The same, with something inside that cannot be written down."""

    def __init__(self, num_envs: int = 1, **kwargs: object) -> None:
        super().__init__(num_envs, **kwargs)
        self.secret = (number for number in range(3))


gym.register("tests/Closed-v0", Unlucky, vector_entry_point=ClosedVector)
gym.register("tests/Unlucky-v0", Unlucky, vector_entry_point=UnluckyVector)

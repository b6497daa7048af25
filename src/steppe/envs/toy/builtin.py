"""Small environments for tests and tutorials, whose correct results can be computed by hand."""

from __future__ import annotations

import time
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

Info = dict[str, Any]


class IdentityEnv(gym.Env[np.int64, np.int64]):
    """Repeat the observation as the action for reward 1; the best return is `length`."""

    def __init__(self, num_choices: int = 4, length: int = 16) -> None:
        self.observation_space = spaces.Discrete(num_choices)
        self.action_space = spaces.Discrete(num_choices)
        self.num_choices = num_choices
        self.length = length
        self.elapsed = 0
        self.shown = np.int64(0)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.int64, Info]:
        super().reset(seed=seed)
        self.elapsed = 0
        return self._show(), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, Info]:
        reward = float(action == self.shown)
        self.elapsed += 1
        return self._show(), reward, False, self.elapsed >= self.length, {}

    def _show(self) -> np.int64:
        self.shown = self.np_random.integers(self.num_choices)
        return self.shown


class ImageIdentityEnv(gym.Env[np.ndarray, np.int64]):
    """Name the quarter of a dim, noisy image that has the bright spot, for reward 1; the best return is `length`."""

    SPOT = 3

    def __init__(self, side: int = 12, length: int = 16) -> None:
        self.observation_space = spaces.Box(0, 255, (side, side), np.uint8)
        self.action_space = spaces.Discrete(4)
        self.side = side
        self.length = length
        self.elapsed = 0
        self.quarter = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        self.elapsed = 0
        return self._show(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        reward = float(action == self.quarter)
        self.elapsed += 1
        return self._show(), reward, False, self.elapsed >= self.length, {}

    def _show(self) -> np.ndarray:
        image = self.np_random.integers(0, 64, (self.side, self.side), np.uint8)
        self.quarter = int(self.np_random.integers(4))
        half = self.side // 2
        row, column = self.np_random.integers(0, half - self.SPOT + 1, 2) + half * np.array(divmod(self.quarter, 2))
        image[row : row + self.SPOT, column : column + self.SPOT] = 255
        return image


class ContinuousIdentityEnv(gym.Env[np.ndarray, np.ndarray]):
    """Repeat a continuous observation as the action: reward −|action − observation|², so the best return is 0."""

    def __init__(self, size: int = 1, length: int = 16) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.length = length
        self.elapsed = 0
        self.shown = np.zeros(size, np.float32)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        self.elapsed = 0
        return self._show(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, Info]:
        reward = -float(np.sum((np.asarray(action) - self.shown) ** 2))
        self.elapsed += 1
        return self._show(), reward, False, self.elapsed >= self.length, {}

    def _show(self) -> np.ndarray:
        self.shown = self.np_random.uniform(-1.0, 1.0, self.shown.shape).astype(np.float32)
        return self.shown.copy()


class TwoStateChainEnv(gym.Env[Any, np.int64]):
    """State 0 gives reward 1 and leads to state 1, which gives reward 2; actions have no effect.

    By default state 1 terminates the episode. With `truncate` it leads back to state 0 and the episode is only
    truncated after `length` steps, so a learner that treats truncation as termination gets other values than `values`.
    """

    def __init__(self, length: int = 7, *, truncate: bool = False) -> None:
        self.observation_space = spaces.Discrete(2)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.truncate = truncate
        self.elapsed = 0
        self.state = 0

    @staticmethod
    def values(gamma: float, *, truncate: bool = False) -> tuple[float, float]:
        """Return the discounted values of states 0 and 1, which are the same for every policy."""
        if not truncate:
            return 1.0 + 2.0 * gamma, 2.0
        return (1.0 + 2.0 * gamma) / (1.0 - gamma**2), (2.0 + gamma) / (1.0 - gamma**2)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        super().reset(seed=seed)
        self.elapsed, self.state = 0, 0
        return self.state, {}

    def step(self, action: np.int64) -> tuple[int, float, bool, bool, Info]:
        reward, ended = (1.0, False) if self.state == 0 else (2.0, not self.truncate)
        self.state = 1 - self.state
        self.elapsed += 1
        return self.state, reward, ended, self.truncate and self.elapsed >= self.length, {}


class CountingEnv(gym.Env[np.ndarray, np.int64]):
    """Observe (identity, episode, step), so that each row shows which trajectory it belongs to.

    The identity comes from the seed. Episode k has 3 + (identity + k) % 5 steps; even ones are terminated, odd ones
    truncated. The reward of a step is its number within the episode, from 1.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 2.0**24, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.identity = -1
        self.episode = -1
        self.elapsed = 0

    @staticmethod
    def length_of(identity: int, episode: int) -> int:
        """Return the number of steps of an episode."""
        return 3 + (identity + episode) % 5

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        if seed is not None or self.identity < 0:
            self.identity, self.episode = int(self.np_random.integers(2**24)), -1
        self.episode += 1
        self.elapsed = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        self.elapsed += 1
        over = self.elapsed >= self.length_of(self.identity, self.episode)
        terminates = self.episode % 2 == 0
        return self._observe(), float(self.elapsed), over and terminates, over and not terminates, {}

    def _observe(self) -> np.ndarray:
        return np.array([self.identity, self.episode, self.elapsed], np.float32)


class SleepEnv(CountingEnv):
    """Count like CountingEnv, and sleep `delay_s` seconds in every step."""

    def __init__(self, delay_s: float = 0.01) -> None:
        super().__init__()
        self.delay_s = delay_s

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        time.sleep(self.delay_s)
        return super().step(action)


class FailingEnv(CountingEnv):
    """Count like CountingEnv, and raise at step `at_step` since construction (from 1), or in the reset after it."""

    def __init__(self, at_step: int = 10, where: Literal["step", "reset"] = "step") -> None:
        super().__init__()
        self.at_step = at_step
        self.where = where
        self.taken = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        if self.where == "reset" and self.taken >= self.at_step:
            raise RuntimeError("this environment was made to fail")
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        self.taken += 1
        if self.where == "step" and self.taken >= self.at_step:
            raise RuntimeError("this environment was made to fail")
        return super().step(action)


class NaNEnv(CountingEnv):
    """Count like CountingEnv, with `value` in observation or reward at step `at_step` since construction (from 1)."""

    def __init__(self, at_step: int = 10, field: Literal["obs", "reward"] = "obs", value: float = float("nan")) -> None:
        super().__init__()
        self.at_step = at_step
        self.field = field
        self.value = value
        self.taken = 0

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        obs, reward, terminated, truncated, info = super().step(action)
        self.taken += 1
        if self.taken == self.at_step and self.field == "obs":
            obs[2] = self.value
        elif self.taken == self.at_step:
            reward = self.value
        return obs, reward, terminated, truncated, info

"""Recall: a memory task for recurrent agents, as a single and as a compiled vector environment.

    step          0        1 … delay    delay + 1
    observation   the cue  zeros        the query
    action        ignored  ignored      name the cue: reward 1 if correct, else 0, and the episode terminates

The query does not depend on the cue: without memory the best expected return is 1 / num_choices, with memory it is 1.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numba
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from steppe.core.contracts.errors import ConfigError

Info = dict[str, Any]


class RecallEnv(gym.Env[np.ndarray, np.int64]):
    """Observe one of `num_choices` cues, wait `delay` steps, then name it.

    The observation is the cue one-hot, followed by a flag for the query.
    """

    def __init__(self, num_choices: int = 4, delay: int = 6) -> None:
        self.observation_space, self.action_space = _spaces(num_choices, delay)
        self.num_choices = num_choices
        self.delay = delay
        self.cue = np.zeros(1, np.int64)
        self.elapsed = np.zeros(1, np.int64)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        self.cue[0], self.elapsed[0] = self.np_random.integers(self.num_choices), 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, Info]:
        asked = bool(self.elapsed[0] > self.delay)
        right = asked and int(action) == self.cue[0]
        self.elapsed += 1
        return self._observe(), float(right), asked, False, {}

    def _observe(self) -> np.ndarray:
        obs = np.zeros((1, self.num_choices + 1), np.float32)
        write_observations(self.cue, self.elapsed, self.delay, obs)
        first: np.ndarray = obs[0]
        return first


class RecallVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Vector version of RecallEnv; an episode that ended is reset in the next step, which ignores its action."""

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int = 1, *, num_choices: int = 4, delay: int = 6) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs={num_envs} must be at least 1")
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = _spaces(num_choices, delay)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.delay = delay
        self.num_choices = num_choices
        self.cue = np.zeros(num_envs, np.int64)
        self.elapsed = np.zeros(num_envs, np.int64)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Info | None = None
    ) -> tuple[np.ndarray, Info]:
        """Start new episodes everywhere; one integer seeds all. Without a seed, the random stream continues."""
        if isinstance(seed, list):
            raise ConfigError("one stream of chance serves all episodes: seed it with one number, not a list")
        super().reset(seed=seed, options=options)
        self.cue[:], self.elapsed[:] = self._cues(), 0
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Info]:
        """Step every environment once."""
        chosen = np.ascontiguousarray(actions, np.int64)
        if chosen.shape != (self.num_envs,):
            raise ConfigError(f"{self.num_envs} environments need as many actions, not {chosen.shape}")
        rewards, terminated = np.empty(self.num_envs), np.empty(self.num_envs, np.bool_)
        step_episodes(chosen, self._cues(), self.cue, self.elapsed, self.delay, rewards, terminated)
        return self._observe(), rewards, terminated, np.zeros(self.num_envs, np.bool_), {}

    def _cues(self) -> np.ndarray:
        return self.np_random.integers(self.num_choices, size=self.num_envs)

    def _observe(self) -> np.ndarray:
        obs = np.zeros((self.num_envs, self.num_choices + 1), np.float32)
        write_observations(self.cue, self.elapsed, self.delay, obs)
        return obs


def _spaces(num_choices: int, delay: int) -> tuple[spaces.Box, spaces.Discrete]:
    if num_choices < 2 or delay < 0:
        raise ConfigError(f"num_choices={num_choices} must be at least 2, and delay={delay} at least 0")
    return spaces.Box(0.0, 1.0, (num_choices + 1,), np.float32), spaces.Discrete(num_choices)


@numba.njit(cache=True, nogil=True)
def write_observations(cue: np.ndarray, elapsed: np.ndarray, delay: int, obs: np.ndarray) -> None:
    """Write the observations into `obs`, which must be 0; they stay 0 after an episode's end."""
    last = obs.shape[1] - 1
    for b in range(len(cue)):
        if elapsed[b] == 0:
            obs[b, cue[b]] = 1.0
        elif elapsed[b] == delay + 1:
            obs[b, last] = 1.0


@numba.njit(cache=True, nogil=True)
def step_episodes(
    actions: np.ndarray,
    fresh: np.ndarray,
    cue: np.ndarray,
    elapsed: np.ndarray,
    delay: int,
    rewards: np.ndarray,
    terminated: np.ndarray,
) -> None:
    """Step every episode once; an episode that has ended restarts with its `fresh` cue."""
    for b in range(len(cue)):
        rewards[b], terminated[b] = 0.0, False
        if elapsed[b] > delay + 1:
            cue[b], elapsed[b] = fresh[b], 0
            continue
        if elapsed[b] == delay + 1:
            terminated[b] = True
            rewards[b] = 1.0 if actions[b] == cue[b] else 0.0
        elapsed[b] += 1

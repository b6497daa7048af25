"""Small worlds with numbered states, and their exact values. Children of a run import this by its name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np

from steppe.classic import BaseAlgorithm, DistClassicRLEnv


class Maze(gym.Env):
    """Random transitions over a few states, the last of which is the end; cut after 20 steps."""

    def __init__(self, seed=3, num_states=6, num_actions=3):
        stream = np.random.default_rng(seed)
        self.observation_space = gym.spaces.Discrete(num_states)
        self.action_space = gym.spaces.Discrete(num_actions)
        self.chances = stream.dirichlet(np.full(num_states, 0.5), (num_states, num_actions))
        self.pay = stream.normal(size=(num_states, num_actions))
        self.elapsed = self.state = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed, self.state = 0, int(self.np_random.integers(len(self.pay) - 1))
        return self.state, {}

    def step(self, action):
        reward = float(self.pay[self.state, action])
        self.state = int(self.np_random.choice(len(self.pay), p=self.chances[self.state, action]))
        self.elapsed += 1
        return self.state, reward, self.state == len(self.pay) - 1, self.elapsed >= 20, {}

    def exact(self, gamma):
        """The values by iteration; nothing follows the end."""
        q = np.zeros_like(self.pay)
        for _ in range(2_000):
            value = q.max(axis=1)
            value[-1] = 0.0
            q = self.pay + gamma * self.chances @ value
        return q[:-1]


class Corridor(DistClassicRLEnv):
    """Five states in a row, right leads to the end and pays 1; says what is allowed: no way left from the first."""

    observation_space_size = 5
    action_space_size = 2

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self.place, self._info()

    def step(self, action):
        assert self.place or action == 1, "a move that was not allowed"
        self.current_step += 1
        self.place += 1 if action == 1 else -1
        over = self.place == 4
        return self.place, float(over), over, False, self._info()

    def _info(self):
        return {"action_mask": np.array([self.place > 0, True], np.int8)}


class Uneven(Corridor):
    """As slow as the number of the rank or worker that asks for it."""

    def step(self, action):
        rank = int(os.environ.get("PMI_RANK", "0"))
        time.sleep(0.0005 * rank)
        return super().step(action)


class NotANumber(Corridor):
    """Pays NaN after a while."""

    def step(self, action):
        state, _, over, cut, info = super().step(action)
        return state, float("nan"), over, cut, info


class Astray(Corridor):
    """Comes to states that it does not have."""

    def step(self, action):
        _, reward, over, cut, info = super().step(action)
        return 7, reward, over, cut, info


class Fatal(Corridor):
    """Kills its process once, at the 40th step; the file that FATAL_MARK names keeps it from doing so again."""

    def step(self, action):
        self.taken = getattr(self, "taken", 0) + 1
        mark = Path(os.environ["FATAL_MARK"])
        if self.taken == 40:
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Several(gym.Env):
    """Two numbers to see and two to choose; pays for choosing what is seen."""

    observation_space = gym.spaces.MultiDiscrete([2, 3])
    action_space = gym.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen, self.elapsed = self.observation_space.nvec * 0, 0
        return self._look(), {}

    def _look(self):
        self.seen = self.np_random.integers(0, [2, 3])
        return self.seen

    def step(self, action):
        reward = float((np.asarray(action) == self.seen).all())
        self.elapsed += 1
        return self._look(), reward, False, self.elapsed >= 10, {}


class Doubles(BaseAlgorithm):
    """A learner of the user's in five lines, over a float64 table."""

    def _initialize_q_table(self):
        return np.zeros((self.state_size, self.action_size))

    def update(self, state, action, reward, next_state, done):
        target = reward + (0.0 if done else self.discount_factor * self.q_table[next_state].max())
        self.q_table[state, action] += self.learning_rate * (target - self.q_table[state, action])

    def select_action(self, state):
        word = int(self.words.take(1)[0])
        if (word & 0xFFFFFFFF) / 2**32 < self.epsilon:
            return (word >> 32) * self.action_size >> 32
        return int(self.q_table[state].argmax())


def maze():
    return Maze()

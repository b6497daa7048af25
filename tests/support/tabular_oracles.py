"""Slow tables in plain Python, written from the papers' rules, and small random worlds with their exact values."""

from bisect import bisect_right

import gymnasium as gym
import numpy as np

WORD = 2**64


def spread_word(word):
    """The two halves of a word as numbers in [0, 1) and [0, 2³²)."""
    return (word & 0xFFFFFFFF) / 2**32, word >> 32


def pick(choices, word):
    """One of the choices by the upper half of a word."""
    return choices[(word >> 32) * len(choices) >> 32]


def splitmix(word):
    """The output of SplitMix64 for a state, with arithmetic modulo 2⁶⁴."""
    word = (word + 0x9E3779B97F4A7C15) % WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def words_of(seed, count):
    """The first words of a learner's stream."""
    return [int(word) for word in np.random.PCG64(seed).random_raw(count)]


class SlowTable:
    """Entries rounded to float32 when stored, doubles in between: the promise that makes batches equal to single steps."""

    def __init__(self, num_states, num_actions, fill=0.0):
        self.num_actions = num_actions
        self.values = {(s, a): float(np.float32(fill)) for s in range(num_states) for a in range(num_actions)}

    def row(self, state, mask=None):
        return [self.values[state, a] for a in range(self.num_actions) if mask is None or mask[a]]

    def move(self, state, action, target, rate):
        value = self.values[state, action]
        self.values[state, action] = float(np.float32(value + rate * (target - value)))

    def array(self):
        flat = [self.values[key] for key in sorted(self.values)]
        return np.array(flat, np.float32).reshape(-1, self.num_actions)


class RandomMDP(gym.Env):
    """Random transitions and rewards; the last state is an end if there are `ends`. Cut after `length` steps."""

    def __init__(self, seed, num_states=5, num_actions=3, length=12, ends=True):
        stream = np.random.default_rng(seed)
        self.observation_space = gym.spaces.Discrete(num_states)
        self.action_space = gym.spaces.Discrete(num_actions)
        self.chances = stream.dirichlet(np.ones(num_states) * 0.5, (num_states, num_actions))
        self.pay = stream.normal(size=(num_states, num_actions))
        self.bounds = self.chances.cumsum(axis=2)[..., :-1].tolist()
        self.end = num_states - 1 if ends else -1
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        self.state = int(self.np_random.integers(len(self.pay) - (self.end >= 0)))
        return self.state, {}

    def step(self, action):
        reward = float(self.pay[self.state, action])
        self.state = bisect_right(self.bounds[self.state][action], self.np_random.random())
        self.elapsed += 1
        return self.state, reward, self.state == self.end, self.elapsed >= self.length, {}

    def exact(self, gamma, value_of):
        """The fixed point of Q = r + γ P value_of(Q), by iteration; an end is worth nothing."""
        q = np.zeros_like(self.pay)
        for _ in range(10_000):
            value = np.asarray(value_of(q), float).copy()
            if self.end >= 0:
                value[self.end] = 0.0
            new = self.pay + gamma * self.chances @ value
            if np.abs(new - q).max() < 1e-12:
                return new
            q = new
        raise AssertionError("no fixed point")

    def known(self):
        """The rows that can be learned."""
        return [state for state in range(len(self.pay)) if state != self.end]


class ManyMDPs:
    """Copies of a RandomMDP side by side; a step gives next states as they were before any reset."""

    def __init__(self, mdp, num_envs, seed):
        self.mdp, self.stream = mdp, np.random.default_rng(seed)
        self.elapsed = self.stream.integers(0, mdp.length, num_envs)  # not all are cut together
        self.states = self._first(num_envs)
        self.bounds = mdp.chances.cumsum(axis=2)[..., :-1]

    def _first(self, count):
        return self.stream.integers(0, len(self.mdp.pay) - (self.mdp.end >= 0), count)

    def step(self, actions):
        """(states, actions, rewards, next_states, dones), truncated."""
        states, draws = self.states, self.stream.random(len(self.states))
        following = (draws[:, None] >= self.bounds[states, actions]).sum(axis=1)
        self.elapsed = self.elapsed + 1
        dones, cuts = following == self.mdp.end, self.elapsed >= self.mdp.length
        over = dones | cuts
        self.elapsed[over] = 0
        self.states = np.where(over, self._first(len(states)), following)
        return (states, actions, self.mdp.pay[states, actions], following, dones), cuts

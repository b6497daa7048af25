"""`check` finds each mistake that authors make, and nothing in sound environments."""

import gymnasium as gym
import numpy as np
import pytest

from steppe.core.contracts.errors import WorldError
from steppe.envs import check_env, require_valid_env
from steppe.envs.toy.builtin import CountingEnv

pytestmark = pytest.mark.unit


def _stepping(**changes):
    """A CountingEnv class whose steps return something else in one place."""
    names = ("obs", "reward", "terminated", "truncated", "info")

    class Changed(CountingEnv):
        def step(self, action):
            result = dict(zip(names, super().step(action), strict=True))
            return tuple((result | changes).values())

    return Changed


class NoSeed(CountingEnv):
    def reset(self):
        return np.zeros(3, np.float32), {}


class OldReset(CountingEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldStep(CountingEnv):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class Unseeded(CountingEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None)


class RaisingLate(CountingEnv):
    def step(self, action):
        if self.episode == 2:
            raise IndexError("off the map")
        return super().step(action)


class RaisingReset(CountingEnv):
    def reset(self, *, seed=None, options=None):
        if self.episode == 0:
            raise IndexError("no second episode")
        return super().reset(seed=seed)


class Texts(CountingEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Text(4)
        self.action_space = gym.spaces.Text(4)


@pytest.mark.parametrize(
    "env",
    [
        "CartPole-v1",
        "Pendulum-v1",
        "Blackjack-v1",
        "Taxi-v4",
        "FrozenLake-v1",
        "steppe/Identity-v0",
        "steppe/Counting-v0",
        CountingEnv,
    ],
)
def test_sound_environments_pass(env):
    assert check_env(env) == []
    require_valid_env(env)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (NoSeed, "reset() takes no seed: define it as reset(self, *, seed=None, options=None)"),
        (OldReset, "reset() must return (observation, info)"),
        (OldStep, "step() must return (observation, reward, terminated, truncated, info)"),
        (Unseeded, "two copies with the same seed (0) and the same actions differ after 0 calls"),
        (RaisingLate, "raised IndexError: off the map"),
        (RaisingReset, "reset() raised IndexError: no second episode"),
        (_stepping(terminated=1), "step() must return terminated as a bool, not 1"),
        (_stepping(truncated=None), "step() must return truncated as a bool, not None"),
        (_stepping(reward="much"), "the reward must be a number, not 'much'"),
        (_stepping(reward=float("nan")), "the reward is nan"),
        (_stepping(info=None), "step() must return info as a dict, not None"),
        (_stepping(obs=np.zeros(2, np.float32)), "its shape is (2,), not (3,)"),
        (_stepping(obs=np.zeros(3, np.float64)), "its dtype is float64, not float32"),
        (_stepping(obs=[0, 0, 0]), "it is a list, not an array"),
        (_stepping(obs=np.full(3, -7, np.float32)), "it is outside the bounds"),
        (_stepping(obs=np.full(3, np.nan, np.float32)), "NaN or an infinity"),
    ],
    ids=str,
)
def test_each_mistake_gets_its_sentence(env, words):
    found = check_env(env)
    assert any(words in sentence for sentence in found), found
    with pytest.raises(WorldError) as caught:
        require_valid_env(env)
    assert words in str(caught.value)


def test_infinity_within_infinite_bounds_is_found():
    class Wide(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))

        def step(self, action):
            _, *rest = super().step(action)
            return np.full(3, np.inf, np.float32), *rest

    assert "has a NaN or an infinity" in check_env(Wide)[0]


def test_spaces_without_a_rule_are_named_both():
    found = check_env(Texts)
    assert len(found) == 2
    assert all("Text space" in sentence for sentence in found)


def test_an_environment_that_cannot_be_made_is_one_finding():
    assert check_env("CartPol-v1") == ["there is no environment 'CartPol-v1'. Did you mean 'CartPole-v1'?"]


def test_several_mistakes_are_found_at_once_and_each_once():
    found = check_env(_stepping(terminated=0, info=[]))
    assert len(found) == 2


def test_keyword_arguments_reach_the_constructor():
    assert check_env("steppe/Failing-v0", at_step=10_000) == []
    assert "made to fail" in check_env("steppe/Failing-v0", at_step=3)[0]

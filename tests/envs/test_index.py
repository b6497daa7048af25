"""Worlds for agents with tables: numbers to see, what is allowed, several choices as one, and bins."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from steppe.classic import DiscretizeWrapper
from steppe.core.config.references import make_reference
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError, EnvironmentFault, WorldError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.envs import make_segment_env, probe
from steppe.testing.env import WorldConformance

pytestmark = pytest.mark.unit
INDEX = EnvConfig(observations="index")


class Shifted(gym.Env):
    """Numbers that begin at 5, and actions at 2."""

    observation_space = gym.spaces.Discrete(3, start=5)
    action_space = gym.spaces.Discrete(2, start=2)
    wrong = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 5, {"action_mask": np.array([1, 0], np.int8)}

    def step(self, action):
        assert action in (2, 3)
        return (9 if self.wrong else 5 + int(action) - 1), 0.0, False, False, {}


class Both(gym.Env):
    """Several numbers to see and to choose."""

    observation_space = gym.spaces.MultiDiscrete([2, 5])
    action_space = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Discrete(4)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([1, 4]), {}

    def step(self, action):
        assert len(action) == 2
        return np.array([0, 3]), float(action[0] * 10 + action[1]), False, False, {}


def stepped(world, actions):
    spec = SegmentSpec(len(actions), world.num_envs, world.spec.obs, world.spec.action.field)
    segment = Segment.blank(spec)
    world.reset(segment["obs"][0])
    masks = [world.masks.copy()]
    for t, action in enumerate(actions):
        world.step(np.full(world.num_envs, action), segment, t)
        masks.append(world.masks.copy())
    return segment, masks


def test_discrete_observations_are_numbers_from_zero():
    world = make_segment_env(make_reference(Shifted), INDEX, 2, np.random.SeedSequence(0))
    assert (world.spec.obs.shape, world.spec.obs.dtype, world.spec.num_states) == ((), "int64", 3)
    segment, masks = stepped(world, [0, 1])
    assert segment["obs"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert masks[0].tolist() == [[True, False]] * 2
    assert masks[1].all(), "no mask is no limit"
    plain = probe(make_reference(Shifted), EnvConfig())
    assert (plain.obs.shape, plain.num_states) == ((3,), None)


def test_an_observation_that_is_not_in_its_space(monkeypatch):
    monkeypatch.setattr(Shifted, "wrong", True)
    world = make_segment_env(make_reference(Shifted), INDEX, 1, np.random.SeedSequence(0))
    with pytest.raises(EnvironmentFault, match="the observation 9 is not in"):
        stepped(world, [0])


def test_several_choices_become_one_number():
    world = make_segment_env(make_reference(Both), INDEX, 1, np.random.SeedSequence(0))
    assert (world.spec.num_states, world.spec.action.sizes) == (10, (12,))
    segment, _ = stepped(world, [7])
    assert segment["obs"].ravel().tolist() == [9, 3]
    assert segment["reward"].item() == 13.0  # (1, 3)


def test_unsupported_spaces_raise_with_advice():
    with pytest.raises(WorldError, match=r'observes Box.*wrappers=\["steppe.classic:DiscretizeWrapper"\]'):
        probe("CartPole-v1", INDEX)
    with pytest.raises(ConfigError, match="frame_stack is for observations that are no numbers"):
        probe("FrozenLake-v1", EnvConfig(observations="index", frame_stack=2))


def test_taxi_provides_action_masks():
    world = make_segment_env("Taxi-v4", INDEX, 3, np.random.SeedSequence(0))
    assert (world.spec.num_states, world.spec.max_episode_steps) == (500, 200)
    _, masks = stepped(world, [0, 1, 2])
    plain = gym.make("Taxi-v4").unwrapped
    assert not masks[0].all()
    assert all(mask.any(axis=1).all() for mask in masks)
    assert masks[0].shape == (3, plain.action_space.n)


@pytest.mark.parametrize("vector", ["native", "loop"])
def test_tictactoe_is_a_native_vector_of_numbers(vector):
    config = EnvConfig(observations="index", vector=vector)
    world = make_segment_env("steppe/TicTacToe-v0", config, 4, np.random.SeedSequence(1))
    assert world.spec.native_vector == (vector == "native")
    assert (world.spec.num_states, world.spec.action.sizes) == (19_683, (9,))
    segment, masks = stepped(world, [4, 0, 8, 2, 6])
    for t in range(6):
        for b in range(4):
            board = segment["obs"][t, b] // 3 ** np.arange(9) % 3
            ended = t > 0 and vector == "native" and segment.cut[t - 1, b]
            assert ended or (masks[t][b] == (board == 0)).all()
            assert masks[t][b].any()


def test_two_agents_in_turns_are_seen():
    config = EnvConfig(observations="index", kwargs={"opponent": "self"})
    assert probe("steppe/TicTacToe-v0", config).in_turns
    assert not probe("steppe/TicTacToe-v0", INDEX).in_turns


class TestTaxiWithNumbers(WorldConformance):
    def make_world(self, num_envs, seed):
        config = EnvConfig(observations="index", time_limit=15)
        return make_segment_env("Taxi-v4", config, num_envs, np.random.SeedSequence(seed))


class TestTicTacToeWithNumbers(WorldConformance):
    def make_world(self, num_envs, seed):
        return make_segment_env("steppe/TicTacToe-v0", INDEX, num_envs, np.random.SeedSequence(seed))


def test_bins():
    env = DiscretizeWrapper(gym.make("MountainCar-v0"), bins=(4, 2))
    assert env.observation_space == gym.spaces.Discrete(8)
    assert env.observation(np.array([-1.2, -0.07])) == 0
    assert env.observation(np.array([-1.2, 0.01])) == 1
    assert env.observation(np.array([0.6, 0.07])) == 7
    assert env.observation(np.array([99.0, -99.0])) == 6
    assert env.observation(np.array([-0.7, 0.0])) == 3
    with pytest.raises(WorldError, match="not finite"):
        env.observation(np.array([np.nan, 0.0]))
    with pytest.raises(ConfigError, match=r"component 1 of .* has no finite bounds"):
        DiscretizeWrapper(gym.make("CartPole-v1"))
    finite = DiscretizeWrapper(gym.make("CartPole-v1"), 3, low=[-2, -3, -0.2, -3], high=[2, 3, 0.2, 3])
    assert finite.observation_space.n == 81
    with pytest.raises(ConfigError, match="4 components"):
        DiscretizeWrapper(gym.make("CartPole-v1"), [3, 3])
    with pytest.raises(ConfigError, match="at least one"):
        DiscretizeWrapper(gym.make("MountainCar-v0"), 0)
    with pytest.raises(WorldError, match="is for Box spaces"):
        DiscretizeWrapper(gym.make("Taxi-v4"))
    spec = probe("MountainCar-v0", EnvConfig(observations="index", wrappers=("steppe.classic:DiscretizeWrapper",)))
    assert spec.num_states == 100

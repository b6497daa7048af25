"""The conformance suite of worlds over the loop, the native vectors and the built-ins."""

import gymnasium as gym
import numpy as np
import pytest

from steppe.core.config.references import make_reference
from steppe.core.config.run import EnvConfig
from steppe.envs import make_segment_env
from steppe.testing.env import WorldConformance, collect

pytestmark = pytest.mark.integration


class _Coins(gym.Env):
    """Dict observations with an image, offset discrete parts and multi-discrete actions."""

    def __init__(self):
        self.observation_space = gym.spaces.Dict(
            {
                "b": gym.spaces.Tuple((gym.spaces.Discrete(3, start=-1), gym.spaces.MultiBinary(2))),
                "a": gym.spaces.Box(-5, 5, (2, 2), np.float64),
                "c": gym.spaces.MultiDiscrete([2, 3], start=[1, 4]),
            }
        )
        self.action_space = gym.spaces.MultiDiscrete([2, 3], start=[0, 5])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert action in self.action_space
        return self.observation_space.sample(), float(action.sum()), self.np_random.random() < 0.1, False, {}


class _Pictures(gym.Env):
    """Images with channels last, and actions that count from 3."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(0, 255, (6, 5, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(4, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._picture(), {}

    def step(self, action):
        assert action in self.action_space
        return self._picture(), float(action), False, self.np_random.random() < 0.2, {}

    def _picture(self):
        return self.np_random.integers(0, 256, (6, 5, 3), np.uint8)


def _expected_seed(seed, index):
    child = np.random.SeedSequence(seed).spawn(index + 1)[index]
    return int(child.generate_state(1, np.uint32)[0]) // 2


class _LoopConformance(WorldConformance):
    env = ""
    config = EnvConfig(vector="loop")

    def make_world(self, num_envs, seed):
        return make_segment_env(self.env, self.config, num_envs, np.random.SeedSequence(seed))

    def make_plain(self):
        return gym.make(self.env)

    def references(self, num_envs, seed):
        return [(self.make_plain(), _expected_seed(seed, index)) for index in range(num_envs)]


class TestCartPoleLoop(_LoopConformance):
    env = "CartPole-v1"
    num_rows = 120


class TestTimeLimitLoop(_LoopConformance):
    env = "Pendulum-v1"
    config = EnvConfig(vector="loop", time_limit=11)

    def make_plain(self):
        return gym.make("Pendulum-v1", max_episode_steps=11)


class TestTupleLoop(_LoopConformance):
    env = "Blackjack-v1"


class TestFrozenLakeLoop(_LoopConformance):
    env = "FrozenLake-v1"
    num_rows = 120


class TestCounting(_LoopConformance):
    env = "steppe/Counting-v0"


class TestIdentity(_LoopConformance):
    env = "steppe/Identity-v0"


class TestContinuousIdentity(_LoopConformance):
    env = "steppe/ContinuousIdentity-v0"


class TestChain(_LoopConformance):
    env = "steppe/TwoStateChain-v0"
    seed_matters = False


class TestTruncatedChain(_LoopConformance):
    env = "steppe/TwoStateChainTruncated-v0"
    seed_matters = False


class TestDictAndMultiDiscrete(_LoopConformance):
    env = make_reference(_Coins)
    make_plain = _Coins


class TestImages(_LoopConformance):
    env = make_reference(_Pictures)
    make_plain = _Pictures

    def row_of(self, space, raw):
        return np.stack([raw[:, :, channel] for channel in range(3)])


class TestNativeCartPole(WorldConformance):
    num_rows = 150

    def make_world(self, num_envs, seed):
        return make_segment_env("CartPole-v1", EnvConfig(vector="native"), num_envs, np.random.SeedSequence(seed))

    def test_it_resets_on_the_next_step(self):
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        assert not journal["valid"].all()

    def test_rows_are_what_gymnasiums_vector_gives(self):
        journal = collect(self.make_world(4, 2), self.num_rows, 7)
        vector = gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
        observations, _ = vector.reset(seed=_expected_seed(2, 0))
        done = np.zeros(4, bool)
        for t in range(self.num_rows):
            np.testing.assert_array_equal(journal["obs"][t], observations)
            observations, reward, terminated, truncated, _ = vector.step(journal["action"][t])
            np.testing.assert_array_equal(journal["valid"][t], ~done)
            np.testing.assert_array_equal(journal["reward"][t], reward)
            np.testing.assert_array_equal(journal["terminated"][t], terminated)
            np.testing.assert_array_equal(journal["truncated"][t], truncated)
            np.testing.assert_array_equal(journal.starts[t + 1], done)
            done = terminated | truncated
            np.testing.assert_array_equal(journal["final_obs"][t][done], observations[done])

    def test_every_valid_transition_is_what_a_plain_cartpole_does(self):
        journal = collect(self.make_world(4, 2), self.num_rows, 7)
        cart = gym.make("CartPole-v1").unwrapped
        checked = 0
        for t, index in zip(*np.nonzero(journal["valid"]), strict=True):
            cart.reset()
            cart.state = journal["obs"][t, index].astype(np.float64)
            after, reward, terminated, _, _ = cart.step(journal["action"][t, index])
            cut = journal["terminated"][t, index] or journal["truncated"][t, index]
            row = journal["final_obs"][t, index] if cut else journal["obs"][t + 1, index]
            np.testing.assert_allclose(row, after, atol=1e-5)
            assert journal["terminated"][t, index] == terminated
            assert journal["reward"][t, index] == reward
            checked += 1
        assert checked > 400


class TestNativeTimeLimit(WorldConformance):
    def make_world(self, num_envs, seed):
        config = EnvConfig(vector="native", time_limit=8)
        return make_segment_env("CartPole-v1", config, num_envs, np.random.SeedSequence(seed))

    def test_episodes_are_truncated_at_the_limit(self):
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        np.testing.assert_array_equal(np.flatnonzero(journal["truncated"][:, 0])[:2], [7, 16])
        assert {length for _, length in journal.finished} == {8}


class TestNativeFrames(WorldConformance):
    num_rows = 100

    def make_world(self, num_envs, seed):
        config = EnvConfig(vector="native", frame_stack=3)
        return make_segment_env("CartPole-v1", config, num_envs, np.random.SeedSequence(seed))

    def test_frames_are_the_newest_observations_of_the_episode(self):
        plain = EnvConfig(vector="native")
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        single = collect(
            make_segment_env("CartPole-v1", plain, self.num_envs, np.random.SeedSequence(0)),
            self.num_rows,
            self.num_rows,
        )
        for index in range(self.num_envs):
            began = 0
            for t in range(self.num_rows + 1):
                began = t if single.starts[t, index] else began
                rows = [single["obs"][max(began, t - back), index] for back in (2, 1, 0)]
                np.testing.assert_array_equal(journal["obs"][t, index], np.concatenate(rows))


class TestRecall(_LoopConformance):
    env = "steppe/Recall-v0"


class TestNativeRecall(WorldConformance):
    def make_world(self, num_envs, seed):
        return make_segment_env("steppe/Recall-v0", EnvConfig(vector="native"), num_envs, np.random.SeedSequence(seed))

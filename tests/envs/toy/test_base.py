"""The base of classic environments, the bandit, and the wrapper that numbers combinations."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from steppe.core.config.references import make_reference
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.envs import make_segment_env, probe
from steppe.envs.toy.bandit import TwoArmedBanditEnv
from steppe.envs.toy.base import DistClassicRLEnv
from steppe.envs.wrappers.flatten import FlattenMultiDiscreteWrapper
from steppe.testing.env import WorldConformance

pytestmark = pytest.mark.unit


class Walk(DistClassicRLEnv):
    """A walk over six cells; action 1 goes right, and the last cell pays and ends."""

    def __init__(self):
        super().__init__()
        self.cell = 0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = 0
        return self.cell, {}

    def step(self, action):
        self.current_step += 1
        self.cell = max(0, self.cell + (1 if action == 1 else -1))
        return self.cell, float(self.cell == 5), self.cell == 5, False, {}

    @property
    def observation_space_size(self):
        return 6

    @property
    def action_space_size(self):
        return 2


class Switches(gym.Env):
    """Three switches of 2, 3 and 4 positions counted from 1; shows two of them and keeps what was set."""

    metadata = {"render_modes": ["ansi"], "name": "switches"}  # noqa: RUF012

    def __init__(self):
        self.action_space = spaces.MultiDiscrete([2, 3, 4], start=[1, 1, 1])
        self.observation_space = spaces.MultiDiscrete([[3, 4]])
        self.render_mode = "ansi"
        self.was_set = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([[0, 0]]), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.was_set = action.tolist()
        return np.array([[action[1] - 1, action[2] - 1]]), 1.0, False, True, {}

    def render(self):
        return "click"


class Plain:
    """No Gymnasium environment: it only says its sizes."""

    action_space_sizes = (3, 2)
    flavour = "plain"

    def reset(self, **kwargs):
        return 7, kwargs

    def step(self, action):
        return action, 0.0, True, False, {}


def test_an_environment_of_ones_own_is_accepted_everywhere():
    check_env(Walk(), skip_render_check=True)
    env = Walk()
    assert (env.num_agents, env.current_step, env.max_episode_steps) == (1, 0, 1000)
    assert env.observation_space == spaces.Discrete(6)
    assert env.render() is None
    assert probe(make_reference(Walk), EnvConfig()).obs.shape == (6,)
    with pytest.raises(TypeError, match="abstract"):
        DistClassicRLEnv()


def test_spaces_may_be_assigned():
    env = Walk()
    env.action_space = spaces.Discrete(3)
    assert env.action_space.n == 3


class TestAWalkAsAWorld(WorldConformance):
    seed_matters = False

    num_rows = 400

    def make_world(self, num_envs, seed):
        return make_segment_env(make_reference(Walk), EnvConfig(time_limit=40), num_envs, np.random.SeedSequence(seed))


def test_the_bandit_pays_by_its_chances():
    env = gym.make("steppe/TwoArmedBandit-v0", chances=(0.2, 0.7), length=5)
    check_env(env.unwrapped, skip_render_check=True)
    paid, lengths = {0: [], 1: []}, []
    env.reset(seed=0)
    for episode in range(2000):
        env.reset()
        ended, length = False, 0
        while not ended:
            _, reward, ended, truncated, _ = env.step(episode % 2)
            assert not truncated
            paid[episode % 2].append(reward)
            length += 1
        lengths.append(length)
    assert set(lengths) == {5}
    assert np.mean(paid[0]) == pytest.approx(0.2, abs=0.025)
    assert np.mean(paid[1]) == pytest.approx(0.7, abs=0.025)


def test_the_bandits_random_stream_continues_over_resets():
    def pulls(env, seed):
        env.reset(seed=seed)
        return [env.step(1)[1] for _ in range(9)]

    env = TwoArmedBanditEnv()
    first = pulls(env, 1)
    assert [pulls(env, None) for _ in range(4)] != [first] * 4
    assert pulls(env, 1) == first


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TwoArmedBanditEnv(chances=(0.5, 1.5)), "chances"),
        (lambda: TwoArmedBanditEnv(length=0), "length=0"),
        (lambda: TwoArmedBanditEnv().step(2), "no arm 2"),
    ],
)
def test_a_bandits_mistakes_are_one_sentence(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_every_combination_has_a_number_and_the_last_component_is_fastest():
    env = FlattenMultiDiscreteWrapper(Switches())
    assert (env.action_space_size, env.action_space_sizes) == (24, [2, 3, 4])
    assert env.action_space == spaces.Discrete(24)
    assert env.observation_space == spaces.Discrete(12)
    assert env.reset(seed=1) == (0, {})
    combinations = [(a, b, c) for a in (1, 2) for b in (1, 2, 3) for c in (1, 2, 3, 4)]
    for number, (a, b, c) in enumerate(combinations):
        observation, reward, terminated, truncated, _ = env.step(number)
        assert env.wrapped_env.was_set == [a, b, c]
        assert (observation, reward, terminated, truncated) == ((b - 1) * 4 + (c - 1), 1.0, False, True)


def test_the_wrapper_passes_on_what_it_does_not_change():
    inner = Switches()
    env = FlattenMultiDiscreteWrapper(inner)
    assert env.wrapped_env is env.env is env.unwrapped is inner
    assert env.metadata["name"] == "switches"
    assert (env.render_mode, env.render(), env.was_set) == ("ansi", "click", None)
    with pytest.raises(AttributeError, match="nothing"):
        env.nothing  # noqa: B018
    env.close()


def test_the_wrapper_takes_objects_that_only_have_sizes():
    env = FlattenMultiDiscreteWrapper(Plain())
    assert (env.action_space_size, env.action_space_sizes, env.flavour) == (6, [3, 2], "plain")
    assert env.reset(seed=3) == (7, {"seed": 3})
    assert [env.step(i)[0] for i in range(6)] == [[a, b] for a in range(3) for b in range(2)]
    env.close()
    single = FlattenMultiDiscreteWrapper(Walk())
    assert (single.action_space_size, single.action_space_sizes) == (2, [2])
    single.reset()
    assert single.step(1)[0] == 1


def test_tuples_of_numbers_are_numbered_too():
    env = FlattenMultiDiscreteWrapper(gym.make("Blackjack-v1"))
    assert env.observation_space_size == 32 * 11 * 2
    observation, _ = env.reset(seed=0)
    hand, shown, ace = gym.make("Blackjack-v1").reset(seed=0)[0]
    assert observation == (hand * 11 + shown) * 2 + ace


def test_the_wrapper_works_inside_a_segment_environment():
    config = EnvConfig(wrappers=("steppe.envs.wrappers.flatten:FlattenMultiDiscreteWrapper",))
    spec = probe(make_reference(Switches), config)
    assert (spec.action.sizes, spec.obs.shape) == ((24,), (12,))


def test_the_wrappers_mistakes_are_one_sentence():
    with pytest.raises(ConfigError, match="action 24 is out of range: there are 24"):
        FlattenMultiDiscreteWrapper(Switches()).step(24)
    with pytest.raises(WorldError, match="cannot number the actions of Box"):
        FlattenMultiDiscreteWrapper(gym.make("Pendulum-v1"))
    with pytest.raises(WorldError, match="no number of observations"):
        FlattenMultiDiscreteWrapper(gym.make("CartPole-v1")).observation_space_size  # noqa: B018

"""The memory task: what is seen and paid, in single episodes and in the compiled vector, and that nothing gives the cue away."""

import gymnasium as gym
import numpy as np
import pytest

from steppe.core.contracts.errors import ConfigError
from steppe.envs.registry import register_builtins
from steppe.envs.toy.recall import RecallEnv, RecallVectorEnv

pytestmark = pytest.mark.unit
sizes = pytest.mark.parametrize(("num_choices", "delay"), [(4, 6), (2, 0), (3, 1)])


@sizes
def test_an_episode_is_cue_delay_question(num_choices, delay):
    env = RecallEnv(num_choices, delay)
    cues = set()
    for seed in range(30):
        observation, _ = env.reset(seed=seed)
        cue = int(np.argmax(observation))
        assert observation.tolist() == [float(place == cue) for place in range(num_choices + 1)]
        cues.add(cue)
        for _ in range(delay):
            observation, reward, terminated, truncated, _ = env.step(np.int64(0))
            assert (observation.any(), reward, terminated, truncated) == (False, 0.0, False, False)
        observation, reward, terminated, _, _ = env.step(np.int64(0))
        assert observation.tolist() == [0.0] * num_choices + [1.0]
        assert (reward, terminated) == (0.0, False)
        answer = (cue + seed % 2) % num_choices
        observation, reward, terminated, truncated, _ = env.step(np.int64(answer))
        assert (reward, terminated, truncated) == (float(answer == cue), True, False)
        assert not observation.any()
    assert cues == set(range(num_choices))


@sizes
def test_the_vector_is_as_many_single_episodes(num_choices, delay):
    """Single environments that are shown the same cues follow every step."""
    many = RecallVectorEnv(5, num_choices=num_choices, delay=delay)
    singles = [RecallEnv(num_choices, delay) for _ in range(5)]
    stream, ended = np.random.default_rng(0), np.ones(5, bool)
    observation, _ = many.reset(seed=3)
    rewards = terminated = np.zeros(5)
    for _ in range(60):
        for b, env in enumerate(singles):
            if ended[b]:
                env.reset()
                env.cue[0] = np.argmax(observation[b])
                np.testing.assert_array_equal(observation[b], np.eye(num_choices + 1)[env.cue[0]])
                assert (rewards[b], terminated[b]) == (0.0, False), "the step of a reset pays nothing"
        actions = stream.integers(0, num_choices, 5)
        over, (observation, rewards, terminated, truncated, _) = ended, many.step(actions)
        resets = np.zeros(5, bool)
        for b, env in enumerate(singles):
            if env.elapsed[0] > delay + 1:
                resets[b] = True
                continue
            expected = env.step(actions[b])
            np.testing.assert_array_equal(observation[b], expected[0])
            assert (rewards[b], terminated[b]) == expected[1:3]
        assert not truncated.any()
        ended = resets
    assert not over.all()


def test_the_question_does_not_tell_the_cue():
    """Whoever always gives the same answer is right one time in four."""
    many = RecallVectorEnv(500)
    many.reset(seed=0)
    total = sum(many.step(np.full(500, 2))[1].sum() for _ in range(9 * 10))
    assert total / (500 * 10) == pytest.approx(0.25, abs=0.03)


def test_the_same_seed_gives_the_same_cues():
    one, other = RecallVectorEnv(8), RecallVectorEnv(8)
    for env in (one, other):
        env.reset(seed=5)
    for _ in range(30):
        np.testing.assert_array_equal(one.step(np.zeros(8, int))[0], other.step(np.zeros(8, int))[0])
    assert (one.reset(seed=6)[0] != other.reset(seed=7)[0]).any()


def test_it_is_registered_with_gymnasium():
    register_builtins()
    assert gym.make("steppe/Recall-v0", delay=2).unwrapped.delay == 2
    assert gym.make_vec("steppe/Recall-v0", 3, "vector_entry_point", num_choices=2).num_choices == 2


def test_invalid_values_are_refused():
    for wrong in ({"num_choices": 1}, {"delay": -1}):
        with pytest.raises(ConfigError, match="must be at least"):
            RecallEnv(**wrong)
        with pytest.raises(ConfigError, match="must be at least"):
            RecallVectorEnv(2, **wrong)
    with pytest.raises(ConfigError, match="num_envs=0"):
        RecallVectorEnv(0)
    env = RecallVectorEnv(2)
    with pytest.raises(ConfigError, match="not a list"):
        env.reset(seed=[1, 2])
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="need as many actions"):
        env.step(np.zeros(3, int))

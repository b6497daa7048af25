"""The built-ins keep what they promise, by Gymnasium's own checker and by hand."""

import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from steppe.envs.registry import register_builtins
from steppe.envs.toy.builtin import CountingEnv, IdentityEnv, SleepEnv, TwoStateChainEnv

pytestmark = pytest.mark.unit
NAMES = [
    "Identity-v0",
    "ContinuousIdentity-v0",
    "TwoStateChain-v0",
    "TwoStateChainTruncated-v0",
    "Counting-v0",
    "Sleep-v0",
]


@pytest.mark.parametrize("name", NAMES)
def test_gymnasiums_checker_passes(name):
    register_builtins()
    with gym.make(f"steppe/{name}", disable_env_checker=True) as env:
        check_env(env.unwrapped, skip_render_check=True)


def test_registering_again_changes_nothing():
    before = dict(gym.registry)
    register_builtins()
    assert dict(gym.registry) == before


def test_built_in_environments_need_no_import_and_no_torch():
    code = (
        "import sys; from steppe.envs import probe; from steppe.core.config.run import EnvConfig\n"
        "print(probe('steppe/Identity-v0', EnvConfig()).obs.shape, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["(4,)", "False"]


def test_identity_pays_for_the_right_answer_only():
    env = IdentityEnv(num_choices=3, length=50)
    observation, _ = env.reset(seed=0)
    for step in range(50):
        answer = observation if step % 2 else (observation + 1) % 3
        observation, reward, terminated, truncated, _ = env.step(answer)
        assert reward == step % 2
        assert not terminated
        assert truncated == (step == 49)


def test_continuous_identity_pays_minus_the_squared_distance():
    env = gym.make("steppe/ContinuousIdentity-v0", size=2)
    observation, _ = env.reset(seed=0)
    after, reward, *_ = env.step(np.array([0.5, -0.5], np.float32))
    assert reward == pytest.approx(-((0.5 - observation[0]) ** 2) - (-0.5 - observation[1]) ** 2, rel=1e-5)
    assert env.step(after)[1] == 0.0


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99])
def test_the_values_of_the_chain_solve_its_bellman_equations(gamma, truncate):
    env = TwoStateChainEnv(length=10**9, truncate=truncate)
    value = np.zeros(2)
    for _ in range(5000):  # value iteration on the steps that the environment really makes
        for state in (0, 1):
            env.reset()
            env.state = state
            after, reward, terminated, _, _ = env.step(0)
            value[state] = reward + gamma * (0.0 if terminated else value[after])
    np.testing.assert_allclose(TwoStateChainEnv.values(gamma, truncate=truncate), value, rtol=1e-9)


def test_the_truncated_chain_is_cut_at_its_length():
    env = TwoStateChainEnv(length=3, truncate=True)
    env.reset()
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


def test_counting_keeps_its_identity_until_it_is_reseeded():
    env = CountingEnv()
    first = env.reset(seed=1)[0]
    assert env.reset()[0][0] == first[0]
    assert env.reset(seed=2)[0][0] != first[0]
    np.testing.assert_array_equal(env.reset(seed=1)[0], first)


def test_sleeping_takes_at_least_its_delay():
    env = SleepEnv(delay_s=0.02)
    env.reset(seed=0)
    began = time.perf_counter()
    env.step(0)
    assert time.perf_counter() - began >= 0.02

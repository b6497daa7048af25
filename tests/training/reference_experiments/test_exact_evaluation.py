"""Exact evaluations against hand-computed values, published optima and simulated episodes."""

import gymnasium as gym
import numpy as np
import pytest

import steppe
from steppe.records.run_directory import RunDirectory
from steppe.training.reference_experiments.exact_evaluation import (
    NUMBERING,
    Model,
    blackjack_values,
    evaluate_exactly,
    model_of,
    optimal_value,
    policy_value,
)

pytestmark = pytest.mark.unit


def two_states(time_limit=None):
    """From state 0, action 0 earns 1 and ends with probability .5; action 1 leads to state 1, where every action ends with 3."""
    transitions, rewards = np.zeros((2, 2, 2)), np.array([[1.0, 0.0], [3.0, 3.0]])
    transitions[0, 0, 0], transitions[0, 1, 1] = 0.5, 1.0
    return Model(transitions, rewards, np.array([1.0, 0.0]), time_limit)


def test_values_by_hand():
    assert policy_value(two_states(), np.array([0, 0])) == pytest.approx(2.0)  # 1 + 1/2 + 1/4 + …
    assert policy_value(two_states(), np.array([1, 0])) == pytest.approx(3.0)
    assert optimal_value(two_states()) == pytest.approx(3.0)


def test_a_time_limit_cuts_the_episode_off():
    assert policy_value(two_states(time_limit=2), np.array([0, 0])) == pytest.approx(1.5)
    assert policy_value(two_states(time_limit=1), np.array([1, 0])) == 0.0
    assert optimal_value(two_states(time_limit=1)) == 1.0


def test_a_policy_that_never_ends_has_no_finite_value():
    transitions = np.ones((1, 1, 1))
    assert policy_value(Model(transitions, np.array([[-1.0]]), np.ones(1)), np.zeros(1, int)) == -np.inf


def test_the_optimum_of_frozen_lake():
    """.913 with 200 steps; the best stationary policy that is known reaches about .886."""
    env = gym.make("FrozenLake8x8-v1")
    assert optimal_value(model_of(env, 200)) == pytest.approx(0.913, abs=0.001)


@pytest.mark.parametrize(
    ("env", "limit", "optimum"), [("CliffWalking-v1", None, -13.0), ("CliffWalking-v1", 200, -13.0)]
)
def test_the_optimum_of_cliff_walking(env, limit, optimum):
    assert optimal_value(model_of(gym.make(env), limit)) == pytest.approx(optimum)


def test_the_optimum_of_blackjack_without_the_rule_for_naturals():
    """-.0466, as basic strategy gives with an infinite deck, no doubling and no splitting."""
    exact = blackjack_values(lambda total, dealer, ace: 0, sab=False, natural=False)
    assert exact.optimum == pytest.approx(-0.0466, abs=0.0001)


@pytest.mark.parametrize("rules", [{"sab": True, "natural": False}, {"sab": False, "natural": True}])
def test_blackjack_agrees_with_simulated_games(rules):
    """Hit below 17: 20,000 games have a standard error of .007."""

    def choose(total, dealer, ace):
        return int(total < 17)

    env = gym.make("Blackjack-v1", **rules).unwrapped
    returns = []
    for game in range(20_000):
        observation, _ = env.reset(seed=0 if game == 0 else None)
        ended = False
        while not ended:
            observation, reward, ended, _, _ = env.step(choose(*observation))
        returns.append(reward)
    exact = blackjack_values(choose, **rules)
    assert exact.value == pytest.approx(np.mean(returns), abs=4 * 0.007)
    assert exact.optimum > exact.value + 0.01


def test_the_policy_of_a_run(tmp_path):
    """A trained run's exact value is what its evaluation episodes scatter around."""
    settings = {"runtime": "inline", "run_dir": str(tmp_path / "run"), "evaluation.every_steps": 10**6}
    result = steppe.train("FrozenLake-v1", algo="q-learning", steps=20_000, seed=1, **settings)
    exact = evaluate_exactly(RunDirectory.open(result.path))
    found = steppe.evaluate(result.path, episodes=400)
    assert 0.3 < exact.value <= exact.optimum
    assert exact.value == pytest.approx(found["return_mean"], abs=4 * 0.5 / 20)


def test_the_policy_of_a_blackjack_run(tmp_path):
    """Numbered observations are the table's order: a trained table is far better than sticking at once, about -.16."""
    wrappers = {"environment.wrappers": [NUMBERING]}
    settings = {"runtime": "inline", "run_dir": str(tmp_path / "run"), "evaluation.every_steps": 10**7, **wrappers}
    result = steppe.train("Blackjack-v1", algo="q-learning", steps=200_000, seed=1, **settings)
    exact = evaluate_exactly(RunDirectory.open(result.path))
    assert -0.12 < exact.value <= exact.optimum


def test_an_environment_without_a_model_has_no_exact_value(tmp_path):
    settings = {"runtime": "inline", "run_dir": str(tmp_path / "run"), "evaluation.episodes": 1}
    result = steppe.train("steppe/Identity-v0", steps=64, **settings)
    assert evaluate_exactly(RunDirectory.open(result.path)) is None

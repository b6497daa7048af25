"""Whole runs learn: seeds, steps and thresholds are stated, and a learner that does not learn misses every threshold."""

import pytest

import steppe

pytestmark = pytest.mark.integration


def test_ppo_solves_cartpole_with_its_defaults():
    """Seed 0, at most 150,000 steps, an evaluation of 20 episodes at 475; a random policy scores about 20."""
    result = steppe.train("CartPole-v1", runtime="inline", steps=150_000, seed=0, target_return=475)
    assert result.state == "SUCCEEDED", result.summary
    assert result.eval_return_mean >= 475


def test_ppo_solves_cartpole_as_plain_environments():
    """Seed 1, at most 100,000 steps, 475."""
    settings = {"environment.vector": "loop"}
    result = steppe.train("CartPole-v1", runtime="inline", steps=100_000, seed=1, target_return=475, **settings)
    assert result.state == "SUCCEEDED", result.summary


def test_dqn_solves_cartpole_with_its_defaults():
    """Seed 0, at most 50,000 steps, an evaluation every 2,500 of them, 475."""
    settings = {"evaluation.every_steps": 2_500}
    result = steppe.train("CartPole-v1", algo="dqn", runtime="inline", steps=50_000, target_return=475, **settings)
    assert result.state == "SUCCEEDED", result.summary


def test_ppo_learns_continuous_actions():
    """Pendulum-v1, seed 0, 100,000 steps: from about −1,200 at random to better than −400."""
    result = steppe.train("Pendulum-v1", runtime="inline", steps=100_000, seed=0, target_return=-400)
    assert result.state == "SUCCEEDED", result.summary


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [{"algo": "a3c"}, {"algo": "a2c", "mode": "workers"}], ids=lambda given: given["algo"]
)
def test_workers_solve_cartpole_by_gradients(settings):
    """Four workers, seed 0, at most 400,000 steps, an evaluation of 20 episodes at 475; a random policy scores about 20."""
    more = {"evaluation.every_steps": 10_000}
    result = steppe.train(
        "CartPole-v1", runtime="inline", actors=4, steps=400_000, seed=0, target_return=475, **settings, **more
    )
    assert result.state == "SUCCEEDED", result.summary
    assert result.eval_return_mean >= 475

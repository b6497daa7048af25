"""Whole runs with several agents learn; seeds, steps and thresholds are stated. The best return is known: every agent is
paid 1 at each of 16 steps."""

import pytest

import steppe

pytestmark = pytest.mark.integration

ENV, BEST = "steppe/Teamwork-v0", 2 * 16
SETTINGS = {"runtime": "inline", "hidden": (32,), "evaluation.every_steps": 2_000, "learning_rate": 3e-3}


def test_a_shared_policy_learns_to_agree():
    """Two agents, seed 0, at most 30,000 steps, 31 of 32; random policies get about 8."""
    result = steppe.train(ENV, steps=30_000, target_return=31, seed=0, **SETTINGS)
    assert result.reason == "target_reached", result.summary
    returns = result.summary["eval_agent_returns"]
    assert returns.keys() == {"agent_0", "agent_1"}
    assert sum(returns.values()) == pytest.approx(result.eval_return_mean)


def test_policies_of_their_own_learn_to_divide_the_work():
    """Two agents, seed 0, at most 30,000 steps, 31 of 32."""
    settings = {**SETTINGS, "policies": "own", "environment.kwargs": {"task": "divide"}}
    result = steppe.train(ENV, steps=30_000, target_return=31, seed=0, **settings)
    assert result.reason == "target_reached", result.summary


def test_a_shared_policy_without_identity_cannot_divide_it():
    """Whatever it learned: at its best choice, both choose alike, and nobody is paid."""
    settings = {**SETTINGS, "environment.kwargs": {"task": "divide"}}
    result = steppe.train(ENV, steps=6_000, seed=0, **settings)
    assert result.eval_return_mean == 0.0
    assert result.summary["agent_steps"] == 2 * result.env_steps

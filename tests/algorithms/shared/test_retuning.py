"""Hyperparameters changed between two updates: the next update is what it would have been with them from the start."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.config.algorithm_table import ALGORITHMS
from steppe.core.contracts.algorithm import Tunable
from steppe.core.contracts.errors import ConfigError
from tests.algorithms.test_ppo import agent_and_batch

pytestmark = pytest.mark.unit

ONE = {"epochs": 1, "minibatch_size": 10_000, "max_grad_norm": 1e9}


def moved(agent, batch) -> np.ndarray:
    before = agent.flat.parameters.clone()
    agent.learn(batch)
    return (agent.flat.parameters - before).numpy()


def test_adams_first_step_is_as_long_as_the_rate_says():
    (plain, batch), (tuned, _) = agent_and_batch(learning_rate=1e-3, **ONE), agent_and_batch(learning_rate=1e-3, **ONE)
    assert isinstance(tuned, Tunable)
    tuned.retune({"learning_rate": 2.5e-4})
    np.testing.assert_allclose(moved(tuned, batch), moved(plain, batch) / 4, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("change", [{"clip": 0.01}, {"entropy_coef": 0.3}, {"gamma": 0.5}, {"epochs": 3}])
def test_a_changed_agent_learns_like_one_that_was_made_so(change):
    (tuned, batch), (made, _) = agent_and_batch(learning_rate=1e-3), agent_and_batch(learning_rate=1e-3, **change)
    untouched, _ = agent_and_batch(learning_rate=1e-3)
    tuned.retune(change)
    steps = moved(tuned, batch)
    np.testing.assert_array_equal(steps, moved(made, batch))
    assert not np.array_equal(steps, moved(untouched, batch))


def test_what_would_be_refused_at_the_start_is_refused_later_and_changes_nothing():
    (tuned, batch), (plain, _) = agent_and_batch(), agent_and_batch()
    for wrong in ({"learning_rate": -1.0}, {"clip": "wide"}, {"no_such": 1}):
        with pytest.raises(ConfigError):
            tuned.retune(wrong)
    np.testing.assert_array_equal(moved(tuned, batch), moved(plain, batch))


def test_nothing_is_both_live_and_fixed():
    for name, kind in ALGORITHMS.items():
        assert not set(kind.live) & set(kind.fixed), name
        assert "learning_rate" not in kind.fixed, name

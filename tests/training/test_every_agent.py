"""Every method of DistributedAgent on every algorithm of the house; what one cannot do is said in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steppe import DistributedAgent, DistributedEnvironment, EnvConfig, UsageError
from steppe.core.config.algorithm_table import ALGORITHMS

pytestmark = pytest.mark.integration

IDENTITY, LAKE = "steppe/Identity-v0", "FrozenLake-v1"


def made(algo: str) -> tuple[DistributedEnvironment, DistributedAgent]:
    in_table = ALGORITHMS[algo].in_table
    config = EnvConfig(observations="index" if in_table else "values")
    environment = DistributedEnvironment(LAKE if in_table else IDENTITY, 1, runtime="inline", seed=0, config=config)
    rate = {"learning_rate": 0.1} if in_table else {}
    return environment, DistributedAgent(algo, seed=0, **rate).bind(environment)


def same(one: dict, other: dict) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("algo", [name for name, kind in ALGORITHMS.items() if kind.memory != "sequences"])
def test_every_method(algo: str, tmp_path: Path) -> None:
    environment, agent = made(algo)
    with environment:
        steps = environment.generate_experiences(agent, 20)
        batch = environment.generate_batch_experiences(agent, 64)
    before = agent.get_policy_parameters()
    if ALGORITHMS[algo].in_table:
        with pytest.raises(UsageError, match="a table is learned without gradients"):
            agent.compute_gradients(batch)
        with pytest.raises(UsageError, match="a table is learned without gradients"):
            agent.apply_gradients(before)
        steps[3]["reward"] = batch["reward"][3] = np.float32(
            1.0
        )  # a lake that pays, so that there is something to learn
    else:
        gradients = agent.compute_gradients(batch)
        assert same(before, agent.get_policy_parameters())
        agent.apply_gradients(gradients)
        assert not same(before, agent.get_policy_parameters())
        agent.set_policy_parameters(before)
    for learn in (lambda: agent.update_policy(steps), lambda: agent.learn_from_batch(batch)):
        earlier = agent.get_policy_parameters()
        assert learn()["updates"] > 0
        assert not same(earlier, agent.get_policy_parameters())
    stats = agent.get_training_stats()
    assert stats["batches"] >= 2
    assert stats["algorithm"] == algo
    agent.save_checkpoint(tmp_path / "agent")
    other = made(algo)[1]
    other.load_checkpoint(tmp_path / "agent")
    assert same(agent.get_policy_parameters(), other.get_policy_parameters())
    other.set_policy_parameters(before)
    assert same(before, other.get_policy_parameters())
    agent.reset_training_stats()
    assert agent.get_training_stats()["batches"] == 0
    verdict = agent.evaluate_policy(3)
    assert verdict["episodes"] == 3
    assert np.isfinite(verdict["return_mean"])


# dhc wants planes to look at: its own tests have worlds for it.
@pytest.mark.parametrize("algo", ["r2d2"])
def test_agents_that_learn_from_sequences_say_so(algo: str, tmp_path: Path) -> None:
    environment, agent = made(algo)
    with environment:
        steps = environment.generate_experiences(agent, 4)
    with pytest.raises(UsageError, match="sequences"):
        agent.update_policy(steps)
    parameters = agent.get_policy_parameters()
    agent.save_checkpoint(tmp_path / "agent")
    other = made(algo)[1]
    other.load_checkpoint(tmp_path / "agent")
    assert same(parameters, other.get_policy_parameters())
    assert np.isfinite(agent.evaluate_policy(2)["return_mean"])

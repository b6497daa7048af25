"""A2C's arithmetic against torch's autograd, and that gradients of parts add up to the whole one's."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.algorithms.a2c.a2c import A2C
from steppe.algorithms.a2c.config import A2CConfig, A3CConfig
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.dqn.dqn import DQN
from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.errors import ConfigError, NotFinite
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import EnvSpec
from steppe.testing.agent import invented_draw, invented_segment
from tests.algorithms.test_ppo import ACTIONS, VECTOR, one_step_advantages, written_out

pytestmark = pytest.mark.unit


def agent_and_batch(kind="discrete", seed=0, **values):
    """An agent whose weights moved a little since the batch was collected: A2C does not correct for that."""
    spec = EnvSpec("invented", VECTOR, ACTIONS[kind])
    config = A2CConfig(hidden=(16,), **{"normalize_obs": False, "normalize_reward": False, **values})
    agent = A2C(config, spec, seed=seed)
    agent.begin(4, np.random.default_rng(seed))
    segment = invented_segment(agent, config, spec, np.random.default_rng(seed))
    stream = torch.Generator().manual_seed(seed)
    agent.flat.parameters += 0.15 * torch.randn(agent.flat.parameters.shape, generator=stream)
    return agent, Batch(segment.columns)


def autograd_gradient(agent, batch, advantage):
    """The loss written with torch.distributions."""
    config, columns, valid = agent.config, batch.columns, batch["valid"]
    returns = torch.from_numpy((advantage + columns["value"])[valid]).float()
    gain = torch.from_numpy(advantage[valid]).float()
    action = torch.from_numpy(columns["action"][valid])
    agent.network.zero_grad(set_to_none=False)
    outputs, value = written_out(agent.network, torch.from_numpy(columns["obs"][:-1][valid]))
    is_box = action.dtype == torch.float32
    if is_box:
        chosen = [torch.distributions.Normal(outputs[:, d], outputs[:, 2 + d].exp()) for d in range(2)]
    else:
        sizes = [4] if action.ndim == 1 else [2, 3]
        chosen = [torch.distributions.Categorical(logits=part) for part in outputs.split(sizes, dim=1)]
    taken = action.reshape(len(action), -1)
    logp = sum(choice.log_prob(taken[:, k]) for k, choice in enumerate(chosen))
    entropy = sum(choice.entropy() for choice in chosen).mean()
    policy = -(logp * gain).mean()
    error = (value - returns).square().mean()
    beyond = torch.relu(outputs[:, :2].abs() - 1.0).square().sum(1).mean() if is_box else 0.0
    (policy + config.value_coef * error - config.entropy_coef * entropy + config.bounds_coef * beyond).backward()
    found = {"policy_loss": policy.item(), "value_loss": error.item(), "entropy": entropy.item()}
    return agent.flat.gradient.numpy().copy(), found


@pytest.mark.parametrize("kind", ACTIONS)
def test_the_gradient_is_autograds(kind):
    agent, batch = agent_and_batch(kind, entropy_coef=0.02, gae_lambda=0.0)
    if kind == "box":  # some means are beyond the bounds, which costs something
        agent.flat.parameters *= 4.0
        means = agent.network.run(batch["obs"][0])[0][:, :2]
        assert np.abs(means).max() > 1.2 > np.abs(means).min()
    expected, terms = autograd_gradient(agent, batch, one_step_advantages(agent, batch))
    np.testing.assert_allclose(agent.gradients(batch), expected, rtol=1e-4, atol=1e-6)
    learned = agent.learn(batch)
    assert learned.updates == 1
    for name, number in terms.items():
        assert learned.stats[name] == pytest.approx(number, rel=1e-4, abs=1e-6)


def parts_of(batch, cuts):
    bounds = [0, *cuts, batch["reward"].shape[1]]
    return [
        Batch({name: column[:, first:last] for name, column in batch.columns.items()})
        for first, last in pairwise(bounds)
    ]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.sets(st.integers(1, 3)), kind=st.sampled_from(list(ACTIONS)))
def test_gradients_of_workers_weighted_by_rows_are_the_joint_batchs(seed, cuts, kind):
    agent, whole = agent_and_batch(kind, seed % 7, entropy_coef=0.01)
    segment = invented_segment(agent, agent.config, EnvSpec("x", VECTOR, ACTIONS[kind]), np.random.default_rng(seed))
    whole = Batch(segment.columns)
    parts = parts_of(whole, sorted(cuts))
    rows = [int(part["valid"].sum()) for part in parts]
    joint = sum(count * agent.gradients(part).astype(np.float64) for count, part in zip(rows, parts, strict=True))
    np.testing.assert_allclose(joint / sum(rows), agent.gradients(whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 4])
def test_gradients_of_replay_agents_average_to_the_joint_batchs(workers):
    spec = EnvSpec("invented", VECTOR, ACTIONS["discrete"])
    agent = DQN(DQNConfig(hidden=(16,)), spec, seed=0)
    whole = invented_draw(spec, np.random.default_rng(1))
    size = len(whole["reward"]) // workers
    parts = [
        Batch({name: column[n * size : (n + 1) * size] for name, column in whole.columns.items()},
              weights=whole.weights[n * size : (n + 1) * size])
        for n in range(workers)
    ]  # fmt: skip
    mean = np.mean([agent.gradients(part).astype(np.float64) for part in parts], axis=0)
    np.testing.assert_allclose(mean, agent.gradients(whole), rtol=1e-4, atol=1e-6)


def test_a_batch_without_experience_changes_nothing():
    agent, batch = agent_and_batch()
    batch["valid"][...] = False
    before = agent.weights().sha256()
    assert agent.learn(batch).updates == 0
    assert not agent.gradients(batch).any()
    assert agent.weights().sha256() == before


def test_the_learning_rate_falls_where_it_should():
    agent, batch = agent_and_batch(anneal=True, learning_rate=0.01)
    segment = invented_segment(agent, agent.config, EnvSpec("x", VECTOR, ACTIONS["discrete"]), np.random.default_rng(0))
    agent.observe(segment, Progress(75, 100))
    assert agent.learn(batch).stats["learning_rate"] == pytest.approx(0.0025)
    with pytest.raises(ConfigError, match="anneal=true needs a run with a number of steps"):
        agent.observe(segment, Progress(75, None))


def test_bounds_are_for_continuous_actions():
    assert agent_and_batch()[0].config.bounds_coef == 0.0
    assert agent_and_batch("box")[0].config.bounds_coef == 0.1
    with pytest.raises(ConfigError, match="bounds_coef is for continuous actions, and invented has others"):
        agent_and_batch(bounds_coef=0.5)


def test_rewards_that_are_no_numbers_are_named():
    agent, batch = agent_and_batch()
    batch["reward"][batch["valid"]] = np.nan
    with pytest.raises(NotFinite, match="loss is nan at update 0"):
        agent.learn(batch)


def test_a3c_is_the_same_agent_where_workers_do_not_wait():
    assert A3CConfig.implementation == A2CConfig.implementation
    assert (A2CConfig.in_rounds, A3CConfig.in_rounds) == (True, False)
    assert (A2CConfig.usual_mode, A3CConfig.usual_mode) == ("sync", "workers")

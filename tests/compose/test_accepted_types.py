"""NumPy's scalars, Python lists and torch's tensors are taken wherever a number or an array is."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import steppe
from steppe import (
    DistributedAgent,
    DistributedEnvironment,
    FederatedParameterServer,
    MainLoop,
    ParameterServer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferPool,
)
from steppe.classic import ExperienceBuffer
from steppe.core.contracts.errors import ConfigError, UsageError

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"


class Odd(gym.Env):
    """Answers with NumPy's scalars for everything."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = np.int64(0)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.ones(2, np.float32), np.float32(1.5), np.bool_(self.steps >= 5), np.bool_(False), {}


def test_counts_may_be_numpy_integers() -> None:
    environment = DistributedEnvironment(IDENTITY, np.int64(2), runtime="inline", envs_per_worker=np.int32(2))
    settings = {"segment_steps": np.int64(8), "hidden": [np.int64(8)], "evaluation.episodes": torch.tensor(2)}
    agent = DistributedAgent("ppo", np.float32(0.01), np.int64(16), seed=np.uint8(3)).bind(environment)
    pool = ReplayBufferPool(np.int64(1), np.int64(64))
    assert type(environment.num_workers) is type(agent.seed) is type(pool.buffer_capacity) is int
    loop = MainLoop(environment, None, agent, config=settings)
    assert loop.config.agent.hidden == (8,) or loop.config.agent.hidden == [8]
    assert loop.run_training(total_episodes=np.int64(4))["state"] == "SUCCEEDED"
    assert len(environment.generate_batch_experiences(agent, np.int16(6))["reward"]) == 6
    assert {step["episode"] for step in environment.generate_experiences(agent, torch.tensor(2), np.int64(4))} == {0, 1}
    environment.shutdown()
    with pytest.raises(ConfigError, match="num_workers"):
        DistributedEnvironment(IDENTITY, np.float64(2.5))
    assert steppe.train(IDENTITY, steps=np.int64(64), **settings, runtime="inline").summary["env_steps"] >= 64


def test_environments_may_answer_with_numpy_scalars() -> None:
    environment = DistributedEnvironment(Odd, 1, runtime="inline")
    agent = DistributedAgent("dqn", seed=0, config={"hidden": [8]}).bind(environment)
    steps = environment.generate_experiences(agent, 2)
    assert [float(step["reward"]) for step in steps] == [1.5] * 10
    environment.shutdown()


@pytest.mark.parametrize("kind", ["numpy", "torch", "lists"])
def test_batches_weights_and_gradients_may_be_anything_like_an_array(kind: str) -> None:
    environment = DistributedEnvironment(IDENTITY, 1, runtime="inline")
    agent, other = (DistributedAgent("dqn", seed=0, config={"hidden": [8]}).bind(environment) for _ in range(2))
    made = {"numpy": np.array, "torch": torch.tensor, "lists": lambda value: np.asarray(value).tolist()}[kind]
    batch = environment.generate_batch_experiences(agent, 8)
    odd = {name: made(value) for name, value in batch.items()}
    gradients = agent.compute_gradients(odd)
    for name, value in other.compute_gradients(batch).items():
        np.testing.assert_array_equal(gradients[name], value)
    agent.apply_gradients({name: made(value) for name, value in gradients.items()})
    other.apply_gradients(gradients)
    same(agent, other)
    assert agent.learn_from_batch(odd)["loss"] == other.learn_from_batch(batch)["loss"]
    agent.set_policy_parameters({name: made(value) for name, value in other.get_policy_parameters().items()})
    same(agent, other)
    rows = [{name: made(value[row]) for name, value in batch.items()} for row in range(8)]
    plain = [{name: value[row] for name, value in batch.items()} for row in range(8)]
    assert agent.update_policy(rows) == other.update_policy(plain)
    environment.update_policy({name: made(value) for name, value in agent.get_policy_parameters().items()})
    environment.shutdown()


def same(one: DistributedAgent, other: DistributedAgent) -> None:
    for name, value in one.get_policy_parameters().items():
        np.testing.assert_array_equal(value, other.get_policy_parameters()[name])


def test_parameter_servers_take_lists_and_tensors() -> None:
    server = ParameterServer({"w": [1.0, 2.0], "b": torch.zeros(3)}, update_frequency=np.int64(1))
    server.register_worker("a")
    assert server.push_gradients("a", {"w": [1, 0], "b": torch.ones(3, requires_grad=True)}, np.float32(1.0))
    np.testing.assert_allclose(server.get_parameters("a")["w"], [0.999, 2.0])
    assert server.push_gradients("a", {"w": "text"}).reason == "wrong_dtype"
    assert server.push_gradients("a", {"w": [1.0, [2.0]]}).reason == "wrong_dtype"
    assert server.version == 1
    rounds = FederatedParameterServer({"w": [0.0]}, np.int64(1))
    assert rounds.federated_averaging({"a": {"w": torch.ones(1)}})["w"] == [1.0]


def test_no_gradients_are_one_sentence() -> None:
    agent = DistributedAgent("ppo").bind(DistributedEnvironment(IDENTITY, 1))
    with pytest.raises(UsageError, match="there are no gradients to apply: give what compute_gradients returned"):
        agent.apply_gradients({})


def test_replay_takes_lists_tensors_and_numbers_with_or_without_an_axis() -> None:
    buffer = ReplayBuffer(np.int64(10), ("obs", "reward", "done"))
    buffer.add({"obs": torch.zeros(2), "reward": np.float32(1.0), "done": np.bool_(False)})
    buffer.add({"obs": [0.0, 1.0], "reward": [2.0], "done": torch.tensor([True])})
    buffer.add_batch({"obs": np.zeros((2, 2), np.float32), "reward": torch.ones(2, 1), "done": [False, True]})
    batch = buffer.sample(np.int64(4))
    assert (batch["obs"].shape, batch["reward"].shape, batch["done"].shape) == ((4, 2), (4,), (4,))
    assert buffer.size() == 4
    drawn = PrioritizedReplayBuffer(8, ("x",))
    drawn.add({"x": 1.0}, np.float32(2.0))
    _, _, indices = drawn.sample(np.int64(1))
    drawn.update_priorities(torch.tensor(indices), torch.ones(1))
    steps = ExperienceBuffer(np.int64(5))
    steps.push(np.int64(1), np.int64(0), np.float32(0.5), np.int64(2), np.bool_(True))
    assert steps.sample(np.int64(1)) == [(1, 0, 0.5, 2, True)]

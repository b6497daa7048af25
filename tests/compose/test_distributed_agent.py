"""DistributedAgent by itself: settings, learning from dictionaries, parameters, gradients, exact checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import steppe
from steppe import DistributedAgent, DistributedEnvironment, EnvSpec
from steppe.core.contracts.errors import ConfigError, RunNotFound, UsageError
from steppe.core.contracts.segment import Batch

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"


@pytest.fixture
def environment():
    with DistributedEnvironment(IDENTITY, 2, runtime="inline", seed=1) as made:
        yield made


def transitions(rows: int, spec: EnvSpec, seed: int = 0) -> dict[str, np.ndarray]:
    stream = np.random.default_rng(seed)
    seen = np.eye(spec.obs.shape[0], dtype=np.float32)[stream.integers(spec.obs.shape[0], size=rows)]
    action = stream.integers(spec.action.sizes[0], size=rows)
    return {
        "obs": seen,
        "action": action,
        "reward": (seen.argmax(axis=1) == action).astype(np.float32),
        "next_obs": np.roll(seen, 1, axis=0),
        "terminated": np.zeros(rows, bool),
    }


def test_arguments_become_the_settings_of_each_algorithm() -> None:
    dqn = DistributedAgent("dqn", 0.002, 64, update_frequency=8, target_update_frequency=500).config
    assert (dqn.learning_rate, dqn.batch_size, dqn.samples_per_insert, dqn.target_every) == (0.002, 64, 8.0, 500)
    ppo = DistributedAgent("ppo", 0.002, 64, config={"epochs": 2}).config
    assert (ppo.learning_rate, ppo.minibatch_size, ppo.epochs) == (0.002, 64, 2)
    exact = steppe.PPOConfig(gamma=0.9)
    assert DistributedAgent("ppo", config=exact).config is exact


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DistributedAgent("ppo", update_frequency=8), "update_frequency=8 means nothing to ppo"),
        (lambda: DistributedAgent("ppo", target_update_frequency=8), "target_update_frequency=8 means nothing to ppo"),
        (lambda: DistributedAgent("ppp"), "there is no algorithm 'ppp'"),
        (lambda: DistributedAgent("dqn", batch_size=0), "batch_size=0: must be greater than 0"),
        (lambda: DistributedAgent("dqn", config={"gama": 0.9}), "Did you mean 'gamma'"),
        (lambda: DistributedAgent("dqn", config={"batch_size": 9}), "batch_size is given twice: 32 .* and 9"),
        (lambda: DistributedAgent("dqn", 0.5, config=steppe.DQNConfig()), "learning_rate=0.5: .* its own settings"),
        (lambda: DistributedAgent("dqn", learning_rate=-1.0), "learning_rate=-1.0"),
    ],
)
def test_settings_that_cannot_be_get_one_sentence(make, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_an_algorithm_may_be_a_name_a_class_or_an_agent(environment: DistributedEnvironment) -> None:
    from steppe.algorithms.ppo.ppo import PPO

    assert DistributedAgent(PPO).algo == "ppo"
    made = PPO(steppe.PPOConfig(gamma=0.5), environment.spec, seed=4)
    agent = DistributedAgent(made).bind(environment)
    assert agent.agent is made
    assert agent.config.gamma == 0.5
    assert DistributedAgent("steppe.algorithms.ppo.ppo:PPO", config=steppe.PPOConfig()).bind(environment).built is False


def test_parameters_are_copies_and_come_back(environment: DistributedEnvironment) -> None:
    agent, other = (
        DistributedAgent("dqn", seed=1).bind(environment),
        DistributedAgent("dqn", seed=2).bind(environment.spec),
    )
    parameters = agent.get_policy_parameters()
    name = max(parameters, key=lambda key: parameters[key].size)
    for value in parameters.values():
        value += 1.0
    assert not np.array_equal(parameters[name], agent.get_policy_parameters()[name])
    other.set_policy_parameters(agent.get_policy_parameters())
    assert other.agent.weights().sha256() == agent.agent.weights().sha256()
    with pytest.raises(ConfigError, match=f"no parameter '{name}s' .* Did you mean '{name}'"):
        agent.set_policy_parameters({f"{name}s": parameters[name]})
    with pytest.raises(ConfigError, match=rf"'{name}' is float32\[3\], not float32"):
        agent.set_policy_parameters(parameters | {name: np.zeros(3, np.float32)})


def test_gradients_by_name_are_the_agent_s_and_step_as_learning_does(environment: DistributedEnvironment) -> None:
    batch = transitions(16, environment.spec)
    learned, stepped = (DistributedAgent("dqn", seed=3).bind(environment) for _ in range(2))
    gradients = stepped.compute_gradients(batch)
    before = stepped.get_policy_parameters()
    flat = stepped.agent.gradients(Batch(batch | {"discount": np.full(16, 0.99, np.float32)}))
    np.testing.assert_array_equal(np.concatenate([value.ravel() for value in gradients.values()]), flat)
    assert set(gradients) == set(before) - {"epsilon"}
    assert all(gradients[name].shape == before[name].shape for name in gradients)
    stepped.apply_gradients(gradients)
    learned.learn_from_batch(batch)
    for name in gradients:
        np.testing.assert_array_equal(stepped.get_policy_parameters()[name], learned.get_policy_parameters()[name])
        assert not np.array_equal(before[name], stepped.get_policy_parameters()[name])
    first = next(iter(gradients))
    with pytest.raises(ConfigError, match=f"the gradients lack '{first}'"):
        stepped.apply_gradients({name: value for name, value in gradients.items() if name != first})


def test_dqn_learns_to_say_what_it_sees_by_hand(environment: DistributedEnvironment) -> None:
    agent = DistributedAgent("dqn", batch_size=64, config={"gamma": 0.0, "hidden": (32,)}, seed=0).bind(environment)
    pool = steppe.ReplayBufferPool(2, 2_000, use_prioritized=True)
    pool.add_experiences(transitions(2_000, environment.spec))
    for _ in range(150):
        batch = pool.sample_batch(64)
        metrics = agent.learn_from_batch(batch)
        pool.update_priorities(batch["indices"], metrics["priorities"])
    assert agent.evaluate_policy(5)["return_mean"] == 16.0
    stats = agent.get_training_stats()
    assert (stats["batches"], stats["updates"], stats["experiences"]) == (150, 150, 150 * 64)
    assert stats["last"]["loss"] == metrics["loss"] < stats["means"]["loss"]
    agent.reset_training_stats()
    assert agent.get_training_stats()["batches"] == 0
    assert agent.evaluate_policy(5)["return_mean"] == 16.0


def test_ppo_learns_to_say_what_it_sees_by_hand(environment: DistributedEnvironment) -> None:
    agent = DistributedAgent("ppo", 0.005, 64, config={"gamma": 0.5}, seed=0).bind(environment)
    before = agent.evaluate_policy(10)["return_mean"]
    for _ in range(15):
        agent.update_policy(environment.generate_experiences(agent, 16))
    for _ in range(5):
        agent.learn_from_batch(environment.generate_batch_experiences(agent, 256))
    assert before < 10.0
    assert agent.evaluate_policy(10)["return_mean"] > 14.0


def test_evaluations_are_reproducible_and_disturb_nothing(environment: DistributedEnvironment) -> None:
    agent = DistributedAgent("ppo").bind(environment)
    weights = agent.agent.weights().sha256()
    first, second, third = (agent.evaluate_policy(8, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first != third
    assert agent.agent.weights().sha256() == weights


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_a_checkpoint_goes_on_exactly(algorithm: str, environment: DistributedEnvironment, tmp_path: Path) -> None:
    agent = DistributedAgent(algorithm, seed=5).bind(environment)
    experiences = environment.generate_experiences(agent, 6)
    agent.update_policy(experiences)
    agent.save_checkpoint(tmp_path / "agent")
    agent.save_checkpoint(tmp_path / "agent")  # in place of the one before
    agent.update_policy(experiences)
    other = DistributedAgent(algorithm, seed=5)
    other.load_checkpoint(tmp_path / "agent")
    other.update_policy(experiences)
    assert other.agent.weights().sha256() == agent.agent.weights().sha256()
    with pytest.raises(RunNotFound, match="holds no checkpoint"):
        other.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(UsageError, match="is a checkpoint of"):
        DistributedAgent("ppo" if algorithm == "dqn" else "dqn").load_checkpoint(tmp_path / "agent")


def test_the_target_network_follows_the_steps_that_updates_stand_for(environment: DistributedEnvironment) -> None:
    agent = DistributedAgent("dqn", update_frequency=4, target_update_frequency=40, seed=0).bind(environment)
    batch = transitions(32, environment.spec)
    targets = []
    for _ in range(25):
        agent.learn_from_batch(batch)
        targets.append(agent.agent.state()["target"].tobytes())
    changes = [number for number in range(1, 25) if targets[number] != targets[number - 1]]
    assert changes == [9, 19], "every 40 steps are 10 updates"


def test_a_built_agent_keeps_to_its_world(environment: DistributedEnvironment) -> None:
    agent = DistributedAgent("ppo").bind(environment)
    agent.get_policy_parameters()
    agent.bind(environment)
    with pytest.raises(UsageError, match=f"built for {IDENTITY}"):
        agent.bind(DistributedEnvironment("CartPole-v1", 1))
    with pytest.raises(UsageError, match="bound to a DistributedEnvironment"):
        DistributedAgent("ppo").bind(environment.spec).evaluate_policy(1)


@pytest.mark.parametrize("algo", ["q-learning", "sarsa", "double-q", "n-step-q", "q-lambda"])
def test_tables_learn_by_hand(algo: str) -> None:
    """The environment numbers its states for an agent with a table, without being told to."""
    with DistributedEnvironment("FrozenLake-v1", 2, runtime="inline", seed=1) as environment:
        agent = DistributedAgent(algo, learning_rate=0.5, seed=0).bind(environment)
        assert environment.spec.num_states == 16
        before = agent.get_policy_parameters()
        for _ in range(8):
            steps = environment.generate_experiences(agent, 50)
            if any(step["reward"] for step in steps):
                break
        assert agent.update_policy(steps)["updates"] == len(steps)
        assert agent.learn_from_batch(environment.generate_batch_experiences(agent, 32))["updates"] == 32
        after = agent.get_policy_parameters()
        assert any(not np.array_equal(before[name], after[name]) for name in before)
        with pytest.raises(UsageError, match="a table is learned without gradients"):
            agent.compute_gradients(environment.generate_batch_experiences(agent, 32))

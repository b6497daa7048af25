"""Loops with a parameter server: workers push gradients, the server goes on from where the run ended, and so do single episodes."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import steppe
from steppe import (
    AsyncAgent,
    AsyncMainLoop,
    DistributedAgent,
    DistributedEnvironment,
    FederatedParameterServer,
    MainLoop,
    ParameterServer,
    ReplayBufferPool,
)
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.params.optimizers import Optimizer
from steppe.params.rounds import Rounds
from steppe.records.run_directory import RunDirectory
from tests.support.commands import wait_until

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"
SHORT = {"evaluation.episodes": 2, "segment_steps": 8, "envs": 4}


def parts(algo="a3c", env=IDENTITY, **given):
    environment = DistributedEnvironment(env, 3, runtime="inline", **given)
    return environment, DistributedAgent(algo, seed=0).bind(environment)


def same(one: dict, other: dict) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_workers_train_through_the_server_that_was_given() -> None:
    environment, agent = parts()
    server = ParameterServer(agent.get_policy_parameters(), update_frequency=1, optimizer="adam")
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=2, config=SHORT)
    assert (loop.config.mode, loop.config.actors, loop.config.runtime) == ("workers", 2, "inline")
    before = server.weights().arrays()
    first = loop.run_async_training(960)
    assert (first["state"], first["reason"]) == ("SUCCEEDED", "steps_done")
    assert first["env_steps"] == 960
    assert server.version == first["updates"] == 30
    assert not same(before, server.weights().arrays())
    assert same(server.weights().arrays(), agent.get_policy_parameters())
    stats = server.get_server_stats()
    assert {name: found["accepted"] for name, found in stats["workers"].items()} == {"worker-0": 15, "worker-1": 15}
    second = loop.run_async_training(320)
    assert server.version == 40, "the second run goes on with versions, moments and accounts"
    assert second["updates"] == 10
    assert server.get_server_stats()["accepted_pushes"] == 40


def test_the_server_says_how_gradients_are_applied() -> None:
    environment, agent = parts("a2c")
    settings = {"rounds": Rounds(synchronous=True), "optimizer": Optimizer("momentum", 0.01, 0.8, max_norm=2.0)}
    server = ParameterServer(agent.get_policy_parameters(), "median", update_frequency=10, **settings)
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=3, config=SHORT)
    params = loop.config.params
    assert (params.in_rounds, params.aggregation, params.update_every) == (True, "median", 3)
    assert (params.optimizer, params.learning_rate, params.beta1, params.max_grad_norm) == ("momentum", 0.01, 0.8, 2.0)
    assert loop.sources["params.aggregation"] == "parts"
    assert loop.run_async_training(960)["updates"] == server.version == 10


def test_what_the_server_knows_is_what_a_run_begins_with() -> None:
    environment, agent = parts()
    taught = {name: value + 1.0 for name, value in agent.get_policy_parameters().items()}
    server = ParameterServer(taught, update_frequency=10**6)
    AsyncMainLoop(environment, None, agent, server, num_workers=1, config=SHORT).run_async_training(64)
    assert same(agent.get_policy_parameters(), taught), "too few pushes for an update: the server's own parameters"


def test_without_a_server_the_run_has_its_own(tmp_path: Path) -> None:
    environment, agent = parts()
    loop = AsyncMainLoop(environment, None, agent, None, num_workers=2, config=SHORT)
    assert loop.run_async_training(640)["updates"] == 20
    assert loop.config.params.optimizer == "adam"


@pytest.mark.slow
def test_workers_are_processes_where_they_can_be() -> None:
    environment = DistributedEnvironment(IDENTITY, 1)
    agent = DistributedAgent("a3c", seed=0).bind(environment)
    server = ParameterServer(agent.get_policy_parameters(), update_frequency=1, optimizer="adam")
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=2, config=SHORT)
    summary = loop.run_async_training(960)
    assert summary["runtime"] == "processes"
    assert summary["env_steps"] >= 960
    assert server.version == summary["updates"]
    assert server.get_server_stats()["accepted_pushes"] == summary["env_steps"] // 32
    here = AsyncMainLoop(
        DistributedEnvironment(lambda: gym.make("CartPole-v1"), 1), None, DistributedAgent("a3c"), None, num_workers=1
    )
    assert here.config.runtime == "inline"


def test_replay_agents_divide_their_buffer() -> None:
    environment, agent = parts("dqn")
    config = {**SHORT, "learning_starts": 64, "samples_per_insert": 8.0}
    loop = AsyncMainLoop(environment, ReplayBufferPool(2, 500), agent, None, num_workers=2, config=config)
    assert loop.config.agent.buffer_size == 1000
    assert loop.run_async_training(960)["updates"] > 20


def refused(server=None, algo="a3c", pool=None, workers=2, **more):
    environment, agent = parts(algo)
    made = server(agent.get_policy_parameters()) if server is not None else None
    return lambda: AsyncMainLoop(environment, pool, agent, made, num_workers=workers, **more)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: refused(FederatedParameterServer, workers=1),
            "a round of this parameter server needs 2 workers, and there are 1",
        ),
        (
            lambda: refused(lambda p: ParameterServer(p, rounds=Rounds(synchronous=True), update_frequency=1)),
            "update_frequency=1 would end a round before all 2 workers",
        ),
        (
            lambda: refused(ParameterServer, config={"runtime": "mpi"}),
            "runtime is 'inline' by the environment, but 'mpi' by the configuration",
        ),
        (lambda: refused(workers=0), "num_workers=0"),
        (lambda: refused(pool=ReplayBufferPool(1, 100)), "keeps no replay buffer"),
        (lambda: refused(config={"mode": "sync"}), "mode is 'workers' by the loop, but 'sync' by the configuration"),
        (lambda: refused(config={"actors": 5}), "actors is 2 by the loop, but 5 by the configuration"),
        (
            lambda: refused(ParameterServer, config={"params.optimizer": "adam"}),
            "optimizer is 'sgd' by the parameter server, but 'adam' by the configuration",
        ),
        (lambda: refused(config={"normalize_obs": True}), "normalize_obs needs what all workers see"),
    ],
)
def test_parts_that_do_not_go_together_get_one_sentence(make, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()()


@pytest.mark.parametrize("runtime", ["ray", "mpi"])
def test_a_server_is_refused_where_the_learner_is_in_another_process(runtime: str) -> None:
    environment = DistributedEnvironment("steppe/Identity-v0", 2)
    agent = DistributedAgent("a3c", seed=0).bind(environment)
    server = ParameterServer(agent.get_policy_parameters())
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=2, config=SHORT | {"runtime": runtime})
    with pytest.raises(ConfigError, match=f"works in this process, and runtime '{runtime}' has its own: use 'inline'"):
        loop.run()


def test_a_server_with_other_parameters_is_refused() -> None:
    environment, agent = parts()
    server = ParameterServer({"other": np.zeros(3, np.float32)})
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=1, config=SHORT)
    with pytest.raises(ConfigError, match="there is no parameter 'other'"):
        loop.run_async_training(64)


def test_main_loop_with_a_server_goes_by_gradients() -> None:
    environment, agent = parts("a2c")
    server = ParameterServer(
        agent.get_policy_parameters(), "weighted", 3, optimizer=Optimizer("adam", 0.01), rounds=Rounds(synchronous=True)
    )
    loop = MainLoop(environment, None, agent, server, config=SHORT)
    assert (loop.config.mode, loop.config.actors) == ("workers", 3)
    assert loop.parameter_server is server
    assert environment.parameter_server is server
    summary = loop.run_training(total_episodes=60, evaluation_frequency=30, checkpoint_frequency=30)
    assert summary["reason"] == "episodes_done"
    assert server.version == summary["updates"] > 5
    assert same(agent.get_policy_parameters(), server.weights().arrays())


def test_a_server_with_nothing_but_parameters_will_do() -> None:
    """The plainest way to write it: average, ten pushes at a time, plain descent."""
    environment, agent = parts("a2c")
    initial_params = agent.get_policy_parameters()
    param_server = ParameterServer(initial_params)
    summary = MainLoop(environment, None, agent, param_server, config=SHORT).run_training(total_episodes=400)
    assert param_server.version == summary["updates"] > 0
    again = AsyncMainLoop(environment, None, agent, param_server, num_workers=2, config=SHORT)
    assert again.run_async_training(960)["state"] == "SUCCEEDED"
    assert param_server.version > summary["updates"]
    assert not same(initial_params, agent.get_policy_parameters())


@pytest.mark.parametrize("algo", ["a2c", "dqn"])
def test_single_episodes_push_to_the_server_and_go_on_with_what_comes_back(algo: str) -> None:
    environment, _ = parts(algo)
    agent = DistributedAgent(algo, seed=0, config={"learning_starts": 16} if algo == "dqn" else {}).bind(environment)
    server = ParameterServer(agent.get_policy_parameters(), update_frequency=1, optimizer="adam")
    loop = MainLoop(environment, None, agent, server)
    told = [loop.run_single_episode() for _ in range(3)]
    assert [one["length"] for one in told] == [16, 16, 16]
    assert server.version == sum(one["updates"] for one in told) > 2
    assert same(server.weights().arrays(), agent.get_policy_parameters())
    assert server.get_server_stats()["workers"]["loop"]["accepted"] == server.version


def test_a_checkpoint_of_the_loop_brings_its_server_back(tmp_path: Path) -> None:
    def make() -> MainLoop:
        environment, agent = parts("a2c")
        server = ParameterServer(agent.get_policy_parameters(), update_frequency=1, optimizer="adam")
        return MainLoop(environment, None, agent, server)

    loop, other = make(), make()
    for _ in range(3):
        loop.run_single_episode()
    loop.save_checkpoint(3, tmp_path / "kept")
    assert other.load_checkpoint(tmp_path / "kept") == 3
    assert other.parameter_server.get_server_stats()["version"] == 3
    assert same(other.parameter_server.weights().arrays(), loop.parameter_server.weights().arrays())
    assert same(other.agent.get_policy_parameters(), loop.agent.get_policy_parameters())


def test_a_loop_without_a_server_keeps_a_store_of_its_own(tmp_path: Path) -> None:
    environment, agent = parts("ppo")
    loop = MainLoop(environment, None, agent, parameter_server=None, config={**SHORT, "steps": 200})
    store = loop.parameter_server
    assert store is loop.parameter_server
    assert store.version == 0
    loop.run()
    assert store.version == 1
    loop.run_single_episode()
    stats = store.get_server_stats()
    assert (stats["version"], stats["accepted_pushes"], stats["workers"]["loop"]["accepted"]) == (2, 2, 2)
    learned, kept = agent.get_policy_parameters(), store.weights().arrays()
    for name, value in learned.items():
        np.testing.assert_allclose(kept[name], value, rtol=1e-6, atol=1e-7)
    loop.save_checkpoint(1, tmp_path / "kept")
    other = MainLoop(*parts("ppo")[:1], None, parts("ppo")[1], config=SHORT)
    other.load_checkpoint(tmp_path / "kept")
    assert other.parameter_server.get_server_stats()["version"] == 2


def test_an_environment_pulls_newer_parameters_by_itself() -> None:
    """Without a loop: whoever pushes to the server changes what the workers do next."""
    environment = DistributedEnvironment(IDENTITY, 2, runtime="inline", seed=1)
    agent = DistributedAgent("ppo", seed=0).bind(environment)
    server = ParameterServer(agent.get_policy_parameters(), update_frequency=1)
    environment.parameter_server = server
    server.register_worker("me")
    bias = next(name for name in agent.get_policy_parameters() if name.startswith("towers.policy") and "2.bias" in name)
    with environment:
        environment.generate_batch_experiences(agent, 64)
        assert environment.get_environment_stats()["policy_version"] == 0
        towards = np.zeros_like(agent.get_policy_parameters()[bias])
        towards[1] = -1.0
        server.push_gradients("me", {bias: towards})
        server.push_gradients("me", {bias: 1e6 * towards})  # now nobody does anything but action 1
        batch = environment.generate_batch_experiences(agent, 64)
        assert environment.get_environment_stats()["policy_version"] == 2
        assert (batch["action"] == 1).all()
        environment.update_policy(agent.get_policy_parameters())
        assert len(set(environment.generate_batch_experiences(agent, 64)["action"].tolist())) > 1
        server.push_gradients("me", {bias: 1e6 * towards})
        steps = environment.generate_experiences(agent, 4)
        assert {int(step["action"]) for step in steps} == {1}


def test_an_agent_trains_in_the_background_until_it_is_stopped() -> None:
    environment = DistributedEnvironment(IDENTITY, 1)
    agent = AsyncAgent("a3c", num_workers=2, seed=0, learning_rate=0.01, config={"segment_steps": 8})
    with pytest.raises(UsageError, match="bind"):
        agent.start_async_training()
    agent.bind(environment)
    before = agent.get_policy_parameters()
    with pytest.raises(UsageError, match="is not being trained"):
        agent.stop_async_training()
    agent.start_async_training()
    with pytest.raises(UsageError, match="is being trained already"):
        agent.start_async_training()

    def updated() -> bool:
        stats = agent.get_training_stats()
        assert stats["training"], "the run ended by itself"
        return bool(stats["progress"]["updates"])

    wait_until(updated)
    summary = agent.stop_async_training()
    assert summary["state"] == "STOPPED"
    assert summary["updates"] > 0
    assert not same(before, agent.get_policy_parameters())
    assert not agent.get_training_stats()["training"]
    assert RunDirectory.open(summary["path"]).config().mode == "workers"


def test_a_training_in_the_background_that_fails_says_so_when_it_is_stopped() -> None:
    environment = DistributedEnvironment("steppe/Failing-v0", 1, config=steppe.EnvConfig(kwargs={"at_step": 20}))
    agent = AsyncAgent("a3c", num_workers=1, config={"segment_steps": 8}).bind(environment)
    agent.start_async_training()
    wait_until(lambda: not agent.get_training_stats()["training"])
    with pytest.raises(steppe.RunFailed, match="made to fail"):
        agent.stop_async_training()

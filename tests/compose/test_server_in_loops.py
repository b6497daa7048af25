"""The parameter server given to a loop is the one in use, in this process or behind a client: its version, statistics and
checkpoints follow the run while it goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import steppe
from steppe import (
    AsyncMainLoop,
    DistributedAgent,
    DistributedEnvironment,
    FederatedParameterServer,
    MainLoop,
    ParameterClient,
    ParameterServer,
)
from steppe.core.contracts.errors import ConfigError, RunFailed
from steppe.params.optimizers import Optimizer
from steppe.params.privacy import PrivacyPlan
from steppe.params.rounds import Rounds

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"
SHORT = {"evaluation.episodes": 2, "segment_steps": 8, "envs": 4}
WAIT_S = 60.0


def parts(algo="a3c", runtime="inline", workers=2, **given):
    environment = DistributedEnvironment(IDENTITY, workers, runtime=runtime, **given)
    return environment, DistributedAgent(algo, seed=0).bind(environment)


def same(one: dict, other: dict) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_server_moves_while_the_run_goes_on(runtime: str, tmp_path: Path) -> None:
    """Another thread sees versions and statistics, finds checkpoints on the server's schedule, and ends the run by them."""
    environment, agent = parts(runtime=runtime)
    path = tmp_path / "server.ckpt"
    server = ParameterServer(
        agent.get_policy_parameters(), update_frequency=1, save_frequency=5, checkpoint_path=path, optimizer="adam"
    )
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=2, config=SHORT)
    seen: list[tuple[int, int]] = []

    def poll() -> None:
        while server.wait_newer(seen[-1][0] if seen else 0, WAIT_S) and len(seen) < 5:
            seen.append((server.version, server.get_server_stats()["accepted_pushes"]))
        loop.stop_training()

    watcher = threading.Thread(target=poll)
    watcher.start()
    summary = loop.run_async_training(10**9)
    watcher.join(WAIT_S)
    assert summary["reason"] == "stop_requested"
    assert len(seen) == 5
    assert [version for version, _ in seen] == sorted({version for version, _ in seen})
    assert all(pushes >= version for version, pushes in seen)
    assert server.version >= summary["updates"] > 0
    kept = ParameterServer(agent.get_policy_parameters(), update_frequency=1, optimizer="adam")
    kept.load_checkpoint(path)
    assert kept.version == server.version - server.version % 5 > 0


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_after_a_crash_the_server_holds_the_last_applied_update(runtime: str) -> None:
    environment = DistributedEnvironment(
        "steppe/Failing-v0", 1, runtime=runtime, config=steppe.EnvConfig(kwargs={"at_step": 100})
    )
    agent = DistributedAgent("a3c", seed=0).bind(environment)
    server = ParameterServer(agent.get_policy_parameters(), update_frequency=1)
    before = server.weights().arrays()
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=1, config={"segment_steps": 8, "envs": 1})
    with pytest.raises(RunFailed, match="made to fail"):
        loop.run_async_training(10**6)
    assert server.version > 5
    assert server.version == server.get_server_stats()["accepted_pushes"]
    assert not same(before, server.weights().arrays())


def test_the_server_applies_by_its_own_rules() -> None:
    """A quorum, a deadline and a schedule of step sizes are the server's; a worker elsewhere takes part in its rounds."""
    environment, agent = parts("a2c")
    optimizer = Optimizer("adam", 0.01, halve_at=(3,))
    rounds = Rounds(synchronous=True, quorum=2, deadline_s=WAIT_S)
    server = ParameterServer(agent.get_policy_parameters(), "weighted", 10, optimizer=optimizer, rounds=rounds)
    server.register_worker("elsewhere")
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=2, config=SHORT)
    zeros = {name: np.zeros_like(value) for name, value in agent.get_policy_parameters().items()}
    over = threading.Event()

    def take_part() -> None:
        while not over.is_set():
            if not server.push_gradients("elsewhere", zeros):
                over.wait(0.002)

    other = threading.Thread(target=take_part)
    other.start()
    try:
        summary = loop.run_async_training(640)
    finally:
        over.set()
        other.join(WAIT_S)
    assert server.version == summary["updates"] == 10
    accepted = {name: found["accepted"] for name, found in server.get_server_stats()["workers"].items()}
    assert accepted["worker-0"] == accepted["worker-1"] == 10
    assert accepted["elsewhere"] >= 10


@pytest.mark.parametrize("updates", ["deltas", "parameters"])
def test_workers_learn_by_themselves_for_a_federated_server(updates: str) -> None:
    environment, agent = parts("a2c")
    server = FederatedParameterServer(agent.get_policy_parameters(), min_workers_for_update=2, updates=updates)
    loop = AsyncMainLoop(environment, None, agent, server, num_workers=2, config=SHORT)
    assert loop.config.params.deltas
    before = server.weights().arrays()
    summary = loop.run_async_training(640)
    assert server.version == summary["updates"] == 10
    assert not same(before, server.weights().arrays())
    assert same(agent.get_policy_parameters(), server.weights().arrays())
    with pytest.raises(ConfigError, match="is for a parameter server that takes deltas"):
        steppe.train(IDENTITY, algo="a3c", steps=64, **{"params.deltas": True, "runtime": "inline"})


def test_a_private_server_spends_its_budget_in_a_loop(tmp_path: Path) -> None:
    environment, agent = parts("a2c")
    plan = PrivacyPlan(tmp_path / "ledger.json", epsilon=8.0, expected_clients=2)
    server = FederatedParameterServer(
        agent.get_policy_parameters(), differential_privacy=True, noise_scale=2.0, privacy=plan
    )
    try:
        loop = AsyncMainLoop(environment, None, agent, server, num_workers=2, config=SHORT)
        summary = loop.run_async_training(192)
        privacy = server.get_server_stats()["privacy"]
        assert server.version == summary["updates"] == 3
        assert 0.0 < privacy["epsilon_spent"] <= 8.0
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["average", "federated"])
def test_a_client_stands_for_a_server_elsewhere(kind: str) -> None:
    environment, agent = parts("a2c")
    params = agent.get_policy_parameters()
    server = (
        FederatedParameterServer(params)
        if kind == "federated"
        else ParameterServer(params, "weighted", 100, optimizer="adam", rounds=Rounds(synchronous=True))
    )
    with ParameterClient(server.share()) as client:
        try:
            loop = MainLoop(environment, None, agent, client, config=SHORT)
            assert loop.parameter_server is client
            assert environment.parameter_server is client
            summary = loop.run_training(total_episodes=40)
            assert server.version == summary["updates"] > 2
            assert not sum(server.get_server_stats()["refused_pushes"].values())
            assert same(agent.get_policy_parameters(), server.weights().arrays())
            before = server.version
            environment.generate_batch_experiences(agent, 8)
            assert environment.get_environment_stats()["policy_version"] == before
        finally:
            environment.shutdown()
            server.close()


def test_a_client_over_grpc_serves_workers_in_processes() -> None:
    environment, agent = parts("a3c", "processes")
    server = ParameterServer(agent.get_policy_parameters(), update_frequency=1)
    port = server.start_server("localhost", 0)
    with ParameterClient(f"grpc://localhost:{port}") as client:
        try:
            loop = AsyncMainLoop(environment, None, agent, client, num_workers=2, config=SHORT)
            summary = loop.run_async_training(320)
            assert server.version == summary["updates"] >= 10
        finally:
            server.close()


@pytest.mark.parametrize("takes", ["gradients", "deltas"])
def test_single_episodes_push_what_the_server_takes(takes: str) -> None:
    environment, agent = parts("a2c", workers=1)
    method = "federated" if takes == "deltas" else "average"
    server = ParameterServer(agent.get_policy_parameters(), method, update_frequency=1)
    before = server.weights().arrays()
    with ParameterClient(server.share()) as client:
        loop = MainLoop(environment, None, agent, client)
        told = [loop.run_single_episode() for _ in range(2)]
        assert server.version == sum(one["updates"] for one in told) == 2
        assert not same(before, server.weights().arrays())
        assert same(agent.get_policy_parameters(), server.weights().arrays())
    environment.shutdown()
    server.close()

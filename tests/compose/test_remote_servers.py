"""A client stands for a federated or private server elsewhere in every loop and in an environment by itself."""

from __future__ import annotations

import numpy as np
import pytest

from steppe import (
    AsyncMainLoop,
    DistributedAgent,
    DistributedEnvironment,
    DistributedMainLoop,
    FederatedParameterServer,
    MainLoop,
    ParameterClient,
)
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.params.privacy import PrivacyPlan
from tests.support.commands import free_port

pytestmark = pytest.mark.integration

IDENTITY = "steppe/Identity-v0"
SHORT = {"evaluation.episodes": 2, "segment_steps": 8, "envs": 4}


def same(one: dict, other: dict) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


@pytest.fixture
def parts():
    with DistributedEnvironment(IDENTITY, 2, runtime="inline") as environment:
        yield environment, DistributedAgent("a2c", seed=0).bind(environment)


@pytest.fixture(params=["federated", "private"])
def remote(request, parts, tmp_path):
    """A server of deltas, with privacy or without, and a client of it over the network that speaks for all workers."""
    settings, tokens = {}, None
    if request.param == "private":
        plan = PrivacyPlan(tmp_path / "ledger.json", epsilon=8.0, expected_clients=2)
        settings = {"differential_privacy": True, "noise_scale": 2.0, "privacy": plan}
        tokens = {name: f"the token of {name}" for name in ("worker-0", "worker-1")}
    server = FederatedParameterServer(parts[1].get_policy_parameters(), **settings)
    port = server.start_server("localhost", 0, token=tokens)
    try:
        with ParameterClient(f"grpc://localhost:{port}", token=tokens) as client:
            yield server, client
    finally:
        server.close()


@pytest.mark.parametrize("kind", [MainLoop, AsyncMainLoop])
def test_a_loop_pushes_to_a_server_elsewhere(kind, parts, remote) -> None:
    (environment, agent), (server, client) = parts, remote
    workers = {"num_workers": 2} if kind is AsyncMainLoop else {}
    loop = kind(environment, None, agent, client, config=SHORT | {"steps": 192}, **workers)
    before = server.weights().arrays()
    loop.run().raise_for_fault()
    assert server.version == loop.agent.get_training_stats()["updates"] == 3
    stats = server.get_server_stats()
    assert stats["accepted_pushes"] == 6
    assert not sum(stats["refused_pushes"].values())
    assert not same(before, server.weights().arrays())
    assert same(server.weights().arrays(), agent.get_policy_parameters())
    if "privacy" in stats:
        assert 0.0 < stats["privacy"]["epsilon_spent"] <= 8.0


def test_an_environment_pulls_newer_parameters_by_itself(parts, remote) -> None:
    (environment, agent), (server, client) = parts, remote
    environment.parameter_server = client
    environment.generate_batch_experiences(agent, 8)
    assert environment.get_environment_stats()["policy_version"] == server.version == 0
    deltas = {name: np.full_like(value, 0.01) for name, value in agent.get_policy_parameters().items()}
    for name in ("worker-0", "worker-1"):
        client.register_worker(name)
    assert all(client.push_gradients(name, deltas) for name in ("worker-0", "worker-1"))
    assert server.version == 1
    environment.generate_batch_experiences(agent, 8)
    assert environment.get_environment_stats()["policy_version"] == 1


@pytest.mark.parametrize("remote", ["private"], indirect=True)
def test_a_client_speaks_only_for_workers_whose_tokens_it_has(remote) -> None:
    _, client = remote
    with pytest.raises(UsageError, match="no token for worker 'somebody', only for worker-0, worker-1"):
        client.register_worker("somebody")


def test_a_node_of_a_cluster_pushes_to_a_federated_server_elsewhere(parts) -> None:
    environment, agent = parts
    server = FederatedParameterServer(agent.get_policy_parameters(), min_workers_for_update=1)
    port = server.start_server("localhost", 0)
    cluster = {"parameter_server": f"localhost:{port}", "sync_every": 1}
    try:
        with ParameterClient(f"grpc://localhost:{port}") as client:
            loop = DistributedMainLoop(environment, None, agent, client, "node-0", cluster, config=SHORT)
            assert loop.config.seed == 0, "the agent's"
            summary = loop.run_distributed_training(16)
            loop.close()
        assert summary["reason"] == "episodes_done"
        assert server.version == server.get_server_stats()["accepted_pushes"] > 0
    finally:
        server.close()


TOKENS = {"node-0": "the token of node-0", "node-1": "the token of node-1"}


@pytest.fixture
def private(parts, tmp_path):
    plan = PrivacyPlan(tmp_path / "ledger.json", epsilon=8.0, expected_clients=1)
    server = FederatedParameterServer(
        parts[1].get_policy_parameters(), 1, differential_privacy=True, noise_scale=2.0, privacy=plan
    )
    yield server
    server.close()


def require_private_exchange(loop: DistributedMainLoop, server: FederatedParameterServer) -> None:
    """Train as the only node: every release is in the ledger, and the node ends with what was released."""
    summary = loop.run_distributed_training(16)
    assert summary["reason"] == "episodes_done"
    stats = server.get_server_stats()
    assert server.version == stats["accepted_pushes"] > 0
    assert not sum(stats["refused_pushes"].values())
    assert 0.0 < stats["privacy"]["epsilon_spent"] <= 8.0
    assert summary["cluster"]["version"] == server.version
    assert same(server.weights().arrays(), loop.agent.get_policy_parameters())
    before = server.version
    loop.synchronize_with_cluster()
    loop.agent.set_policy_parameters(
        {name: array + np.float32(0.1) for name, array in loop.agent.get_policy_parameters().items()}
    )
    assert loop.synchronize_with_cluster() == server.version == before + 1
    loop.close()


def test_a_node_of_a_cluster_pushes_to_a_private_server_elsewhere(parts, private) -> None:
    port = private.start_server("localhost", 0, token=TOKENS)
    cluster = {"parameter_server": f"localhost:{port}", "sync_every": 1}
    with ParameterClient(f"grpc://localhost:{port}", token={"node-0": TOKENS["node-0"]}) as client:
        require_private_exchange(DistributedMainLoop(*pair(parts), client, "node-0", cluster, config=SHORT), private)
        assert client.is_serving(), "the client stays the caller's"


def test_a_node_of_a_cluster_serves_a_private_server(parts, private, tmp_path) -> None:
    """The node takes its own token from the file that the server reads."""
    (tmp_path / "tokens.toml").write_text("".join(f'{name} = "{token}"\n' for name, token in TOKENS.items()))
    cluster = {"parameter_server": f"localhost:{free_port()}", "sync_every": 1}
    loop = DistributedMainLoop(*pair(parts), private, "node-0", cluster, config=SHORT)
    with pytest.raises(ConfigError, match=r"a private server has to know who pushes: name a file .* as server.tokens"):
        loop.run_distributed_training(16)
    cluster["server"] = {"tokens": str(tmp_path / "tokens.toml")}
    require_private_exchange(DistributedMainLoop(*pair(parts), private, "node-0", cluster, config=SHORT), private)
    assert not private.is_serving


def pair(parts: tuple) -> tuple:
    """Environment, no pool, agent: what every loop begins with."""
    environment, agent = parts
    return environment, None, agent

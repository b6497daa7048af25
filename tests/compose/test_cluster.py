"""DistributedMainLoop: several nodes train CartPole together, a liar among them, and what one node's loop says and refuses."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from steppe import (
    DistributedAgent,
    DistributedEnvironment,
    DistributedMainLoop,
    FederatedParameterServer,
    MainLoop,
    ParameterClient,
    ParameterServer,
)
from steppe.compose.cluster import make_cluster_server
from steppe.core.config.cluster import read_cluster
from steppe.core.config.run import RunConfig, resolve_config
from steppe.core.contracts.errors import ConfigError
from steppe.params.rpc.protocol import TOKEN_VARIABLE
from steppe.records.run_directory import RunDirectory

pytestmark = pytest.mark.integration

TOKEN = "a token for these tests"
RUN = {"env": "CartPole-v1", "algo": "ppo", "envs": 32}


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))


def loop_of(name: str, cluster: dict, seed: int = 0, server=None, **more) -> DistributedMainLoop:
    environment = DistributedEnvironment("CartPole-v1", 1, envs_per_worker=32, runtime="inline")
    settings = {"seed": seed, "name": name, "evaluation.episodes": 2, **more}
    return DistributedMainLoop(environment, None, DistributedAgent("ppo"), server, name, cluster, config=settings)


def make_server(cluster: dict) -> ParameterServer:
    return make_cluster_server(read_cluster(cluster), resolve_config(("call", RUN)))


class Liar(threading.Thread):
    """Takes part in every round and pushes nonsense."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.ending, self.pushes = threading.Event(), 0
        self.client = ParameterClient(url)
        self.client.register_worker("liar")

    def run(self) -> None:
        stream, version = np.random.default_rng(0), -1
        names = self.client.pull("liar").arrays()
        while not self.ending.is_set():
            update = {name: 3.0 * stream.standard_normal(array.shape) for name, array in names.items()}
            self.pushes += bool(self.client.push_gradients("liar", update))
            found = self.client.wait_newer("liar", version, 0.1)
            version = version if found is None else found.version
        self.client.unregister_worker("liar")
        self.client.close()


def train_with_a_liar(aggregation: str) -> tuple[float, float]:
    """Two honest nodes and a liar; what the honest ones are worth in the end, and the smallest deviation of a layer's weights."""
    cluster = {"parameter_server": "localhost:1", "aggregation": aggregation, "sync_every": 1, "deadline_s": 60.0}
    server = make_server(cluster)
    port = server.start_server(port=0, token=TOKEN)
    cluster["parameter_server"] = f"localhost:{port}"
    loops = [loop_of(f"{aggregation}-{i}", cluster, i, steps=60_000) for i in range(2)]
    liar = Liar(f"grpc://localhost:{port}")
    liar.start()
    threads = [threading.Thread(target=loop.run) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    liar.ending.set()
    liar.join()
    assert liar.pushes > 10
    assert server.version > 10
    server.close()
    layers = [array for array in loops[0].agent.get_policy_parameters().values() if array.ndim == 2]
    return max(loop.agent.evaluate_policy(20)["return_mean"] for loop in loops), min(layer.std() for layer in layers)


@pytest.mark.long
@pytest.mark.slow
def test_krum_defeats_a_byzantine_node_and_averaging_does_not() -> None:
    """CartPole, 60,000 steps a node: an untrained policy is worth about 20, 500 is perfect. An average of three takes a third of
    the nonsense over in each of more than ten rounds, a deviation of 1; what such a policy is worth is anybody's guess."""
    value, deviation = train_with_a_liar("krum")
    assert value > 150.0
    assert deviation < 0.5
    _, deviation = train_with_a_liar("federated")
    assert deviation > 1.5


def test_a_node_serves_trains_and_says_what_the_cluster_did() -> None:
    agent = DistributedAgent("ppo")
    environment = DistributedEnvironment("CartPole-v1", 1, envs_per_worker=8, runtime="inline")
    agent.bind(environment)
    server = FederatedParameterServer(agent.get_policy_parameters(), min_workers_for_update=1)
    free = ParameterServer({"w": np.zeros(1)})
    port = free.start_server(port=0)
    free.close()
    cluster = {"parameter_server": f"localhost:{port}", "nodes": ["other", "worker_1"], "sync_every": 1}
    loop = DistributedMainLoop(
        environment, None, agent, server, node_id="worker_1", cluster_config=cluster, config={"evaluation.episodes": 2}
    )
    assert loop.rank == 1
    summary = loop.run_distributed_training(total_episodes=40)
    assert summary["state"] == "SUCCEEDED"
    found = summary["cluster"]
    assert (found["node_id"], found["rank"], found["run"]) == ("worker_1", 1, server.run)
    assert found["version"] == server.version >= 1
    metrics = found["nodes"]["worker_1"]["metrics"]
    assert metrics["episodes"] >= 40
    assert metrics["done"] == 1.0
    events = [
        record["details"]
        for _, record in RunDirectory.open(summary["path"]).store.read("events")
        if record["kind"] == "cluster"
    ]
    assert events == [{"run": server.run, "node": "worker_1", "rank": 1, "nodes": ["other", "worker_1"], "version": 0}]
    newest = server.weights().arrays()
    mine = agent.get_policy_parameters()
    for name in mine:
        np.testing.assert_array_equal(mine[name], newest[name])
    assert loop.synchronize_with_cluster() == server.version
    before = server.version
    agent.set_policy_parameters(
        {name: array + np.float32(1.0) for name, array in agent.get_policy_parameters().items()}
    )
    assert loop.synchronize_with_cluster() == before + 1
    loop.close()
    assert not server.is_serving


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cluster_config": None}, "cluster_config is required"),
        ({"cluster_config": {}}, "cluster.parameter_server is required"),
        ({"cluster_config": {"parameter_servr": "h:1"}}, "Did you mean 'parameter_server'"),
        ({"cluster_config": {"parameter_server": "h:1", "node_id": "b"}}, "set it in one place only"),
        ({"cluster_config": {"parameter_server": "h:1", "nodes": ["b"]}}, "no node 'a'"),
        (
            {"cluster_config": {"parameter_server": "h:1"}, "param_server": ParameterClient},
            "the cluster's server is at grpc://h:1",
        ),
        ({"cluster_config": {"parameter_server": "h:1"}, "param_server": 3}, "param_server"),
        (
            {"cluster_config": {"backend": "mpi", "nodes": ["a"]}, "param_server": ParameterServer({"w": np.zeros(1)})},
            "backend 'mpi' has a parameter server of its own: leave param_server None",
        ),
    ],
)
def test_what_is_no_node(given: dict, words: str) -> None:
    if given.get("param_server") is ParameterClient:
        given = {**given, "param_server": ParameterClient("grpc://localhost:1")}
    environment = DistributedEnvironment("CartPole-v1", 1, runtime="inline")
    with pytest.raises(ConfigError) as caught:
        DistributedMainLoop(
            environment, None, DistributedAgent("ppo"), **{"param_server": None, "node_id": "a", **given}
        )
    assert words in str(caught.value)


def test_a_whole_configuration_takes_the_cluster_too() -> None:
    environment = DistributedEnvironment("CartPole-v1", 1, envs_per_worker=8, runtime="inline")
    config = MainLoop(environment, None, DistributedAgent("ppo"), config={"seed": 7}).config
    assert isinstance(config, RunConfig)
    loop = DistributedMainLoop(
        environment,
        None,
        DistributedAgent("ppo"),
        None,
        "a",
        {"parameter_server": "h:1"},
        config=config,
    )
    assert (loop.config.cluster.node_id, loop.config.seed) == ("a", 7)

"""A cluster's description: unknown keys with the nearest name, contradictions in one sentence, and files beside the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from steppe.core.config.cluster import ClusterConfig, read_cluster, read_cluster_file
from steppe.core.config.run import flatten, resolve_config, unflatten
from steppe.core.contracts.errors import ConfigError

pytestmark = pytest.mark.unit

PLAIN = {"parameter_server": "host:8888", "nodes": ["worker_1", "worker_2"], "node_id": "worker_2"}


def test_the_issue_example_is_one() -> None:
    found = read_cluster(
        {
            "backend": "grpc",
            "parameter_server": "host:8888",
            "nodes": ["worker_1", "worker_2"],
            "aggregation": "federated",
            "sync_every": 10,
            "tls": {"ca": "ca.pem"},
        }
    )
    assert (found.address, found.url, found.rank) == (("host", 8888), "grpcs://host:8888", None)
    assert read_cluster(PLAIN).rank == 1
    assert read_cluster({**PLAIN, "nodes": []}).rank is None
    assert read_cluster({**PLAIN, "exchange": "gradients"}).sync_every == 1
    assert read_cluster({**PLAIN, "exchange": "gradients"}).aggregation == "weighted"


def test_nodes_have_seeds_of_their_own() -> None:
    assert [read_cluster({**PLAIN, "node_id": name}).seed_offset for name in PLAIN["nodes"]] == [0, 1]
    anyone = {"parameter_server": "host:8888"}
    assert len({read_cluster({**anyone, "node_id": name}).seed_offset for name in "abcd"}) == 4


def test_in_ray_and_mpi_the_first_node_has_the_server() -> None:
    nodes = ["a", "b"]
    ray = read_cluster({"backend": "ray", "nodes": nodes, "node_id": "a"})
    assert (ray.joined, ray.hosts, ray.url) == (True, True, "ray://auto/steppe")
    at = read_cluster({"backend": "ray", "parameter_server": "h:6379", "name": "mine", "nodes": nodes, "node_id": "b"})
    assert (at.joined, at.hosts, at.url) == (True, False, "ray://h:6379/mine")
    world = read_cluster({"backend": "mpi", "nodes": nodes, "node_id": "a"})
    assert (world.joined, world.hosts, world.url) == (True, True, "mpi://world/steppe")
    assert not read_cluster(PLAIN).hosts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sync_evry": 3}, "unknown key 'sync_evry' in cluster_config. Did you mean 'sync_every'?"),
        ({"tls": {"certficate": "x"}}, "unknown key 'tls.certficate' in cluster_config. Did you mean 'certificate'?"),
        ({"privacy": {"epsilon": 1, "ledgr": "x"}}, "Did you mean 'ledger'"),
        ({"nodes": ["a", "a"]}, "two nodes 'a'"),
        ({"node_id": "worker_3"}, "no node 'worker_3' in this cluster of worker_1, worker_2"),
        ({"backend": "ray", "nodes": [], "node_id": None}, "cluster.nodes with backend 'ray' is required"),
        ({"backend": "ray", "tls": {"ca": "x"}}, "cluster.tls with backend 'ray' has no meaning there"),
        (
            {"backend": "ray", "privacy": {"ledger": "l", "epsilon": 1}},
            "is not possible: nodes are not authenticated",
        ),
        ({"backend": "ray", "server": {"tokens": "t"}}, "cluster.server.tokens with backend 'ray'"),
        ({"backend": "mpi"}, "cluster.parameter_server with backend 'mpi'"),
        ({"backend": "mpi", "parameter_server": None, "name": "x"}, "cluster.name with backend 'mpi'"),
        ({"backend": "mpi", "parameter_server": None, "server": {"listen": "h"}}, "cluster.server.listen with"),
        ({"parameter_server": "auto"}, "is for backend 'ray': give host:port"),
        ({"name": "x"}, "cluster.name is for backend 'ray'"),
        ({"backend": "grcp"}, "cluster.backend='grcp'"),
        ({"parameter_server": "host"}, "must be host:port"),
        ({"parameter_server": "grpc://host:1"}, "must be host:port"),
        ({"aggregation": "mean"}, "cluster.aggregation='mean'"),
        ({"sync_every": 0}, "cluster.sync_every=0"),
        ({"exchange": "gradients", "sync_every": 3}, "cluster.sync_every is for exchange='deltas'"),
        ({"exchange": "gradients", "optimizer": "fedadam"}, "cluster.optimizer is for exchange='deltas'"),
        ({"exchange": "gradients", "aggregation": "federated"}, "cluster.aggregation is for"),
        ({"exchange": "gradients", "privacy": {"ledger": "l", "epsilon": 1.0}}, "cluster.privacy is for"),
        ({"privacy": {"ledger": "l"}}, "privacy.epsilon is required"),
        ({"nodes": [""]}, "cluster.nodes"),
    ],
)
def test_invalid_arguments_are_refused_in_one_sentence(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cluster({**PLAIN, **changes})
    assert words in str(caught.value)


def test_a_run_with_a_cluster_survives_being_written_down() -> None:
    for more in ({}, {"exchange": "gradients"}, {"tls": {"ca": "ca.pem"}, "server": {"save_every": 3}}):
        keys = {f"cluster.{key}": value for key, value in {**PLAIN, **more}.items()}
        config = resolve_config(("call", {"env": "CartPole-v1", **keys})).config
        assert config.cluster.joined
        assert unflatten(flatten(config)) == config
    assert not resolve_config(("call", {"env": "CartPole-v1"})).config.cluster.joined


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"cluster.parameter_server": "host:1"}, "cluster.node_id is required"),
        ({"cluster.node_id": "a"}, "cluster.parameter_server is required"),
        ({"cluster.parameter_servr": "host:1"}, "Did you mean 'cluster.parameter_server'"),
        (
            {"cluster.parameter_server": "h:1", "cluster.node_id": "a", "algo": "q-learning"},
            "one learner with a network",
        ),
        (
            {
                "cluster.parameter_server": "h:1",
                "cluster.node_id": "a",
                "cluster.exchange": "gradients",
                "anneal": True,
            },
            "anneal=true does not go with",
        ),
        (
            {
                "cluster.parameter_server": "h:1",
                "cluster.node_id": "a",
                "cluster.exchange": "gradients",
                "target_kl": 0.1,
            },
            "target_kl does not go with",
        ),
        (
            {"cluster.backend": "mpi", "cluster.nodes": ["a"], "cluster.node_id": "a", "runtime": "processes"},
            "a node of an MPI world is one process: use --runtime inline",
        ),
    ],
)
def test_runs_that_cannot_be_nodes(keys: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(("call", {"env": "CartPole-v1", **keys}))
    assert words in str(caught.value)


def test_a_file_has_the_run_beside_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'parameter_server = "host:1"\nnodes = ["a"]\n[tls]\nca = "ca.pem"\n[server]\ncheckpoint = "s.ckpt"\n'
        '[run]\nenv = "CartPole-v1"\n[run.agent]\nlearning_rate = 0.1\n'
    )
    found, run = read_cluster_file(path)
    assert found.tls.ca == tmp_path / "ca.pem"
    assert found.server.checkpoint == tmp_path / "s.ckpt"
    assert run == {"env": "CartPole-v1", "agent": {"learning_rate": 0.1}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("nodes = [", "is not valid TOML"),
        ("run = 3", "is a table"),
        ("[runn]\nenv = 1", "Did you mean 'run'?"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_cluster_file(path)
    assert words in str(caught.value)


def test_every_key_is_documented() -> None:
    for name, field in ClusterConfig.model_fields.items():
        assert field.description, name

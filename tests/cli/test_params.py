"""`steppe params` and `steppe node` as a user runs them: a cluster of real processes over gRPC, with TLS and a token."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import pytest

from tests.support.certificates import certificate
from tests.support.commands import wait_until
from tests.support.warm_host import Forked, WarmHost

pytestmark = pytest.mark.integration

TOKEN = "a token for these tests"
CLUSTER = """
parameter_server = "localhost:{port}"
nodes = ["worker_1", "worker_2"]
sync_every = 1
[tls]
ca = "server.pem"
certificate = "server.pem"
key = "server.key"
[server]
checkpoint = "server.ckpt"
[run]
env = "CartPole-v1"
algo = "ppo"
runtime = "inline"
envs = 8
steps = 4000
[run.evaluation]
episodes = 2
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    certificate(tmp_path, "server")
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(port=0))
    return path


class Served:
    """`steppe params serve`, in a process of its own: a fork of `host`, as the commands that ask it are."""

    def __init__(self, cluster: Path, host: WarmHost) -> None:
        self.host = host
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}
        self.environment |= {"STEPPE_PARAMS_TOKEN": TOKEN, "STEPPE_HOME": str(cluster.parent / "home")}
        logs = Path(tempfile.mkdtemp(dir=cluster.parent))
        words = ["params", "serve", "--cluster", str(cluster), "--json"]
        self.process = host.start(words, self.environment, cluster.parent, logs)
        wait_until(lambda: (logs / "stdout").exists() and "\n" in (logs / "stdout").read_text(), self.process)
        self.about = json.loads((logs / "stdout").read_text().partition("\n")[0])
        port = self.about["url"].rpartition(":")[2]
        cluster.write_text(CLUSTER.format(port=port))

    def run(self, cluster: Path, *words: str) -> subprocess.CompletedProcess[str]:
        logs = Path(tempfile.mkdtemp(dir=cluster.parent))
        return self.host.run(list(words), self.environment, cluster.parent, logs)

    def stop(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)


def node_of(host: WarmHost, cluster: Path, name: str, environment: dict[str, str]) -> Forked:
    logs = cluster.parent / name
    logs.mkdir()
    words = ["node", "--cluster", str(cluster), "--node-id", name, "--json"]
    return host.start(words, environment, cluster.parent, logs)


@pytest.mark.long
@pytest.mark.slow
def test_a_cluster_of_processes_with_tls(cluster: Path, torch_host: WarmHost) -> None:
    """Two nodes train; the server is stopped and continues where it was; then it is killed and continues again."""
    with Served(cluster, torch_host) as served:
        assert served.about["version"] == 0
        assert served.about["url"].startswith("grpcs://localhost:")
        environment = {**served.environment, "STEPPE_RUNS": str(cluster.parent / "runs")}
        nodes = [node_of(torch_host, cluster, name, environment) for name in ("worker_1", "worker_2")]
        ended = [node.communicate(timeout=200) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], ended
        assert all(json.loads(out)["state"] == "SUCCEEDED" for out, _ in ended)
        status = json.loads(served.run(cluster, "params", "status", "--cluster", "cluster.toml", "--json").stdout)
        assert status["version"] >= 4
        assert status["run"] == served.about["run"]
        done = {name: found["metrics"]["done"] for name, found in status["workers"].items()}
        assert done == {"worker_1": 1.0, "worker_2": 1.0}
        table = served.run(cluster, "params", "status", "--cluster", "cluster.toml").stdout
        assert "worker_2" in table
        assert re.search(rf"^version +{status['version']} *$", table, re.MULTILINE)
        found = served.run(cluster, "params", "checkpoint", served.about["url"], "--ca", "server.pem")
        assert found.stdout.strip() == str(cluster.parent / "server.ckpt")
        assert "stopped at version" in served.stop()
        assert served.process.returncode == 0
    with Served(cluster, torch_host) as again:
        assert (again.about["version"], again.about["run"]) == (status["version"], status["run"])
        again.stop(signal.SIGKILL)
    with Served(cluster, torch_host) as once_more:
        assert once_more.about["version"] == status["version"]
        once_more.stop(signal.SIGINT)
        assert once_more.process.returncode == 0
        gone = once_more.run(cluster, "params", "status", "--cluster", "cluster.toml")
    assert gone.returncode == 3
    assert "is it running" in gone.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["params", "status"], 2, "no server given"),
        (["params", "status", "http://x"], 2, "is no address"),
        (["params", "checkpoint", "grpc://localhost:1", "--cluster", "x.toml"], 2, "no server given"),
        (["params", "serve", "--cluster", "none.toml"], 2, "cannot read none.toml"),
        (["node", "--cluster", "empty.toml", "--node-id", "a"], 2, "has no table [run]"),
        (["node", "--cluster", "cluster.toml", "--node-id", "worker_3"], 2, "Did you mean"),
        (["params", "privacy", "--epsilon", "8"], 2, "give two of"),
        (["params", "privacy", "--epsilon", "8", "--rounds", "0"], 2, "--rounds is out of range"),
    ],
)
def test_usage_error_is_one_paragraph(steppe, tmp_path: Path, words: list[str], code: int, said: str) -> None:
    (tmp_path / "empty.toml").write_text('parameter_server = "h:1"\n')
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(port=1))
    done = steppe(*words)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_privacy_budget_is_planned(steppe) -> None:
    """z = 1, 100 rounds, delta = 1e-5: epsilon is 91.82."""
    plan = json.loads(steppe("params", "privacy", "--noise", "1", "--rounds", "100", "--json").stdout)
    assert plan["epsilon"] == pytest.approx(91.82, abs=0.005)
    needed = json.loads(steppe("params", "privacy", "--epsilon", "91.83", "--rounds", "100", "--json").stdout)
    assert needed["noise"] == pytest.approx(1.0, abs=0.001)
    rounds = json.loads(steppe("params", "privacy", "--epsilon", "91.83", "--noise", "1", "--json").stdout)
    assert rounds["rounds"] == 100
    said = steppe("params", "privacy", "--noise", "1", "--rounds", "100").stdout
    assert said == "epsilon 91.82 (delta 1e-05): 100 rounds with noise multiplier 1\n"

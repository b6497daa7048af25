"""Clusters with the backends ray and mpi, with real processes, a real Ray cluster and a real mpiexec."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from steppe.params.checkpoints import read_checkpoint
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.mpi import launch as mpi

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPPE = Path(sys.executable).with_name("steppe")
PROGRAM = Path(__file__).parents[1] / "support" / "parallel_learners.py"
LEARNED = ["dqn", "ppo", "dhc"]  # printed before the address of its cluster
RUN = """
nodes = ["one", "two"]
quorum = 2
retry_s = 120
{more}
[server]
checkpoint = "server.ckpt"
[run]
env = "CartPole-v1"
algo = "{algo}"
runtime = "inline"
envs = 4
steps = 2000
seed = 5
hidden = [16]
[run.evaluation]
episodes = 2
"""


def described(directory: Path, backend: str, more: str = "", algo: str = "ppo") -> Path:
    path = directory / "cluster.toml"
    path.write_text(f'backend = "{backend}"' + RUN.format(more=more, algo=algo))
    return path


def environment(directory: Path) -> dict[str, str]:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_AUTH_MODE": "token"}
    quiet["RAY_AUTH_TOKEN"] = "0123456789abcdef" * 4  # token of the cluster that these tests start
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}
    return {**kept, **quiet, "STEPPE_RUNS": str(directory / "runs")}


def check(directory: Path, summaries: list[dict]) -> None:
    """Check that both nodes succeeded with the server's parameters, and that each had its own seed."""
    assert [summary["state"] for summary in summaries] == ["SUCCEEDED", "SUCCEEDED"]
    runs = [RunDirectory.open(directory / "runs" / summary["run"]) for summary in summaries]
    assert sorted(json.loads((run.path / "run.json").read_text())["config"]["seed"] for run in runs) == [5, 6]
    state, fell_back = read_checkpoint(directory / "server.ckpt")
    assert not fell_back
    assert state["counters"]["version"] > 2
    for run in runs:
        found = Checkpoints(run.checkpoints).latest().weights.arrays()
        for name, array in state["parameters"].items():
            np.testing.assert_array_equal(found[name], array)
        events = [record for _, record in run.store.read("events")]
        (joined,) = (record["details"] for record in events if record["kind"] == "cluster")
        (ended,) = (record["details"] for record in events if record["kind"] == "cluster_end")
        assert joined["run"] == ended["run"] == state["run"]
        assert joined["nodes"] == ["one", "two"]
        assert joined["rank"] == ["one", "two"].index(joined["node"])
        assert ended["nodes"][joined["node"]]["metrics"]["env_steps"] >= 2000


@pytest.mark.slow
def test_every_mpi_rank_is_a_node(tmp_path: Path) -> None:
    """This test exchanges gradients; the nodes in Ray exchange deltas."""
    path = described(tmp_path, "mpi", 'exchange = "gradients"', "a2c")
    command = [mpi.find_mpiexec(), "-n", "2", STEPPE, "node", "--cluster", path, "--json"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    check(tmp_path, [json.loads(line) for line in done.stdout.splitlines()])


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        (["node", "--node-id", "two"], 1, "the MPI world has 1 ranks, and the cluster 2 nodes: use mpiexec -n 2"),
        (["node"], 3, "the MPI world has 3 ranks"),
        (["params", "serve"], 1, "the first node starts the server"),
        (["params", "status"], 1, "cannot be reached from outside"),
    ],
)
def test_invalid_mpi_world_is_refused(tmp_path: Path, words: list[str], ranks: int, said: str) -> None:
    path = described(tmp_path, "mpi")
    command = [mpi.find_mpiexec(), "-n", str(ranks), STEPPE, *words, "--cluster", path]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def ray_cluster(scratch: Path) -> Iterator[list[str]]:
    """Yield the output of a process with a Ray cluster on loopback; the last line is its address. The cluster ends with the process."""
    command = [sys.executable, PROGRAM, "ray", str(scratch)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(scratch), cwd=scratch
    ) as ray:
        try:
            yield [ray.stdout.readline().strip() for _ in (*LEARNED, "address")]
        finally:
            ray.stdin.close()
            ray.wait(60)


@pytest.mark.long
@pytest.mark.slow
def test_nodes_share_a_server_in_a_ray_cluster(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The program that has it finds that two nodes in it learn as one. Then two programs join it; the first brings up the server
    as an actor, which ends when both have left."""
    scratch = tmp_path_factory.mktemp("r", numbered=True)
    with ray_cluster(scratch) as (*learned, address):
        assert learned == LEARNED
        assert address
        path = described(tmp_path, "ray", f'parameter_server = "{address}"\nsync_every = 1')
        nodes = [
            subprocess.Popen(
                [STEPPE, "node", "--cluster", path, "--node-id", name, "--json"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(tmp_path),
            )
            for name in ("two", "one")
        ]
        ended = [node.communicate(timeout=300) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], ended
        check(tmp_path, [json.loads(out) for out, _ in ended])
        gone = subprocess.run(
            [STEPPE, "params", "status", "--cluster", path],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=False,
        )
        assert gone.returncode == 3
        assert "is the cluster's first node running?" in gone.stderr

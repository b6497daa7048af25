"""Learners whose every step is one of all together do what one learner with the joint batch does: every agent, and every way
of meeting. What the nodes count together is the parameter server's to keep apart, and to go on without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from steppe import FederatedParameterServer, ParameterServer
from steppe.algorithms.nn.optimizers import FlatAdam
from steppe.core.contracts.errors import UsageError
from steppe.params.from_cluster import build_parameter_server
from steppe.params.rounds import Rounds
from steppe.params.rpc.protocol import TOKEN_VARIABLE
from steppe.roles.cluster.node import ClusterNode, connect
from steppe.runtimes.mpi import launch as mpi
from tests.support import parallel_learners as kit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

TOKEN = "a token for these tests"
PROGRAM = Path(kit.__file__)


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


@pytest.mark.parametrize("case", kit.CASES)
def test_two_nodes_on_the_network_are_one_learner(case: str) -> None:
    """Three quarters of each batch at one node, the rest at the other; Adam and clipping are the server's."""
    server = build_parameter_server(kit.cluster_of(0, parameter_server="localhost:1"), *kit.begun(case))
    port = server.start_server(port=0, token=TOKEN)
    try:
        clusters = [kit.cluster_of(index, parameter_server=f"localhost:{port}") for index in range(2)]
        found = kit.in_threads(*(kit.member(case, index, clusters[index]) for index in range(2)))
    finally:
        server.close()
    known = kit.alone(case)
    for agent in found:
        kit.agree(case, agent, known)
        assert isinstance(agent.optimizer, FlatAdam)
        assert agent.joint_sum is None
    np.testing.assert_array_equal(kit.flat(found[0]), kit.flat(found[1]))


def test_with_moments_of_its_own_a_node_would_learn_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would not see if the parts' advantages were alike."""
    monkeypatch.setattr(ClusterNode, "all_reduce_sum", lambda _, counted: counted)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_two_nodes_on_the_network_are_one_learner("ppo")


@pytest.mark.slow
def test_two_ranks_of_an_mpi_world_are_one_learner(tmp_path: Path) -> None:
    """What each agent does is seen above, and what the messages carry here. For Ray, tests/cli/test_cluster_backends.py shows it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}
    command = [mpi.find_mpiexec(), "-n", "2", sys.executable, PROGRAM, "mpi"]
    done = subprocess.run(command, env=kept, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == list(kit.CARRIED)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def counting(quorum: int = 1, deadline_s: float | None = 10.0) -> tuple[ParameterServer, Clock]:
    server = ParameterServer(
        {"w": np.zeros(2)}, "weighted", 2**31, rounds=Rounds(synchronous=True, quorum=quorum, deadline_s=deadline_s)
    )
    server.clock = clock = Clock()
    for worker in "abc":
        server.register_worker(worker)
    return server, clock


def push(server: ParameterServer, worker: str) -> None:
    assert server.push_gradients(worker, {"w": np.ones(2)})


def test_what_was_counted_is_added_up_once_all_have_and_is_the_same_for_all() -> None:
    server, _ = counting()
    assert server.sum_over_workers("a", 0, [1.0, 0.1]) == (0, None)
    assert server.sum_over_workers("c", 0, [3.0, 0.3]) == (0, None)
    assert server.sum_over_workers("a", 0, [1.0, 0.1]) == (0, None), "asking again counts once"
    total = [6.0, 0.1 + 0.2 + 0.3]
    assert server.sum_over_workers("b", 0, [2.0, 0.2]) == (0, total)
    assert server.sum_over_workers("a", 0, [1.0, 0.1]) == (0, total)
    with pytest.warns(DeprecationWarning, match="is now called sum_over_workers"):
        assert server.tally("a", 0, [1.0, 0.1]) == (0, total)
    for worker in "abc":
        push(server, worker)
    assert server.round_number == 1
    assert server.sum_over_workers("a", 0, [1.0, 0.1]) == (1, None), "the round is over"
    assert server.sum_over_workers("a", 1, [5.0, 0.5]) == (1, None), "the next one begins with nothing"


def test_who_does_not_count_is_waited_for_once() -> None:
    """At the deadline the sum is that of those who did; their pushes end the round, and the late one has its result."""
    server, clock = counting(quorum=2)
    server.sum_over_workers("a", 0, [1.0])
    clock.now = 10.0
    assert server.sum_over_workers("a", 0, [1.0]) == (0, None), "two are needed"
    assert server.sum_over_workers("b", 0, [2.0]) == (0, [3.0])
    assert server.sum_over_workers("c", 0, [4.0]) == (0, [3.0]), "too late for the sum, and still told"
    push(server, "a")
    push(server, "b")
    assert (server.round_number, server.version) == (1, 1)


def test_who_left_is_not_waited_for() -> None:
    server, _ = counting()
    server.sum_over_workers("a", 0, [1.0])
    server.sum_over_workers("b", 0, [2.0])
    server.unregister_worker("c")
    assert server.sum_over_workers("a", 0, [1.0]) == (0, [3.0])
    assert server.sum_over_workers("c", 0, [1.0]) == (-1, None)


def test_a_server_that_was_restarted_waits_for_nobody_who_has_pushed() -> None:
    server, _ = counting()
    for worker in "abc":
        server.sum_over_workers(worker, 0, [1.0])
    push(server, "a")
    other, _ = counting()
    other.restore(server.state())
    assert other.sum_over_workers("b", 0, [1.0]) == (0, None)
    assert other.sum_over_workers("c", 0, [1.0]) == (0, [2.0])


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ([], "1 to 64"),
        ([1.0] * 65, "1 to 64"),
        ([float("nan")], "finite"),
        ([2.0], "other numbers"),
        ([1.0, 2.0], "other"),
    ],
)
def test_what_cannot_be_counted_is_refused(counted: list[float], words: str) -> None:
    server, _ = counting()
    server.sum_over_workers("a", 0, [1.0])
    with pytest.raises(UsageError, match=words):
        server.sum_over_workers("a", 0, counted)
    with pytest.raises(UsageError, match="all workers add as many"):
        server.sum_over_workers("b", 0, [1.0, 1.0])
    assert server.sum_over_workers("b", 0, [1.0]) == (0, None)


def test_nobody_counts_where_one_could_mislead_the_others() -> None:
    for server in (
        ParameterServer({"w": np.zeros(2)}),
        ParameterServer({"w": np.zeros(2)}, "median", rounds=Rounds(synchronous=True)),
        FederatedParameterServer({"w": np.zeros(2)}),
    ):
        server.register_worker("a")
        assert not server.description()["supports_sums"]
        with pytest.raises(UsageError, match="without privacy"):
            server.sum_over_workers("a", 0, [1.0])


def test_a_node_whose_round_went_on_without_it_is_with_the_others_again() -> None:
    server = build_parameter_server(kit.cluster_of(0, parameter_server="localhost:1"), *kit.begun("ppo"))
    port = server.start_server(port=0, token=TOKEN)
    try:
        cluster = kit.cluster_of(0, parameter_server=f"localhost:{port}")
        node = ClusterNode(cluster, kit.made("ppo"), connect(cluster))
        node.join()
        server.round_number += 1
        mine = np.array([3.0, 1.0, 2.0])
        np.testing.assert_array_equal(node.all_reduce_sum(mine), mine)
        node.leave()
        node.client.close()
    finally:
        server.close()

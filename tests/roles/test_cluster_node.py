"""A cluster's nodes with real agents, a real server and gRPC between them: steps together, deltas, joining, leaving, cuts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from steppe import FederatedParameterServer, ParameterServer
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.dqn.dqn import DQN
from steppe.algorithms.nn.optimizers import FlatAdam
from steppe.core.config.cluster import ClusterConfig, read_cluster
from steppe.core.contracts.algorithm import Learned, Progress, trainable_entries
from steppe.core.contracts.errors import ConfigError, RunFailed
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.params.optimizers import Optimizer
from steppe.params.rounds import Rounds
from steppe.params.rpc.protocol import TOKEN_VARIABLE
from steppe.roles.cluster.node import ClusterNode, connect
from steppe.testing.agent import invented_draw, invented_segment

pytestmark = pytest.mark.integration

SPEC = EnvSpec("invented", FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (4,)))
RATE, NORM = 0.01, 0.1
TOKEN = "a token for these tests"


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def learner(seed: int = 2) -> DQN:
    config = DQNConfig(hidden=(16,), learning_rate=RATE, max_grad_norm=NORM)
    agent = DQN(config, SPEC, seed=seed)
    agent.begin(4, np.random.default_rng(0))
    agent.observe(invented_segment(agent, agent.config, SPEC, np.random.default_rng(1)), Progress(0, 100))
    return agent


def params_of(agent: DQN) -> dict[str, np.ndarray]:
    arrays = agent.weights().arrays()
    return {entry.name: arrays[entry.name] for entry in trainable_entries(agent)}


def flat(agent: DQN) -> np.ndarray:
    return np.concatenate([array.ravel() for array in params_of(agent).values()])


def parts_of(batch: Batch, count: int) -> list[Batch]:
    rows = len(batch["reward"]) // count
    return [
        Batch(
            {name: column[i * rows : (i + 1) * rows].copy() for name, column in batch.columns.items()},
            weights=batch.weights[i * rows : (i + 1) * rows].copy(),
        )
        for i in range(count)
    ]


def cluster_of(port: int, name: str, **more) -> ClusterConfig:
    return read_cluster({"parameter_server": f"localhost:{port}", "node_id": name, **more})


@contextlib.contextmanager
def serving(server: ParameterServer) -> Iterator[int]:
    try:
        yield server.start_server(port=0, token=TOKEN)
    finally:
        server.close()


def together(count: int) -> ParameterServer:
    optimizer = Optimizer("adam", RATE, eps=1e-8, max_norm=NORM)
    rounds = Rounds(synchronous=True, quorum=count, deadline_s=60.0)
    return ParameterServer(params_of(learner()), "weighted", 2**31, optimizer=optimizer, rounds=rounds)


def in_threads(*works) -> None:
    failures: list[BaseException] = []

    def run(work) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("count", [2, 4])
def test_steps_together_are_those_of_one_learner_with_the_joint_batch(count: int) -> None:
    """Adam and clipping included, for 12 steps from another beginning; to the rounding of sums in another order."""
    server, stream = together(count), np.random.default_rng(3)
    batches = [invented_draw(SPEC, stream) for _ in range(12)]
    assert len(batches[0]["reward"]) % count == 0
    alone = learner()
    before = flat(alone)
    for batch in batches:
        batch["reward"][:] *= 4.0  # long gradients: they are clipped
        assert alone.learn(Batch(batch.columns, weights=batch.weights)).stats["grad_norm"] > NORM
    with serving(server) as port:
        agents = [learner() for _ in range(count)]
        for number, agent in enumerate(agents):
            nudge(agent, 0.1 * number)
        nodes = [
            ClusterNode(cluster := cluster_of(port, f"n{i}", exchange="gradients"), agent, connect(cluster))
            for i, agent in enumerate(agents)
        ]
        for node in nodes:
            node.join()

        def learn(index: int) -> None:
            for batch in batches:
                agents[index].learn(parts_of(batch, count)[index])

        in_threads(*(lambda index=index: learn(index) for index in range(count)))
        for node, agent in zip(nodes, agents, strict=True):
            node.leave()
            node.client.close()
            np.testing.assert_allclose(flat(agent), flat(alone), rtol=2e-4, atol=2e-6)
            np.testing.assert_array_equal(flat(agent), flat(agents[0]))
            assert isinstance(agent.optimizer, FlatAdam)
            assert node.counts == {"exchanges": 12, "missed": 0}
    assert np.abs(flat(alone) - before).max() > 0.01, "something was learned"


def federated(**given) -> FederatedParameterServer:
    settings = {"min_workers_for_update": 1, "deadline_s": 60.0, **given}
    return FederatedParameterServer(params_of(learner()), **settings)


def nudge(agent: DQN, by: float) -> None:
    agent.flat.parameters += by


def joined(port: int, name: str, seed: int = 5, **more) -> ClusterNode:
    cluster = cluster_of(port, name, **more)
    node = ClusterNode(cluster, learner(seed), connect(cluster))
    node.join()
    return node


def test_deltas_are_averaged_by_their_updates_and_everyone_has_the_result() -> None:
    server = federated()
    begin = flat(learner())
    with serving(server) as port:
        one, two = joined(port, "a", sync_every=2), joined(port, "b", sync_every=1)
        np.testing.assert_array_equal(flat(one.agent), begin)
        nudge(one.agent, 0.3)
        nudge(two.agent, 0.6)
        assert not one.count_update(Learned(1)), "it is not time yet"
        in_threads(lambda: one.count_update(Learned(1)), lambda: two.count_update(Learned(1)))
        np.testing.assert_allclose(flat(one.agent), begin + 0.4, rtol=1e-5, atol=1e-6)  # (2 · 0.3 + 1 · 0.6) / 3
        np.testing.assert_array_equal(flat(one.agent), flat(two.agent))
        assert one.version == two.version == server.version == 1
        two.report({"env_steps": 12})
        found = server.get_server_stats()["workers"]["b"]["metrics"]
        assert found == {"env_steps": 12.0, "exchanges": 1.0, "missed": 0.0}


def test_late_joiners_begin_with_what_the_cluster_has_and_leavers_hold_nobody_up() -> None:
    with serving(federated()) as port:
        one = joined(port, "a")
        nudge(one.agent, 1.0)
        assert one.synchronize()
        late = joined(port, "late")
        np.testing.assert_array_equal(flat(late.agent), flat(one.agent))
        late.leave()
        nudge(one.agent, 1.0)
        assert one.synchronize(), "nobody else is waited for"
        assert one.version == 2


def test_a_node_that_comes_too_late_for_a_round_goes_on_with_its_result() -> None:
    """The others did not wait beyond the deadline; what it made does not count, and it is with them again."""
    server = federated(deadline_s=0.3)
    with serving(server) as port:
        one, slow = joined(port, "a", deadline_s=0.3), joined(port, "b", deadline_s=0.3)
        nudge(one.agent, 1.0)
        nudge(slow.agent, 5.0)
        assert one.synchronize()
        assert slow.synchronize()
        np.testing.assert_array_equal(flat(slow.agent), flat(one.agent))
        assert server.get_server_stats()["refused_pushes"] == {"stale_round": 1}


def test_below_the_quorum_a_node_keeps_what_it_has_and_tries_again() -> None:
    server = federated(min_workers_for_update=2, deadline_s=0.3)
    with serving(server) as port:
        one = joined(port, "a", deadline_s=0.3)
        nudge(one.agent, 1.0)
        mine = flat(one.agent)
        assert not one.synchronize()
        np.testing.assert_array_equal(flat(one.agent), mine)
        two = joined(port, "b", deadline_s=30.0)
        done = []
        while True not in done:  # they may come too far apart for one round
            in_threads(lambda: done.append(one.synchronize()), lambda: done.append(two.synchronize()))
        assert one.counts["missed"] >= 1


def test_without_a_server_a_node_goes_on_alone() -> None:
    server = federated()
    with serving(server) as port:
        one = joined(port, "a", retry_s=0.1, timeout_s=60.0)  # a server that is gone refuses at once
        nudge(one.agent, 1.0)
        server.stop_server()
        mine = flat(one.agent)
        assert not one.synchronize()
        np.testing.assert_array_equal(flat(one.agent), mine)
        one.report({"env_steps": 1.0})
        server.start_server(port=port, token=TOKEN)
        one.client.close()
        one.client = connect(one.config)
        one.client.register_worker("a")
        assert one.synchronize()
        np.testing.assert_allclose(flat(one.agent), mine, rtol=1e-6)
        assert one.counts == {"exchanges": 1, "missed": 1}


def test_steps_together_end_when_too_few_come_again_and_again() -> None:
    rounds = Rounds(synchronous=True, quorum=2, deadline_s=0.1)
    server = ParameterServer(params_of(learner()), update_frequency=2**31, rounds=rounds)
    with serving(server) as port:
        alone = joined(port, "a", exchange="gradients", deadline_s=0.1)
        with pytest.raises(RunFailed, match=r"too few nodes: is cluster.quorum"):
            alone.agent.learn(invented_draw(SPEC, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("server", "more", "words"),
    [
        (lambda: federated(), {"exchange": "gradients"}, "takes deltas, and this node has exchange='gradients'"),
        (lambda: together(1), {}, "takes gradients, and this node has exchange='deltas'"),
        (lambda: ParameterServer(params_of(learner())), {"exchange": "gradients"}, "but no rounds"),
        (lambda: FederatedParameterServer({"w": np.zeros(3)}), {}, "it serves another agent"),
    ],
)
def test_servers_that_do_not_fit_are_named(server, more: dict, words: str) -> None:
    with serving(server()) as port:
        with pytest.raises(ConfigError) as caught:
            joined(port, "a", **more)
        assert words in str(caught.value)

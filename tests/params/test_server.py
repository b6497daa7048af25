"""The server in one process: rounds, accounts, refusals, versions, checkpoints, and the seed's own way of using it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from steppe import ParameterServer
from steppe.core.contracts.errors import ConfigError, DamagedFile, UsageError
from steppe.core.contracts.weights import Weights
from steppe.params.aggregation import METHODS, Aggregation
from steppe.params.optimizers import Optimizer
from steppe.params.rounds import Rounds
from steppe.transport.local import LocalWeights

pytestmark = pytest.mark.unit

SYNC = Rounds(synchronous=True)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def params() -> dict[str, np.ndarray]:
    return {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.float64), "n": np.array([7])}


def step_of(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), value, np.float32), "b": np.full(3, value)}


def server_of(workers: int = 2, **settings) -> ParameterServer:
    server = ParameterServer(params(), **{"optimizer": Optimizer("sgd", 1.0), **settings})
    for number in range(workers):
        assert server.register_worker(f"w{number}")
    return server


def test_gradients_are_averaged_and_applied_after_so_many_pushes() -> None:
    server = server_of(update_frequency=2)
    assert server.push_gradients("w0", step_of(1.0))
    assert server.version == 0
    receipt = server.push_gradients("w1", step_of(3.0))
    assert (receipt.accepted, receipt.version) == (True, 1)
    found = server.get_parameters("w0")
    np.testing.assert_array_equal(found["w"], params()["w"] - 2.0)
    np.testing.assert_array_equal(found["b"], np.full(3, -2.0))
    assert {name: array.dtype for name, array in found.items()} == {n: a.dtype for n, a in params().items()}
    assert found["n"].tolist() == [7]


def test_by_hand_aggregate_then_update_with_a_rate() -> None:
    server = server_of(optimizer=None)
    server.push_gradients("w0", step_of(1.0))
    server.push_gradients("w1", step_of(2.0))
    assert server.aggregate_gradients()["w"][0, 0] == 1.5
    with pytest.raises(UsageError, match="not applied yet"):
        server.aggregate_gradients()
    server.update_parameters(learning_rate=0.1)
    np.testing.assert_allclose(server.get_parameters("w0")["b"], -0.15, rtol=1e-6)
    server.push_gradients("w0", step_of(1.0))
    server.update_parameters()  # aggregates by itself, with the usual 0.001
    np.testing.assert_allclose(server.get_parameters("w0")["b"], -0.151, rtol=1e-6)
    with pytest.raises(UsageError, match="0 pushes are waiting, 1 are needed"):
        server.update_parameters()
    with pytest.raises(ConfigError, match="learning_rate"):
        server.update_parameters(-1.0)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_by_name(method: str) -> None:
    server = server_of(3, aggregation_method=method, optimizer=None, update_frequency=3)
    before = server.get_parameters("w0")["w"]
    for number in range(3):
        assert server.push_gradients(f"w{number}", step_of(1.0))
    moved = server.get_parameters("w0")["w"] - before
    expected = {"federated": 1.0, "sum": -0.003}.get(method, -0.001)
    np.testing.assert_allclose(moved, expected, rtol=1e-3)


def test_weights_count_by_samples() -> None:
    server = server_of(aggregation_method="weighted", update_frequency=2)
    server.push_gradients("w0", step_of(1.0), weight=30)
    server.push_gradients("w1", step_of(5.0), weight=10.0)
    np.testing.assert_array_equal(server.get_parameters("w0")["b"], np.full(3, -2.0))


def test_a_parameter_that_is_not_named_gets_no_change() -> None:
    server = server_of(1, update_frequency=1)
    assert server.push_gradients("w0", {"b": np.ones(3, np.float16)})
    np.testing.assert_array_equal(server.get_parameters("w0")["w"], params()["w"])
    assert server.get_parameters("w0")["b"][0] == -1.0


BAD = {
    "not_finite": {"w": np.full((2, 3), np.nan, np.float32)},
    "wrong_shape": {"w": np.ones((3, 2), np.float32)},
    "unknown_parameter": {"v": np.ones(2, np.float32)},
    "wrong_dtype": {"w": np.ones((2, 3), np.int32)},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_push_is_refused_with_the_reason_and_the_round_continues(reason: str) -> None:
    server = server_of(update_frequency=2)
    server.push_gradients("w0", step_of(1.0))
    receipt = server.push_gradients("w1", BAD[reason])
    assert not receipt
    assert receipt.reason == reason
    assert receipt.message
    assert server.get_server_stats()["refused_pushes"] == {reason: 1}
    assert server.get_server_stats()["workers"]["w1"]["refused"] == {reason: 1}
    assert server.push_gradients("w1", step_of(1.0))
    np.testing.assert_array_equal(server.get_parameters("w0")["b"], np.full(3, -1.0))


def test_too_large_for_float32_counts_as_not_finite() -> None:
    assert server_of().push_gradients("w0", {"b": np.full(3, 1e300)}).reason == "not_finite"


def test_what_is_carried_is_not_trained() -> None:
    assert server_of().push_gradients("w0", {"n": np.ones(1)}).reason == "wrong_dtype"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 2.0])
def test_wrong_weights_are_refused(weight: float) -> None:
    assert server_of().push_gradients("w0", step_of(1.0), weight).reason == "bad_weight"


def test_only_registered_workers_push_and_pull() -> None:
    server = server_of(1)
    assert server.push_gradients("stranger", step_of(1.0)).reason == "unknown_worker"
    with pytest.raises(UsageError, match="not registered: call register_worker"):
        server.get_parameters("stranger")
    assert not server.register_worker("w0")
    assert server.unregister_worker("w0")
    assert not server.unregister_worker("w0")
    with pytest.raises(UsageError, match="printable"):
        server.register_worker("")


def test_a_wrong_type_says_which_argument() -> None:
    with pytest.raises(ConfigError, match="worker_id"):
        server_of().register_worker(3)
    with pytest.raises(ConfigError, match="gradients"):
        server_of().push_gradients("w0", [1.0])
    with pytest.raises(ConfigError, match="update_frequency"):
        ParameterServer(params(), update_frequency="often")


def test_synchronous_rounds_take_one_push_per_worker() -> None:
    server = server_of(rounds=SYNC)
    assert server.push_gradients("w0", step_of(2.0), round_number=0)
    assert server.push_gradients("w0", step_of(9.0), round_number=0).reason == "pushed_twice"
    assert server.push_gradients("w0", step_of(9.0), round_number=1).reason == "future_round"
    assert server.push_gradients("w1", step_of(4.0), round_number=0).round_number == 1
    late = server.push_gradients("w1", step_of(9.0), round_number=0)
    assert (late.reason, late.round_number, late.version) == ("stale_round", 1, 1)
    np.testing.assert_array_equal(server.get_parameters("w0")["b"], np.full(3, -3.0))


def test_registering_again_gives_no_second_push() -> None:
    server = server_of(3, rounds=SYNC)
    server.push_gradients("w0", step_of(1.0))
    server.unregister_worker("w0")
    server.register_worker("w0")
    assert server.push_gradients("w0", step_of(1.0)).reason == "pushed_twice"


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    server = server_of(3, rounds=SYNC)
    server.push_gradients("w0", step_of(1.0))
    server.push_gradients("w1", step_of(1.0))
    assert server.version == 0
    server.unregister_worker("w2")
    assert server.version == 1


def test_a_deadline_ends_a_round_with_a_quorum_and_gives_it_up_without() -> None:
    server = server_of(3, rounds=Rounds(synchronous=True, quorum=2, deadline_s=10.0))
    clock = server.clock = Clock()
    server.push_gradients("w0", step_of(1.0))
    clock.now += 9.9
    assert server.get_server_stats()["round"] == 0
    clock.now += 0.2
    stats = server.get_server_stats()
    assert (stats["round"], stats["version"], stats["abandoned_rounds"]) == (1, 0, 1)
    assert "too few" in stats["last_trouble"]
    server.push_gradients("w0", step_of(1.0))
    server.push_gradients("w1", step_of(1.0))
    clock.now += 10.0
    assert server.push_gradients("w2", step_of(1.0), round_number=1).reason == "stale_round"
    assert server.version == 1


def test_waiting_for_a_version_ends_a_round_at_its_deadline() -> None:
    server = server_of(2, rounds=Rounds(synchronous=True, deadline_s=0.02))
    assert not server.wait_newer(0, 0.0)
    server.push_gradients("w0", step_of(1.0))
    assert server.wait_newer(0, 60.0)


def test_asynchronous_pushes_are_counted_by_the_workers_own_number() -> None:
    server = server_of(update_frequency=1)
    assert server.push_gradients("w0", step_of(1.0), round_number=5)
    assert server.push_gradients("w0", step_of(1.0), round_number=5).reason == "pushed_twice"
    assert server.push_gradients("w0", step_of(1.0), round_number=4).reason == "stale_round"
    assert server.push_gradients("w1", step_of(1.0), round_number=4)
    assert server.push_gradients("w0", step_of(1.0))
    assert server.version == 3


def test_old_pushes_count_less_and_too_old_ones_not_at_all() -> None:
    server = server_of(update_frequency=1, rounds=Rounds(damping=0.5, max_staleness=3))
    for _ in range(3):
        server.get_parameters("w0")
        server.push_gradients("w0", step_of(0.0))
    server.push_gradients("w1", step_of(1.0))  # made with version 0, three versions ago
    np.testing.assert_allclose(server.get_parameters("w0")["b"], -0.5, rtol=1e-6)
    late = server.push_gradients("w1", step_of(1.0))
    assert (late.reason, late.message) == ("too_stale", "it was made 4 versions ago, 3 are allowed")
    assert server.push_gradients("w1", step_of(1.0), version=4)
    assert server.push_gradients("w1", step_of(1.0), version=99).reason == "future_version"
    assert server.get_server_stats()["staleness"] == {0: 4, 3: 1}


def test_a_round_whose_sum_is_too_large_is_abandoned() -> None:
    server = server_of(aggregation_method="sum", update_frequency=2)
    server.push_gradients("w0", step_of(3e38))
    assert server.push_gradients("w1", step_of(3e38))
    stats = server.get_server_stats()
    assert (stats["version"], stats["abandoned_rounds"], stats["pending_pushes"]) == (0, 1, 0)
    assert "too large" in stats["last_trouble"]


def test_a_step_into_infinity_leaves_everything_as_it_was() -> None:
    server = server_of(1, update_frequency=1, optimizer=Optimizer("sgd", 1e6))
    server.push_gradients("w0", step_of(1e37))
    assert "infinite" in server.get_server_stats()["last_trouble"]
    np.testing.assert_array_equal(server.get_parameters("w0")["w"], params()["w"])


def test_what_is_returned_is_the_callers() -> None:
    server = server_of(1)
    server.get_parameters("w0")["w"][:] = 99.0
    np.testing.assert_array_equal(server.get_parameters("w0")["w"], params()["w"])


def test_every_version_is_published_to_the_store() -> None:
    store = LocalWeights()
    server = server_of(1, update_frequency=1, store=store)
    assert store.newer_than("policy", -1).version == 0
    server.push_gradients("w0", step_of(1.0))
    found = store.newer_than("policy", 0)
    assert (found.version, found.updates) == (1, 1)
    assert found.sha256() == server.newer_than("policy", 0).sha256()
    assert server.newer_than("policy", 1) is None
    assert server.broadcast_parameters() == 1
    with pytest.raises(UsageError, match="one policy"):
        server.newer_than("other", 0)


def busy(server: ParameterServer, seed: int, pushes: int) -> None:
    stream = np.random.default_rng(seed)
    for _ in range(pushes):
        worker = f"w{stream.integers(3)}"
        if stream.random() < 0.3:
            server.get_parameters(worker)
        bad = stream.random() < 0.1
        server.push_gradients(worker, BAD["not_finite"] if bad else step_of(float(stream.normal())))


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_restored_exactly_in_the_middle_of_a_round(tmp_path: Path, optimizer: str) -> None:
    rounds = Rounds(damping=1.0)
    first = server_of(3, optimizer=optimizer, update_frequency=4, rounds=rounds)
    busy(first, seed=0, pushes=23)
    assert first.get_server_stats()["pending_pushes"] > 0
    first.save_checkpoint(tmp_path / "server.ckpt")
    second = server_of(0, optimizer=optimizer, update_frequency=4, rounds=rounds)
    second.load_checkpoint(tmp_path / "server.ckpt")
    assert second.get_server_stats() == first.get_server_stats()
    for server in (first, second):
        busy(server, seed=1, pushes=30)
    assert second.get_server_stats() == first.get_server_stats()
    assert second.weights().sha256() == first.weights().sha256()


def test_a_push_repeated_after_a_restart_is_applied_once(tmp_path: Path) -> None:
    server = server_of(update_frequency=2, checkpoint_path=tmp_path / "server.ckpt", save_frequency=1)
    server.push_gradients("w0", step_of(1.0), round_number=0)
    server.push_gradients("w1", step_of(1.0), round_number=0)  # an update, so a checkpoint
    again = server_of(0, update_frequency=2)
    again.load_checkpoint(tmp_path / "server.ckpt")
    assert again.push_gradients("w1", step_of(1.0), round_number=0).reason == "pushed_twice"
    assert again.version == 1


def test_checkpoints_by_themselves_and_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "server.ckpt"
    server = server_of(1, update_frequency=1, save_frequency=2, checkpoint_path=path)
    for _ in range(5):
        server.push_gradients("w0", step_of(1.0))
    path.write_bytes(path.read_bytes()[:-1])
    again = server_of(0)
    again.load_checkpoint(path)
    assert (again.version, again.get_server_stats()["fell_back"]) == (2, True)
    (tmp_path / "server.ckpt.previous").write_bytes(b"nothing")
    with pytest.raises(DamagedFile, match="previous"):
        again.load_checkpoint(path)
    with pytest.raises(UsageError, match="no checkpoint at"):
        again.load_checkpoint(tmp_path / "other")
    with pytest.raises(UsageError, match="where should the checkpoint go"):
        again.save_checkpoint()


@pytest.mark.parametrize(
    "other",
    [
        lambda: ParameterServer({"w": np.zeros(2, np.float32)}),
        lambda: ParameterServer(params(), "median"),
        lambda: ParameterServer(params(), optimizer="adam"),
    ],
)
def test_a_checkpoint_of_another_server_is_refused_and_changes_nothing(tmp_path: Path, other) -> None:
    server_of().save_checkpoint(tmp_path / "server.ckpt")
    server = other()
    before = server.weights().sha256()
    with pytest.raises(ConfigError):
        server.load_checkpoint(tmp_path / "server.ckpt")
    assert server.weights().sha256() == before


def test_many_threads_lose_no_push() -> None:
    server = server_of(8, update_frequency=1)

    def work(name: str) -> None:
        for _ in range(25):
            server.get_parameters(name)
            assert server.push_gradients(name, step_of(1.0))

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.version == 200
    np.testing.assert_array_equal(server.get_parameters("w0")["b"], np.full(3, -200.0))
    assert sum(server.get_server_stats()["staleness"].values()) == 200


def test_gradient_descent_by_workers_reaches_the_least_squares_solution() -> None:
    """Four workers with a quarter of the data each, against NumPy's solver."""
    stream = np.random.default_rng(5)
    inputs, truth = stream.normal(size=(80, 3)), np.array([1.0, -2.0, 0.5])
    targets = inputs @ truth + 0.1 * stream.normal(size=80)
    server = ParameterServer({"w": np.zeros(3)}, update_frequency=4, optimizer=Optimizer("adam", 0.05), rounds=SYNC)
    names = [f"w{number}" for number in range(4)]
    for name in names:
        server.register_worker(name)
    for _ in range(600):
        for number, name in enumerate(names):
            x, y = inputs[number::4], targets[number::4]
            residual = x @ server.get_parameters(name)["w"] - y
            server.push_gradients(name, {"w": x.T @ residual / len(y)})
    expected = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    np.testing.assert_allclose(server.get_parameters("w0")["w"], expected, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"update_frequency": 0}, "at least 1"),
        ({"aggregation_method": "mean"}, "there is no aggregation 'mean'"),
        ({"aggregation_method": Aggregation("krum", byzantine=4)}, "needs 11 pushes"),
        ({"optimizer": "fedavg"}, "gradients need sgd"),
        ({"optimizer": "adam", "aggregation_method": "federated"}, "deltas need fedavg"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParameterServer(params(), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"quorum": 2},
        {"deadline_s": 1.0},
        {"synchronous": True, "damping": 1.0},
        {"synchronous": True, "quorum": 0},
        {"max_staleness": -1},
    ],
)
def test_rounds_ignore_no_option(settings: dict) -> None:
    with pytest.raises(ConfigError):
        Rounds(**settings)


@pytest.mark.parametrize(
    "given", [{}, {"w": np.array(["a"])}, {"w": np.array([np.nan], np.float32)}, {"n": np.array([1])}]
)
def test_parameters_that_cannot_be_trained_are_refused(given: dict) -> None:
    with pytest.raises(ConfigError):
        ParameterServer(given)


def test_an_agents_parameters_and_gradients_fit() -> None:
    """The layout of a torch agent with running scales: float64 statistics and a counter beside float32 parameters."""
    weights = Weights.from_arrays({"net": np.ones(4, np.float32), "mean": np.full(2, 1 / 3), "count": np.array(3)})
    server = ParameterServer(weights.arrays(), update_frequency=1)
    server.register_worker("a")
    assert server.push_gradients("a", {"net": np.ones(4, np.float32)})
    assert not weights.layout.differences(server.weights().layout)

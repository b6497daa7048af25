"""Federated rounds without privacy: deltas and whole parameters, quorum, robust methods against Byzantine updates, restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from steppe import FederatedParameterServer
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.params.aggregation import Aggregation

pytestmark = pytest.mark.unit


def delta(*values: float) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.float32)}


def server_of(workers: str = "", **settings) -> FederatedParameterServer:
    server = FederatedParameterServer({"w": np.zeros(2)}, **settings)
    for name in workers:
        server.register_worker(name)
    return server


def test_a_whole_round_at_once_returns_the_mean_of_the_deltas() -> None:
    server = server_of()
    found = server.federated_averaging({"a": delta(1, 2), "b": delta(3, 6)})
    assert found["w"].tolist() == [2.0, 4.0]
    assert server.version == 1
    assert server.federated_averaging({"a": delta(1, 0), "b": delta(1, 0)})["w"].tolist() == [3.0, 4.0]


def test_invalid_updates_are_excluded_and_counted() -> None:
    server = server_of()
    updates = {"a": delta(1, 2), "b": delta(np.nan, 0), "c": delta(3, 4), "d": delta(1, 2, 3)}
    assert server.federated_averaging(updates)["w"].tolist() == [2.0, 3.0]
    assert server.get_server_stats()["refused_pushes"] == {"not_finite": 1, "wrong_shape": 1}


def test_too_few_good_updates_are_no_round() -> None:
    server = server_of(min_workers_for_update=2)
    with pytest.raises(UsageError, match="1 pushes are waiting, 2 are needed"):
        server.federated_averaging({"a": delta(1, 2), "b": delta(np.inf, 2)})
    assert server.version == 0
    assert server.push_gradients("b", delta(3, 4))  # what was good waits for another
    assert server.get_parameters("a")["w"].tolist() == [2.0, 3.0]


def test_a_round_ends_when_all_have_pushed_and_weighs_by_samples() -> None:
    server = server_of("abc")
    assert server.validate_worker_update("a", delta(1, 1))
    server.push_gradients("a", delta(1, 0), weight=100)
    server.push_gradients("b", delta(5, 0), weight=300)
    assert not server.validate_worker_update("a", delta(1, 1))  # it has pushed
    assert not server.validate_worker_update("z", delta(1, 1))
    assert not server.validate_worker_update("c", delta(1, np.nan))
    assert server.version == 0
    server.push_gradients("c", delta(4, 0), weight=400)
    assert server.get_parameters("a")["w"].tolist() == [4.0, 0.0]
    assert server.get_server_stats()["refused_pushes"] == {}


def test_whole_parameters_are_deltas_from_the_version_they_were_made_with() -> None:
    server = server_of("ab", updates="parameters")
    server.federated_averaging({"a": delta(1, 1), "b": delta(3, 3)})
    assert server.get_parameters("a")["w"].tolist() == [2.0, 2.0]
    assert server.push_gradients("b", delta(9, 9)).reason == "stale_round"  # b still has version 0
    server.get_parameters("b")
    assert server.push_gradients("b", {"w": np.array([4.0, 4.0])})
    assert server.push_gradients("a", {}).reason == "wrong_shape"
    assert server.push_gradients("a", delta(2, 2))
    assert server.get_parameters("a")["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("optimizer", ["fedavg", "fedadam", "fedyogi"])
def test_optimizers_move_towards_where_the_workers_want_to_go(optimizer: str) -> None:
    server = server_of("ab", optimizer=optimizer)
    for _ in range(400):
        here = server.get_parameters("a")["w"]
        for name, goal in (("a", np.array([1.0, 0.0])), ("b", np.array([1.0, 2.0]))):
            server.push_gradients(name, {"w": 0.1 * (goal - here)})
    np.testing.assert_allclose(server.get_parameters("a")["w"], [1.0, 1.0], atol=0.05)


def train_with_a_liar(method: str | Aggregation, rounds: int = 60) -> np.ndarray:
    """Six honest workers walk towards (1, −1) with noise; one pushes the opposite, a thousand times as large."""
    stream = np.random.default_rng(2)
    server = server_of("abcdefg", aggregation_method=method)
    for _ in range(rounds):
        here = server.get_parameters("a")["w"]
        for name in "abcdef":
            noisy = np.array([1.0, -1.0]) - here + 0.02 * stream.normal(size=2)
            server.push_gradients(name, {"w": 0.2 * noisy})
        server.push_gradients("g", {"w": -1000.0 * (np.array([1.0, -1.0]) - here) - 1.0})
    return server.get_parameters("a")["w"]


@pytest.mark.parametrize("method", ["median", Aggregation("trimmed_mean", byzantine=1), "krum", "multi_krum"])
def test_byzantine_updates_do_not_move_the_result(method: str | Aggregation) -> None:
    np.testing.assert_allclose(train_with_a_liar(method), [1.0, -1.0], atol=0.05)


def test_byzantine_updates_move_the_average() -> None:
    assert np.abs(train_with_a_liar("federated", rounds=3) - [1.0, -1.0]).max() > 100


def test_restored_in_the_middle_of_a_round(tmp_path: Path) -> None:
    server = server_of("abc", optimizer="fedyogi")
    for name in "abc":
        server.push_gradients(name, delta(1, 1))
    server.push_gradients("a", delta(1, 2))
    server.save_checkpoint(tmp_path / "federated.ckpt")
    again = server_of(optimizer="fedyogi")
    again.load_checkpoint(tmp_path / "federated.ckpt")
    assert again.push_gradients("a", delta(1, 2)).reason == "pushed_twice"
    for name in "bc":
        for one in (server, again):
            assert one.push_gradients(name, delta(3, 4), round_number=1)
    assert again.weights().sha256() == server.weights().sha256()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"update_frequency": 1}, "below min_workers_for_update=2"),
        ({"optimizer": "adam"}, "deltas need fedavg"),
        ({"min_workers_for_update": 0}, "quorum of at least 1"),
        ({"updates": "gradients"}, "updates"),
    ],
)
def test_what_does_not_fit_together_is_refused(settings: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        server_of(**settings)

"""The fourteen rules of private aggregation, one test each, and the accountant against closed forms and dp-accounting."""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, stats

from steppe import FederatedParameterServer
from steppe.core.contracts.errors import BudgetSpent, ConfigError, Conflict, DamagedFile, UsageError
from steppe.params import checkpoints, privacy
from steppe.params.aggregation import METHODS
from steppe.params.privacy import (
    Charge,
    PrivacyLedger,
    PrivacyPlan,
    PrivateSum,
    clip_scales,
    epsilon_after,
    epsilon_of,
    noise_needed,
    releases_within,
)

pytestmark = pytest.mark.unit

SIZE = 400


def plan_of(tmp_path: Path, **settings) -> PrivacyPlan:
    return PrivacyPlan(tmp_path / "ledger.json", **{"epsilon": 1e6, "expected_clients": 2, **settings})


def server_of(tmp_path: Path, workers: int = 2, noise_scale: float = 1.0, *, plan=None, **settings):
    server = FederatedParameterServer(
        {"w": np.zeros(SIZE, np.float32)},
        differential_privacy=True,
        noise_scale=noise_scale,
        privacy=plan or plan_of(tmp_path),
        **settings,
    )
    for number in range(workers):
        server.register_worker(f"c{number}")
    return server


def delta(value: float = 1e-4) -> dict[str, np.ndarray]:
    return {"w": np.full(SIZE, value, np.float32)}


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bits set: the logarithm of 1, so a radius and noise of 0."""
    monkeypatch.setattr(os, "urandom", lambda size: b"\xff" * size)


def a_round(server: FederatedParameterServer) -> None:
    for number in range(2):
        assert server.push_gradients(f"c{number}", delta())


def test_p1_only_registered_clients_may_push(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    assert server.push_gradients("stranger", delta()).reason == "unknown_worker"
    assert not server.validate_worker_update("stranger", delta())
    with pytest.raises(UsageError, match="1 pushes are waiting, 2 are needed"):
        server.federated_averaging({"c0": delta(), "stranger": delta()})
    server.close()


def test_p2_one_update_per_client_and_round(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    assert server.push_gradients("c0", delta())
    assert server.push_gradients("c0", delta()).reason == "pushed_twice"
    server.unregister_worker("c0")
    server.register_worker("c0")
    assert server.push_gradients("c0", delta()).reason == "pushed_twice"
    assert server.get_server_stats()["pending_pushes"] == 1
    server.close()


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        ({"w": np.zeros(SIZE + 1, np.float32)}, "wrong_shape"),
        ({"w": np.zeros(SIZE, np.int64)}, "wrong_dtype"),
        ({"w": np.full(SIZE, np.nan, np.float32)}, "not_finite"),
        ({"w": np.full(SIZE, -np.inf, np.float32)}, "not_finite"),
        ({"v": np.zeros(SIZE, np.float32)}, "unknown_parameter"),
    ],
)
def test_p3_what_cannot_be_clipped_is_refused(tmp_path: Path, update: dict, reason: str) -> None:
    server = server_of(tmp_path)
    assert not server.validate_worker_update("c0", update)
    assert server.push_gradients("c0", update).reason == reason
    a_round(server)
    assert server.version == 1
    server.close()


def test_p4_deltas_are_clipped_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = np.random.default_rng(0)
    updates = (stream.normal(size=(6, SIZE)) * np.array([[0], [1e-30], [1e-3], [0.05], [1.0], [1e30]])).astype(
        np.float32
    )
    clipped = updates.astype(np.float64) * clip_scales(updates, 0.7)[:, None]
    norms = np.linalg.norm(clipped, axis=1)
    assert (norms <= 0.7).all()
    np.testing.assert_allclose(norms[-2:], 0.7, rtol=1e-9)  # 1e30 squared is beyond float32
    np.testing.assert_array_equal(clipped[:3], updates[:3].astype(np.float64))  # a zero one included
    quiet(monkeypatch)
    server = server_of(tmp_path, plan=plan_of(tmp_path, clip_norm=0.7))
    server.push_gradients("c0", {"w": updates[-1]})
    server.push_gradients("c1", {"w": updates[0]})
    np.testing.assert_allclose(server.get_parameters("c0")["w"], clipped[-1] / 2, rtol=1e-6)
    server.close()


def test_p4_whole_parameters_are_clipped_as_deltas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    server = FederatedParameterServer(
        {"w": np.full(4, 100.0)}, differential_privacy=True, privacy=plan_of(tmp_path), updates="parameters"
    )
    for name in ("a", "b"):
        server.register_worker(name)
        server.push_gradients(name, {"w": np.array([100.5, 100.0, 100.0, 100.0])})
    np.testing.assert_allclose(server.get_parameters("a")["w"], [100.5, 100, 100, 100])
    server.close()


def test_p5_every_client_counts_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    server = server_of(tmp_path)
    assert server.push_gradients("c0", delta(), weight=2.0).reason == "bad_weight"
    server.push_gradients("c0", delta(1e-4))
    server.push_gradients("c1", delta(3e-4))
    np.testing.assert_allclose(server.get_parameters("c0")["w"], 2e-4, rtol=1e-6)
    server.close()


def test_p6_noise_is_added_once_to_the_sum(tmp_path: Path) -> None:
    """Deviation z · C of the sum, whatever the number of clients; normal by a Kolmogorov–Smirnov test."""
    plan = plan_of(tmp_path, clip_norm=0.5, expected_clients=1)
    mechanism = PrivateSum(plan, 3.0, np.random.default_rng(7).bytes)
    for clients in (1, 40):
        out, _ = mechanism.release(np.zeros((clients, 200_001), np.float32))
        assert abs(out.std() / 1.5 - 1.0) < 0.01
        assert abs(out.mean()) < 0.02
        assert stats.kstest(out / 1.5, "norm").pvalue > 1e-3
        assert abs(np.corrcoef(out[:-1:2], out[1::2])[0, 1]) < 0.02  # both of a pair from two words
    mechanism.ledger.close()


def test_p7_the_divisor_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    server = server_of(tmp_path, workers=3, plan=plan_of(tmp_path, expected_clients=10), deadline_s=5.0)
    now = [0.0]
    server.clock = lambda: now[0]
    for number in range(2):
        server.push_gradients(f"c{number}", delta(1e-4))
    now[0] = 6.0
    np.testing.assert_allclose(server.get_parameters("c0")["w"], 2e-5, rtol=1e-6)  # two of ten: eight count as zero
    server.close()


def test_p8_the_charge_is_on_disk_before_anything_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(tmp_path)
    seen = []
    real = privacy.kernels.noisy_sum

    def watched(*words) -> None:
        seen.append(json.loads((tmp_path / "ledger.json").read_text())["count"])
        real(*words)

    monkeypatch.setattr(privacy.kernels, "noisy_sum", watched)
    a_round(server)
    a_round(server)
    assert seen == [1, 2]
    monkeypatch.setattr(privacy.atomic_files, "write_atomic", lambda *_: (_ for _ in ()).throw(OSError(5, "no disk")))
    before = server.weights().sha256()
    server.push_gradients("c0", delta())
    with pytest.raises(OSError, match="no disk"):
        server.push_gradients("c1", delta())
    assert server.weights().sha256() == before
    assert len(seen) == 2
    server.close()


def test_p9_a_charge_that_would_pass_the_budget_is_refused(tmp_path: Path) -> None:
    fits = releases_within(2.0, 5.0, 1e-5)
    server = server_of(tmp_path, noise_scale=2.0, plan=plan_of(tmp_path, epsilon=5.0))
    for _ in range(fits):
        a_round(server)
    assert server.version == fits
    before = server.weights().sha256()
    server.push_gradients("c0", delta())
    server.push_gradients("c1", delta())
    assert server.weights().sha256() == before
    assert server.push_gradients("c0", delta()).reason == "budget_spent"
    report = server.get_server_stats()["privacy"]
    assert report["releases"] == fits
    assert report["epsilon_spent"] <= 5.0 < epsilon_after(2.0, fits + 1, 1e-5)
    assert "above the budget" in server.get_server_stats()["last_trouble"]
    server.close()


def test_p9_by_hand_the_refusal_is_raised(tmp_path: Path) -> None:
    server = server_of(tmp_path, workers=3, plan=plan_of(tmp_path, epsilon=0.1))
    server.push_gradients("c0", delta())
    server.push_gradients("c1", delta())
    with pytest.raises(BudgetSpent, match=r"above the budget of 0.1"):
        server.update_parameters()
    assert json.dumps(server.get_server_stats()["privacy"]["releases"]) == "0"
    server.close()


def test_p9_a_whole_round_at_once_raises_too(tmp_path: Path) -> None:
    server = server_of(tmp_path, plan=plan_of(tmp_path, epsilon=0.1))
    with pytest.raises(BudgetSpent, match="spent"):
        server.federated_averaging({"c0": delta(), "c1": delta()})
    server.close()


def charges_in(path: Path) -> list[Charge]:
    """The charges in a ledger that no server holds."""
    ledger = PrivacyLedger(path)
    ledger.close()
    return ledger.charges


def test_p10_amplification_only_where_the_server_draws(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs deadline_s"):
        server_of(tmp_path, plan=plan_of(tmp_path, sampling_rate=0.5))
    server = server_of(tmp_path, workers=400, plan=plan_of(tmp_path, sampling_rate=0.25), deadline_s=1e9)
    drawn = {f"c{number}" for number in range(400) if server.is_drawn(f"c{number}")}
    assert 50 < len(drawn) < 150  # 100 ± 8.7
    out = next(f"c{number}" for number in range(400) if f"c{number}" not in drawn)
    for _ in range(50):  # coming again is no second chance
        server.unregister_worker(out)
        server.register_worker(out)
        assert server.push_gradients(out, delta()).reason == "not_drawn"
    for name in drawn:
        assert server.push_gradients(name, delta())
    assert server.version == 1
    assert {f"c{number}" for number in range(400) if server.is_drawn(f"c{number}")} != drawn
    server.close()
    assert charges_in(tmp_path / "ledger.json") == [Charge(1.0, 0.25, 1)]


def test_p10_without_drawing_the_full_price_is_charged(tmp_path: Path) -> None:
    server = server_of(tmp_path, workers=100)
    for number in range(100):
        server.push_gradients(f"c{number}", delta())
    server.close()
    assert charges_in(tmp_path / "ledger.json") == [Charge(1.0, 1.0, 1)]


def test_p11_noise_comes_from_the_system_and_has_no_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = os.urandom

    def watched(size: int) -> bytes:
        asked.append(size)
        return real(size)

    monkeypatch.setattr(os, "urandom", watched)
    server = server_of(tmp_path)
    asked.clear()
    np.random.seed(0)
    a_round(server)
    assert 8 * SIZE in asked
    first = server.get_parameters("c0")["w"]
    np.random.seed(0)
    a_round(server)
    assert not np.allclose(server.get_parameters("c0")["w"] - first, first)
    names = [*inspect.signature(FederatedParameterServer).parameters, *inspect.signature(PrivacyPlan).parameters]
    assert not {name for name in names if "seed" in name or "rng" in name or "entropy" in name}
    server.close()


def test_p12_the_ledger_outlives_the_server_and_older_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.ckpt"
    server = server_of(tmp_path, checkpoint_path=path)
    a_round(server)
    old = path.read_bytes()
    a_round(server)
    newest = server.weights().sha256()
    server.close()
    again = server_of(tmp_path, workers=0)
    assert again.get_server_stats()["privacy"]["releases"] == 2
    again.load_checkpoint(path)
    assert again.weights().sha256() == newest
    (tmp_path / "old.ckpt").write_bytes(old)
    with pytest.raises(UsageError, match=r"has release 1, but the ledger .* says that release 2 is out"):
        again.load_checkpoint(tmp_path / "old.ckpt")
    path.write_bytes(b"damaged")  # the one before is older than the ledger
    with pytest.raises(UsageError, match="release 1"):
        again.load_checkpoint(path)
    again.close()


def test_p12_charged_and_not_released_is_no_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.ckpt"
    server = server_of(tmp_path, checkpoint_path=path)
    a_round(server)
    monkeypatch.setattr(server, "save_checkpoint", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    server.push_gradients("c0", delta())
    with pytest.raises(KeyboardInterrupt):
        server.push_gradients("c1", delta())
    server.close()
    again = server_of(tmp_path, workers=0)
    again.load_checkpoint(path)
    assert (again.version, again.get_server_stats()["privacy"]["releases"]) == (1, 2)
    again.close()


def test_p12_what_cannot_be_kept_is_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = server_of(tmp_path, checkpoint_path=tmp_path / "server.ckpt")
    a_round(server)
    before = server.weights()

    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(checkpoints, "write_atomic", full)
    a_round(server)
    assert (server.version, server.weights().sha256()) == (1, before.sha256())
    assert "no room" in server.last_trouble
    assert server.get_server_stats()["privacy"]["releases"] == 2  # charged all the same
    monkeypatch.undo()
    a_round(server)
    assert server.version == 2
    server.close()


def test_p12_no_clients_delta_is_written_to_disk(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    a_round(server)
    server.push_gradients("c0", delta(0.123456))
    server.save_checkpoint(tmp_path / "server.ckpt")
    assert np.float32(0.123456).tobytes() not in (tmp_path / "server.ckpt").read_bytes()
    server.close()
    again = server_of(tmp_path, workers=0)
    again.load_checkpoint(tmp_path / "server.ckpt")
    a_round(again)  # c0 may push again, as its push is gone
    assert again.version == 2
    assert again.get_server_stats()["accepted_pushes"] == 4
    again.close()


def test_p12_a_damaged_ledger_is_never_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    server = server_of(tmp_path)
    a_round(server)
    server.close()
    text = path.read_text()
    for written, other in (('"count": 1', '"count": 0'), ('"noise_multiplier": 1.0', '"noise_multiplier": 9.0')):
        assert written in text
        path.write_text(text.replace(written, other))
        with pytest.raises(DamagedFile, match="nothing more may be released"):
            server_of(tmp_path)
    path.write_text(text)
    server_of(tmp_path).close()


def test_p12_a_ledger_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    body = {"format": 2, "count": 0, "released": 0, "charges": []}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (tmp_path / "ledger.json").write_text(json.dumps({**body, "sha256": digest}))
    with pytest.raises(DamagedFile, match="checksum or format does not match"):
        PrivacyLedger(tmp_path / "ledger.json")


def test_p12_releases_of_different_kinds_are_kept_apart(tmp_path: Path) -> None:
    ledger, plan = PrivacyLedger(tmp_path / "ledger.json"), plan_of(tmp_path)
    kinds = [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, 0.5)]
    assert [ledger.charge(*kind, plan) for kind in kinds] == [1, 2, 3, 4, 5]
    ledger.close()
    made = [Charge(1.0, 1.0, 2), Charge(2.0, 1.0, 1), Charge(1.0, 1.0, 1), Charge(1.0, 0.5, 1)]
    assert charges_in(tmp_path / "ledger.json") == made


def test_p12_one_server_per_ledger(tmp_path: Path) -> None:
    server = server_of(tmp_path)
    with pytest.raises(Conflict, match="in use by another server"):
        server_of(tmp_path)
    server.close()
    a_round(server)
    assert server.version == 0
    assert "closed" in server.last_trouble


def test_p13_nothing_about_one_client_is_published(tmp_path: Path) -> None:
    server = server_of(tmp_path, workers=3)
    server.push_gradients("c0", delta(5.0))
    server.push_gradients("c1", {"w": np.full(SIZE, np.nan, np.float32)})
    text = json.dumps({**server.get_server_stats(), "run": ""})
    assert not [name for name in ("c0", "c1", "c2") if name in text]
    assert "norm" not in text.replace("clip_norm", "")
    server.close()


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("average", "federated")])
def test_p14_robust_and_weighted_aggregation_are_refused_with_privacy(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match="is not private: one client may change its result by more"):
        server_of(tmp_path, aggregation_method=method)


def test_p14_noise_without_a_plan_or_without_noise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="noise promises nothing"):
        FederatedParameterServer({"w": np.zeros(2)}, differential_privacy=True)
    with pytest.raises(ConfigError, match="noise promises nothing"):
        FederatedParameterServer({"w": np.zeros(2)}, privacy=plan_of(tmp_path))
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=f"noise_scale={scale} must be above 0: without noise nothing is private"):
            server_of(tmp_path, noise_scale=scale)
        with pytest.raises(ConfigError, match=f"noise_multiplier={scale} must be above 0"):
            epsilon_after(scale, 1, 1e-5)


@pytest.mark.parametrize("scale", [math.inf, 1e200])
def test_p14_noise_that_leaves_nothing_is_refused_for_that_reason(tmp_path: Path, scale: float) -> None:
    words = re.escape(f"={scale} must be at most 1.1e+09: more noise leaves nothing of the deltas")
    with pytest.raises(ConfigError, match=f"noise_scale{words}"):
        server_of(tmp_path, noise_scale=scale)
    with pytest.raises(ConfigError, match=f"noise_multiplier{words}"):
        releases_within(scale, 1.0, 1e-5)
    server_of(tmp_path, noise_scale=1e9).close()


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Balle and Wang 2018, theorem 8, solved for ε."""

    def excess(eps: float) -> float:
        tail = stats.norm.logcdf(-1 / (2 * sigma) - eps * sigma)
        return stats.norm.cdf(1 / (2 * sigma) - eps * sigma) - math.exp(eps + tail) - delta

    return float(optimize.brentq(excess, 0.0, 1e4, xtol=1e-12))


@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (1.0, 100), (4.0, 30), (0.7, 3)])
def test_epsilon_without_drawing_is_the_closed_form(z: float, rounds: int) -> None:
    assert epsilon_after(z, rounds, 1e-5) == pytest.approx(gaussian_epsilon(z / math.sqrt(rounds), 1e-5), rel=1e-6)


def test_the_known_figure() -> None:
    assert epsilon_after(1.0, 100, 1e-5) == pytest.approx(91.82, abs=0.01)


def test_epsilon_with_drawing_is_dp_accountings() -> None:
    import dp_accounting  # takes a second, which collecting the tests should not

    accountant = dp_accounting.rdp.RdpAccountant()
    for _ in range(3):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.1)), 20)
    found = epsilon_after(1.1, 60, 1e-5, 0.1)
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert found < epsilon_after(1.1, 60, 1e-5) / 5


def test_different_noise_adds_up() -> None:
    mixed = epsilon_of([Charge(1.0, 1.0, 2), Charge(2.0, 1.0, 4)], 1e-5)
    assert mixed == pytest.approx(epsilon_after(1.0, 3, 1e-5), rel=1e-9)  # 2 + 4 / 2² = 3
    assert epsilon_of([], 1e-5) == 0.0
    assert epsilon_of([Charge(1.0, 1.0, 2), Charge(2.0, 0.1, 4)], 1e-5) > epsilon_after(1.0, 2, 1e-5) * 0.9


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_planning(rate: float) -> None:
    rounds = releases_within(2.0, 8.0, 1e-5, rate)
    assert epsilon_after(2.0, rounds, 1e-5, rate) <= 8.0 < epsilon_after(2.0, rounds + 1, 1e-5, rate)
    z = noise_needed(50, 3.0, 1e-5, rate)
    assert epsilon_after(z, 50, 1e-5, rate) <= 3.0 < epsilon_after(z - 0.001, 50, 1e-5, rate)
    assert releases_within(0.01, 0.1, 1e-5, rate) == 0


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # of dp-accounting, where ε is very large or 0
def test_planning_for_millions_of_releases() -> None:
    """Twice as many are tried each time, up to ten million: what is more is not counted, and never given as a count."""
    rounds = releases_within(1800.0, 8.0, 1e-5)
    assert 2**23 < rounds < 10_000_000
    assert epsilon_after(1800.0, rounds, 1e-5) <= 8.0 < epsilon_after(1800.0, rounds + 1, 1e-5)
    for noise in (1900.0, 1e6):
        assert epsilon_after(noise, 10_000_000, 1e-5) <= 8.0
        with pytest.raises(
            UsageError, match=r"10,000,000 releases or more stay within epsilon=8 .*: choose less noise"
        ):
            releases_within(noise, 8.0, 1e-5)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # of dp-accounting, where ε is very large or 0
def test_where_no_noise_is_enough_planning_says_so() -> None:
    with pytest.raises(UsageError, match=r"no noise brings 10{24} releases within epsilon=1"):
        noise_needed(10**24, 1.0, 1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"delta": 1.0},
        {"expected_clients": 0},
        {"clip_norm": 0.0},
        {"sampling_rate": 1.5},
    ],
)
def test_plans_that_promise_nothing_are_refused(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(ConfigError):
        plan_of(tmp_path, **settings)


CRASHING = """
import os, sys
from pathlib import Path
from steppe.params.privacy import PrivacyLedger, PrivacyPlan
ledger = PrivacyLedger(Path(sys.argv[1]))
plan = PrivacyPlan(sys.argv[1], epsilon=1e9, expected_clients=1)
while True:
    number = ledger.charge(1.0, 1.0, plan)
    os.write(1, b"%d\\n" % number)  # the release
    ledger.mark_released(number)
"""


def test_killed_at_any_moment_the_ledger_never_counts_less_than_was_released(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    released = 0
    for rounds in (2, 7):
        process = subprocess.Popen([sys.executable, "-c", CRASHING, str(path)], stdout=subprocess.PIPE, text=True)
        for _ in range(rounds):
            released = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        printed = process.communicate()[0].split()
        released = int(printed[-1]) if printed else released
        ledger = PrivacyLedger(path)  # the lock went with the process
        assert released <= ledger.count <= released + 1
        assert ledger.released in (ledger.count, ledger.count - 1, ledger.count - 2)
        ledger.close()


def test_plans_and_charges_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        plan_of(tmp_path).epsilon = 2.0
    with pytest.raises(AttributeError):
        Charge(1.0, 1.0, 1).releases = 2


def test_a_new_ledger_has_released_nothing(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path / "ledger.json")
    try:
        assert (ledger.count, ledger.released, ledger.charges) == (0, 0, [])
        ledger.require(0)
    finally:
        ledger.close()


def test_equal_releases_are_one_charge(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path / "ledger.json")
    plan = plan_of(tmp_path)
    try:
        assert [ledger.charge(z, rate, plan) for z, rate in [(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (2.0, 0.5), (2.0, 0.5)]] == [
            1, 2, 3, 4, 5,
        ]  # fmt: skip
        assert ledger.charges == [Charge(1.0, 1.0, 2), Charge(2.0, 1.0, 1), Charge(2.0, 0.5, 2)]
    finally:
        ledger.close()


@pytest.mark.parametrize(("releases", "epsilon"), [(1, 100.0), (1, 4.0), (3, 1.0)])
def test_the_noise_needed_is_the_least_to_a_thousandth(releases: int, epsilon: float) -> None:
    """Against the closed form: a thousandth less would exceed epsilon."""
    found = noise_needed(releases, epsilon, 1e-5)
    thousandths = round(found * 1000)
    assert found * 1000 == pytest.approx(thousandths)
    assert gaussian_epsilon(thousandths / 1000 / math.sqrt(releases), 1e-5) <= epsilon * (1 + 1e-9)
    assert gaussian_epsilon((thousandths - 1) / 1000 / math.sqrt(releases), 1e-5) > epsilon


def test_a_rate_of_1_draws_everybody_without_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("nothing is left to chance")

    private = PrivateSum(plan_of(tmp_path), 1.0)
    monkeypatch.setattr(privacy.secrets, "SystemRandom", refuse)
    try:
        assert private.draw(["a", "b"]) == {"a", "b"}
    finally:
        private.ledger.close()

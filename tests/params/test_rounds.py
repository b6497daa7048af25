"""Rounds by themselves, without a server: which settings fit together, which pushes count, how rows are kept."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.params import rounds as module
from steppe.params.rounds import PendingPushes, Receipt, Rounds, WorkerAccount, WorkerRegistry, check_round

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"damping": 0.5},
        {"max_staleness": 0},
        {"damping": 0.5, "max_staleness": 1},
        {"synchronous": True},
        {"synchronous": True, "quorum": 2},
        {"synchronous": True, "deadline_s": 0.5},
        {"synchronous": True, "quorum": 3, "deadline_s": 2.0},
    ],
)
def test_compatible_settings_are_accepted(settings):
    rounds = Rounds(**settings)
    defaults = {"synchronous": False, "quorum": 1, "deadline_s": None, "damping": 0.0, "max_staleness": None}
    assert {name: getattr(rounds, name) for name in defaults} == {**defaults, **settings}
    with pytest.raises(AttributeError):
        rounds.quorum = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"synchronous": True, "quorum": 0}, "quorum of at least 1"),
        ({"synchronous": True, "deadline_s": 0.0}, "deadline_s above 0"),
        ({"synchronous": True, "deadline_s": -1.0}, "deadline_s above 0"),
        ({"synchronous": True, "deadline_s": math.nan}, "deadline_s above 0"),
        ({"damping": -0.5}, "at least 0"),
        ({"damping": math.nan}, "at least 0"),
        ({"max_staleness": -1}, "at least 0"),
        ({"synchronous": True, "damping": 0.5}, "none is old"),
        ({"synchronous": True, "max_staleness": 0}, "none is old"),
        ({"quorum": 2}, "synchronous=True"),
        ({"deadline_s": 0.5}, "synchronous=True"),
    ],
)
def test_incompatible_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        Rounds(**settings)


def test_a_receipt_is_true_when_the_push_counts():
    assert Receipt(True, 3, 4)
    assert not Receipt(False, 3, 4, "stale_round", "round 2 is over")
    with pytest.raises(AttributeError):
        Receipt(True, 3, 4).accepted = False  # type: ignore[misc]
    assert WorkerAccount() == WorkerAccount(last=-1, version=0, accepted=0, refused={})


def test_a_roster_registers_once_and_accounts_stay():
    roster = WorkerRegistry()
    assert roster.add("a", 3)
    assert not roster.add("a", 9), "it is registered already"
    assert roster.account("a") == WorkerAccount(version=3)
    roster.account("a").accepted = 2
    roster.registered.discard("a")
    with pytest.raises(UsageError, match="register_worker"):
        roster.account("a")
    assert roster.add("a", 7)
    assert roster.account("a") == WorkerAccount(version=7, accepted=2)


@pytest.mark.parametrize(
    ("name", "fits"), [("", False), ("x", True), ("x" * 128, True), ("x" * 129, False), ("\n", False)]
)
def test_worker_names_are_validated(name, fits):
    if fits:
        assert WorkerRegistry().add(name, 0)
    else:
        with pytest.raises(UsageError, match="1 to 128 printable"):
            WorkerRegistry().add(name, 0)


def test_the_number_of_workers_is_limited(monkeypatch):
    assert (module.MAX_WORKERS, module.MAX_NAME) == (65_536, 128)
    monkeypatch.setattr(module, "MAX_WORKERS", 2)
    roster = WorkerRegistry()
    assert roster.add("a", 0)
    assert roster.add("b", 0)
    with pytest.raises(UsageError, match="2 workers"):
        roster.add("c", 0)
    roster.registered.clear()
    assert roster.add("a", 1), "one that is known comes back"


def test_refusals_are_counted_and_everything_is_restored():
    roster = WorkerRegistry()
    roster.add("b", 1)
    roster.add("a", 2)
    for worker, reason in (("a", "late"), ("a", "late"), ("a", "wrong"), ("stranger", "late")):
        roster.refuse(worker, reason)
    assert roster.refused == {"late": 3, "wrong": 1}
    assert roster.accounts["a"].refused == {"late": 2, "wrong": 1}
    assert roster.accounts["b"].refused == {}
    assert "stranger" not in roster.accounts
    roster.registered.discard("b")
    state = msgspec.json.decode(msgspec.json.encode(roster.state()))
    again = WorkerRegistry()
    again.load(state)
    assert (again.registered, again.accounts, again.refused) == ({"a"}, roster.accounts, roster.refused)
    again.refuse("a", "late")
    assert roster.refused == {"late": 3, "wrong": 1}, "nothing is shared with the state"


def test_rows_stay_while_the_array_grows_by_doubling():
    pending = PendingPushes(2)
    assert (len(pending), pending.rows.shape, pending.opened_at) == (0, (0, 2), None)
    expected, capacities = [], []
    for number in range(9):
        row = pending.blank()
        capacities.append(len(row.base))
        assert row.dtype == np.float32
        row[:] = (number, -number)
        expected.append((number, -number))
        pending.add(f"w{number}", number / 2, now=10.0 + number)
        np.testing.assert_array_equal(pending.rows, expected)
    assert capacities == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert pending.opened_at == 10.0, "the first push opens the round"
    assert pending.weights == [number / 2 for number in range(9)]
    pending.clear()
    assert (len(pending), pending.weights, pending.opened_at, pending.rows.shape) == (0, [], None, (0, 2))
    assert len(pending.blank().base) == 16, "the array is used again"


def test_a_blank_that_was_not_added_counts_for_nothing():
    pending = PendingPushes(1)
    pending.blank()[:] = 5.0
    assert len(pending.rows) == 0
    pending.blank()[:] = 6.0
    pending.add("a", 1.0, now=0.0)
    np.testing.assert_array_equal(pending.rows, [[6.0]])
    assert pending.opened_at == 0.0
    pending.add("b", 1.0, now=3.0)
    assert pending.opened_at == 0.0


def test_a_row_may_be_lent_until_the_round_is_over():
    pending, row = PendingPushes(3), np.arange(3, dtype=np.float32)
    pending.use_row_in_place(row)
    pending.add("a", 2.0, now=1.0)
    assert np.shares_memory(pending.rows, row)
    np.testing.assert_array_equal(pending.rows, [[0, 1, 2]])
    pending.clear()
    assert pending.rows.shape == (0, 3)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_partial_round_is_restored(count):
    pending = PendingPushes(2)
    for number in range(count):
        pending.blank()[:] = (number, number + 0.5)
        pending.add(f"w{number}", 1.0 + number, now=float(number))
    again = PendingPushes(2)
    again.load(pending.state(), now=77.0)
    np.testing.assert_array_equal(again.rows, pending.rows)
    assert (again.workers, again.weights) == (pending.workers, pending.weights)
    assert again.opened_at == (77.0 if count else None), "its deadline counts from now on"
    again.blank()[:] = 9.0
    again.add("late", 1.0, now=80.0)
    assert again.rows.shape == (count + 1, 2)


@pytest.mark.parametrize(
    ("last", "given", "reason"),
    [(4, None, None), (4, 5, None), (4, 6, "future_round"), (4, 4, "stale_round"), (3, 3, "stale_round"),
     (5, None, "pushed_twice"), (5, 5, "pushed_twice"), (-1, 5, None), (5, 6, "future_round")],
)  # fmt: skip
def test_a_synchronous_push_is_for_the_current_round_once(last, given, reason):
    found = check_round(WorkerAccount(last=last), Rounds(synchronous=True), 5, given)
    assert (None if found is None else found.reason) == reason


@pytest.mark.parametrize(
    ("last", "given", "reason"),
    [(-1, None, None), (-1, 0, None), (4, None, None), (4, 5, None), (4, 9, None), (4, 4, "pushed_twice"),
     (4, 3, "stale_round"), (4, 0, "stale_round")],
)  # fmt: skip
def test_an_asynchronous_push_has_a_number_above_the_last(last, given, reason):
    found = check_round(WorkerAccount(last=last), Rounds(), 5, given)
    assert (None if found is None else found.reason) == reason

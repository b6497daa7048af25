"""control/operations.py: a live process without heartbeats may only lack CPU time, so the deadline of an operation decides."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from steppe.control import operations
from steppe.control.database import new_operation
from steppe.core.config.run import resolve_config
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.records import store as stores
from steppe.records.run_directory import RunDirectory
from steppe.records.store import LOST_AFTER_S

pytestmark = pytest.mark.unit


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(s=1e9)
    for module in (operations, stores):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: found.s))
    return found


@pytest.fixture
def run(tmp_path, clock):
    resolved = resolve_config(("call", {"env": "CartPole-v1", "run_dir": str(tmp_path / "run")}))
    directory = RunDirectory.create(resolved.config, resolved.sources)
    for path in directory.path.iterdir():  # the service takes their modification times for heartbeats
        os.utime(path, (0, 0))
    yield directory
    directory.release()


def pending_operation(kind, clock, **details):
    return new_operation(kind, "run", "test", **details) | {"created_s": clock.s}


def stop_heartbeats(run, clock, state):
    run.store.set_status(state)
    os.utime(run.store.path, (0, 0))
    clock.s += LOST_AFTER_S + 1
    assert (run.store.status().state, run.store.status().reason) == ("LOST", "heartbeat_expired")


@pytest.mark.parametrize(("kind", "details"), [("start", {}), ("pause", {}), ("set", {}), ("scale", {"actors": 2})])
def test_an_operation_on_a_run_without_heartbeats_fails_at_its_deadline(run, clock, kind, details):
    record = pending_operation(kind, clock, deadline_s=100.0, **details)
    stop_heartbeats(run, clock, "STARTING" if kind == "start" else "RUNNING")
    assert operations.refresh_operation(record, run)["state"] == "pending"
    clock.s += 100.0
    found = operations.refresh_operation(record, run)
    assert (found["state"], found["message"]) == ("failed", "not confirmed within 100 s")


def test_an_operation_succeeds_if_the_run_reports_again(run, clock):
    start = pending_operation("start", clock, deadline_s=100.0)
    stop_heartbeats(run, clock, "STARTING")
    run.store.set_status("RUNNING")
    assert operations.refresh_operation(start, run)["state"] == "succeeded"
    record = pending_operation("pause", clock)
    number = run.store.post(COMMANDS, {"command": "pause", "id": record["id"]})
    record["details"]["number"] = 0
    run.store.set_status("PAUSED")
    answer = {"command": "pause", "id": record["id"], "obeyed": True}
    run.store.post(EVENTS, EventReport(run="run", kind="command", role="learner", details=answer).record())
    assert number
    assert operations.refresh_operation(record, run)["state"] == "succeeded"


def test_an_operation_fails_at_once_if_the_process_is_dead(run, clock, monkeypatch):
    record = pending_operation("start", clock, deadline_s=100.0)
    run.store.set_status("STARTING")
    monkeypatch.setattr(stores, "process_start", lambda pid: None)
    found = operations.refresh_operation(record, run)
    assert found["state"] == "failed"
    assert "ended without saying why" in found["message"]

"""control/operations.py: a run whose process is alive but silent may only be short of processor time, so the deadline decides."""

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
    for path in directory.path.iterdir():  # their times count as signs of life
        os.utime(path, (0, 0))
    yield directory
    directory.release()


def begun(kind, clock, **details):
    return new_operation(kind, "run", "test", **details) | {"created_s": clock.s}


def silent(run, clock, state):
    run.store.set_status(state)
    os.utime(run.store.path, (0, 0))
    clock.s += LOST_AFTER_S + 1
    assert (run.store.status().state, run.store.status().reason) == ("LOST", "heartbeat_expired")


@pytest.mark.parametrize(("kind", "details"), [("start", {}), ("pause", {}), ("set", {}), ("scale", {"actors": 2})])
def test_an_operation_on_a_silent_run_waits_for_its_deadline(run, clock, kind, details):
    record = begun(kind, clock, deadline_s=100.0, **details)
    silent(run, clock, "STARTING" if kind == "start" else "RUNNING")
    assert operations.refresh_operation(record, run)["state"] == "pending"
    clock.s += 100.0
    found = operations.refresh_operation(record, run)
    assert (found["state"], found["message"]) == ("failed", "nobody has carried it out within 100 s")


def test_one_that_is_heard_of_again_succeeds(run, clock):
    start = begun("start", clock, deadline_s=100.0)
    silent(run, clock, "STARTING")
    run.store.set_status("RUNNING")
    assert operations.refresh_operation(start, run)["state"] == "succeeded"
    record = begun("pause", clock)
    number = run.store.post(COMMANDS, {"command": "pause", "id": record["id"]})
    record["details"]["number"] = 0
    run.store.set_status("PAUSED")
    answer = {"command": "pause", "id": record["id"], "obeyed": True}
    run.store.post(EVENTS, EventReport(run="run", kind="command", role="learner", details=answer).record())
    assert number
    assert operations.refresh_operation(record, run)["state"] == "succeeded"


def test_a_process_that_is_gone_fails_it_at_once(run, clock, monkeypatch):
    record = begun("start", clock, deadline_s=100.0)
    run.store.set_status("STARTING")
    monkeypatch.setattr(stores, "process_start", lambda pid: None)
    found = operations.refresh_operation(record, run)
    assert found["state"] == "failed"
    assert "ended without saying why" in found["message"]

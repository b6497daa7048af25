"""Determine whether an operation is finished from the run's own store, independent of the caller and the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from steppe.control import process_host
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVENTS, SCALE, SET
from steppe.records.run_directory import RunDirectory
from steppe.records.store import HEARTBEAT_EXPIRED, LOST, PAUSED, PENDING, RUNNING, STOPPED, SUCCEEDED, Status
from steppe.records.view import ENDED

Record = dict[str, Any]
_RECENT_REPORTS = 2_000  # enough records to cover more than READY_S of reports
DEADLINE_S = 60.0  # default time limit of an operation
READY_S = 6.0  # an actor whose last report is at most this old is ready


def refresh_operation(record: Record, run: RunDirectory) -> Record:
    """Return the operation in its current state."""
    status = run.store.status()
    outcome = _OUTCOME_CHECKS.get(record["kind"], _acknowledged_outcome)(record, run, status)
    no_deadline = record["kind"] == SET and status.state == PAUSED  # paused workers apply values with the next weights
    deadline_s = record["details"].get("deadline_s", DEADLINE_S)
    if outcome is None and not no_deadline and time.time() - record["created_s"] > deadline_s:
        if record["kind"] in ("stop", "kill"):
            return _kill_overdue(record, status)
        outcome = "failed", f"not confirmed within {deadline_s:g} s"
    if outcome is None:
        return record
    state, message = outcome
    return record | {"state": state, "message": message, "finished_s": time.time()}


OperationOutcome = tuple[str, str | None] | None


def _start_outcome(record: Record, run: RunDirectory, status: Status) -> OperationOutcome:
    if status.state in (RUNNING, PAUSED, SUCCEEDED, STOPPED):
        return "succeeded", None
    return ("failed", status.message or status.reason) if _has_ended(status) else None


def _stop_outcome(record: Record, run: RunDirectory, status: Status) -> OperationOutcome:
    if status.state not in ENDED:
        return None
    if record["details"].get("escalated") or record["kind"] == "kill":
        if status.state == LOST:
            run.store.set_status(STOPPED, "killed", f"killed by {record['issuer']}")
            process_host.remove_stale_shared_memory()
        return "succeeded", "the run did not stop in time and was killed" if record["kind"] == "stop" else None
    return "succeeded", None


def _pause_outcome(record: Record, run: RunDirectory, status: Status) -> OperationOutcome:
    requested = PAUSED if record["kind"] == "pause" else RUNNING
    if status.state == requested:
        return _acknowledged_outcome(record, run, status)
    return _ended_outcome(status)


def _scale_outcome(record: Record, run: RunDirectory, status: Status) -> OperationOutcome:
    acknowledged = _acknowledged_outcome(record, run, status)
    if acknowledged is None or acknowledged[0] == "failed":
        return acknowledged
    later = run.store.read(COMMANDS, record["details"].get("number", 0))
    if any(command.get("command") == SCALE for _, command in later):
        return "failed", "another number was requested before this one was reached"
    if _has_ended(status):
        return _ended_outcome(status)
    ready = ready_actors(run)
    return ("succeeded", None) if ready == record["details"]["actors"] else None


def _acknowledged_outcome(record: Record, run: RunDirectory, status: Status) -> OperationOutcome:
    """Return the outcome that the executor of the command reported, or that follows from the run's end."""
    for _, event in run.store.read(EVENTS, record["details"].get("number", 0)):
        details = event.get("details", {})
        if event.get("kind") == "command" and details.get("id") == record["id"]:
            if not details.get("obeyed"):
                return "failed", details.get("message") or "the run refused the command"
            return "succeeded", _set_message(details)
    if record["kind"] == SET and (_has_ended(status) or status.state == PENDING):
        return "succeeded", "takes effect on restart"
    return _ended_outcome(status)


def _set_message(details: Record) -> str | None:
    if details.get("command") != SET:
        return None
    later = sorted(set(details.get("values", ())) - set(details.get("live", ())))
    if not details.get("live"):
        return "takes effect on restart"
    rest = f"; {', '.join(later)} on restart" if later else ""
    return f"in effect from version {details.get('version')}{rest}"


def _ended_outcome(status: Status) -> OperationOutcome:
    return ("failed", f"the run ended first: {status.state}") if _has_ended(status) else None


def _has_ended(status: Status) -> bool:
    """Return whether the run is over. A process without heartbeats may only lack CPU time: the deadline decides."""
    return status.state in ENDED and status.reason != HEARTBEAT_EXPIRED


def _kill_overdue(record: Record, status: Status) -> Record:
    """Kill a run that did not stop in time; the next refresh finds it ended."""
    process_host.kill_run_processes(status)
    return record | {"details": record["details"] | {"escalated": True}}


def ready_actors(run: RunDirectory) -> int:
    """Return the number of actors that report to be running."""
    newest: dict[int, tuple[str, float]] = {}
    after = max(0, run.store.newest(ACTORS) - _RECENT_REPORTS)
    for _, report in run.store.read(ACTORS, after):
        newest[report["actor"]] = (report.get("state", "running"), report["time_s"])
    bound = time.time() - READY_S
    return sum(state == "running" and time_s > bound for state, time_s in newest.values())


_OUTCOME_CHECKS: dict[str, Callable[[Record, RunDirectory, Status], OperationOutcome]] = {
    "start": _start_outcome,
    "stop": _stop_outcome,
    "kill": _stop_outcome,
    "pause": _pause_outcome,
    "resume": _pause_outcome,
    SCALE: _scale_outcome,
}

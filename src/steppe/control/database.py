"""The service's own persistent state: operations, desired states, answers to repeated requests, the audit log.

One SQLite file in the directory of the runs, which several services may share. The state of runs is not in it, but in
their own stores.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from steppe.control.pagination import STALE_CURSOR
from steppe.core.contracts.errors import Conflict, UsageError

KEEP_S = 7 * 86_400.0  # retention of answers, finished operations and audit entries
_TABLES = """
CREATE TABLE IF NOT EXISTS operations (
    id TEXT PRIMARY KEY, run TEXT NOT NULL, pending INTEGER NOT NULL, created_s REAL NOT NULL, record TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS operations_by_run ON operations (run, created_s);
CREATE INDEX IF NOT EXISTS operations_pending ON operations (pending);
CREATE TABLE IF NOT EXISTS wishes (run TEXT PRIMARY KEY, desired TEXT NOT NULL, generation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, request TEXT NOT NULL, answer TEXT, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT, time_s REAL NOT NULL, who TEXT NOT NULL, scope TEXT NOT NULL,
    operation TEXT NOT NULL, run TEXT, outcome TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS dues (
    id TEXT PRIMARY KEY, operation TEXT NOT NULL, run TEXT NOT NULL, command TEXT NOT NULL, waits INTEGER NOT NULL);
"""


class Stale(Conflict):
    """The run has changed since the caller read it."""


class KeyReused(UsageError):
    """An idempotency key was used again with another request."""


class RequestedState(NamedTuple):
    """What was requested of a run: the desired state, if any, its generation, and the newest operation."""

    desired: str | None = None
    generation: int = 1
    operation: str | None = None


class PendingAnswer(NamedTuple):
    """A command on Kafka without an answer yet, and the operation that shows its outcome."""

    id: str
    operation: str
    run: str
    command: dict[str, Any]
    waits: bool = False  # whether it must still be published, once a broker answers


class ControlDatabase:
    """Thread-safe; every write is on disk when the call returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / "control.sqlite"
        with contextlib.suppress(
            FileExistsError
        ):  # mknod instead of open: closing the file would drop this process's SQLite locks on it
            os.mknod(path, stat.S_IFREG | 0o600)
        self._lock = threading.RLock()
        self._database = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.executescript(_TABLES)
        self.forget(time.time() - KEEP_S)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def forget(self, before_s: float) -> None:
        """Delete older entries, except pending operations."""
        self._run("DELETE FROM operations WHERE pending = 0 AND created_s < ?", before_s)
        self._run("DELETE FROM answers WHERE created_s < ?", before_s)
        self._run("DELETE FROM audit WHERE time_s < ?", before_s)

    def save_operation(self, record: dict[str, Any]) -> None:
        """Store the current state of an operation."""
        values = (record["id"], record["run"], record["state"] == "pending", record["created_s"], json.dumps(record))
        self._run("INSERT OR REPLACE INTO operations VALUES (?, ?, ?, ?, ?)", *values)

    def operation(self, identity: str) -> dict[str, Any] | None:
        rows = self._run("SELECT record FROM operations WHERE id = ?", identity)
        return json.loads(rows[0][0]) if rows else None

    def operations(
        self, run: str | None = None, *, pending: bool = False, limit: int = 100, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Return operations of one run or of all, newest first, after the operation with the id `after`.

        Raises UsageError if there is no operation with that id.
        """
        before: tuple[float, str] = (float("inf"), "")
        if after is not None:
            rows = self._run("SELECT created_s, id FROM operations WHERE id = ?", after)
            if not rows:
                raise UsageError(STALE_CURSOR)
            before = (rows[0][0], rows[0][1])
        where = "(? IS NULL OR run = ?) AND (? = 0 OR pending = 1) AND (created_s, id) < (?, ?)"
        query = f"SELECT record FROM operations WHERE {where} ORDER BY created_s DESC, id DESC LIMIT ?"
        return [json.loads(text) for (text,) in self._run(query, run, run, int(pending), *before, limit)]

    def desired_state(self, run: str) -> tuple[str | None, int]:
        """Return the desired state, if one was requested, and the run's generation."""
        rows = self._run("SELECT desired, generation FROM wishes WHERE run = ?", run)
        return (rows[0][0] or None, rows[0][1]) if rows else (None, 1)

    def requested_states(self) -> dict[str, RequestedState]:
        """Return the requested state of every run that received a request."""
        desired_states = {row[0]: row[1:] for row in self._run("SELECT run, desired, generation FROM wishes")}
        newest = dict(self._run("SELECT run, id FROM (SELECT run, id, MAX(created_s) FROM operations GROUP BY run)"))
        known = ((run, *desired_states.get(run, ("", 1))) for run in {*desired_states, *newest})
        return {run: RequestedState(desired or None, generation, newest.get(run)) for run, desired, generation in known}

    def require(self, run: str, expected: int | None) -> None:
        """Raise Stale unless the run's generation is `expected`, if that is given."""
        _, generation = self.desired_state(run)
        if expected is not None and expected != generation:
            raise Stale(f"{run} is at generation {generation}, not {expected}: read it again before changing it")

    def change(self, run: str, desired: str | None, expected: int | None) -> int:
        """Accept a change and return the next generation; raises Stale unless the run's generation is `expected`."""
        with self._transaction():
            self.require(run, expected)
            before, generation = self.desired_state(run)
            values = (run, desired or before or "", generation + 1)
            self._run("INSERT OR REPLACE INTO wishes VALUES (?, ?, ?)", *values)
            return generation + 1

    def delete_run_records(self, run: str) -> None:
        self._run("DELETE FROM wishes WHERE run = ?", run)
        self._run("DELETE FROM operations WHERE run = ?", run)
        self._run("DELETE FROM dues WHERE run = ?", run)

    def save_pending_answer(self, due: PendingAnswer) -> None:
        """Store that a command must be answered on Kafka."""
        values = (due.id, due.operation, due.run, json.dumps(due.command), due.waits)
        self._run("INSERT OR REPLACE INTO dues VALUES (?, ?, ?, ?, ?)", *values)

    def delete_pending_answer(self, identity: str) -> None:
        """Delete a pending answer: it was sent, or the command was never published."""
        self._run("DELETE FROM dues WHERE id = ?", identity)

    def pending_answers(self) -> list[PendingAnswer]:
        """Return the commands that must still be answered, oldest first."""
        rows = self._run("SELECT id, operation, run, command, waits FROM dues ORDER BY rowid")
        return [PendingAnswer(row[0], row[1], row[2], json.loads(row[3]), bool(row[4])) for row in rows]

    def claim_idempotency_key(self, key: str, request: str) -> dict[str, Any] | None:
        """Return the answer that this request got before; None if the caller must execute it now."""
        with self._transaction():
            rows = self._run("SELECT request, answer FROM answers WHERE key = ?", key)
            if not rows:
                self._run("INSERT INTO answers VALUES (?, ?, NULL, ?)", key, request, time.time())
                return None
            if rows[0][0] != request:
                raise KeyReused("this Idempotency-Key was used with another request: use a new one")
            if rows[0][1] is None:
                raise Conflict("the same request is in progress: repeat it later to get its response")
            answer: dict[str, Any] = json.loads(rows[0][1])
            return answer

    def save_answer(self, key: str, answer: dict[str, Any] | None) -> None:
        """Store the answer of a request; with None it was not executed and may be repeated."""
        if answer is None:
            self._run("DELETE FROM answers WHERE key = ?", key)
        else:
            self._run("UPDATE answers SET answer = ? WHERE key = ?", json.dumps(answer), key)

    def delete_unfinished_answers(self) -> None:
        """Call at the start of a service: requests that its predecessor did not finish may be repeated."""
        self._run("DELETE FROM answers WHERE answer IS NULL")

    def audit(self, who: str, scope: str, operation: str, run: str | None, outcome: str) -> None:
        """Add an entry to the audit log."""
        query = "INSERT INTO audit (time_s, who, scope, operation, run, outcome) VALUES (?, ?, ?, ?, ?, ?)"
        self._run(query, time.time(), who, scope, operation, run, outcome[:500])

    def audit_entries(self, limit: int, after: str | None = None) -> list[dict[str, Any]]:
        """Return entries, newest first, after the entry with the number `after`."""
        if after is not None and not (after.isdigit() and len(after) < 19):
            raise UsageError(STALE_CURSOR)
        names = ("number", "time_s", "who", "scope", "operation", "run", "outcome")
        query = f"SELECT {', '.join(names)} FROM audit WHERE number < ? ORDER BY number DESC LIMIT ?"
        rows = self._run(query, int(after) if after is not None else 2**62, limit)
        return [dict(zip(names, row, strict=True)) for row in rows]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """Read and write atomically, also against other processes (`steppe mcp` in parallel with `steppe serve`)."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                self._database.execute("COMMIT")  # also after an error, which has written nothing

    def _run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(query, values).fetchall()


def new_operation(kind: str, run: str, issuer: str, *, settled_by: str = "run", **details: Any) -> dict[str, Any]:
    """Return the record of a new operation (models.Operation); `ControlDatabase.save_operation` stores it."""
    return {
        "id": uuid.uuid4().hex,
        "kind": kind,
        "run": run,
        "state": "pending",
        "message": None,
        "issuer": issuer,
        "created_s": time.time(),
        "finished_s": None,
        "settled_by": settled_by,
        "details": details,
    }

"""What the service itself has to remember over its own death: operations, wishes, answers to repeated requests, the audit.

One SQLite file beside the runs, which several services may share. What runs are and do is not in it: that is in their own stores.
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

KEEP_S = 7 * 86_400.0  # how long answers, finished operations and audit entries are kept
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
    """The run has changed since the caller looked at it."""


class KeyReused(UsageError):
    """An idempotency key came again with another request."""


class RequestedState(NamedTuple):
    """What was asked of a run: the desired state, if anybody wanted one, its generation, and the newest operation."""

    desired: str | None = None
    generation: int = 1
    operation: str | None = None


class PendingAnswer(NamedTuple):
    """A command on Kafka that was not answered there yet, and the operation that shows what comes of it."""

    id: str
    operation: str
    run: str
    command: dict[str, Any]
    waits: bool = False  # whether it is still to be published, when a broker answers


class ControlDatabase:
    """May be used by several threads; every write is on the disk when it returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / "control.sqlite"
        with contextlib.suppress(
            FileExistsError
        ):  # not opened: closing it would drop locks that this process holds on it
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
        """Drop what is older, but nothing that is still under way."""
        self._run("DELETE FROM operations WHERE pending = 0 AND created_s < ?", before_s)
        self._run("DELETE FROM answers WHERE created_s < ?", before_s)
        self._run("DELETE FROM audit WHERE time_s < ?", before_s)

    def save_operation(self, record: dict[str, Any]) -> None:
        """Write down what has become of an operation."""
        values = (record["id"], record["run"], record["state"] == "pending", record["created_s"], json.dumps(record))
        self._run("INSERT OR REPLACE INTO operations VALUES (?, ?, ?, ?, ?)", *values)

    def operation(self, identity: str) -> dict[str, Any] | None:
        rows = self._run("SELECT record FROM operations WHERE id = ?", identity)
        return json.loads(rows[0][0]) if rows else None

    def operations(
        self, run: str | None = None, *, pending: bool = False, limit: int = 100, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Newest first, of one run or of all; after the operation of an id. UsageError when there is none of that id."""
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
        """The desired state, if anybody asked for one, and the run's generation."""
        rows = self._run("SELECT desired, generation FROM wishes WHERE run = ?", run)
        return (rows[0][0] or None, rows[0][1]) if rows else (None, 1)

    def asked(self) -> dict[str, RequestedState]:
        """Of every run that anything was asked of."""
        wishes = {row[0]: row[1:] for row in self._run("SELECT run, desired, generation FROM wishes")}
        newest = dict(self._run("SELECT run, id FROM (SELECT run, id, MAX(created_s) FROM operations GROUP BY run)"))
        known = ((run, *wishes.get(run, ("", 1))) for run in {*wishes, *newest})
        return {run: RequestedState(desired or None, generation, newest.get(run)) for run, desired, generation in known}

    def require(self, run: str, expected: int | None) -> None:
        """Stale unless the run's generation is the `expected` one, if one is."""
        _, generation = self.desired_state(run)
        if expected is not None and expected != generation:
            raise Stale(f"{run} is at generation {generation}, not {expected}: look at it again before changing it")

    def change(self, run: str, desired: str | None, expected: int | None) -> int:
        """Accept a change: the next generation, if the run's is the `expected` one; Stale otherwise."""
        with self._alone():
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
        """Write down that a command is to be answered on Kafka."""
        values = (due.id, due.operation, due.run, json.dumps(due.command), due.waits)
        self._run("INSERT OR REPLACE INTO dues VALUES (?, ?, ?, ?, ?)", *values)

    def delete_pending_answer(self, identity: str) -> None:
        """A command was answered, or none is on Kafka."""
        self._run("DELETE FROM dues WHERE id = ?", identity)

    def pending_answers(self) -> list[PendingAnswer]:
        """The commands that are still to be answered, oldest first."""
        rows = self._run("SELECT id, operation, run, command, waits FROM dues ORDER BY rowid")
        return [PendingAnswer(row[0], row[1], row[2], json.loads(row[3]), bool(row[4])) for row in rows]

    def claim_idempotency_key(self, key: str, request: str) -> dict[str, Any] | None:
        """The answer that this request got before; None when it is to be carried out now."""
        with self._alone():
            rows = self._run("SELECT request, answer FROM answers WHERE key = ?", key)
            if not rows:
                self._run("INSERT INTO answers VALUES (?, ?, NULL, ?)", key, request, time.time())
                return None
            if rows[0][0] != request:
                raise KeyReused("this Idempotency-Key came before with another request: use a new one")
            if rows[0][1] is None:
                raise Conflict("the same request is being carried out just now: ask again for its answer")
            answer: dict[str, Any] = json.loads(rows[0][1])
            return answer

    def save_answer(self, key: str, answer: dict[str, Any] | None) -> None:
        """What the request got; with None it was not carried out and may come again."""
        if answer is None:
            self._run("DELETE FROM answers WHERE key = ?", key)
        else:
            self._run("UPDATE answers SET answer = ? WHERE key = ?", json.dumps(answer), key)

    def delete_unfinished_answers(self) -> None:
        """At the start of a service: what its predecessor was doing when it died may be asked for again."""
        self._run("DELETE FROM answers WHERE answer IS NULL")

    def audit(self, who: str, scope: str, operation: str, run: str | None, outcome: str) -> None:
        """Write down who did what."""
        query = "INSERT INTO audit (time_s, who, scope, operation, run, outcome) VALUES (?, ?, ?, ?, ?, ?)"
        self._run(query, time.time(), who, scope, operation, run, outcome[:500])

    def audit_entries(self, limit: int, after: str | None = None) -> list[dict[str, Any]]:
        """Newest first, after the entry of a number."""
        if after is not None and not (after.isdigit() and len(after) < 19):
            raise UsageError(STALE_CURSOR)
        names = ("number", "time_s", "who", "scope", "operation", "run", "outcome")
        query = f"SELECT {', '.join(names)} FROM audit WHERE number < ? ORDER BY number DESC LIMIT ?"
        rows = self._run(query, int(after) if after is not None else 2**62, limit)
        return [dict(zip(names, row, strict=True)) for row in rows]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Read and write with nobody in between, not even another process (`steppe mcp` beside `steppe serve`)."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            finally:
                self._database.execute("COMMIT")  # also after a refusal, which has written nothing

    def _run(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(query, values).fetchall()


def new_operation(kind: str, run: str, issuer: str, *, settled_by: str = "run", **details: Any) -> dict[str, Any]:
    """The record of an operation that begins now (model.Operation); `Ledger.keep_operation` writes it down."""
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

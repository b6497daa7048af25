"""The run's SQLite store: a Board for any number of processes at once, and the run's status.

Write-ahead log with synchronous=NORMAL: a record survives the death of any process; a power failure may lose the newest
records but never the file (checkpoints have a stronger guarantee, in core/io/atomic_files.py). Records are JSON with
JSON5's words NaN, Infinity and -Infinity, so every number is read back unchanged. Every process and thread has its own
connection, also after a fork. A thread keeps the connections to the stores that it used last and closes the others, so
the number of file descriptors does not grow with the number of runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from steppe.core.contracts.errors import Conflict, DamagedFile, DiskFull, RunNotFound
from steppe.core.contracts.transport import EVENTS
from steppe.core.io.atomic_files import free_bytes

PENDING, STARTING, RUNNING, PAUSED, STOPPING = "PENDING", "STARTING", "RUNNING", "PAUSED", "STOPPING"
SUCCEEDED, FAILED, STOPPED, LOST = "SUCCEEDED", "FAILED", "STOPPED", "LOST"
LIVE = (STARTING, RUNNING, PAUSED, STOPPING)
STATES = (PENDING, *LIVE, SUCCEEDED, FAILED, STOPPED, LOST)
HEARTBEAT_S = 2.0
HEARTBEAT_EXPIRED = "heartbeat_expired"  # reason of a LOST run whose process is alive
LOST_AFTER_S = 3 * HEARTBEAT_S
SCHEMA = 1
NO_OWNER = 0  # the owner of a run that waits to be started
OPEN_PER_THREAD = 16  # stores that a thread keeps open; the least recently used one is closed
_BUSY_S = 30.0
_DISK_FULL_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)
_MIN_FREE_BYTES = 64 << 10  # with less free space, a file that cannot be opened is one that cannot be created
_TABLES = """
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_topic ON records (topic, number);
CREATE TABLE IF NOT EXISTS status (
    id INTEGER PRIMARY KEY CHECK (id = 1), state TEXT NOT NULL, reason TEXT, message TEXT,
    pid INTEGER NOT NULL, process_start INTEGER, heartbeat_s REAL NOT NULL, started_s REAL NOT NULL, changed_s REAL NOT NULL);
"""


@dataclass(frozen=True)
class Status:
    """The state of a run as a reader sees it now. Times are seconds since the epoch."""

    state: str = PENDING
    reason: str | None = None
    message: str | None = None
    pid: int | None = None
    heartbeat_s: float | None = None
    started_s: float | None = None
    changed_s: float | None = None

    @property
    def live(self) -> bool:
        """Whether a process is working on the run."""
        return self.state in LIVE


class RunStore:
    """One file, many writers and readers; a write takes tens of microseconds if the disk is not busy.

    On a full disk, writing raises DiskFull, and works again once there is free space.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        self.reference = weakref.ref(self)
        self._local = threading.local()
        self._heartbeat_s = 0.0  # this process's own last heartbeat, known without reading the disk
        if not create and not path.exists():
            raise RunNotFound(f"{path} is missing: this directory holds no run")
        with self._connection() as database:
            database.executescript(_TABLES)

    def post(self, topic: str, record: dict[str, Any]) -> int:
        """Append a record of plain values and return its number; numbers increase over all topics together."""
        text = json.dumps(record, separators=(",", ":"))
        with self._connection() as database:
            cursor = database.execute("INSERT INTO records (topic, record) VALUES (?, ?)", (topic, text))
            return int(cursor.lastrowid or 0)

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        """Return the records numbered above `after`, oldest first."""
        query = "SELECT number, record FROM records WHERE topic = ? AND number > ? ORDER BY number LIMIT ?"
        with self._connection() as database:
            rows = database.execute(query, (topic, after, limit)).fetchall()
        return [(number, _decoded(text)) for number, text in rows]

    def refused_commands(self) -> frozenset[str]:
        """Return the ids of the commands that were refused, according to the event log."""
        query = "SELECT record FROM records WHERE topic = ? AND record LIKE '%\"obeyed\":false%'"
        with self._connection() as database:
            rows = database.execute(query, (EVENTS,)).fetchall()
        found = [_decoded(text).get("details", {}) for (text,) in rows]
        return frozenset(str(details["id"]) for details in found if details.get("obeyed") is False and "id" in details)

    def is_answered(self, command_id: str) -> bool:
        """Whether the event log has the outcome of the command with that id."""
        query = "SELECT record FROM records WHERE topic = ? AND record LIKE '%\"obeyed\":%' AND INSTR(record, ?)"
        with self._connection() as database:
            rows = database.execute(query, (EVENTS, json.dumps(command_id))).fetchall()
        return any(_decoded(text).get("details", {}).get("id") == command_id for (text,) in rows)

    def newest(self, topic: str) -> int:
        """Return the number of a topic's newest record; 0 if there is none."""
        with self._connection() as database:
            row = database.execute("SELECT MAX(number) FROM records WHERE topic = ?", (topic,)).fetchone()
        return int(row[0] or 0)

    def set_status(
        self, state: str, reason: str | None = None, message: str | None = None, *, owner: int | None = None
    ) -> None:
        """Set the run's state; its owner is then the calling process, or process `owner`.

        NO_OWNER owns a run that waits to be started.
        """
        if state not in STATES:
            raise ValueError(f"there is no state {state!r}; there are: {', '.join(STATES)}")
        now = time.time()
        owner = os.getpid() if owner is None else owner
        values = (state, reason, message, owner, process_start(owner), now, now, now)
        with self._connection() as database:
            database.execute(
                "INSERT INTO status VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state, "
                "reason = excluded.reason, message = excluded.message, pid = excluded.pid, changed_s = excluded.changed_s, "
                "process_start = excluded.process_start, heartbeat_s = excluded.heartbeat_s",
                values,
            )

    def heartbeat(self) -> None:
        """Record that the owner is alive; due every HEARTBEAT_S while the state is a live one."""
        self._heartbeat_s = time.time()
        try:
            with self._connection() as database:
                database.execute("UPDATE status SET heartbeat_s = ? WHERE pid = ?", (self._heartbeat_s, os.getpid()))
        except DiskFull:
            os.utime(self.path)  # needs no disk space; `status` also reads the file's time

    @contextlib.contextmanager
    def heartbeats(self) -> Iterator[None]:
        """Send heartbeats from a background thread, as a slow import or a long step does not mean a dead owner."""
        ended = threading.Event()

        def send() -> None:
            while not ended.wait(HEARTBEAT_S):
                self.heartbeat()

        thread = threading.Thread(target=send, name="steppe-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def status(self) -> Status:
        """Return the run's status now.

        LOST if the stored state is pending or live and the process is dead, or live and without a heartbeat for
        LOST_AFTER_S.
        """
        with self._connection() as database:
            row = database.execute(
                "SELECT state, reason, message, pid, heartbeat_s, started_s, changed_s, process_start FROM status"
            ).fetchone()
        if row is None:
            return Status()
        status, start = Status(*row[:7]), row[7]
        if status.state == PENDING and status.pid == NO_OWNER:
            return status
        return (
            _with_liveness(status, start, self._last_heartbeat(status))
            if status.live or status.state == PENDING
            else status
        )

    def _last_heartbeat(self, status: Status) -> float:
        own = self._heartbeat_s if status.pid == os.getpid() else 0.0
        return max(status.heartbeat_s or 0.0, own, self.path.stat().st_mtime)

    def close(self) -> None:
        """Close this thread's connection; other connections close with their thread or process."""
        if getattr(self._local, "pid", None) == os.getpid():
            self._local.database.close()
            del self._local.database, self._local.pid

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._thread_connection()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise Conflict(f"{self.path} is locked by another process for more than {_BUSY_S:.0f} s") from error
            if self._is_disk_full(error):
                raise DiskFull(f"there is no disk space to write {self.path}: {error}") from error
            raise DamagedFile(f"{self.path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            raise DamagedFile(f"{self.path} is damaged: {error}") from error

    def _is_disk_full(self, error: sqlite3.OperationalError) -> bool:
        code = getattr(error, "sqlite_errorcode", None)
        free = free_bytes(self.path.parent)
        return code in _DISK_FULL_CODES or (
            code == sqlite3.SQLITE_CANTOPEN and free is not None and free < _MIN_FREE_BYTES
        )

    def _thread_connection(self) -> sqlite3.Connection:
        """Return this thread's connection.

        SQLite forbids using a connection inherited over a fork, even to close it, so such a connection is kept
        referenced.
        """
        database: sqlite3.Connection | None = getattr(self._local, "database", None)
        _open_stores.mark_used(self)
        if database is not None and self._local.pid == os.getpid():
            return database
        if database is not None:
            _inherited_connections.append(database)
        database = self._local.database = _connect(self.path)
        self._local.pid = os.getpid()
        return database


class _OpenStores(threading.local):
    """The stores that this thread has open, the most recently used one last."""

    def __init__(self) -> None:
        self._stores: dict[weakref.ref[RunStore], None] = {}

    def mark_used(self, store: RunStore) -> None:
        """Record the use, and close this thread's connection to the least recently used store if too many are open."""
        reference = store.reference
        self._stores.pop(reference, None)
        self._stores[reference] = None
        if len(self._stores) > OPEN_PER_THREAD:
            self._stores = {known: None for known in self._stores if known() is not None}
            while len(self._stores) > OPEN_PER_THREAD:
                oldest = next(iter(self._stores))
                del self._stores[oldest]
                if (found := oldest()) is not None:
                    found.close()


_open_stores = _OpenStores()


def _decoded(text: str) -> dict[str, Any]:
    """Decode a record; msgspec's faster decoder does not know the words NaN and Infinity."""
    try:
        return msgspec.json.decode(text)  # type: ignore[no-any-return]
    except msgspec.DecodeError:
        return json.loads(text)  # type: ignore[no-any-return]


_inherited_connections: list[sqlite3.Connection] = []


def _connect(path: Path) -> sqlite3.Connection:
    # isolation_level=None: every statement is its own transaction, so no writer waits for an idle one.
    # Create the file without opening it: closing any descriptor of it drops the locks of this process's connections.
    with contextlib.suppress(OSError):  # the file exists, or sqlite3 reports best what is wrong
        os.mknod(path, stat.S_IFREG | 0o600)  # its log and index get the same permissions
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _with_liveness(status: Status, start: int | None, heartbeat: float) -> Status:
    pid = status.pid or 0
    now = process_start(pid)
    if now is None or (start is not None and now != start):
        message = f"process {pid} ended without saying why while the run was {status.state}"
        return _lost(status, "process_dead", message)
    silence_s = time.time() - heartbeat
    if status.live and silence_s > LOST_AFTER_S:
        return _lost(status, HEARTBEAT_EXPIRED, f"process {pid} has been silent for {silence_s:.0f} s")
    return status


def _lost(status: Status, reason: str, message: str) -> Status:
    return Status(LOST, reason, message, status.pid, status.heartbeat_s, status.started_s, status.changed_s)


def process_start(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(rest[18])

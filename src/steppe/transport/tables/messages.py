"""A shared table over messages: its owner holds it, and remote workers send their changes.

    BEGIN, MERGE, CLAIM, CLAIM_EPISODES → the owner      REPLY → the worker

Nothing here blocks. A worker sends merges for the steps it was granted, then claims more; the reply carries the rows
that other workers changed since. The worker does not learn while it waits for a reply, so its copy can be overwritten.
A claim also states how many granted steps and episodes the worker still has to take: whatever else the owner misses was
in corrupt messages, and is granted again. transport/mpi/tables.py and transport/ray/tables.py carry the messages; those
of one worker arrive in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

import numpy as np

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.transport import TableDelta, TableTotals
from steppe.core.table_merge import find_changed_rows
from steppe.transport.tables.shared import LocalTable

BEGIN, MERGE, CLAIM, CLAIM_EPISODES, REPLY = range(5)
# Header words, before rows and values: granted or claimed steps (episodes), number of rows, steps, episodes (in a
# request: those still to take), clock (a float), lost steps, unused, unused.
_WORDS = 8


class _RemoteWorker:
    """A worker's side when the table is elsewhere: its copy, and the request in flight."""

    def __init__(self, local: np.ndarray) -> None:
        self.local, self.base = local, local.copy()
        self.changed_rows = np.empty(len(local) + 1, np.int64)
        self.pending: int | None = None  # the request in flight
        self.reply: int | None = None
        self.steps_left = self.episodes_left = 0  # granted and not taken yet

    def store_reply(self, granted: int) -> None:
        """Store the reply to the request in flight."""
        if self.pending == CLAIM:
            self.steps_left += granted
        elif self.pending == CLAIM_EPISODES:
            self.episodes_left += granted
        self.pending, self.reply = None, granted


class MessageTable(ABC):
    """A SharedTable over messages. The process that owns the table may also run a worker."""

    def __init__(self, *, owns_table: bool) -> None:
        self._owned = LocalTable() if owns_table else None
        self._waiting: list[int] = []  # workers to reply to once there is a table
        self._log_positions: dict[int, int] = {}
        self._remotes: dict[int, _RemoteWorker] = {}
        self._totals = TableTotals(0, 0, 0.0, 0.0)
        self.dropped: Counter[str] = Counter()  # rejected messages, by cause

    def create(
        self,
        values: np.ndarray,
        num_workers: int,
        limit: int | None,
        steps: int = 0,
        episodes: int = 0,
        *,
        episode_limit: int | None = None,
    ) -> None:
        self._table.create(values, num_workers, limit, steps, episodes, episode_limit=episode_limit)
        for worker in dict.fromkeys(self._waiting):
            self._send_reply(worker, 0)
        self._waiting.clear()

    def begin(self, worker: int, local: np.ndarray) -> int | None:
        if self._owned is not None:
            return self._owned.begin(worker, local)
        remote = self._remotes.setdefault(worker, _RemoteWorker(local))
        return self._request(worker, remote, BEGIN, 0)

    def claim(self, worker: int, num_steps: int, now_s: float) -> int | None:
        if self._owned is not None:
            return self._owned.claim(worker, num_steps, now_s)
        return self._request(worker, self._remotes[worker], CLAIM, num_steps, now_s)

    def claim_episodes(self, worker: int, num_episodes: int) -> int | None:
        if self._owned is not None:
            return self._owned.claim_episodes(worker, num_episodes)
        return self._request(worker, self._remotes[worker], CLAIM_EPISODES, num_episodes)

    def merge(self, worker: int, change: TableDelta, now_s: float) -> None:
        if self._owned is not None:
            self._owned.merge(worker, change, now_s)
            return
        remote = self._remotes[worker]
        rows = remote.changed_rows[
            : find_changed_rows(remote.local, remote.base, change.candidates, remote.changed_rows)
        ]
        own, old = remote.local[rows], remote.base[rows]
        kept = np.where(own == old, 1.0, change.kept[rows]).astype(own.dtype)
        remote.base[rows] = own
        remote.steps_left = max(0, remote.steps_left - change.steps)
        remote.episodes_left = max(0, remote.episodes_left - change.episodes)
        counts = (0, len(rows), change.steps, change.episodes)
        self._send(worker, MERGE, counts, now_s, rows, np.stack([kept, own - kept * old]))

    def totals(self) -> TableTotals:
        return self._totals if self._owned is None else self._owned.totals()

    def read(self, values: np.ndarray) -> TableTotals:
        return self._table.read(values)

    @abstractmethod
    def _post(self, worker: int, kind: int, data: np.ndarray) -> None:
        """Send a message: an REPLY to that worker, any other from that worker to the owner."""

    @property
    def _all_replied(self) -> bool:
        """Whether no reply to this process is in flight."""
        return all(remote.pending is None for remote in self._remotes.values())

    @property
    def _table(self) -> LocalTable:
        assert self._owned is not None, "only its owner has the table"
        return self._owned

    def _request(self, worker: int, remote: _RemoteWorker, kind: int, number: int, now_s: float = 0.0) -> int | None:
        """Return the reply to a request, sending the request if it was not sent; None while the reply is in flight."""
        if remote.pending is None and remote.reply is None:
            remote.pending = kind
            self._send(worker, kind, (number, 0, remote.steps_left, remote.episodes_left), now_s)
        reply, remote.reply = remote.reply, None
        return reply

    def _handle(self, worker: int, kind: int, data: np.ndarray) -> None:
        """Handle a message. A corrupt one from a worker is counted and changes nothing; a corrupt claim is granted 0.

        The worker then claims again.
        """
        try:
            self._handle_valid(worker, kind, data)
        except DamagedFile:
            if kind == REPLY:  # the owner is trusted, and the worker cannot continue without its reply
                raise
            self.dropped["refused"] += 1
            if kind in (CLAIM, CLAIM_EPISODES):
                self._send_reply(worker, 0)

    def _handle_valid(self, worker: int, kind: int, data: np.ndarray) -> None:
        if len(data) < _WORDS * 8:
            raise DamagedFile(f"a message about a table has {len(data)} bytes, less than its header")
        header, now_s = data[: _WORDS * 8].view(np.int64), float(data[: _WORDS * 8].view(np.float64)[4])
        count = int(header[1])
        if not 0 <= count <= len(data) // 8 - _WORDS:
            raise DamagedFile(f"a message about a table names {count} rows in {len(data)} bytes")
        rows = data[_WORDS * 8 : (_WORDS + count) * 8].view(np.int64)
        payload = data[(_WORDS + count) * 8 :]
        if kind == REPLY:
            remote = self._remotes[worker]
            (values,) = _values(rows, payload, remote.local, 1)
            remote.local[rows] = remote.base[rows] = values
            self._totals = TableTotals(int(header[2]), int(header[3]), now_s, now_s, int(header[5]))
            remote.store_reply(int(header[0]))
        elif kind == MERGE:
            kept, added = _values(rows, payload, self._table.values, 2)
            if min(header[2], header[3]) < 0:
                raise DamagedFile(f"a worker reports {header[2]} steps and {header[3]} episodes")
            self._table.apply_rows(rows, kept, added)
            self._table.count(worker, int(header[2]), int(header[3]), now_s)
        elif kind in (CLAIM, CLAIM_EPISODES):
            number = int(header[0])
            if min(number, header[2], header[3]) < 0:
                raise DamagedFile(f"a worker claims {number}, with {header[2]} steps and {header[3]} episodes left")
            self._table.reclaim(worker, int(header[2]), int(header[3]))
            table = self._table
            granted = table.claim(worker, number, now_s) if kind == CLAIM else table.claim_episodes(worker, number)
            self._send_reply(worker, granted or 0)
        elif self._table.created:  # an earlier worker of this number may have left steps that it was granted
            self._log_positions.pop(worker, None)
            self._send_reply(worker, self._table.reclaim(worker))
        else:
            self._waiting.append(worker)

    def _send_reply(self, worker: int, granted: int) -> None:
        """Reply with granted steps and every row that changed since the last reply; the first reply has all rows."""
        table, totals = self._table, self._table.totals()
        rows, logged = table.changed_since(self._log_positions.get(worker, -(1 << 62)))
        self._log_positions[worker] = logged
        counts = (granted, len(rows), totals.steps, totals.episodes)
        self._send(worker, REPLY, counts, totals.merged_s, rows, table.values[rows], totals.lost_steps)

    def _send(
        self,
        worker: int,
        kind: int,
        counts: tuple[int, int, int, int],
        now_s: float,
        rows: np.ndarray | None = None,
        values: np.ndarray | None = None,
        lost: int = 0,
    ) -> None:
        header = np.zeros(_WORDS, np.int64)
        header[:4], header[5] = counts, lost
        header.view(np.float64)[4] = now_s
        parts = [header.view(np.uint8)]
        if rows is not None and values is not None:
            parts += [
                np.ascontiguousarray(rows, np.int64).view(np.uint8),
                np.ascontiguousarray(values).ravel().view(np.uint8),
            ]
        self._post(worker, kind, np.concatenate(parts))


def _values(rows: np.ndarray, payload: np.ndarray, table: np.ndarray, parts: int) -> np.ndarray:
    """Return the values [parts, rows, actions] of a message. DamagedFile unless they fit the table and are finite."""
    expected = parts * len(rows) * table.shape[1] * table.dtype.itemsize
    if payload.nbytes != expected:
        raise DamagedFile(f"{len(rows)} rows of a table come with {payload.nbytes} bytes instead of {expected}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(table):
        raise DamagedFile(f"a message names rows from {rows.min()} to {rows.max()} of a table with {len(table)}")
    values = payload.view(table.dtype).reshape(parts, len(rows), table.shape[1])
    if not np.isfinite(values).all():
        raise DamagedFile("a message has values for a table that are not finite")
    return values

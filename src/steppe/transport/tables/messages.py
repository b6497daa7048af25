"""A shared table over messages: its owner holds it, and remote workers send their changes.

    BEGIN, MERGE, CLAIM, CLAIM_EPISODES → the owner      ANSWER → the worker

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

BEGIN, MERGE, CLAIM, CLAIM_EPISODES, ANSWER = range(5)
# Header words, before rows and values: granted or wanted steps (episodes), number of rows, steps, episodes (in a
# request: those still to take), clock (a float), lost steps, unused, unused.
_WORDS = 8


class _RemoteWorker:
    """A worker's side when the table is elsewhere: its copy, and the request in flight."""

    def __init__(self, local: np.ndarray) -> None:
        self.local, self.base = local, local.copy()
        self.found = np.empty(len(local) + 1, np.int64)
        self.asked: int | None = None  # the request in flight
        self.answer: int | None = None
        self.steps_left = self.episodes_left = 0  # granted and not taken yet

    def take(self, given: int) -> None:
        """Store the reply to the request in flight."""
        if self.asked == CLAIM:
            self.steps_left += given
        elif self.asked == CLAIM_EPISODES:
            self.episodes_left += given
        self.asked, self.answer = None, given


class MessageTable(ABC):
    """A SharedTable over messages. The process that owns the table may also run a worker."""

    def __init__(self, *, keeps: bool) -> None:
        self._kept = LocalTable() if keeps else None
        self._waiting: list[int] = []  # workers to reply to once there is a table
        self._seen: dict[int, int] = {}
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
            self._answer(worker, 0)
        self._waiting.clear()

    def begin(self, worker: int, local: np.ndarray) -> int | None:
        if self._kept is not None:
            return self._kept.begin(worker, local)
        remote = self._remotes.setdefault(worker, _RemoteWorker(local))
        return self._reply(worker, remote, BEGIN, 0)

    def claim(self, worker: int, num_steps: int, now_s: float) -> int | None:
        if self._kept is not None:
            return self._kept.claim(worker, num_steps, now_s)
        return self._reply(worker, self._remotes[worker], CLAIM, num_steps, now_s)

    def claim_episodes(self, worker: int, num_episodes: int) -> int | None:
        if self._kept is not None:
            return self._kept.claim_episodes(worker, num_episodes)
        return self._reply(worker, self._remotes[worker], CLAIM_EPISODES, num_episodes)

    def merge(self, worker: int, change: TableDelta, now_s: float) -> None:
        if self._kept is not None:
            self._kept.merge(worker, change, now_s)
            return
        remote = self._remotes[worker]
        rows = remote.found[: find_changed_rows(remote.local, remote.base, change.candidates, remote.found)]
        mine, old = remote.local[rows], remote.base[rows]
        kept = np.where(mine == old, 1.0, change.kept[rows]).astype(mine.dtype)
        remote.base[rows] = mine
        remote.steps_left = max(0, remote.steps_left - change.steps)
        remote.episodes_left = max(0, remote.episodes_left - change.episodes)
        counts = (0, len(rows), change.steps, change.episodes)
        self._send(worker, MERGE, counts, now_s, rows, np.stack([kept, mine - kept * old]))

    def totals(self) -> TableTotals:
        return self._totals if self._kept is None else self._kept.totals()

    def read(self, values: np.ndarray) -> TableTotals:
        return self._table.read(values)

    @abstractmethod
    def _post(self, worker: int, what: int, data: np.ndarray) -> None:
        """Send a message: an ANSWER to that worker, any other from that worker to the owner."""

    @property
    def _answered(self) -> bool:
        """Whether no reply to this process is in flight."""
        return all(remote.asked is None for remote in self._remotes.values())

    @property
    def _table(self) -> LocalTable:
        assert self._kept is not None, "only its keeper has the table"
        return self._kept

    def _reply(self, worker: int, remote: _RemoteWorker, what: int, number: int, now_s: float = 0.0) -> int | None:
        """Return the reply to a request, sending the request if it was not sent; None while the reply is in flight."""
        if remote.asked is None and remote.answer is None:
            remote.asked = what
            self._send(worker, what, (number, 0, remote.steps_left, remote.episodes_left), now_s)
        answer, remote.answer = remote.answer, None
        return answer

    def _take(self, worker: int, what: int, data: np.ndarray) -> None:
        """Handle a message. A corrupt one from a worker is counted and changes nothing; a corrupt claim is granted 0.

        The worker then claims again.
        """
        try:
            self._take_whole(worker, what, data)
        except DamagedFile:
            if what == ANSWER:  # the owner is trusted, and the worker cannot continue without its reply
                raise
            self.dropped["refused"] += 1
            if what in (CLAIM, CLAIM_EPISODES):
                self._answer(worker, 0)

    def _take_whole(self, worker: int, what: int, data: np.ndarray) -> None:
        if len(data) < _WORDS * 8:
            raise DamagedFile(f"a message about a table has {len(data)} bytes, less than its head")
        words, now_s = data[: _WORDS * 8].view(np.int64), float(data[: _WORDS * 8].view(np.float64)[4])
        count = int(words[1])
        if not 0 <= count <= len(data) // 8 - _WORDS:
            raise DamagedFile(f"a message about a table names {count} rows in {len(data)} bytes")
        rows = data[_WORDS * 8 : (_WORDS + count) * 8].view(np.int64)
        rest = data[(_WORDS + count) * 8 :]
        if what == ANSWER:
            remote = self._remotes[worker]
            (values,) = _values(rows, rest, remote.local, 1)
            remote.local[rows] = remote.base[rows] = values
            self._totals = TableTotals(int(words[2]), int(words[3]), now_s, now_s, int(words[5]))
            remote.take(int(words[0]))
        elif what == MERGE:
            kept, added = _values(rows, rest, self._table.values, 2)
            if min(words[2], words[3]) < 0:
                raise DamagedFile(f"a worker says that it took {words[2]} steps and {words[3]} episodes")
            self._table.put(rows, kept, added)
            self._table.count(worker, int(words[2]), int(words[3]), now_s)
        elif what in (CLAIM, CLAIM_EPISODES):
            number = int(words[0])
            if min(number, words[2], words[3]) < 0:
                raise DamagedFile(f"a worker asks for {number}, with {words[2]} steps and {words[3]} episodes left")
            self._table.reclaim(worker, int(words[2]), int(words[3]))
            table = self._table
            given = table.claim(worker, number, now_s) if what == CLAIM else table.claim_episodes(worker, number)
            self._answer(worker, given or 0)
        elif self._table.made:  # an earlier worker of this number may have left steps that it was granted
            self._seen.pop(worker, None)
            self._answer(worker, self._table.reclaim(worker))
        else:
            self._waiting.append(worker)

    def _answer(self, worker: int, given: int) -> None:
        """Reply with granted steps and every row that changed since the last reply; the first reply has all rows."""
        table, totals = self._table, self._table.totals()
        rows, logged = table.news(self._seen.get(worker, -(1 << 62)))
        self._seen[worker] = logged
        counts = (given, len(rows), totals.steps, totals.episodes)
        self._send(worker, ANSWER, counts, totals.merged_s, rows, table.values[rows], totals.lost_steps)

    def _send(
        self,
        worker: int,
        what: int,
        counts: tuple[int, int, int, int],
        now_s: float,
        rows: np.ndarray | None = None,
        values: np.ndarray | None = None,
        lost: int = 0,
    ) -> None:
        words = np.zeros(_WORDS, np.int64)
        words[:4], words[5] = counts, lost
        words.view(np.float64)[4] = now_s
        parts = [words.view(np.uint8)]
        if rows is not None and values is not None:
            parts += [
                np.ascontiguousarray(rows, np.int64).view(np.uint8),
                np.ascontiguousarray(values).ravel().view(np.uint8),
            ]
        self._post(worker, what, np.concatenate(parts))


def _values(rows: np.ndarray, rest: np.ndarray, table: np.ndarray, parts: int) -> np.ndarray:
    """Return the values [parts, rows, actions] of a message. DamagedFile unless they fit the table and are finite."""
    wanted = parts * len(rows) * table.shape[1] * table.dtype.itemsize
    if rest.nbytes != wanted:
        raise DamagedFile(f"{len(rows)} rows of a table come with {rest.nbytes} bytes instead of {wanted}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < len(table):
        raise DamagedFile(f"a message names rows from {rows.min()} to {rows.max()} of a table with {len(table)}")
    values = rest.view(table.dtype).reshape(parts, len(rows), table.shape[1])
    if not np.isfinite(values).all():
        raise DamagedFile("a message brings values for a table that are not finite")
    return values

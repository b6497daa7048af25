"""A Board that does not fail when the disk is full: records wait in memory."""

from __future__ import annotations

from collections import deque
from typing import Any

from steppe.core.contracts.errors import DiskFull
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS, Board

MAX_BUFFERED_RECORDS = 2_000  # an hour of one role's reports


class BufferedBoard:
    """Posts to another Board, in order. When the disk is full, records wait for the next post.

    Beyond `limit`, the oldest are dropped; the event log gets their number once there is free space again.
    """

    def __init__(self, board: Board, limit: int = MAX_BUFFERED_RECORDS) -> None:
        self._board, self._limit = board, limit
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self.num_dropped = 0

    def post(self, topic: str, record: dict[str, Any]) -> int:
        """Append a record and return its number; 0 while it waits."""
        self._waiting.append((topic, record))
        return self.flush()

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        """Return the records that have reached the board; none if the disk is too full even to read."""
        try:
            return self._board.read(topic, after, limit)
        except DiskFull:
            return []

    def flush(self) -> int:
        """Post waiting records as far as disk space allows; return the last number, 0 if records still wait."""
        number = 0
        try:
            while self._waiting:
                topic, record = self._waiting[0]
                number = self._board.post(topic, record)
                self._waiting.popleft()
                self._report_dropped(str(record.get("run", "")))
        except DiskFull:
            self._drop_oldest()
            return 0
        return number

    def __len__(self) -> int:
        return len(self._waiting)

    def _report_dropped(self, run: str) -> None:
        if self.num_dropped:
            message = f"the disk was full: {self.num_dropped} records were given up"
            details = {"message": message, "given_up": self.num_dropped}
            self._board.post(EVENTS, EventReport(run=run, kind="warning", details=details).record())
            self.num_dropped = 0

    def _drop_oldest(self) -> None:
        while len(self._waiting) > self._limit:
            self._waiting.popleft()
            self.num_dropped += 1

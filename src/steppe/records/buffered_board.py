"""A Board that never fails for want of room: what the disk does not take waits in memory."""

from __future__ import annotations

from collections import deque
from typing import Any

from steppe.core.contracts.errors import DiskFull
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS, Board

MAX_BUFFERED_RECORDS = 2_000  # records; an hour of one role's reports


class BufferedBoard:
    """Posts to another Board, in order. Without room, records wait for the next post; the oldest are given up beyond
    `limit`, and counted in the event log once there is room again."""

    def __init__(self, board: Board, limit: int = MAX_BUFFERED_RECORDS) -> None:
        self._board, self._limit = board, limit
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self.num_dropped = 0

    def post(self, topic: str, record: dict[str, Any]) -> int:
        """The record's number, or 0 while it waits."""
        self._waiting.append((topic, record))
        return self.flush()

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        """What has reached the board; nothing where even reading needs room that is not there."""
        try:
            return self._board.read(topic, after, limit)
        except DiskFull:
            return []

    def flush(self) -> int:
        """Post what waits as far as there is room; returns the last number, 0 when something still waits."""
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

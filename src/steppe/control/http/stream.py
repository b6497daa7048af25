"""Stream of changes as numbered messages: a snapshot first, then deltas from the number where a client left off.

One thread polls the runs and appends news to a message buffer (a ring); every client reads the buffer at its own pace,
so a slow client costs nothing and is dropped with notice once the buffer has overwritten its position. The messages
that a client lacks are sent as one frame with a message per line. The frame is built once for all clients at the same
position and written to all of them in one pass: waking a task per client would cost far more than the writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from steppe.control.http.ws_frames import FrameSocket, text_frame
from steppe.control.models import Run
from steppe.control.periodic import PeriodicTask
from steppe.control.service import Service
from steppe.records.view import ENDED

POLL_INTERVAL_S = 0.1
HEARTBEAT_INTERVAL_S = 2.0
SEND_TIMEOUT_S = 10.0  # a client that accepts nothing for this long is dropped
RING = 4_096  # messages that are kept for slow clients
RING_BYTES = 32 << 20
FRAME_BYTES = 1 << 18  # no message is added to a frame of this size
POINTS = 200  # of each series in one delta


class Hub:
    """The message buffer. `put` and `wake` are thread-safe; the rest belongs to the clients' event loop."""

    def __init__(self, size: int = RING, size_bytes: int = RING_BYTES) -> None:
        self.epoch = secrets.token_hex(4)  # message numbers are valid only within one run of the service
        self.clients = 0
        self._ring: deque[tuple[int, bytes]] = deque()
        self._size, self._size_bytes, self._bytes = size, size_bytes, 0
        self._number = self._notified_number = 0
        self._frame = (0, 0, b"")  # the newest frame: number before it, its last number, and its bytes
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._message_event = asyncio.Event()
        self._subscribers: set[Subscriber] = set()

    def serve_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @property
    def number(self) -> int:
        """Number of the newest message."""
        return self._number

    def put(self, kind: str, **content: Any) -> int:
        """Append a message and return its number; clients are notified at the next `wake`."""
        with self._lock:
            self._number += 1
            text = msgspec.json.encode({"type": kind, "number": self._number, **content})
            self._ring.append((self._number, text))
            self._bytes += len(text)
            while len(self._ring) > self._size or (self._bytes > self._size_bytes and len(self._ring) > 1):
                self._bytes -= len(self._ring.popleft()[1])
            return self._number

    def wake(self) -> None:
        """Notify waiting clients of all messages since the last call."""
        if self._notified_number == self._number or self._loop is None or self._loop.is_closed():
            return
        self._notified_number = self._number
        self._loop.call_soon_threadsafe(self._wake)

    def after(self, number: int) -> list[tuple[int, bytes]] | None:
        """Return the messages after a number; None if the buffer has overwritten them."""
        with self._lock:
            oldest = self._ring[0][0] if self._ring else self._number + 1
            if number < oldest - 1 or number > self._number:
                return None
            return [self._ring[row] for row in range(number - self._number, 0)]  # numbers are consecutive

    def frame(self, number: int) -> tuple[int, bytes] | None:
        """Return the last number and the frame of messages after `number`, one per line; None as with `after`."""
        if number == self._number:
            return number, b""
        begin, end, frame = self._frame
        if begin == number and end == self._number:
            return end, frame
        news = self.after(number)
        if news is None:
            return None
        size, lines = 0, list[bytes]()
        for _, line in news:
            lines.append(line)
            size += len(line)
            if size >= FRAME_BYTES:
                break
        end, frame = number + len(lines), text_frame(b"\n".join(lines))
        self._frame = (number, end, frame)
        return end, frame

    async def news(self, timeout_s: float) -> None:
        """Wait for a message, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._message_event.wait()

    def _wake(self) -> None:
        self._message_event.set()
        self._message_event = asyncio.Event()

    @contextlib.contextmanager
    def subscribe(self, socket: FrameSocket, number: int) -> Iterator[Subscriber]:
        """Subscribe a client that has received everything up to `number`; send it later messages meanwhile."""
        subscriber = Subscriber(self, socket, number)
        self._subscribers.add(subscriber)
        socket.when_ready = subscriber.send_news
        try:
            subscriber.send_news()
            yield subscriber
        finally:
            socket.when_ready = None
            self._subscribers.discard(subscriber)

    async def deliver(self) -> None:
        """Send new messages to the clients as they come, until cancelled."""
        while True:
            await self.news(HEARTBEAT_INTERVAL_S / 4)
            for subscriber in [*self._subscribers]:
                subscriber.send_news()
            self._send_heartbeats(time.monotonic() - HEARTBEAT_INTERVAL_S)

    def _send_heartbeats(self, silent_since: float) -> None:
        """Send a heartbeat to clients that received nothing since then."""
        silent = [subscriber for subscriber in self._subscribers if subscriber.last_sent_s <= silent_since]
        if silent:
            message = {"type": "heartbeat", "number": self._number, "time_s": time.time()}
            frame = text_frame(msgspec.json.encode(message))
            for subscriber in silent:
                subscriber.heartbeat(frame)


class Subscriber:
    """The position of one client in the stream. `dropped` is done once the client was too slow."""

    def __init__(self, hub: Hub, socket: FrameSocket, number: int) -> None:
        self.number, self.last_sent_s = number, time.monotonic()
        self.dropped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hub, self._socket = hub, socket

    def send_news(self) -> None:
        """Send as many new messages as the client takes."""
        news = self._hub.frame(self.number)
        while news is not None and news[0] > self.number and self._socket.ready:
            self.number = news[0]
            self._socket.write_frame(news[1])
            self.last_sent_s = time.monotonic()
            news = self._hub.frame(self.number)
        stuck = not self._socket.ready and time.monotonic() - self.last_sent_s > SEND_TIMEOUT_S
        if (news is None or stuck) and not self.dropped.done():
            self.dropped.set_result(None)

    def heartbeat(self, frame: bytes) -> None:
        if self._socket.ready and self.number == self._hub.number:
            self._socket.write_frame(frame)
            self.last_sent_s = time.monotonic()


class RunWatcher(PeriodicTask):
    """Polls the runs while the service is up, and reconciles its operations."""

    def __init__(self, service: Service, hub: Hub, every_s: float = POLL_INTERVAL_S) -> None:
        super().__init__("steppe-watcher", every_s, service.reconcile, self.poll, hub.wake)
        self.service, self.hub = service, hub
        self._runs: dict[
            str, tuple[Run, Run]
        ] = {}  # each run, and its copy without the heartbeat, which is not a change
        self._cursors: dict[str, int] = {}

    def poll(self) -> None:
        """Put changes since the last poll into the message buffer."""
        runs = {run.id: run for run in self.service.list_runs().runs}
        for removed in self._runs.keys() - runs.keys():
            del self._runs[removed]
            self._cursors.pop(removed, None)
            self.hub.put("removed", run=removed)
        for name, run in runs.items():
            before = self._runs.get(name)
            if before is not None and before[0] is run:
                continue
            self._runs[name] = (run, run.model_copy(update={"heartbeat_s": None}))
            if before is None or before[1] != self._runs[name][1]:
                self.hub.put("run", run=run.model_dump(mode="json"))
                if self.hub.clients and (name in self._cursors or run.state not in ENDED):
                    self._put_points(name)

    def _put_points(self, run: str) -> None:
        """Send new points of the curves; earlier ones are in the history."""
        since = self._cursors.get(run)
        found = self.service.get_metrics(run, since=since or 0, max_points=POINTS if since is not None else 2)
        self._cursors[run] = found.next
        series = {one.name: one.points for one in found.series if one.points}
        if since is not None and series:
            self.hub.put("metrics", run=run, series=series, next=found.next)


def snapshot(service: Service, hub: Hub) -> tuple[int, str]:
    """Return the number after which a client's deltas start, and the snapshot that it starts with."""
    number = hub.number  # before reading: a change in between is sent twice rather than never
    runs = service.list_runs().model_dump(mode="json")["runs"]
    return number, json.dumps({"type": "snapshot", "number": number, "epoch": hub.epoch, "runs": runs})

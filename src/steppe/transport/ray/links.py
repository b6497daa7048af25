"""Segments and weights between Ray actors, through the object store.

    segments   the reader makes as many calls to each writer as the writer has slots; each call blocks in the writer and
               returns one segment. When the reader releases it, it calls again: a credit. So the segments in flight are
               bounded, and belong to the reader whatever happens to the writer.
    weights    the writer puts a version into the object store once and passes the reference to every reader, each time
               after the reader has taken the one before. Readers on one node share the memory. Small weights are passed
               in the call itself.

Both are flat arrays of bytes (transport/frames.py), which Ray stores without conversion. Ray runs callbacks in its own
threads: a lock guards the state here, and `wake` wakes the role's thread.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from steppe.core.contracts.errors import MissingExtra, RoleDied
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.weights import Weights, WeightsLayout
from steppe.transport.frames import HEADER_BYTES, SegmentFrame, WeightsFrame, decode_weights_metadata

EMPTY_REPLY = np.zeros(0, np.uint8)  # the reply of a writer that has ended
MAX_INLINE_BYTES = 64 << 10  # of weights: up to this size, a call is faster than the object store
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
LastSegment = tuple[int, bytes | None]  # sequence number and state of an actor's last segment
Wake = Callable[[], object]


def import_ray() -> Any:
    """Import and return ray, with usage statistics disabled. MissingExtra if it is not installed."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise MissingExtra("runtime 'ray'", "ray") from error
    return ray


class RayWriter:
    """A Channel, writer side, of one actor; each call of the reader runs `take` in its own thread."""

    def __init__(self, spec: SegmentSpec, slots: int, wake: Wake, last: LastSegment | None = None) -> None:
        self._frames = [SegmentFrame(spec, slot) for slot in range(slots)]
        self._free = deque(range(slots))
        self._held: int | None = None
        self._ready: deque[np.ndarray] = deque()
        self._wake, self._last = wake, last
        self._offered = 0
        self._closed = False
        self._changed = threading.Condition()

    def blank(self, actor: int) -> Segment | None:
        if self._held is None and self._free:
            self._held = self._free.popleft()
        return None if self._held is None else self._frames[self._held].segment

    def offer(self, segment: Segment) -> bool:
        assert segment.header is not None, "a segment is offered with its header set"
        frame = self._frames[segment.slot]
        frame.write(segment.slot, segment.header, segment.state, self._offered)
        state = np.frombuffer(segment.state or b"", np.uint8)
        message = np.concatenate([frame.buffer, state]) if len(state) else frame.buffer
        with self._changed:
            self._ready.append(message)
            self._last, self._held = (segment.header.sequence, segment.state), None
            self._offered += 1
            self._changed.notify()
        return True

    def poll(self) -> Segment | None:
        """Return None: this side only writes."""
        return None

    def release(self, segment: Segment) -> None:
        raise ValueError("only the reader of a channel releases its segments")

    def recall(self, actor: int) -> LastSegment | None:
        return self._last

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        self._last = (sequence, state)

    def take(self, released: int) -> np.ndarray:
        """Block until a segment is ready and return it; `released` is a slot that the reader has released, or -1."""
        with self._changed:
            if released >= 0:
                self._free.append(released)
                self._wake()
            self._changed.wait_for(lambda: self._ready or self._closed)
            return self._ready.popleft() if self._ready else EMPTY_REPLY

    def close(self) -> None:
        """Unblock calls that wait for a segment."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


@dataclass(eq=False)
class _RemoteWriter:
    """One incarnation of an actor, as the reader sees it."""

    actor: int
    take: Callable[[int], Any]  # calls the writer's `take` with a slot; returns the reference to the reply
    expected: int = 0  # send number of the next segment
    early: dict[int, np.ndarray] = field(default_factory=dict)  # segments that arrived too early, by send number


@dataclass(eq=False)
class _Arrival:
    writer: _RemoteWriter
    data: np.ndarray
    state: bytes | None


class RayReader:
    """A Channel, reader side. A segment whose size is not that of the run's segments is rejected and counted."""

    def __init__(self, spec: SegmentSpec, run: str, num_actors: int, slots_per_actor: int, wake: Wake) -> None:
        self._run, self._slots, self._wake = run, slots_per_actor, wake
        self._nbytes = HEADER_BYTES + spec.nbytes
        self._frames = [SegmentFrame(spec, slot) for slot in range(num_actors * slots_per_actor)]
        self._free = [deque(self._slots_of(actor)) for actor in range(num_actors)]
        self._writers: dict[int, _RemoteWriter] = {}
        self._reading: dict[int, _RemoteWriter] = {}  # frame → writer of the segment in it
        self._arrived: deque[_Arrival] = deque()
        self._last: dict[int, LastSegment] = {}
        self.dropped: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._lock = threading.RLock()

    def attach(self, actor: int, take: Callable[[int], Any]) -> LastSegment | None:
        """Read from this writer from now on; return the last segment that arrived, after which it has to continue.

        What an earlier writer sent and did not arrive is lost.
        """
        writer = _RemoteWriter(actor, take)
        with self._lock:
            self._writers[actor] = writer
            last = self._last.get(actor)
        for _ in range(self._slots):
            self._call(writer, -1)
        return last

    def blank(self, actor: int) -> Segment | None:
        """Return None: this side only reads."""
        return None

    def offer(self, segment: Segment) -> bool:
        return False

    def poll(self) -> Segment | None:
        with self._lock:
            if self._error is not None:
                raise self._error
            arrival = next((arrival for arrival in self._arrived if self._free[arrival.writer.actor]), None)
            if arrival is None:
                return None
            self._arrived.remove(arrival)
            slot = self._free[arrival.writer.actor].popleft()
            self._reading[slot] = arrival.writer
        frame = self._frames[slot]
        np.copyto(frame.buffer, arrival.data[: self._nbytes])  # a copy, so that the object store can free its memory
        return frame.read(self._run, arrival.writer.actor, arrival.state)

    def release(self, segment: Segment) -> None:
        with self._lock:
            writer = self._reading.pop(segment.slot)
            self._free[writer.actor].append(segment.slot)
            is_current = self._writers[writer.actor] is writer
        if is_current:
            self._call(writer, int(self._frames[segment.slot].words[SegmentFrame.SLOT]))

    def recall(self, actor: int) -> LastSegment | None:
        """Return sequence number and state of the last segment that arrived; only these count as offered."""
        return self._last.get(actor)

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        self._last[actor] = (sequence, state)

    def _slots_of(self, actor: int) -> Sequence[int]:
        return range(actor * self._slots, (actor + 1) * self._slots)

    def _call(self, writer: _RemoteWriter, released: int) -> None:
        writer.take(released).future().add_done_callback(partial(self._on_reply, writer))

    def _on_reply(self, writer: _RemoteWriter, reply: Future[np.ndarray]) -> None:
        """Handle a writer's reply. Runs in one of Ray's threads."""
        error = reply.exception()
        if error is not None:
            self._error = self._error or (None if is_actor_lost(error) else error)
        elif len(data := reply.result()):
            with self._lock:
                self._accept(writer, data)
        self._wake()

    def _accept(self, writer: _RemoteWriter, data: np.ndarray) -> None:
        if self._writers[writer.actor] is not writer:
            return  # another writer has replaced this one
        if not self._has_expected_size(data):
            self.dropped["rejected"] += 1
            if not self._has_valid_header(writer, data):
                self._call(writer, -1)  # it is unknown which segment it was
                return
            data = self._without_payload(data)
        words = data[:HEADER_BYTES].view(np.int64)
        writer.early[int(words[SegmentFrame.SEND_NUMBER])] = data
        while (due := writer.early.pop(writer.expected, None)) is not None:
            writer.expected += 1
            words = due[:HEADER_BYTES].view(np.int64)
            state = due[self._nbytes :].tobytes() if words[SegmentFrame.STATE] >= 0 else None
            self._last[writer.actor] = (int(words[SegmentFrame.SEQUENCE]), state)
            self._arrived.append(_Arrival(writer, due, state))

    def _has_expected_size(self, data: np.ndarray) -> bool:
        """Whether the size is that of a segment of this run, with a state of the size in its header."""
        if len(data) < self._nbytes:
            return False
        return len(data) == self._nbytes + max(0, int(data[:HEADER_BYTES].view(np.int64)[SegmentFrame.STATE]))

    def _has_valid_header(self, writer: _RemoteWriter, data: np.ndarray) -> bool:
        """Whether the header of a rejected message still tells which segment it should have been."""
        if len(data) < HEADER_BYTES:
            return False
        words = data[:HEADER_BYTES].view(np.int64)
        slot, send_number = int(words[SegmentFrame.SLOT]), int(words[SegmentFrame.SEND_NUMBER])
        due = writer.expected <= send_number < writer.expected + self._slots and send_number not in writer.early
        return due and 0 <= slot < self._slots

    def _without_payload(self, data: np.ndarray) -> np.ndarray:
        """Return a segment with the same header, no valid rows and no state, so that its round can continue."""
        empty = np.zeros(self._nbytes, np.uint8)
        empty[:HEADER_BYTES] = data[:HEADER_BYTES]
        empty[:HEADER_BYTES].view(np.int64)[SegmentFrame.STATE] = -1
        return empty


class RayRpcServer:
    """An RpcServer: each request is a call of `call`, which runs in its own thread and blocks until the reply."""

    def __init__(self) -> None:
        self._requests: dict[int, np.ndarray] = {}
        self._replies: dict[int, np.ndarray] = {}
        self._next = 0
        self._closed = False
        self._changed = threading.Condition()

    def call(self, request_id: int, request: np.ndarray) -> np.ndarray:
        """Block until the request `request_id` has its reply and return it.

        Requests are served in the order of their numbers, whatever the order of arrival.
        """
        with self._changed:
            self._requests[request_id] = request
            self._changed.notify_all()
            self._changed.wait_for(lambda: request_id in self._replies or self._closed)
            return self._replies.pop(request_id, EMPTY_REPLY)

    def take(self, timeout_s: float) -> memoryview | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._next in self._requests, timeout_s):
                return None
            return self._requests.pop(self._next).data

    def reply(self, data: bytes) -> None:
        with self._changed:
            self._replies[self._next] = np.frombuffer(data, np.uint8)
            self._next += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Unblock calls that will get no reply."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class RayRpcClient:
    """An RpcClient of the role `name`; `call` calls its server's `call` and returns the reference to the reply."""

    def __init__(self, name: str, call: Callable[[int, np.ndarray], Any]) -> None:
        self.name, self._call = name, call
        self._sent = 0
        self._pending: deque[Any] = deque()

    def send(self, request: bytes) -> None:
        self._pending.append(self._call(self._sent, np.frombuffer(request, np.uint8)))
        self._sent += 1

    def receive(self) -> memoryview:
        try:
            reply: np.ndarray = import_ray().get(self._pending.popleft())
        except import_ray().exceptions.RayError as error:
            if not is_actor_lost(error):
                raise
            reply = EMPTY_REPLY
        if not len(reply):
            raise RoleDied(f"{self.name} is gone, and with it a part of the replay; the newest checkpoint has it")
        return reply.data


def is_actor_lost(error: BaseException) -> bool:
    """Whether the error means that the other side is gone, which its supervisor handles."""
    exceptions = import_ray().exceptions
    return isinstance(error, exceptions.RayError) and not isinstance(error, exceptions.RayTaskError)


@dataclass(eq=False)
class _RemoteReader:
    """A reader that weights are passed to."""

    deliver: Callable[[Any], Any]  # calls the reader's `take` with a frame or its reference; returns that of the reply
    min_interval_s: float = 0.0  # minimum time between two calls
    last_sent_s: float = -math.inf
    busy: bool = False
    gone: bool = False
    sent: dict[str, int] = field(default_factory=dict)


class RayWeights:
    """A WeightStore that sends weights published here to the attached readers.

    Each reader has its own store, whose `take` receives the weights. A slow reader delays no other: when it is ready,
    it gets the newest version.
    """

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._newest: dict[str, WeightsFrame] = {}
        self._layouts: dict[str, WeightsLayout] = {}
        self._metadata_cache: dict[bytes, tuple[str, WeightsLayout]] = {}
        self._objects: dict[str, Any] = {}  # policy → its newest frame, if small, or the reference to it in the store
        self._readers: dict[str, _RemoteReader] = {}
        self._error: BaseException | None = None
        self._lock = threading.RLock()

    def attach(self, name: str, deliver: Callable[[Any], Any], min_interval_s: float = 0.0) -> None:
        """Pass the newest weights to this reader from now on, at most every `min_interval_s`; replaces one of that name."""
        with self._lock:
            self._readers[name] = _RemoteReader(deliver, min_interval_s)
            self.progress()

    def publish(self, policy: str, weights: Weights) -> None:
        with self._lock:
            frame = self._newest.get(policy)
            if frame is not None and weights.version <= frame.version:
                raise ValueError(f"version {weights.version} is not newer than {frame.version}")
            weights.require(self._layouts.setdefault(policy, weights.layout), "those published before")
            frame = frame or WeightsFrame.blank(policy, weights)
            frame.write(weights)
            self._newest[policy] = frame
            self._objects[policy] = None
            self.progress()

    def newer_than(self, policy: str, version: int) -> Weights | None:
        with self._lock:
            newest = self._newest.get(policy)
            if newest is None or newest.version <= version:
                return None
            return newest.read(self._layouts[policy])

    def take(self, data: np.ndarray) -> None:
        """Receive weights from the writer: memory of the object store, kept until newer weights arrive."""
        frame = WeightsFrame(data)
        with self._lock:
            metadata = frame.metadata
            if metadata not in self._metadata_cache:
                self._metadata_cache[metadata] = decode_weights_metadata(metadata, frame.buffer.nbytes)
            policy, self._layouts[policy] = self._metadata_cache[metadata]
            before = self._newest.get(policy)
            if before is None or before.version < frame.version:
                self._newest[policy] = frame
        self._wake()

    def progress(self) -> None:
        """Pass newer weights to every reader that is ready for them."""
        with self._lock:
            if self._error is not None:
                raise self._error
            now = time.monotonic()
            for reader in self._readers.values():
                if reader.busy or reader.gone or now < reader.last_sent_s + reader.min_interval_s:
                    continue
                for policy, frame in self._newest.items():
                    if not reader.busy and reader.sent.get(policy, -1) < frame.version:
                        self._send_to(reader, policy, frame)

    @property
    def delivered(self) -> bool:
        """Whether every live reader has the newest version of every policy."""
        versions = {policy: frame.version for policy, frame in self._newest.items()}
        with self._lock:
            return all(
                reader.gone or (not reader.busy and reader.sent == versions) for reader in self._readers.values()
            )

    def _send_to(self, reader: _RemoteReader, policy: str, frame: WeightsFrame) -> None:
        if self._objects.get(policy) is None:
            self._objects[policy] = (
                frame.data if frame.data.nbytes <= MAX_INLINE_BYTES else import_ray().put(frame.data)
            )
        reader.busy, reader.last_sent_s, reader.sent[policy] = True, time.monotonic(), frame.version
        reader.deliver(self._objects[policy]).future().add_done_callback(partial(self._on_reply, reader))

    def _on_reply(self, reader: _RemoteReader, reply: Future[None]) -> None:
        """Handle a reader's reply. Runs in one of Ray's threads."""
        error = reply.exception()
        if error is not None:
            reader.gone = True
            self._error = self._error or (None if is_actor_lost(error) else error)
        reader.busy = False
        self._wake()

"""Messages between MPI ranks. Nothing here blocks: `progress` receives what arrived and sends what is due.

    channel   tag 4 · actor + kind    SEGMENT, STATE → reader      CREDIT, PRIME → writer
    weights   tag 0                   the newest version → each reader, one message in flight to each
    control   tags 0, 1               commands to each kind of role → every rank    notes → the first rank

Each of the three has its own communicator, created by all ranks together, so that every probe may accept any tag.
Messages from one rank to another over one communicator arrive in order. Memory is bounded: by credits in a channel, by
synchronous sends (complete only when the receiver has started to receive) in a store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import MissingExtra
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.weights import Weights, WeightsLayout
from steppe.transport.frames import SegmentFrame, WeightsFrame, decode_weights_metadata

if TYPE_CHECKING:
    from mpi4py.MPI import Comm as Comm
    from mpi4py.MPI import Message, Request
    from mpi4py.MPI import Status as Status
else:
    Comm = Message = Request = Status = Any


def import_mpi(threads: str = "funneled") -> Any:
    """Import and return mpi4py.MPI; the first import initializes MPI. MissingExtra if that is not possible.

    `threads` is MPI's thread level: "funneled" if only one thread of a rank calls MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.thread_level = threads
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is installed, but no MPI library
        raise MissingExtra("runtime 'mpi'", "mpi") from error
    return MPI


class Outbox:
    """Sends in flight, kept with their buffers until they are complete."""

    def __init__(self) -> None:
        self._in_flight: list[tuple[Request, object]] = []

    def keep(self, request: Request, sent: object) -> None:
        self._in_flight.append((request, sent))

    def progress(self) -> None:
        if self._in_flight:
            self._in_flight = [pair for pair in self._in_flight if not pair[0].Test()]

    @property
    def empty(self) -> bool:
        return not self._in_flight


class _SegmentMessage(SegmentFrame):
    """The memory of one message with a segment, and its pending receives."""

    def __init__(self, spec: SegmentSpec, slot: int) -> None:
        super().__init__(spec, slot)
        self.actor = -1
        self.requests: list[Request] = []
        self.state: np.ndarray | None = None

    @property
    def complete(self) -> bool:
        """Whether all of it has arrived; a state arrives in a message of its own, after the segment."""
        if not all(request.Test() for request in self.requests):
            return False
        return self.state is not None or self.state_bytes < 0

    def arrived(self, run: str) -> Segment:
        """Return the segment, once it is complete."""
        return self.read(run, self.actor, None if self.state is None else self.state.tobytes())


class MpiChannel:
    """A Channel from the ranks in `writers`, one for each actor, to the rank `reader`.

    An actor has as many message buffers at either end as it has slots. A buffer that was sent stays in use until the
    reader releases it and its number comes back as a credit; so the reader always has a free buffer for an incoming
    segment.
    """

    SEGMENT, STATE, CREDIT, PRIME = range(4)
    _KINDS = 4

    def __init__(
        self,
        comm: Comm,
        spec: SegmentSpec,
        run: str,
        writers: Sequence[int],
        slots_per_actor: int = 1,
        *,
        reader: int = 0,
    ) -> None:
        """Collective: all ranks of `comm` create their channel together."""
        self._mpi = import_mpi()
        self._comm: Comm = comm.Dup()
        self._run, self._writers, self._reader = run, tuple(writers), reader
        own_rank = self._comm.Get_rank()
        own = [actor for actor, rank in enumerate(writers) if rank == own_rank]
        self._out = {actor: [_SegmentMessage(spec, slot) for slot in range(slots_per_actor)] for actor in own}
        self._free = {actor: list(range(slots_per_actor)) for actor in own}
        self._held: dict[int, int] = {}  # actor → the slot it is filling
        self._last: dict[int, tuple[int, bytes | None]] = {}
        num_in = len(self._writers) * slots_per_actor if own_rank == reader else 0
        self._in = [_SegmentMessage(spec, slot) for slot in range(num_in)]
        self._empty = {
            actor: self._in[actor * slots_per_actor : (actor + 1) * slots_per_actor] for actor in range(len(writers))
        }
        self._arriving: list[_SegmentMessage] = []  # in order of arrival
        self._outbox = Outbox()
        self._status: Status = self._mpi.Status()

    def blank(self, actor: int) -> Segment | None:
        if actor not in self._held:
            self.progress()
            if not self._free[actor]:
                return None
            self._held[actor] = self._free[actor].pop(0)
        return self._out[actor][self._held[actor]].segment

    def offer(self, segment: Segment) -> bool:
        header = segment.header
        assert header is not None, "a segment is offered with its header set"
        packet = self._out[header.actor][segment.slot]
        packet.write(segment.slot, header, segment.state)
        self._send(packet.buffer, self._reader, header.actor, self.SEGMENT)
        if segment.state is not None:
            self._send(segment.state, self._reader, header.actor, self.STATE)
        self._last[header.actor] = (header.sequence, segment.state)
        del self._held[header.actor]
        return True

    def poll(self) -> Segment | None:
        self.progress()
        blocked: set[int] = set()  # actors with an earlier segment that is not complete
        for packet in self._arriving:
            if packet.actor not in blocked and packet.complete:
                self._arriving.remove(packet)
                return packet.arrived(self._run)
            blocked.add(packet.actor)
        return None

    def release(self, segment: Segment) -> None:
        packet = self._in[segment.slot]
        credit = packet.words[: _SegmentMessage.SLOT + 1].copy()
        packet.requests, packet.state = [], None
        self._empty[packet.actor].append(packet)
        self._send(credit, self._writers[packet.actor], packet.actor, self.CREDIT)

    def recall(self, actor: int) -> tuple[int, bytes | None] | None:
        self.progress()
        return self._last.get(actor)

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        """Send the position to the actor's rank, which receives it in its next `progress`."""
        message = msgspec.msgpack.encode((sequence, state))
        tag = actor * self._KINDS + self.PRIME
        self._outbox.keep(self._comm.Issend(message, self._writers[actor], tag), message)

    def progress(self) -> None:
        """Receive what arrived, and drop completed sends."""
        self._outbox.progress()
        probe, any_source = self._comm.Improbe, self._mpi.ANY_SOURCE
        while (message := probe(any_source, self._mpi.ANY_TAG, self._status)) is not None:
            actor, kind = divmod(self._status.Get_tag(), self._KINDS)
            self._handle(message, actor, kind)

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight: all sends are complete, and all arriving segments are."""
        return self._outbox.empty and all(packet.complete for packet in self._arriving)

    def close(self) -> None:
        """Free the communicator; collective, when nothing is in flight."""
        self._comm.Free()

    def _handle(self, message: Message, actor: int, kind: int) -> None:
        if kind == self.SEGMENT:
            packet = self._empty[actor].pop(0)
            packet.actor = actor
            packet.requests = [message.Irecv(packet.buffer)]
            self._arriving.append(packet)
        elif kind == self.STATE:
            packet = next(packet for packet in reversed(self._arriving) if packet.actor == actor)
            packet.state = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            packet.requests.append(message.Irecv(packet.state))
        elif kind == self.CREDIT:
            credit = np.zeros(1, np.int64)
            message.Recv(credit)
            self._free[actor].append(int(credit[0]))
        else:
            self._last[actor] = msgspec.msgpack.decode(self._read_bytes(message), type=tuple[int, bytes | None])

    def _read_bytes(self, message: Message) -> bytes:
        data = bytearray(self._status.Get_count(self._mpi.BYTE))
        message.Recv(data)
        return bytes(data)

    def _send(self, data: np.ndarray | bytes, rank: int, actor: int, kind: int) -> None:
        self._outbox.keep(self._comm.Isend(data, rank, actor * self._KINDS + kind), data)


class MpiWeights:
    """A WeightStore: the rank `writer` sends to each of `readers`, and reads its own publications locally.

    Nothing more is sent to a reader that has not started to receive the last frame; then it gets the newest. So a slow
    reader delays no other, and the writer keeps at most two frames more than it has readers.
    """

    def __init__(self, comm: Comm, readers: Sequence[int], *, writer: int = 0) -> None:
        """Collective: all ranks of `comm` create their store together."""
        self._mpi = import_mpi()
        self._comm: Comm = comm.Dup()
        self._writer = writer
        self._publishes = self._comm.Get_rank() == writer
        self._newest: dict[str, WeightsFrame] = {}
        self._layouts: dict[str, WeightsLayout] = {}
        self._spare: list[WeightsFrame] = []
        self._sent: dict[int, dict[str, int]] = {reader: {} for reader in readers if reader != writer}
        self._in_flight: dict[int, tuple[Request, WeightsFrame]] = {}
        self._incoming: tuple[Request, WeightsFrame] | None = None
        self._metadata_cache: dict[bytes, tuple[str, WeightsLayout]] = {}
        self._status: Status = self._mpi.Status()

    def publish(self, policy: str, weights: Weights) -> None:
        newest = self._newest.get(policy)
        if newest is not None and weights.version <= newest.version:
            raise ValueError(f"version {weights.version} is not newer than {newest.version}")
        weights.require(self._layouts.setdefault(policy, weights.layout), "those published before")
        self.progress()
        frame = self._take_spare(newest) or WeightsFrame.blank(policy, weights)
        frame.write(weights)
        self._newest[policy] = frame
        self._recycle(newest)
        self._send()

    def newer_than(self, policy: str, version: int) -> Weights | None:
        self.progress()
        newest = self._newest.get(policy)
        return newest.read(self._layouts[policy]) if newest is not None and newest.version > version else None

    def progress(self) -> None:
        """Receive what arrived, drop completed sends, and send newer weights."""
        if self._publishes:
            for reader, (request, frame) in list(self._in_flight.items()):
                if request.Test():
                    del self._in_flight[reader]
                    frame.pending_sends -= 1
                    self._recycle(frame)
            self._send()
        else:
            while self._received() or self._receive():
                pass

    @property
    def receiving(self) -> bool:
        """Whether weights are being received and are not complete yet."""
        return self._incoming is not None

    def delivered(self, reader: int) -> bool:
        """Whether a reader has started to receive the newest version of every policy."""
        versions = {policy: frame.version for policy, frame in self._newest.items()}
        return reader not in self._in_flight and self._sent.get(reader, versions) == versions

    def close(self) -> None:
        """Free the communicator; collective, when nothing is in flight."""
        self._comm.Free()

    def _send(self) -> None:
        for reader, sent in self._sent.items():
            for policy, frame in self._newest.items():
                if reader not in self._in_flight and sent.get(policy, -1) < frame.version:
                    self._in_flight[reader] = (self._comm.Issend(frame.data, reader), frame)
                    sent[policy] = frame.version
                    frame.pending_sends += 1

    def _recycle(self, frame: WeightsFrame | None) -> None:
        """Keep a frame's memory for reuse, once it is neither being sent nor the newest."""
        if (
            frame is not None
            and frame.pending_sends == 0
            and not any(frame is known for known in self._newest.values())
        ):
            self._spare.append(frame)

    def _take_spare(self, like: WeightsFrame | None) -> WeightsFrame | None:
        if like is None:
            return None
        for frame in self._spare:
            if frame.data.nbytes == like.data.nbytes and frame.metadata == like.metadata:
                self._spare.remove(frame)
                return frame
        return None

    def _receive(self) -> bool:
        message = self._comm.Improbe(self._writer, 0, self._status)
        if message is None:
            return False
        size = self._status.Get_count(self._mpi.BYTE)
        spare = next((frame for frame in self._spare if frame.data.nbytes == size), None)
        if spare is not None:
            self._spare.remove(spare)
        frame = spare or WeightsFrame(np.zeros(size, np.uint8))
        self._incoming = (message.Irecv(frame.data), frame)
        return True

    def _received(self) -> bool:
        if self._incoming is None or not self._incoming[0].Test():
            return False
        frame, self._incoming = self._incoming[1], None
        metadata = frame.metadata
        if metadata not in self._metadata_cache:
            self._metadata_cache[metadata] = decode_weights_metadata(metadata, frame.buffer.nbytes)
        policy, self._layouts[policy] = self._metadata_cache[metadata]
        before = self._newest.get(policy)
        self._newest[policy] = frame
        self._recycle(before)
        return True


class MpiControl:
    """Control messages: a table of words from the first rank to all others, notes from them to the first.

    Of the words only the newest values count; every note arrives.
    """

    _VALUES, _NOTE = range(2)

    def __init__(self, comm: Comm, names: Sequence[str]) -> None:
        """Collective: all ranks of `comm` create theirs together. Every value is 0 until it is set."""
        self._mpi = import_mpi()
        self._comm: Comm = comm.Dup()
        self._is_first = self._comm.Get_rank() == 0
        self._names = tuple(names)
        self._table = np.zeros(len(self._names), np.int64)
        self._sent_values = {rank: self._table.copy() for rank in range(1, self._comm.Get_size())}
        self._outbox = Outbox()
        self._notes: deque[tuple[int, dict[str, Any]]] = deque()
        self._status: Status = self._mpi.Status()

    def set(self, name: str, value: int) -> None:
        """On the first rank: set a value, which the next `progress` sends. May be called in a signal handler."""
        self._table[self._names.index(name)] = value

    def get(self, name: str) -> int:
        """Return a value, as far as it is known here."""
        return int(self._table[self._names.index(name)])

    def send_note(self, note: dict[str, Any]) -> None:
        """Send a note to the first rank."""
        data = msgspec.json.encode(note)
        self._outbox.keep(self._comm.Isend(data, 0, self._NOTE), data)

    def notes(self) -> list[tuple[int, dict[str, Any]]]:
        """On the first rank: return the notes that arrived since the last call, each with its sender's rank."""
        found = list(self._notes)
        self._notes.clear()
        return found

    def progress(self, skip: Sequence[int] = ()) -> None:
        """Receive what arrived, and send changed values, except to the ranks in `skip`."""
        self._outbox.progress()
        if self._is_first:
            self._send(skip)
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, self._status)) is not None:
            if self._status.Get_tag() == self._VALUES:
                message.Recv(self._table)
                continue
            data, source = bytearray(self._status.Get_count(self._mpi.BYTE)), self._status.Get_source()
            message.Recv(data)
            self._notes.append((source, msgspec.json.decode(data)))

    @property
    def settled(self) -> bool:
        """Whether all sends are complete and, on the first rank, every rank was sent the newest values."""
        return self._outbox.empty and all(
            (sent == self._table).all() for sent in self._sent_values.values() if self._is_first
        )

    def close(self) -> None:
        """Free the communicator; collective, when nothing is in flight."""
        self._comm.Free()

    def _send(self, skip: Sequence[int]) -> None:
        for rank, sent in self._sent_values.items():
            if rank not in skip and not (sent == self._table).all():
                now = self._table.copy()
                self._sent_values[rank] = now
                self._outbox.keep(self._comm.Isend(now, rank, self._VALUES), now)

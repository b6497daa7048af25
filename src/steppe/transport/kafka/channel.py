"""Segments through Kafka. Weights are in weights.py.

    actor ── begin ─ segment 0 ─ segment 1 ─ …  ▶ experiences[partition of the actor] ▶ learner
    actor ◀ experiences.progress: the learner has read up to n, and still holds these ◀ learner
    actor ◀ model_updates ◀ one transaction: weights, and the offsets of the segments they were learned from ◀ learner

A writer's incarnation (header `life`) begins with a message `begin`, whose offset is its number. Segments that an
earlier incarnation sent after that message, from a process that was killed, are dropped: the new process has not seen
them. A writer continues after the last segment before its own `begin`, with the state that is attached to that segment.

The reader tracks the offsets of segments that it has passed on and not got back: everything before the first of these
was learned from. A transaction commits that offset, a checkpoint stores it, and another reader continues there.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import DamagedFile, Overtaken, RunFailed, Unreachable
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.io.codec import (
    SEGMENT_SCHEMA,
    decode_segment,
    encode_segment,
    segment_header,
)
from steppe.transport.kafka.client import (
    EXPERIENCES,
    INT64,
    PROGRESS,
    RETRY_S,
    KafkaConnection,
    Message,
    PartitionReader,
    decode_headers,
    describe_error,
    find_newest,
    get_watermarks,
    import_kafka,
    is_unknown_topic,
    lost_broker_within,
    map_produce_errors,
    open_consumer,
    partition_of,
    read_backwards,
    read_range,
    topic_id,
)
from steppe.transport.kafka.dead_letters import DeadLetterQueue

SEGMENT, BEGIN, PRIME = b"segment", b"begin", b"prime"  # kinds of messages in experiences
ACK_S = 30.0  # how long a message may take that must arrive before anything else
MIN_UNRELEASED = 16  # minimum number of segments of a partition that the reader may hold
LOOK_BACK = 16  # messages
MAX_MESSAGES_PER_POLL = 1_000  # messages that one poll handles
LastSegment = tuple[int, bytes | None]
Marks = dict[int, tuple[int, list[int]]]  # partition → its low mark, and offsets above it that were learned from


class ReadProgress(msgspec.Struct, frozen=True, rename={"incarnation": "life", "round_offset": "shift"}):
    """How far the reader is with one actor: segments below `next` that are not in `held` were learned from."""

    next: int  # -1: this reader has read none of its segments yet, but another may have
    held: tuple[int, ...] = ()
    incarnation: int = -1  # the actor's, as the reader knows it
    refused: tuple[int, str] | None = None  # the offset of a message that was rejected, and why
    round_offset: int = 0  # the round number of its next segment, minus that segment's sequence number


class KafkaSender:
    """A producer that tracks delivery and resends messages."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._kafka = import_kafka()
        self._producer, self._wait_s = connection.producer(), connection.config.wait_s
        self._waiting: deque[tuple[Any, ...]] = deque()  # undelivered, to be sent again
        self.failure: str | None = None
        self.written: deque[int] = deque(maxlen=64)  # the newest offsets

    def send(self, topic: str, value: bytes | None, key: bytes, partition: int, headers: Mapping[str, bytes]) -> bool:
        """Enqueue a message; never blocks. False if the queue to the broker is full: try again."""
        self._producer.poll(0)
        self._waiting.append((topic, value, key, partition, list(headers.items())))
        if self._resend():
            return True
        self._waiting.pop()
        self.progress()
        return False

    def _resend(self) -> bool:
        """Enqueue waiting messages in order; return whether none is left."""
        try:
            while self._waiting:
                topic, value, key, partition, headers = self._waiting[0]
                with map_produce_errors(topic):
                    self._producer.produce(topic, value, key, partition, on_delivery=self._delivered, headers=headers)
                self._waiting.popleft()
        except BufferError:
            return False
        return True

    def post(self, topic: str, value: bytes | None, key: bytes, partition: int, headers: Mapping[str, bytes]) -> int:
        """Send a message and block until the broker acknowledges it; return its offset. Unreachable after ACK_S."""
        offsets: list[int] = []

        def delivered(error: Any, message: Message) -> None:
            self._delivered(error, message)
            offsets.extend([] if error is not None else [message.offset()])

        until = time.monotonic() + ACK_S
        while time.monotonic() < until:
            try:
                with map_produce_errors(topic):
                    pairs = list(headers.items())
                    self._producer.produce(topic, value, key, partition, on_delivery=delivered, headers=pairs)
                break
            except BufferError:
                self._producer.poll(RETRY_S)
        while not offsets and self.failure is None and (left_s := until - time.monotonic()) > 0:
            self._producer.poll(min(left_s, 1.0))
        self.progress()
        if not offsets:
            raise Unreachable(f"a message to {topic} was not written down within {ACK_S:g} s: is the broker running?")
        return offsets[0]

    def progress(self) -> None:
        """Handle delivery reports and resend. RunFailed if a message can never be delivered."""
        self._producer.poll(0)
        self._resend()
        if self.failure is not None:
            raise RunFailed(f"a message could not be written {self.failure}")

    def flush(self, timeout_s: float) -> int:
        """Wait until the broker has acknowledged everything; return how many messages it has not."""
        self._resend()
        return int(self._producer.flush(timeout_s)) + len(self._waiting)

    def _delivered(self, error: Any, message: Message) -> None:
        if error is None:
            self.written.append(message.offset())
        elif is_unknown_topic(error) and lost_broker_within(self._wait_s):
            # A broker that has just restarted does not know its topics yet.
            headers = list(decode_headers(message).items())
            self._waiting.append((message.topic(), message.value(), message.key(), message.partition(), headers))
        else:
            self.failure = f"to {message.topic()}: {describe_error(error)}"


class KafkaWriter:
    """A Channel, writer side, of one actor."""

    def __init__(
        self,
        connection: KafkaConnection,
        partition_reader: PartitionReader,
        spec: SegmentSpec,
        actor: int,
        slots: int,
        partitions: int,
        dead_letters: DeadLetterQueue | None = None,
    ) -> None:
        """`dead_letters` receives invalid records of experiences.progress."""
        self._connection, self._actor = connection, actor
        self._dead_letters = dead_letters or DeadLetterQueue(connection, f"actor-{actor}")
        self._topic, self._partition = connection.topic(EXPERIENCES), partition_of(connection.run, actor, partitions)
        self._key, self._run = connection.key(actor), connection.run.encode()
        self._sender = KafkaSender(connection)
        self._blank, self._blank_in_use = Segment.blank(spec), False  # one is enough: a message is a copy
        self._refused: tuple[int, str] | None = None
        self._known_incarnations: dict[
            int, bool
        ] = {}  # the last later incarnation named in a message, and whether it began
        self._partition_reader, self._slots, self.round_offset = partition_reader, slots, 0
        headers = {"kind": BEGIN, "run": self._run, "actor": INT64.pack(actor)}
        self.incarnation = self._sender.post(self._topic, None, self._key, self._partition, headers)
        self._last = find_last_segment(connection, actor, self._partition, before=self.incarnation)
        self._read = self._follow_progress()
        sent = -1 if self._last is None else self._last[0]
        self._outstanding = set(range(max(self._read.next, sent - slots + 1), sent + 1)) | set(self._read.held)

    def blank(self, actor: int) -> Segment | None:
        self._partition_reader.progress()
        self._sender.progress()
        self._dead_letters.progress()
        self._require_accepted()
        self._blank_in_use = self._blank_in_use or len(self._outstanding) < self._slots
        return self._blank if self._blank_in_use else None

    def offer(self, segment: Segment) -> bool:
        header = segment.header
        assert header is not None, "a segment is offered with its header set"
        headers = {
            "kind": SEGMENT,
            "schema": INT64.pack(SEGMENT_SCHEMA),
            "run": self._run,
            "actor": INT64.pack(header.actor),
            "epoch": INT64.pack(header.epoch),
            "sequence": INT64.pack(header.sequence),
            "version": INT64.pack(header.version),
            "life": INT64.pack(self.incarnation),
        }
        if segment.state is not None:
            headers["state"] = segment.state
        if not self._sender.send(self._topic, encode_segment(segment), self._key, self._partition, headers):
            return False
        self._last, self._blank_in_use = (header.sequence, segment.state), False
        self._outstanding.add(header.sequence)
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

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait for messages in flight; return whether all were acknowledged."""
        return self._sender.flush(timeout_s) == 0

    def _follow_progress(self) -> ReadProgress:
        connection, topic, key = self._connection, self._connection.topic(PROGRESS), self._key

        def own(message: Message) -> ReadProgress | None:
            return self._validate_progress(message) if message.key() == key else None

        newest, end = find_newest(connection, topic, 0, lambda message: own(message) is not None)
        found, _ = find_newest(connection, topic, 0, lambda message: (own(message) or ReadProgress(-1)).next >= 0, end)
        self._partition_reader.follow(topic, 0, end, self._handle)
        if (
            newest is not None and (read := own(newest)) is not None
        ):  # perhaps about this incarnation: the reader may be faster
            self._require_not_overtaken(read)
            self.round_offset = read.round_offset
        return (own(found) if found is not None else None) or ReadProgress(0)

    def _require_not_overtaken(self, read: ReadProgress) -> None:
        if read.incarnation > self.incarnation:
            raise Overtaken(f"another process has taken over actor-{self._actor} of {self._connection.run}")

    def _validate_progress(self, message: Message) -> ReadProgress | None:
        """Decode this actor's progress; None if it is invalid or names an incarnation that never began."""
        read = _decode_progress(message)
        if read is None or read.incarnation <= self.incarnation:
            return read
        try:
            if read.incarnation not in self._known_incarnations:
                self._known_incarnations = {read.incarnation: self._began(read.incarnation)}
        except Unreachable:
            return None  # the learner reports again
        return read if self._known_incarnations[read.incarnation] else None

    def _began(self, incarnation: int) -> bool:
        """Whether a writer of this actor sent its `begin` at that offset."""
        with open_consumer(self._connection) as consumer:
            _, high = get_watermarks(consumer, self._topic, self._partition)
            messages = (
                read_range(consumer, self._topic, self._partition, incarnation, incarnation + 1)
                if incarnation < high
                else []
            )
        return any(
            message.offset() == incarnation and _is_begin(message) and message.key() == self._key
            for message in messages
        )

    def _handle(self, message: Message) -> None:
        if message.key() != self._key:
            return
        read = self._validate_progress(message)
        if read is None:
            self._dead_letters.refuse(message, "it does not say how far the learner has read")
            return
        self._require_not_overtaken(read)
        self._refused, self.round_offset = read.refused, read.round_offset
        if read.next < 0:
            return
        self._read, held = read, set(read.held)
        self._outstanding = {
            sequence for sequence in self._outstanding if sequence >= self._read.next or sequence in held
        }

    def _require_accepted(self) -> None:
        """Raise RunFailed if the learner rejected this writer's own message; others may write to the topic too."""
        refused = self._refused
        if refused is not None and refused[0] in self._sender.written:
            raise RunFailed(f"the learner refused a segment of actor-{self._actor}: {refused[1]}")


def _decode_progress(message: Message) -> ReadProgress | None:
    """Decode a message of experiences.progress; None if it is invalid."""
    try:
        read = msgspec.msgpack.decode(message.value() or b"", type=ReadProgress)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    numbers = (read.next, read.incarnation, *read.held)
    return read if all(-1 <= number < 1 << 62 for number in numbers) and abs(read.round_offset) < 1 << 62 else None


def find_last_segment(
    connection: KafkaConnection, actor: int, partition: int, before: int | None = None
) -> LastSegment | None:
    """Return sequence number and state of the last segment that an actor has written, or None."""
    topic, key, found = connection.topic(EXPERIENCES), connection.key(actor), list[tuple[int, dict[str, bytes]]]()
    with open_consumer(connection) as consumer:
        low, high = connection.ends(consumer, topic, partition)
        for messages in read_backwards(consumer, topic, partition, low, high if before is None else before):
            own = [(message.offset(), message) for message in messages if message.key() == key]
            found[:0] = [
                (offset, decode_headers(message))
                for offset, message in own
                if _is_valid_message(message, connection.name)
            ]
            last = _find_last_valid(found)
            if last is not None and last >= LOOK_BACK:  # far enough to see a `begin` that voids it
                break
        last = _find_last_valid(found)
        if last is None:
            return None
        headers = found[last][1]
        return INT64.unpack(headers["sequence"])[0], headers.get("state")


def _is_begin(message: Message) -> bool:
    """Whether a message is how a writer's incarnation begins: of that kind, and without contents."""
    return decode_headers(message).get("kind") == BEGIN and message.value() is None


def _is_valid_message(message: Message, run: str) -> bool:
    """Whether a message is a `begin` or `prime`, or a segment of this run whose contents match its headers."""
    headers = decode_headers(message)
    if headers.get("kind") != SEGMENT:
        return headers.get("kind") == PRIME or _is_begin(message)
    try:
        header = segment_header(message.value() or b"")
        return header.run == run and header.sequence == _header_int(headers, "sequence")
    except DamagedFile:
        return False


def _find_last_valid(messages: Sequence[tuple[int, Mapping[str, bytes]]]) -> int | None:
    """Return the index of an actor's last segment; `messages` are oldest first.

    What an incarnation sent after a later one had begun does not count.
    """
    last, owner = None, -1
    for index, (offset, headers) in enumerate(messages):
        kind, incarnation = headers.get("kind"), int.from_bytes(headers.get("life", b""), "little")
        if kind == BEGIN:
            owner = offset
        elif len(headers.get("sequence", b"")) == INT64.size and (
            kind == PRIME or (kind == SEGMENT and incarnation >= owner)
        ):
            last = index
    return last


class _PartitionState:
    """The reader's progress in one partition."""

    def __init__(self, offset: int, done: tuple[int, ...], limit: int) -> None:
        self.next = offset  # everything before it was passed on or skipped
        self.done = set(done)  # offsets at or above the low mark that were learned from
        self.held: dict[int, int] = {}  # offset → actor, of segments that the learner holds
        self.limit = limit
        self.paused = False

    @property
    def low(self) -> int:
        """The offset before which everything was learned from."""
        return next(iter(self.held), self.next)  # offsets were added in order

    def release(self, offset: int) -> None:
        first = offset == self.low
        del self.held[offset]
        self.done.add(offset)
        if first:
            low = self.low
            self.done = {done for done in self.done if done >= low}


@dataclass(slots=True)
class _ActorProgress:
    """The reader's progress with one actor: the contents of a ReadProgress."""

    next: int = -1
    due: int | None = None  # sequence number of this incarnation's next segment, once it has sent one
    may_have_missed_begin: bool = True  # whether an incarnation may have begun in messages that were not read
    held: dict[int, None] = field(default_factory=dict)  # sequence numbers
    incarnation: int = -1
    refused: tuple[int, str] | None = None
    round_offset: int = 0
    unreported_releases: int = 0  # segments that were released and not reported yet

    def read(self) -> ReadProgress:
        return ReadProgress(self.next, tuple(self.held), self.incarnation, self.refused, self.round_offset)


class KafkaReader:
    """A Channel, reader side.

    It takes messages from `partition_reader` one at a time, so its memory is bounded however much the topic holds.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        partition_reader: PartitionReader,
        spec: SegmentSpec,
        num_actors: int,
        slots: int,
        marks: Marks,
        incarnations: Mapping[int, int] | None = None,
        dead_letters: DeadLetterQueue | None = None,
    ) -> None:
        """`marks` is where to begin in each partition: its low mark, and offsets above it that were learned from.

        `incarnations` are the incarnations that had begun until then; `dead_letters` receives invalid messages.
        """
        self._connection, self._partition_reader, self._spec = connection, partition_reader, spec
        self._num_actors = num_actors
        self._topic, self._run, self._id = connection.topic(EXPERIENCES), connection.run, topic_id(connection)
        self._own = connection.run.encode()
        self._sender = KafkaSender(connection)
        self._dead_letters = dead_letters or DeadLetterQueue(connection, "learner")
        self.metadata = partition_reader.metadata()  # consumer group metadata; without subscriptions it never changes
        self._ready: deque[Segment] = deque()
        self._spare: deque[Segment] = deque(maxlen=MIN_UNRELEASED)  # allocation costs as much as reading
        self._slots: dict[int, tuple[int, int]] = {}  # segment's slot → partition, offset
        self._next_slot = 0
        self._actor_progress: defaultdict[int, _ActorProgress] = defaultdict(_ActorProgress)
        for actor, incarnation in (incarnations or {}).items():
            self._actor_progress[actor].incarnation = incarnation
        self._report_every = max(1, slots // 8)  # a report per release would cost as much as a small segment
        self.joined: deque[tuple[int, bool]] = deque(maxlen=1024)  # actors that began, and whether in place of another
        self.dropped: Counter[str] = Counter()
        self._received = [0, 0, 0.0]  # segments, their bytes, and the newest one's age in seconds
        self.partitions: dict[int, _PartitionState] = {}
        for partition, (offset, done) in marks.items():
            num_local = sum(partition_of(self._run, actor, len(marks)) == partition for actor in range(num_actors))
            self.partitions[partition] = _PartitionState(
                offset, tuple(done), max(MIN_UNRELEASED, num_local * (slots + 2))
            )
            partition_reader.follow(self._topic, partition, offset, self._handle)

    def blank(self, actor: int) -> Segment | None:
        """Return None: this side only reads."""
        return None

    def offer(self, segment: Segment) -> bool:
        return False

    def poll(self) -> Segment | None:
        for _ in range(MAX_MESSAGES_PER_POLL):
            if self._ready or not self._partition_reader.handle_next():
                break
        self._sender.progress()
        self._dead_letters.progress()
        return self._ready.popleft() if self._ready else None

    def release(self, segment: Segment) -> None:
        assert segment.header is not None
        partition, offset = self._slots.pop(segment.slot)
        state, progress = self.partitions[partition], self._actor_progress[segment.header.actor]
        state.release(offset)
        if state.paused and len(state.held) <= state.limit // 2:  # not for every release: resuming takes a moment
            state.paused = False
            self._partition_reader.set_paused(self._topic, partition, paused=False)
        progress.held.pop(segment.header.sequence, None)  # absent only if the segment was sent twice
        progress.unreported_releases += 1
        if progress.unreported_releases >= self._report_every:
            self._report(segment.header.actor, progress)
        self._spare.append(Segment(segment.spec, segment.columns))  # users of the old object keep its header

    def set_round_offset(self, actor: int, round_offset: int) -> None:
        """Report to an actor the `round_offset` from its next sequence number to the round that this segment is for."""
        progress = self._actor_progress[actor]
        if progress.round_offset != round_offset:
            progress.round_offset = round_offset
            self._report(actor, progress)

    def recall(self, actor: int) -> LastSegment | None:
        return find_last_segment(self._connection, actor, self._partition_of(actor))

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        Primer(self._connection, len(self.partitions)).prime(actor, sequence, state)

    def mark(self) -> Tree:
        """Return where another reader continues, for a checkpoint."""
        marks = [[number, low, done] for number, (low, done) in self.marks().items()]
        incarnations = [[actor, progress.incarnation] for actor, progress in self._actor_progress.items()]
        return {"topic": self._id, "marks": marks, "lives": incarnations}

    def marks(self) -> Marks:
        """Return where another reader continues, by partition."""
        return {
            number: (state.low, sorted(offset for offset in state.done if offset >= state.low))
            for number, state in self.partitions.items()
        }

    def offsets(self) -> list[Any]:
        """Return the same positions in the form that Kafka commits."""
        topic_partition = import_kafka().TopicPartition
        return [topic_partition(self._topic, number, state.low) for number, state in self.partitions.items()]

    def stats(self) -> dict[str, float]:
        segments, size, age_s = self._received
        return {"kafka/lag": self.lag(), "kafka/segments": segments, "kafka/bytes": size, "kafka/age_s": age_s}

    def lag(self) -> int:
        """Return how many messages are not read yet, as far as known here; messages of other runs are included."""
        return sum(
            max(0, self._partition_reader.end(self._topic, number) - state.next)
            for number, state in self.partitions.items()
        )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Report releases and wait for messages in flight; return whether all were acknowledged."""
        self._report_all()
        self._dead_letters.close(timeout_s)
        return self._sender.flush(timeout_s) == 0

    def _partition_of(self, actor: int) -> int:
        return partition_of(self._run, actor, len(self.partitions))

    def _handle(self, message: Message) -> None:
        state, offset = self.partitions[message.partition()], message.offset()
        if offset > state.next:  # the topic no longer has the messages between
            self._reset_expectations(message.partition(), unsure=True)
        state.next = offset + 1
        if offset in state.done:
            self._reset_expectations(message.partition())
            return
        headers = decode_headers(message)
        try:
            if "run" not in headers or headers.get("kind") not in (SEGMENT, BEGIN, PRIME):
                raise DamagedFile("it does not say which run and which kind of message it is")
            if headers["run"] != self._own:
                return
            actor = _header_int(headers, "actor", self._num_actors)
            if headers["kind"] == BEGIN:
                self._begin(message, actor)
            elif headers["kind"] == SEGMENT:
                self._receive(message, headers, actor)
        except DamagedFile as error:
            self._reject(message, headers, str(error))

    def _reset_expectations(self, partition: int, *, unsure: bool = False) -> None:
        """Forget which segments are due after messages of a partition were skipped.

        With `unsure`, the skipped messages may include a `begin`.
        """
        for actor, progress in self._actor_progress.items():
            if self._partition_of(actor) == partition:
                progress.due, progress.may_have_missed_begin = None, progress.may_have_missed_begin or unsure

    def _require_partition(self, message: Message, actor: int) -> None:
        if message.partition() != self._partition_of(actor):
            raise DamagedFile(f"it is in partition {message.partition()}, which is not that of actor-{actor}")

    def _begin(self, message: Message, actor: int) -> None:
        self._require_partition(message, actor)
        if message.key() != self._connection.key(actor) or not _is_begin(message):
            raise DamagedFile(f"it is not how actor-{actor} announces itself")
        progress, incarnation = self._actor_progress[actor], message.offset()
        progress.due, progress.may_have_missed_begin = None, False
        if incarnation > progress.incarnation:  # otherwise the previous reader has read it
            self.joined.append((actor, progress.incarnation >= 0))
            progress.incarnation = incarnation
        progress.refused = None
        self._report(actor, progress)

    def _receive(self, message: Message, headers: Mapping[str, bytes], actor: int) -> None:
        incarnation, progress = _header_int(headers, "life"), self._actor_progress[actor]
        if incarnation < progress.incarnation < message.offset():  # the new writer has seen what is before its `begin`
            self.dropped["overtaken"] += 1
            return
        segment = self._decoded(message, headers, actor)
        self._require_partition(message, actor)
        if incarnation >= message.offset() or (
            incarnation > progress.incarnation and not progress.may_have_missed_begin
        ):
            raise DamagedFile(
                f"its header 'life' is {incarnation}, and no incarnation began before offset {message.offset()}"
            )
        assert segment.header is not None
        if progress.due is not None and segment.header.sequence > progress.due:
            raise DamagedFile(f"its sequence number is {segment.header.sequence}, and {progress.due} is due")
        progress.incarnation = max(
            incarnation, progress.incarnation
        )  # only now: a forged number would end the actor's own incarnation
        progress.due = max(progress.due or 0, segment.header.sequence + 1)
        progress.next, progress.refused = max(progress.next, segment.header.sequence + 1), None
        progress.held[segment.header.sequence] = None
        partition, state = message.partition(), self.partitions[message.partition()]
        segment.slot, self._next_slot = self._next_slot, self._next_slot + 1
        age_s = max(0.0, time.time() - message.timestamp()[1] / 1000)
        self._received = [self._received[0] + 1, self._received[1] + len(message), age_s]
        self._slots[segment.slot] = (partition, message.offset())
        state.held[message.offset()] = actor
        self._ready.append(segment)
        if len(state.held) >= state.limit and not state.paused:
            state.paused = True
            self._partition_reader.set_paused(self._topic, partition, paused=True)

    def _decoded(self, message: Message, headers: Mapping[str, bytes], actor: int) -> Segment:
        """Decode the segment. DamagedFile unless it belongs to this run and its headers match its contents."""
        if _header_int(headers, "schema") > SEGMENT_SCHEMA:
            raise DamagedFile(
                f"its schema is {_header_int(headers, 'schema')}, newer than {SEGMENT_SCHEMA}, the newest known here"
            )
        value = message.value() or b""
        if len(value) > self._connection.max_bytes:
            raise DamagedFile(f"it has {len(value)} bytes, more than kafka.max_message_mb allows")
        segment = decode_segment(value, self._spec, self._spare.pop() if self._spare else None)
        header = segment.header
        assert header is not None
        named = tuple(_header_int(headers, name) for name in ("epoch", "sequence", "version"))
        if (header.run, header.actor, header.epoch, header.sequence, header.version) != (
            self._connection.name,
            actor,
            *named,
        ):
            raise DamagedFile("its headers and its contents name different segments")
        segment.state = headers.get("state")
        return segment

    def _reject(self, message: Message, headers: Mapping[str, bytes], reason: str) -> None:
        """Forward a message to the dead-letter topic, and report it to its writer if that is one of this run."""
        self.dropped["rejected"] += 1
        self._dead_letters.refuse(message, reason)
        for actor in range(self._num_actors):
            named = headers.get("run") == self._own and headers.get("actor") == INT64.pack(actor)
            if named and message.partition() == self._partition_of(actor):  # its writer writes to no other partition
                self._actor_progress[actor].refused = (message.offset(), reason[:200])
                self._report(actor, self._actor_progress[actor])

    def _report_all(self) -> None:
        for actor, progress in self._actor_progress.items():
            if progress.unreported_releases:
                self._report(actor, progress)

    def _report(self, actor: int, progress: _ActorProgress) -> None:
        progress.unreported_releases = 0
        data = msgspec.msgpack.encode(progress.read())
        self._sender.send(self._connection.topic(PROGRESS), data, self._connection.key(actor), 0, {})


class Primer:
    """Writes where the actors of a resumed run continue, before any of them begins."""

    def __init__(self, connection: KafkaConnection, partitions: int) -> None:
        self._connection, self._partitions = connection, partitions
        self._sender = KafkaSender(connection)

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        """Write the position to the topics, unless the topic already has that segment or a later one."""
        connection, partition = self._connection, partition_of(self._connection.run, actor, self._partitions)
        last = find_last_segment(connection, actor, partition)
        if last is not None and last[0] >= sequence:
            return
        key, pack = connection.key(actor), INT64.pack
        headers = {"kind": PRIME, "run": connection.run.encode(), "actor": pack(actor), "sequence": pack(sequence)}
        if state is not None:
            headers["state"] = state
        self._sender.post(connection.topic(EXPERIENCES), None, key, partition, headers)
        self._sender.post(connection.topic(PROGRESS), msgspec.msgpack.encode(ReadProgress(sequence + 1)), key, 0, {})


def _header_int(headers: Mapping[str, bytes], name: str, below: int | None = None) -> int:
    value = headers.get(name, b"")
    if len(value) != INT64.size:
        raise DamagedFile(f"its header {name!r} is missing or no number")
    (number,) = INT64.unpack(value)
    if number < 0 or (below is not None and number >= below):
        raise DamagedFile(f"its header {name!r} is {number}, which is out of range")
    return int(number)


def marks_at_end(connection: KafkaConnection, num_partitions: int) -> Marks:
    """Return marks that skip everything that is in the topic now."""
    topic = connection.topic(EXPERIENCES)
    with open_consumer(connection) as consumer:
        return {number: (get_watermarks(consumer, topic, number)[1], []) for number in range(num_partitions)}

"""Segments and weights through Kafka.

    actor ── begin ─ segment 0 ─ segment 1 ─ …  ▶ experiences[home of the actor] ▶ learner
    actor ◀ experiences.progress: the learner has read up to n, and still holds these ◀ learner
    actor ◀ model_updates ◀ one transaction: weights, and the offsets of what they were made of ◀ learner

A writer's life begins with a message `begin`; its offset numbers the life. What an earlier life sent behind it, from a
process that was killed, counts for nothing: whoever took its place has not seen it. A writer goes on after the last
segment that is in front of its beginning, with the state that travels with it.

The reader keeps the offsets of what it has handed out and not got back: in front of the first of these everything was
learned from. That is what a transaction commits and a checkpoint names, and where another reader goes on.
"""

from __future__ import annotations

import hashlib
import math
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from steppe.core.agent import Tree
from steppe.core.codec import (
    SEGMENT_SCHEMA,
    WEIGHTS_SCHEMA,
    decode_segment,
    decode_weights,
    encode_segment,
    encode_weights,
)
from steppe.core.durable import write_atomic
from steppe.core.errors import DamagedFile, Overtaken, RunFailed
from steppe.core.experience import Segment
from steppe.core.specs import SegmentSpec
from steppe.core.weights import Layout, Weights
from steppe.transport.kafka import (
    EXPERIENCES,
    PROGRESS,
    REJECTED,
    UPDATES,
    Connection,
    Feed,
    Message,
    backwards,
    ends,
    headers_of,
    home_of,
    library,
    newest,
    reading,
    topic_id,
)

SEGMENT, BEGIN, PRIME = b"segment", b"begin", b"prime"  # what a message in experiences is
WORD = struct.Struct("<q")
ACK_S = 60.0  # how long a message that must arrive before anything else may take
LEAST_HELD = 16  # segments of a partition that the reader may have in memory, at the least
LOOK_BACK = 16  # messages
KEPT_CLAIMS = 4  # files of weights that are left for readers who are late
UNREADABLE_S = 30.0  # how long a reader without any weights tries to read some
Last = tuple[int, bytes | None]
Marks = dict[int, tuple[int, list[int]]]  # partition → its low mark, and what was learned from behind that


class Read(msgspec.Struct, frozen=True):
    """How far the reader is with one actor: what is below `next` and not `held` was learned from."""

    next: int  # -1: this reader has read nothing of it yet, and another may have
    held: tuple[int, ...] = ()
    life: int = -1  # of the actor, as the reader knows it
    refused: tuple[int, str] | None = None  # the offset of a message that was no segment, and why


class Sender:
    """A producer, and what became of its messages."""

    def __init__(self, connection: Connection) -> None:
        self._kafka = library()
        self._producer = connection.producer()
        self.failure: str | None = None
        self.written: deque[int] = deque(maxlen=64)  # the newest offsets

    def send(self, topic: str, value: bytes | None, key: bytes, partition: int, headers: Mapping[str, bytes]) -> None:
        """Hand over for sending; never blocks."""
        self._producer.produce(topic, value, key, partition, on_delivery=self._delivered, headers=list(headers.items()))
        self.progress()

    def post(self, topic: str, value: bytes | None, key: bytes, partition: int, headers: Mapping[str, bytes]) -> int:
        """Send and wait until it is written down; returns its offset."""
        offsets: list[int] = []

        def delivered(error: Any, message: Message) -> None:
            self._delivered(error, message)
            offsets.extend([] if error is not None else [message.offset()])

        self._producer.produce(topic, value, key, partition, on_delivery=delivered, headers=list(headers.items()))
        self._producer.flush(ACK_S)
        self.progress()
        if not offsets:
            raise RunFailed(f"a message to {topic} was not written down within {ACK_S:g} s: is the broker there?")
        return offsets[0]

    def progress(self) -> None:
        """Hear what became of messages; RunFailed when one will never arrive."""
        self._producer.poll(0)
        if self.failure is not None:
            raise RunFailed(f"a message could not be written to Kafka: {self.failure}")

    def flush(self, timeout_s: float) -> int:
        """Wait until everything is written down; returns how many messages are not."""
        return int(self._producer.flush(timeout_s))

    def _delivered(self, error: Any, message: Message) -> None:
        if error is not None:
            self.failure = error.str()
        else:
            self.written.append(message.offset())


class KafkaOutlet:
    """A Channel as its one writer holds it."""

    def __init__(
        self, connection: Connection, feed: Feed, spec: SegmentSpec, actor: int, slots: int, partitions: int
    ) -> None:
        self._connection, self._actor = connection, actor
        self._topic, self._home = connection.topic(EXPERIENCES), home_of(connection.run, actor, partitions)
        self._key = connection.key(actor)
        self._sender = Sender(connection)
        self._free = deque(Segment.blank(spec) for _ in range(slots))
        self._held: Segment | None = None
        self._refused: tuple[int, str] | None = None
        self._feed, self._slots = feed, slots
        about = {"kind": BEGIN, "run": connection.run.encode(), "actor": WORD.pack(actor)}
        self.life = self._sender.post(self._topic, None, self._key, self._home, about)
        self._last = last_of(connection, actor, self._home, before=self.life)
        self._read = self._begin_reading()
        sent = -1 if self._last is None else self._last[0]
        self._outstanding = set(range(max(self._read.next, sent - slots + 1), sent + 1)) | set(self._read.held)

    def blank(self, actor: int) -> Segment | None:
        if self._held is None:
            self._feed.progress()
            self._sender.progress()
            self._require_accepted()
            if self._free and len(self._outstanding) < self._slots:
                self._held = self._free.popleft()
        return self._held

    def offer(self, segment: Segment) -> bool:
        header = segment.header
        assert header is not None, "a segment is offered with its header set"
        about = {
            "kind": SEGMENT,
            "schema": WORD.pack(SEGMENT_SCHEMA),
            "run": self._connection.run.encode(),
            "actor": WORD.pack(header.actor),
            "epoch": WORD.pack(header.epoch),
            "sequence": WORD.pack(header.sequence),
            "version": WORD.pack(header.version),
            "life": WORD.pack(self.life),
        }
        if segment.state is not None:
            about["state"] = segment.state
        self._sender.send(self._topic, encode_segment(segment), self._key, self._home, about)
        self._last, self._held = (header.sequence, segment.state), None
        self._outstanding.add(header.sequence)
        self._free.append(segment)  # the message has a copy
        return True

    def poll(self) -> Segment | None:
        """Nothing comes here."""
        return None

    def release(self, segment: Segment) -> None:
        raise ValueError("only the reader of a channel releases its segments")

    def recall(self, actor: int) -> Last | None:
        return self._last

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        self._last = (sequence, state)

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for what is under way."""
        self._sender.flush(timeout_s)

    def _begin_reading(self) -> Read:
        topic, key = self._connection.topic(PROGRESS), self._key
        found, end = newest(
            self._connection, topic, 0, lambda message: message.key() == key and _read(message).next >= 0
        )
        self._feed.follow(topic, 0, end, self._take)
        return Read(0) if found is None else _read(found)

    def _take(self, message: Message) -> None:
        if message.key() != self._key:
            return
        read = _read(message)
        if read.life > self.life:
            raise Overtaken(f"another process has taken the place of actor-{self._actor} in {self._connection.run}")
        self._refused = read.refused
        if read.next < 0:
            return
        self._read, held = read, set(read.held)
        self._outstanding = {one for one in self._outstanding if one >= self._read.next or one in held}

    def _require_accepted(self) -> None:
        """Others may write to the topic too: only what this writer has sent itself is its own fault."""
        refused = self._refused
        if refused is not None and refused[0] in self._sender.written:
            raise RunFailed(f"the learner refused a segment of actor-{self._actor}: {refused[1]}")


def _read(message: Message) -> Read:
    """What a message of experiences.progress says."""
    try:
        return msgspec.msgpack.decode(message.value() or b"", type=Read)
    except msgspec.MsgspecError:
        return Read(-1)


def last_of(connection: Connection, actor: int, home: int, before: int | None = None) -> Last | None:
    """Sequence number and state of the last segment that an actor has written down."""
    topic, key, seen = connection.topic(EXPERIENCES), connection.key(actor), list[tuple[int, dict[str, bytes]]]()
    with reading(connection) as consumer:
        low, high = connection.ends(consumer, topic, home)
        for messages in backwards(consumer, topic, home, low, high if before is None else before):
            own = [(message.offset(), headers_of(message)) for message in messages if message.key() == key]
            seen[:0] = own
            last = _last_valid(seen)
            if last is not None and last >= LOOK_BACK:  # no life began so shortly before that a killed one still sends
                break
        last = _last_valid(seen)
        if last is None:
            return None
        about = seen[last][1]
        return WORD.unpack(about["sequence"])[0], about.get("state")


def _last_valid(seen: Sequence[tuple[int, Mapping[str, bytes]]]) -> int | None:
    """Which of an actor's messages, oldest first, is its last segment; not what a life sent after another had begun."""
    last, owner = None, -1
    for index, (offset, about) in enumerate(seen):
        kind, life = about.get("kind"), int.from_bytes(about.get("life", b""), "little")
        if kind == BEGIN:
            owner = offset
        elif len(about.get("sequence", b"")) == WORD.size and (kind == PRIME or (kind == SEGMENT and life >= owner)):
            last = index
    return last


class _Home:
    """One partition, as the reader keeps account of it."""

    def __init__(self, offset: int, done: tuple[int, ...], limit: int) -> None:
        self.next = offset  # everything in front of it has been handed out or needs no handing out
        self.done = set(done)  # offsets at or above the low mark that were learned from
        self.held: dict[int, int] = {}  # offset → actor of what is with the learner
        self.limit = limit
        self.paused = False

    @property
    def low(self) -> int:
        """In front of it everything was learned from."""
        return min(self.held, default=self.next)


class KafkaInlet:
    """A Channel as its one reader holds it. It takes its messages from `feed`, one at a time, so that what it has in memory
    is bounded however much the topic holds."""

    def __init__(
        self, connection: Connection, feed: Feed, spec: SegmentSpec, num_actors: int, slots: int, marks: Marks
    ) -> None:
        """`marks` says for each partition where to begin: its low mark, and what was learned from behind that."""
        self._connection, self._feed, self._spec = connection, feed, spec
        self._num_actors = num_actors
        self._topic, self._run, self._id = connection.topic(EXPERIENCES), connection.run, topic_id(connection)
        self._sender = Sender(connection)
        self._ready: deque[Segment] = deque()
        self._slots: dict[int, tuple[int, int]] = {}  # segment's slot → partition, offset
        self._next_slot = 0
        self._lives: dict[int, int] = {}
        self._reads: dict[int, Read] = {}
        self.dropped: Counter[str] = Counter()
        self._came = [0, 0, 0.0]  # segments, their bytes, and the newest one's age in seconds
        self.homes: dict[int, _Home] = {}
        for partition, (offset, done) in marks.items():
            here = sum(home_of(self._run, actor, len(marks)) == partition for actor in range(num_actors))
            self.homes[partition] = _Home(offset, tuple(done), max(LEAST_HELD, here * (slots + 2)))
            feed.follow(self._topic, partition, offset, self._take)

    def blank(self, actor: int) -> Segment | None:
        """Nothing is written here."""
        return None

    def offer(self, segment: Segment) -> bool:
        return False

    def poll(self) -> Segment | None:
        while not self._ready and self._feed.one():
            pass
        self._sender.progress()
        return self._ready.popleft() if self._ready else None

    def release(self, segment: Segment) -> None:
        assert segment.header is not None
        partition, offset = self._slots.pop(segment.slot)
        home, actor = self.homes[partition], segment.header.actor
        del home.held[offset]
        home.done.add(offset)
        home.done = {one for one in home.done if one > home.low or one >= home.next}
        if home.paused and len(home.held) <= home.limit // 2:  # not for each one: it takes a moment
            home.paused = False
            self._feed.hold(self._topic, partition, on=False)
        known = self._reads[actor]
        self._tell(
            actor, msgspec.structs.replace(known, held=tuple(n for n in known.held if n != segment.header.sequence))
        )

    def recall(self, actor: int) -> Last | None:
        return last_of(self._connection, actor, self._home(actor))

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        Primer(self._connection, len(self.homes)).prime(actor, sequence, state)

    def mark(self) -> Tree:
        """Where another reader goes on, for a checkpoint."""
        return {"topic": self._id, "marks": [[number, low, done] for number, (low, done) in self.marks().items()]}

    def marks(self) -> Marks:
        """Where another reader goes on, by partition."""
        return {
            number: (home.low, sorted(offset for offset in home.done if offset >= home.low))
            for number, home in self.homes.items()
        }

    def offsets(self) -> list[Any]:
        """The same as Kafka commits it."""
        place = library().TopicPartition
        return [place(self._topic, number, home.low) for number, home in self.homes.items()]

    def metadata(self) -> Any:
        return self._feed.metadata()

    def stats(self) -> dict[str, float]:
        segments, size, age_s = self._came
        return {"kafka/lag": self.lag(), "kafka/segments": segments, "kafka/bytes": size, "kafka/age_s": age_s}

    def lag(self) -> int:
        """How many messages wait in the topic behind what was read, as far as is known here; those of other runs included."""
        return sum(max(0, self._feed.end(self._topic, number) - home.next) for number, home in self.homes.items())

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for what is under way."""
        self._sender.flush(timeout_s)

    def _home(self, actor: int) -> int:
        return home_of(self._run, actor, len(self.homes))

    def _take(self, message: Message) -> None:
        home, offset = self.homes[message.partition()], message.offset()
        home.next = offset + 1
        if offset in home.done:
            return
        about = headers_of(message)
        try:
            if "run" not in about or about.get("kind") not in (SEGMENT, BEGIN, PRIME):
                raise DamagedFile("it does not say which run and which kind of message it is")
            if about["run"] != self._run.encode():
                return
            actor = _word(about, "actor", self._num_actors)
            if about["kind"] == BEGIN:
                self._begin(actor, offset)
            elif about["kind"] == SEGMENT:
                self._receive(message, about, actor)
        except DamagedFile as error:
            self._reject(message, about, str(error))

    def _begin(self, actor: int, life: int) -> None:
        self._lives[actor] = life
        self._tell(actor, msgspec.structs.replace(self._reads.get(actor, Read(-1)), refused=None))

    def _receive(self, message: Message, about: Mapping[str, bytes], actor: int) -> None:
        life = _word(about, "life")
        if life < self._lives.get(actor, -1):
            self.dropped["overtaken"] += 1
            return
        self._lives[actor] = life
        segment = self._decoded(message, about, actor)
        assert segment.header is not None
        partition, home = message.partition(), self.homes[message.partition()]
        segment.slot, self._next_slot = self._next_slot, self._next_slot + 1
        age_s = max(0.0, time.time() - message.timestamp()[1] / 1000)
        self._came = [self._came[0] + 1, self._came[1] + len(message), age_s]
        self._slots[segment.slot] = (partition, message.offset())
        home.held[message.offset()] = actor
        held = (*self._reads.get(actor, Read(0)).held, segment.header.sequence)
        self._reads[actor] = Read(segment.header.sequence + 1, held, life)
        self._ready.append(segment)
        if len(home.held) >= home.limit and not home.paused:
            home.paused = True
            self._feed.hold(self._topic, partition, on=True)

    def _decoded(self, message: Message, about: Mapping[str, bytes], actor: int) -> Segment:
        """The segment, if the message is one of this run and its headers say the same as its contents."""
        if _word(about, "schema") > SEGMENT_SCHEMA:
            raise DamagedFile(
                f"its schema is {_word(about, 'schema')}, newer than {SEGMENT_SCHEMA}, the newest known here"
            )
        value = message.value() or b""
        if len(value) > self._connection.max_bytes:
            raise DamagedFile(f"it has {len(value)} bytes, more than kafka.max_message_mb allows")
        segment = decode_segment(value, self._spec)
        header = segment.header
        assert header is not None
        words = tuple(_word(about, name) for name in ("epoch", "sequence", "version"))
        if (header.run, header.actor, header.epoch, header.sequence, header.version) != (
            self._connection.name,
            actor,
            *words,
        ):
            raise DamagedFile("its headers and its contents name different segments")
        segment.state = about.get("state")
        return segment

    def _reject(self, message: Message, about: Mapping[str, bytes], reason: str) -> None:
        """Put it aside with the reason, and let its writer know, if it is one of ours."""
        self.dropped["rejected"] += 1
        where = {"partition": WORD.pack(message.partition()), "offset": WORD.pack(message.offset())}
        parked = {**about, "reason": reason.encode(), **where}
        value = (message.value() or b"")[: self._connection.max_bytes]
        key = message.key() or self._connection.key("unknown")
        self._sender.send(self._connection.topic(REJECTED), value, key, 0, parked)
        for actor in range(self._num_actors):
            if about.get("run") == self._run.encode() and about.get("actor") == WORD.pack(actor):
                known = self._reads.get(actor, Read(-1))
                self._tell(actor, msgspec.structs.replace(known, refused=(message.offset(), reason[:200])))

    def _tell(self, actor: int, read: Read) -> None:
        if read.next >= 0:
            self._reads[actor] = read
        told = msgspec.structs.replace(read, life=self._lives.get(actor, read.life))
        self._sender.send(
            self._connection.topic(PROGRESS), msgspec.msgpack.encode(told), self._connection.key(actor), 0, {}
        )


class Primer:
    """What tells actors of a resumed run where it goes on from, before any of them begins."""

    def __init__(self, connection: Connection, partitions: int) -> None:
        self._connection, self._partitions = connection, partitions
        self._sender = Sender(connection)

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        """Where the topic knows as much or more, that stays."""
        connection, home = self._connection, home_of(self._connection.run, actor, self._partitions)
        last = last_of(connection, actor, home)
        if last is not None and last[0] >= sequence:
            return
        key, word = connection.key(actor), WORD.pack
        about = {"kind": PRIME, "run": connection.run.encode(), "actor": word(actor), "sequence": word(sequence)}
        if state is not None:
            about["state"] = state
        self._sender.post(connection.topic(EXPERIENCES), None, key, home, about)
        self._sender.post(connection.topic(PROGRESS), msgspec.msgpack.encode(Read(sequence + 1)), key, 0, {})


def _word(about: Mapping[str, bytes], name: str, below: int | None = None) -> int:
    value = about.get(name, b"")
    if len(value) != WORD.size:
        raise DamagedFile(f"its header {name!r} is missing or no number")
    (number,) = WORD.unpack(value)
    if number < 0 or (below is not None and number >= below):
        raise DamagedFile(f"its header {name!r} is {number}, which is out of range")
    return int(number)


def beginning(connection: Connection, partitions: int) -> Marks:
    """Marks that leave out everything that is in the topic now."""
    topic = connection.topic(EXPERIENCES)
    with reading(connection) as consumer:
        return {number: (ends(consumer, topic, number)[1], []) for number in range(partitions)}


class KafkaWeights:
    """A WeightStore, as a reader holds it; the learner's has a press, which writes."""

    def __init__(self, connection: Connection, feed: Feed | None, claims: Path, press: Press | None = None) -> None:
        self._connection, self._claims, self._press = connection, claims, press
        self._newest: dict[str, Weights] = {}
        self._came: dict[str, Message] = {}
        self.damaged: str | None = None  # why the newest message was not taken
        self._damaged_s = math.inf  # since when
        self._sought: set[str] = set()
        self._feed = feed
        self._published: dict[str, tuple[int, Layout]] = {}
        with reading(connection) as consumer:
            _, self._begun = ends(consumer, connection.topic(UPDATES))
        if feed is not None:
            feed.follow(connection.topic(UPDATES), 0, self._begun, self._take)

    def publish(self, policy: str, weights: Weights) -> None:
        if self._press is None:
            raise ValueError("only the learner publishes weights")
        version, layout = self._published.get(policy, (-1, weights.layout))
        if policy in self._published and weights.version <= version:
            raise ValueError(f"version {weights.version} is not newer than {version}")
        weights.require(layout, "those published before")
        copy = weights.copy()
        self._press.put(policy, copy)
        self._newest[policy], self._published[policy] = copy, (weights.version, layout)
        self._came.pop(policy, None)

    def newer_than(self, policy: str, version: int) -> Weights | None:
        if self._feed is not None:
            self._feed.progress()
            self._seek(policy)
        if policy in self._came:
            self._decode(policy, self._came.pop(policy))
        found = self._newest.get(policy)
        if found is None and time.monotonic() - self._damaged_s > UNREADABLE_S:
            raise RunFailed(f"no weights can be read: {self.damaged}")
        return found.copy() if found is not None and found.version > version else None

    def earlier(self, policy: str) -> int:
        """The newest version that an earlier learner of this run has published; -1 when there was none."""
        found = self._before(policy)
        word = b"" if found is None else headers_of(found).get("version", b"")
        return int(WORD.unpack(word)[0]) if len(word) == WORD.size else -1

    def _seek(self, policy: str) -> None:
        """The first time that somebody asks for a policy: what was published before this reader came."""
        if policy in self._sought:
            return
        self._sought.add(policy)
        if policy not in self._came and (found := self._before(policy)) is not None:
            self._take(found)

    def _before(self, policy: str) -> Message | None:
        key = self._connection.key(policy)
        wanted = lambda message: message.key() == key  # noqa: E731
        return newest(self._connection, self._connection.topic(UPDATES), 0, wanted, self._begun)[0]

    def _take(self, message: Message) -> None:
        about = headers_of(message)
        if about.get("run") == self._connection.run.encode() and "policy" in about and "version" in about:
            self._came[about["policy"].decode(errors="replace")] = message  # read only if somebody wants it

    def _decode(self, policy: str, message: Message) -> None:
        """Keep the old weights where the new ones are not what they claim."""
        about = headers_of(message)
        try:
            if len(about.get("schema", b"")) != WORD.size or WORD.unpack(about["schema"])[0] > WEIGHTS_SCHEMA:
                raise DamagedFile("weights of a schema that is not known here")
            data = message.value() or b""
            if "sha256" in about:
                data = self._claimed(about)
            self._newest[policy] = decode_weights(data)
            self.damaged, self._damaged_s = None, math.inf
        except DamagedFile as error:
            self.damaged, self._damaged_s = str(error), min(self._damaged_s, time.monotonic())

    def _claimed(self, about: Mapping[str, bytes]) -> bytes:
        name = about["sha256"].hex()
        try:
            data = (self._claims / f"{name}.weights").read_bytes()
        except OSError as error:
            raise DamagedFile(f"the weights' file {name} cannot be read in {self._claims}: {error.strerror}") from None
        if hashlib.sha256(data).digest() != about["sha256"]:
            raise DamagedFile(f"the weights' file {name} does not match its name")
        return data


class Press:
    """Writes weights, each with the offsets of what was learned from by then, in one transaction, in a thread of its own.

    A press that is begun fences the one before it: of two learners of one run only the later can publish.
    """

    def __init__(self, connection: Connection, inlet: KafkaInlet | None, claims: Path) -> None:
        self._connection, self._inlet, self._claims = connection, inlet, claims
        self._kafka = library()
        name = f"steppe/{connection.config.prefix}{connection.run}/learner"
        self._producer = connection.producer(
            **{"transactional.id": name, "transaction.timeout.ms": 60_000, "message.timeout.ms": 55_000}
        )
        self._waiting: dict[str, tuple[Weights, list[Any]]] = {}
        self._error: BaseException | None = None
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._again(lambda: self._producer.init_transactions(30.0))
        self._thread = threading.Thread(target=self._work, name="press", daemon=True)
        self._thread.start()

    def put(self, policy: str, weights: Weights) -> None:
        """Write this next; one that waits for its turn is replaced. Raises what went wrong before."""
        with self._changed:
            self.require()
            self._waiting[policy] = (weights, self._inlet.offsets() if self._inlet is not None else [])
            self._changed.notify_all()

    def require(self) -> None:
        """Raise what went wrong, if something did."""
        if self._error is not None:
            raise self._error

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written; whether it is."""
        with self._changed:
            done = self._changed.wait_for(lambda: (not self._waiting and not self._busy) or self._error, timeout_s)
            self.require()
            return bool(done)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._changed.wait_for(lambda: (not self._waiting and not self._busy) or self._error, timeout_s)
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (due := self._due()) is not None:
            try:
                self._print(*due)
            except BaseException as error:  # noqa: BLE001 - raised again where the learner publishes next
                with self._changed:
                    self._error = error
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _due(self) -> tuple[str, Weights, list[Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and self._error is None))
            if self._closed and not self._waiting:
                return None
            if self._closed and self._error is not None:
                return None
            policy = next(iter(self._waiting))
            self._busy = True
            return (policy, *self._waiting.pop(policy))

    def _print(self, policy: str, weights: Weights, offsets: list[Any]) -> None:
        data = encode_weights(weights)
        about = {
            "schema": WORD.pack(WEIGHTS_SCHEMA),
            "run": self._connection.run.encode(),
            "policy": policy.encode(),
            "version": WORD.pack(weights.version),
        }
        if len(data) > self._connection.config.claim_mb * (1 << 20):
            about["sha256"], data = self._claim(data), b""
        topic, key = self._connection.topic(UPDATES), self._connection.key(policy)
        while True:
            try:
                self._transact(topic, data, key, about, offsets)
                return
            except _Again:
                continue

    def _transact(self, topic: str, data: bytes, key: bytes, about: Mapping[str, bytes], offsets: list[Any]) -> None:
        self._again(self._producer.begin_transaction)
        self._producer.produce(topic, data, key, 0, headers=list(about.items()))
        if self._inlet is not None and offsets:
            metadata = self._inlet.metadata()
            self._again(lambda: self._producer.send_offsets_to_transaction(offsets, metadata, 30.0))
        self._again(lambda: self._producer.commit_transaction(30.0))

    def _again(self, act: Any) -> None:
        """Do it until it is done: a broker that is away comes back. _Again when the transaction has to begin anew."""
        while True:
            try:
                act()
                return
            except self._kafka.KafkaException as error:
                inner = error.args[0]
                if inner.code() in (
                    self._kafka.KafkaError._FENCED,
                    self._kafka.KafkaError.INVALID_PRODUCER_EPOCH,
                    self._kafka.KafkaError.PRODUCER_FENCED,
                ):
                    raise Overtaken(f"another learner has taken over {self._connection.run}: this one ends") from None
                if inner.txn_requires_abort():
                    self._again(lambda: self._producer.abort_transaction(30.0))
                    raise _Again from None
                if self._closed or (not inner.retriable() and inner.code() != self._kafka.KafkaError._TIMED_OUT):
                    raise RunFailed(f"weights could not be published: {inner.str()}") from None

    def _claim(self, data: bytes) -> bytes:
        """Put weights into a file of their own, and remove those that nobody will ask for any more."""
        digest = hashlib.sha256(data).digest()
        self._claims.mkdir(parents=True, exist_ok=True)
        write_atomic(self._claims / f"{digest.hex()}.weights", data)
        for old in list(_by_age(self._claims))[:-KEPT_CLAIMS]:
            old.unlink(missing_ok=True)
        return digest


class _Again(Exception):
    """A transaction was given up, and is to be begun anew."""


def _by_age(claims: Path) -> Iterator[Path]:
    yield from sorted(claims.glob("*.weights"), key=lambda path: path.stat().st_mtime_ns)

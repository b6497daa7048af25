"""Arbitrary, truncated, nested, oversized and misaddressed records for every topic of a run.

Nothing here is a forgery: each record has at least one fault that its reader can see. Well-formed lies are for the brokers' ACLs.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from typing import NamedTuple

import msgspec

from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVALUATIONS, EVENTS, TOPICS, TRAINING
from steppe.transport.kafka.channel import BEGIN, ReadProgress
from steppe.transport.kafka.client import (
    EXPERIENCES,
    INT64,
    MODEL_UPDATES,
    PROGRESS,
    KafkaConnection,
    decode_headers,
    get_watermarks,
    open_consumer,
    partition_of,
    read_range,
)

EVERY = (EXPERIENCES, PROGRESS, MODEL_UPDATES, *TOPICS)
HOSTILE = ("epoch", "sequence", "version", "life", "schema", "actor", "kind", "run", "policy", "state")
SAMPLES = 50  # messages of a topic that others are made from
OVERSIZED_EVERY, MOST_OVERSIZED = 40, 200  # records; more would only fill the disk
ANSWERED = 0.1  # of the misaddressed commands are well-formed: each is answered, which takes a while


class Garbage(NamedTuple):
    """One record, as a producer takes it."""

    topic: str
    value: bytes | None
    key: bytes
    partition: int
    headers: list[tuple[str, bytes]]


class Maker:
    """Makes records from what is in the topics of a run now; the same for the same seed and topics."""

    def __init__(self, connection: KafkaConnection, seed: str, partitions: int = 2) -> None:
        self._connection, self._random, self._partitions = connection, random.Random(seed), partitions
        self._own, self._name = ("run", connection.run.encode()), connection.name
        self._made = 0
        self._kinds = [self._arbitrary] * 4 + [self._truncated] * 3 + [self._nested] * 2 + [self._misaddressed] * 6
        with open_consumer(connection) as consumer:
            places = [(EXPERIENCES, number) for number in range(partitions)] + [(MODEL_UPDATES, 0)]
            self._samples = {place: self._recent(consumer, *place) for place in places}

    def make(self) -> Garbage:
        """The next record. Every so often it is an oversized one, to each topic in turn."""
        self._made += 1
        number, rest = divmod(self._made, OVERSIZED_EVERY)
        if not rest and number <= MOST_OVERSIZED:
            return self._oversized(EVERY[number % len(EVERY)])
        topic = self._random.choice(EVERY)
        return self._random.choice(self._kinds)(topic)

    def _recent(self, consumer, topic, partition):
        low, high = get_watermarks(consumer, self._connection.topic(topic), partition)
        start = max(low, high - SAMPLES)
        if start >= high:
            return []
        found = read_range(consumer, self._connection.topic(topic), partition, start, high)
        return [message for message in found if not self._is_misplaced_begin(message)]

    def _is_misplaced_begin(self, message):
        """Garbage of an earlier maker: in the other partition it would be a forgery, as it is the actor's own `begin` again."""
        about = decode_headers(message)
        if about.get("kind") != BEGIN:
            return False
        actor = INT64.unpack(about["actor"])[0] if len(about.get("actor", b"")) == INT64.size else -1
        return message.partition() != partition_of(self._connection.run, actor, self._partitions)

    def _garbage(self, topic, value, headers=None, key=None):
        partition = self._random.randrange(self._partitions) if topic == EXPERIENCES else 0
        key = self._connection.key(self._random.choice((0, 1, "policy", "learner", "x"))) if key is None else key
        about = self._about() if headers is None else headers
        return Garbage(topic, value, key, partition, about)

    def _about(self):
        """Mostly the run's own header, as whoever means harm would have it, and some that belong to segments or weights."""
        run = self._own if self._random.random() < 0.8 else ("run", self._random.choice((b"", b"other~1", b"\xff")))
        names = self._random.sample(HOSTILE, self._random.randrange(4))
        return [(name, self._word()) for name in names if name not in ("run", "kind")] + [run]

    def _word(self):
        number = self._random.choice((0, 1, 7, -1, 2**40, 2**62, -(2**63)))
        return self._random.choice((INT64.pack(number), b"", b"x", self._random.randbytes(9)))

    def _arbitrary(self, topic):
        return self._garbage(topic, self._random.choice((None, b"", b"{}", b"[]", b"null", self._random.randbytes(40))))

    def _truncated(self, topic):
        if topic in (EXPERIENCES, MODEL_UPDATES) and (sample := self._sample(topic)) is not None:
            value = sample.value() or b""
            cut = value[: self._random.randrange(max(1, len(value)))]
            return self._like(topic, sample, cut)
        if topic == PROGRESS:
            whole = msgspec.msgpack.encode(ReadProgress(5, (3, 4), 2))
        else:
            whole = self._whole(topic)
        return self._garbage(topic, whole[: self._random.randrange(len(whole))])

    def _nested(self, topic):
        depth = self._random.choice((20, 900, 5_000))
        words = (b"[" * depth, b'{"a":' * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"\x81\xa1a" * depth)
        return self._garbage(topic, self._random.choice(words))

    def _oversized(self, topic):
        size = self._random.choice((100_000, 900_000, 2_000_000))  # compressed, all of them pass a broker
        return self._garbage(topic, self._random.choice((b"x" * size, json.dumps({"a": "x" * size}).encode())))

    def _misaddressed(self, topic):
        if topic in (EXPERIENCES, MODEL_UPDATES):
            sample = self._sample(topic)
            return self._arbitrary(topic) if sample is None else self._changed(topic, sample)
        if topic == PROGRESS:
            wrong = (
                ReadProgress(-9),
                ReadProgress(0, incarnation=2**50),
                ReadProgress(0, round_offset=2**62),
                ReadProgress(2**62),
                ReadProgress(0, (-5,)),
            )
            return self._garbage(topic, msgspec.msgpack.encode(self._random.choice(wrong)))
        if topic == COMMANDS and self._random.random() > ANSWERED:
            return self._arbitrary(topic)
        if topic == COMMANDS:
            return self._garbage(topic, json.dumps(self._late_command()).encode(), [self._own])
        record = json.loads(self._whole(topic))
        wrong = {
            "run": "other",
            "schema": 99,
            "time_s": float("nan"),
            "actor": 10**6,
            "env_steps": 2**70,
            "role": "ü" * 200,
        }
        names = [name for name in wrong if name in record]
        name = self._random.choice(names)
        return self._garbage(topic, json.dumps({**record, name: wrong[name]}).encode(), [self._own])

    def _late_command(self):
        """Well-formed, and for nobody: it is answered, not parked."""
        about = {"command": "stop", "id": uuid.UUID(int=self._random.getrandbits(128)).hex, "issuer": "test"}
        wrong = ({"run": "other"}, {"generation": 99}, {"expires_s": 1.0}, {"command": "explode"}, {"command": "set"})
        return {**about, **self._random.choice(wrong)}

    def _sample(self, topic):
        places = [place for place, found in self._samples.items() if place[0] == topic and found]
        return self._random.choice(self._samples[self._random.choice(places)]) if places else None

    def _like(self, topic, sample, value, **changes):
        about = {**decode_headers(sample), **changes}
        return Garbage(topic, value, sample.key() or b"", sample.partition(), list(about.items()))

    def _changed(self, topic, sample):
        """One that was there, with another header, partition, key or byte; or once more as it was."""
        how, value = self._random.randrange(4), sample.value()
        found = self._like(topic, sample, value)
        if how == 0 and decode_headers(sample).get("kind", b"segment") == b"segment":
            return found
        if how == 1 and topic == EXPERIENCES:
            return found._replace(partition=1 - found.partition)
        if how == 2 and value:
            where = self._random.randrange(len(value))
            return found._replace(value=value[:where] + bytes([value[where] ^ 0xFF]) + value[where + 1 :])
        name = self._random.choice(("actor", "epoch", "sequence", "version", "life"))
        return self._like(topic, sample, value or b"x", **{name: self._word()})

    def _whole(self, topic):
        run, counts = self._name, {"version": 1, "updates": 1, "env_steps": 1, "train_s": 1.0}
        made = {
            TRAINING: lambda: TrainingReport(run=run, **counts).record(),
            ACTORS: lambda: ActorReport(run=run, actor=0, epoch=0, version=1, sequence=1, env_steps=1).record(),
            EVALUATIONS: lambda: EvaluationReport(
                run=run, returns=[1.0], lengths=[1], return_mean=1.0, return_std=0.0, duration_s=1.0, weights_sha256="x",
                **counts,
            ).record(),
            EVENTS: lambda: EventReport(run=run, kind="note", role="test", details={"a": 1}).record(),
            COMMANDS: lambda: {"command": "pause", "id": "1", "issuer": "test", "time_s": time.time()},
        }  # fmt: skip
        return json.dumps(made[topic]()).encode()

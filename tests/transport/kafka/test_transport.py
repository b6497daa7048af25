"""Segments and weights over a real broker: refused messages, replaced writers, and where a reader continues."""

from __future__ import annotations

import struct
import time
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import ConfigError, Overtaken, RunFailed
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.weights import Weights
from steppe.core.io.codec import encode_segment, encode_weights
from steppe.testing.channel import SPEC, send
from steppe.testing.weights import some_weights
from steppe.transport.kafka import channel
from steppe.transport.kafka.channel import (
    MIN_UNRELEASED,
    KafkaReader,
    KafkaWriter,
    ReadProgress,
    find_last_segment,
    marks_at_end,
)
from steppe.transport.kafka.client import (
    KafkaConnection,
    PartitionReader,
    decode_headers,
    ensure_topics,
    get_watermarks,
    import_kafka,
    partition_of,
    read_range,
    security,
)
from steppe.transport.kafka.weights import KafkaWeights, WeightPublisher
from tests.support.kafka import PATIENCE_S, connected, dead_letters, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
RUN = "conformance"


@contextmanager
def kafka_channel(connection, actors=2, slots=4, marks=None, incarnations=None):
    """Yield a reader and a function that creates writers; all are closed at the end."""
    partition_readers = [PartitionReader(connection, group=f"steppe-{connection.run}")]
    kafka_reader = KafkaReader(
        connection, partition_readers[0], SPEC, actors, slots, marks or marks_at_end(connection, 2), incarnations
    )

    def writer(actor):
        partition_readers.append(PartitionReader(connection))
        return KafkaWriter(connection, partition_readers[-1], SPEC, actor, slots, 2)

    try:
        yield kafka_reader, writer
    finally:
        kafka_reader.close()
        for partition_reader in partition_readers:
            partition_reader.close()


def polled(kafka_reader):
    """Return the next segment, however long it takes."""
    found = []
    wait_until(lambda: found or (found.extend([s for s in [kafka_reader.poll()] if s is not None]) or found))
    return found[0]


def word(number):
    return struct.pack("<q", number)


def headers(connection, **more):
    about = {"kind": b"segment", "schema": word(1), "run": connection.run.encode(), "actor": word(0), "epoch": word(0)}
    about |= {"sequence": word(0), "version": word(0), "life": word(2**40), **more}
    return [(name, value) for name, value in about.items() if value is not None]


def encoded(spec=SPEC, run=RUN, actor=0, sequence=0):
    segment = Segment.blank(spec)
    segment.header = SegmentHeader(run, actor, 0, sequence, 0)
    return encode_segment(segment)


def test_refused_messages_go_to_the_dead_letter_topic_and_reading_continues(kafka):
    connection = connected(kafka)
    from dataclasses import replace

    poison = {
        "does not say which run": (b"anything", []),
        "is missing or no number": (encoded(), headers(connection, sequence=b"7")),
        "out of range": (encoded(), headers(connection, actor=word(99))),
        "newer than 1": (encoded(), headers(connection, schema=word(2))),
        "not a Steppe message": (b"x" * 400, headers(connection)),
        "truncated": (encoded()[:-9], headers(connection)),
        "instead of": (encoded(replace(SPEC, num_envs=5)), headers(connection)),
        "name different segments": (encoded(sequence=3), headers(connection)),
        "checksum": (_flipped(encoded()), headers(connection)),
    }
    with kafka_channel(connection) as (kafka_reader, writer):
        producer = connection.producer()
        for value, about in poison.values():
            producer.produce(connection.topic("experiences"), value, b"key", 0, headers=about)
        producer.produce(
            connection.topic("experiences"), b"x", b"k", 0, headers=[("run", b"other"), ("kind", b"segment")]
        )
        assert producer.flush(PATIENCE_S) == 0
        good = writer(1)
        send(good, RUN, 1, 0)
        assert polled(kafka_reader).header.actor == 1
        assert kafka_reader.dropped["rejected"] == len(poison)
    dead = dead_letters(connection)
    assert len(dead) == len(poison)
    for message, (reason, (value, _)) in zip(dead, poison.items(), strict=True):
        assert reason in decode_headers(message)["reason"].decode()
        assert message.value() == value[:4096]


def test_refusals_in_another_partition_do_not_concern_the_writer(kafka):
    """Offsets are counted per partition: the same offset elsewhere is another message."""
    connection = connected(kafka)
    topic, home = connection.topic("experiences"), partition_of(connection.run, 0, 2)
    with kafka_channel(connection) as (kafka_reader, writer):
        kafka_writer = writer(0)
        send(kafka_writer, RUN, 0, 0)
        polled(kafka_reader)
        producer = connection.producer()
        for _ in range(
            2
        ):  # so that the last one has the offset of the writer's segment, which follows its start message
            producer.produce(topic, b"x", b"key", 1 - home, headers=headers(connection, schema=word(99)))
        assert producer.flush(PATIENCE_S) == 0
        wait_until(lambda: kafka_reader.poll() is None and kafka_reader.dropped["rejected"] == 2)
        kafka_reader.set_round_offset(0, 7)
        wait_until(lambda: kafka_writer.blank(0) is not None and kafka_writer.round_offset == 7)
        send(kafka_writer, RUN, 0, 1)
        assert polled(kafka_reader).header.sequence == 1


def test_misaddressed_messages_are_refused_and_end_no_writer(kafka):
    """Whole segments and start messages in the wrong partition, of an unknown incarnation, or out of order; and false
    claims about incarnations.
    """
    connection = connected(kafka)
    topic, home = connection.topic("experiences"), partition_of(connection.run, 0, 2)
    with kafka_channel(connection) as (kafka_reader, writer):
        kafka_writer = writer(0)
        send(kafka_writer, RUN, 0, 0)
        polled(kafka_reader)
        incarnation = word(kafka_writer.incarnation)
        begin = [("kind", b"begin"), ("run", connection.run.encode()), ("actor", word(0))]
        forged = {
            "in partition": (None, connection.key(0), 1 - home, begin),
            "announces itself": (None, b"key", home, begin),
            "no incarnation began": (encoded(sequence=1), b"key", home, headers(connection, sequence=word(1), life=word(1 << 40))),
            "and 1 is due": (encoded(sequence=9), b"key", home, headers(connection, sequence=word(9), life=incarnation)),
        }  # fmt: skip
        producer = connection.producer()
        for value, key, partition, about in forged.values():
            producer.produce(topic, value, key, partition, headers=about)
        for value in (
            b"",
            b"\x81\xa1x" + b"\x91" * 9_000,
            msgspec.msgpack.encode(ReadProgress(0, incarnation=1 << 50)),
        ):
            producer.produce(connection.topic("experiences.progress"), value, connection.key(0), 0)
        assert producer.flush(PATIENCE_S) == 0
        wait_until(lambda: kafka_reader.poll() is None and kafka_reader.dropped["rejected"] == len(forged))
        kafka_reader.set_round_offset(0, 7)
        wait_until(lambda: kafka_writer.blank(0) is not None and kafka_writer.round_offset == 7)
        send(kafka_writer, RUN, 0, 1)
        assert polled(kafka_reader).header.sequence == 1
        count = len(forged) + 3
        wait_until(lambda: kafka_writer.blank(0) and len(dead_letters(connection)) >= count, "what is put aside")
    told = [decode_headers(message)["reason"].decode() for message in dead_letters(connection)]
    assert len(told) == count
    assert all(any(reason in words for words in told) for reason in forged), told


@pytest.mark.regression
def test_a_start_message_with_content_ends_no_writer_and_hides_no_segment(kafka):
    """The reader refuses it, so others must not take it for the start of another incarnation."""
    connection = connected(kafka)
    topic, home, key = connection.topic("experiences"), partition_of(connection.run, 0, 2), connection.key(0)
    begin = [("kind", b"begin"), ("run", connection.run.encode()), ("actor", word(0))]
    with kafka_channel(connection) as (kafka_reader, writer):
        kafka_writer, offsets, producer = writer(0), [], connection.producer()
        send(kafka_writer, RUN, 0, 0, state=b"zero")
        kafka_writer.close()
        producer.produce(
            topic, b"x", key, home, headers=begin, on_delivery=lambda _, sent: offsets.append(sent.offset())
        )
        assert producer.flush(PATIENCE_S) == 0
        told = msgspec.msgpack.encode(ReadProgress(0, incarnation=offsets[0], round_offset=3))
        producer.produce(connection.topic("experiences.progress"), told, key, 0)
        assert producer.flush(PATIENCE_S) == 0
        kafka_reader.set_round_offset(0, 7)
        wait_until(lambda: kafka_writer.blank(0) is not None and kafka_writer.round_offset == 7)
        send(kafka_writer, RUN, 0, 1, state=b"one")
        kafka_writer.close()
        assert find_last_segment(connection, 0, home) == (1, b"one")


class OneMessageAtATime(KafkaConnection):
    """Allows one message at a time to wait for the broker, and delays it."""

    def producer(self, **more):
        return super().producer(**{"queue.buffering.max.messages": 1, "linger.ms": 500, **more})


def test_a_writer_waits_while_the_maximum_is_in_flight(kafka):
    connection = connected(kafka)
    with kafka_channel(OneMessageAtATime(connection.config, connection.run)) as (kafka_reader, writer):
        kafka_writer, offered = writer(0), []
        for sequence in range(2):
            segment = kafka_writer.blank(0)
            segment.header = SegmentHeader(RUN, 0, 0, sequence, 0)
            offered.append(kafka_writer.offer(segment))
        assert offered == [True, False]
        wait_until(lambda: kafka_writer.blank(0) is segment and kafka_writer.offer(segment))
        assert [polled(kafka_reader).header.sequence for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("taken", [False, True])
def test_a_slow_writer_receives_all_messages_about_it(kafka, monkeypatch, taken):
    """Between its start message and its first poll it can be replaced, and rounds can continue."""
    find, slow = channel.find_last_segment, [True]

    def meanwhile(connection, actor, home, before=None):
        if slow and slow.pop():
            if taken:
                writer(0)
            wait_until(lambda: kafka_reader.poll() is None and len(kafka_reader.joined) == 1 + taken)
            kafka_reader.set_round_offset(0, 7)
            assert kafka_reader.close(PATIENCE_S)  # the reader sends messages about it
        return find(connection, actor, home, before=before)

    monkeypatch.setattr(channel, "find_last_segment", meanwhile)
    with kafka_channel(connected(kafka)) as (kafka_reader, writer):
        if taken:
            with pytest.raises(Overtaken, match="another process has taken over actor-0"):
                writer(0)
        else:
            assert writer(0).round_offset == 7


def _flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


class ScriptedFeed:
    """A feed that returns what the test gives it."""

    def __init__(self):
        self.takers = {}

    def metadata(self):
        return None

    def follow(self, topic, partition, offset, take):
        self.takers[partition] = take

    def handle_next(self):
        return False

    def give(self, message):
        self.takers[message.partition()](message)


class Crafted:
    """A message that never was in a topic."""

    newest = 2**50

    def __init__(self, value, about, partition):
        self._value, self._about, self._partition = value, about, partition
        Crafted.newest = self._offset = Crafted.newest + 1

    def value(self):
        return self._value

    def headers(self):
        return self._about

    def key(self):
        return b"key"

    def partition(self):
        return self._partition

    def offset(self):
        return self._offset

    def topic(self):
        return "experiences"

    def timestamp(self):
        return 1, 0

    def __len__(self):
        return len(self._value)


@pytest.fixture(scope="module")
def fuzzed(kafka):
    connection, partition_reader = connected(kafka), ScriptedFeed()
    kafka_reader = KafkaReader(connection, partition_reader, SPEC, 2, 4, marks_at_end(connection, 2))
    yield connection, partition_reader, kafka_reader
    kafka_reader.close()


names = st.sampled_from(["kind", "run", "actor", "epoch", "sequence", "version", "life", "schema", "state", "x"])


@trials(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    changes=st.dictionaries(names, st.none() | st.binary(max_size=9) | st.integers(-3, 2**62).map(word), max_size=4),
    cut=st.integers(0, 2**12),
    flips=st.lists(st.tuples(st.integers(0, 2**14), st.integers(1, 255)), max_size=3),
)
def test_arbitrary_messages_cannot_break_the_reader(fuzzed, changes, cut, flips):
    """Whatever is wrong with a message, it is either delivered whole or refused."""
    connection, partition_reader, kafka_reader = fuzzed
    data = bytearray(encoded()[: None if cut > 2**11 else -1 - cut])
    for where, mask in flips:
        if data:
            data[where % len(data)] ^= mask
    before = kafka_reader.dropped.total()
    partition_reader.give(Crafted(bytes(data), headers(connection, **changes), partition_of(connection.run, 0, 2)))
    if (segment := kafka_reader.poll()) is None:
        own = changes.get("run") in (None, connection.run.encode())
        assert kafka_reader.dropped.total() == before + 1 or not own or changes.get("kind") == b"prime"
        return
    assert segment.header.run == RUN
    assert not flips or bytes(data) == encoded()
    kafka_reader.release(segment)


def test_late_messages_of_a_killed_writer_are_ignored(kafka):
    """Its successor continued from what was there when it started."""
    connection = connected(kafka)
    with kafka_channel(connection) as (kafka_reader, writer):
        first = writer(0)
        send(first, RUN, 0, 0, state=b"zero")
        first.close()
        successor = writer(0)
        assert successor.recall(0) == (0, b"zero")
        send(first, RUN, 0, 1, state=b"of the dead")
        first.close()
        send(successor, RUN, 0, 1, state=b"of the heir")
        states = []
        for _ in range(2):
            segment = polled(kafka_reader)
            states.append(segment.state)
            kafka_reader.release(segment)
        kafka_reader.close()
        assert states == [b"zero", b"of the heir"]
        assert kafka_reader.dropped["overtaken"] == 1

        def noticed():
            try:
                first.blank(0)
            except Overtaken as error:
                return "another process has taken over actor-0" in str(error)
            return False

        wait_until(noticed)
        assert find_last_segment(connection, 0, partition_of(connection.run, 0, 2))[1] is not None


@pytest.mark.regression
def test_another_reader_knows_replaced_writers(kafka):
    """Late messages of a replaced writer are ignored even if the successor's start message lies before the point at
    which this reader continues; messages before that start which were not yet learned from count.
    """
    connection = connected(kafka)
    with kafka_channel(connection) as (kafka_reader, writer):
        first, other = writer(0), writer(0 + 1)
        for sequence in range(2):
            send(first, RUN, 0, sequence, state=b"alive")
        first.close()
        segments = [polled(kafka_reader) for _ in range(2)]
        wait_until(lambda: first.blank(0) is not None)
        blank = first.blank(0)
        first.blank = lambda actor: blank  # it receives nothing from now on, like a process that hangs
        successor = writer(0)
        send(other, RUN, 1, 0)
        other.close()
        wait_until(
            lambda: kafka_reader.poll() is not None or dict(kafka_reader.mark()["lives"])[0] == successor.incarnation
        )
        kafka_reader.release(segments[1])
        unlearned, saved = kafka_reader.marks(), kafka_reader.mark()
        kafka_reader.release(segments[0])
        learned = kafka_reader.marks()
        for sequence in (2, 3):
            send(first, RUN, 0, sequence, state=b"of the dead")
        first.close()
        send(successor, RUN, 0, 2, state=b"of the heir")
        successor.close()
    incarnations = dict(saved["lives"])
    assert incarnations[0] == successor.incarnation
    for marks, expected in ((unlearned, [(0, b"alive"), (2, b"of the heir")]), (learned, [(2, b"of the heir")])):
        with kafka_channel(connection, marks=marks, incarnations=incarnations) as (kafka_reader, _):
            came = []
            while len(came) < len(expected):
                segment = polled(kafka_reader)
                if segment.header.actor == 0:
                    came.append((segment.header.sequence, segment.state))
            assert came == expected
            assert kafka_reader.dropped["overtaken"] == 2


def test_a_reader_continues_exactly_where_another_ended(kafka):
    """Released out of order: released segments are not repeated, others are."""
    connection = connected(kafka)
    marks = marks_at_end(connection, 2)
    with kafka_channel(connection, actors=1, slots=6, marks=marks) as (kafka_reader, writer):
        out = writer(0)
        for sequence in range(6):
            send(out, RUN, 0, sequence)
        held = [polled(kafka_reader) for _ in range(6)]
        for index in (0, 2, 3):
            kafka_reader.release(held[index])
        told = {number: (low, done) for number, low, done in kafka_reader.mark()["marks"]}
        with kafka_channel(connection, actors=1, slots=6, marks=told) as (other, _):
            first = polled(other)
            other.release(first)  # before the finished ones, which must not be repeated because of it
            rest = [polled(other) for _ in range(2)]
            assert [segment.header.sequence for segment in (first, *rest)] == [1, 4, 5]
            assert other.poll() is None


def test_a_long_backlog_needs_bounded_memory(kafka):
    connection = connected(kafka)
    marks = marks_at_end(connection, 2)
    with kafka_channel(connection, actors=1, slots=60, marks=marks) as (_, writer):
        out = writer(0)
        for sequence in range(60):
            send(out, RUN, 0, sequence)
        out.close()
        with kafka_channel(connection, actors=1, slots=2, marks=marks) as (kafka_reader, _):
            taken = [polled(kafka_reader) for _ in range(MIN_UNRELEASED)]
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                assert kafka_reader.poll() is None, "more than the reader may hold"
            come = [segment.header.sequence for segment in taken]
            while come[-1] < 59:
                for segment in taken:
                    kafka_reader.release(segment)
                taken = [polled(kafka_reader)]
                come.append(taken[0].header.sequence)
            assert come == list(range(60))


def test_weights_and_offsets_are_committed_together_and_a_second_publisher_fences_the_first(kafka, tmp_path):
    connection = connected(kafka)
    group = f"steppe-{connection.run}"
    with kafka_channel(connection) as (kafka_reader, writer):
        out = writer(0)
        for sequence in range(3):
            send(out, RUN, 0, sequence)
        held = [polled(kafka_reader) for _ in range(3)]
        publisher = WeightPublisher(connection, kafka_reader, tmp_path)
        store = KafkaWeights(connection, None, tmp_path, publisher)
        kafka_reader.release(held[0])
        store.publish("policy", some_weights(0))
        assert publisher.flush(PATIENCE_S)
        lows = {number: low for number, low, _ in kafka_reader.mark()["marks"]}
        consumer = connection.consumer(group)
        places = [import_kafka().TopicPartition(connection.topic("experiences"), number) for number in lows]
        assert {place.partition: place.offset for place in consumer.committed(places, timeout=60)} == lows
        consumer.close()
        second = WeightPublisher(connection, kafka_reader, tmp_path)
        later = KafkaWeights(connection, None, tmp_path, second)
        assert later.last_published_version("policy") == 0
        store.publish("policy", some_weights(1))
        with pytest.raises(Overtaken, match="another learner has taken over"):
            publisher.flush(PATIENCE_S)
        later.publish("policy", some_weights(2))
        assert second.flush(PATIENCE_S)
        partition_reader = PartitionReader(connection)
        reader = KafkaWeights(connection, partition_reader, tmp_path)
        wait_until(lambda: reader.newer_than("policy", 1) is not None)
        assert reader.newer_than("policy", -1).version == 2
        partition_reader.close()
        publisher.close()
        second.close()


class SlowProducer:
    """A producer whose first commit of weights comes after the broker has aborted the transaction."""

    def __init__(self, producer, connection, late):
        self._producer, self._connection, self._late, self._weights = producer, connection, late, False

    def __getattr__(self, name):
        return getattr(self._producer, name)

    def produce(self, *words, headers):
        self._weights = "version" in dict(headers)
        self._producer.produce(*words, headers=headers)

    def commit_transaction(self, timeout_s):
        if self._weights and not self._late:
            self._late.append(1)
            topic, consumer = self._connection.topic("model_updates"), self._connection.consumer()
            before = get_watermarks(consumer, topic)[1]  # up to the last decided transaction
            self._producer.flush(PATIENCE_S)
            wait_until(lambda: get_watermarks(consumer, topic)[1] > before, "the broker's patience")
            consumer.close()
        self._producer.commit_transaction(timeout_s)


def test_a_transaction_aborted_by_brokers_is_repeated(kafka, tmp_path):
    """As after a long pause of the machine: no other learner has taken over, and this one continues."""
    late = []

    class ShortTransactions(KafkaConnection):
        """Brokers abort its transactions after a second."""

        def producer(self, **more):
            if "transactional.id" not in more:
                return super().producer(**more)
            brief = {"transaction.timeout.ms": 1000, "message.timeout.ms": 900}
            return SlowProducer(super().producer(**more | brief), self, late)

    known = connected(kafka)
    connection = ShortTransactions(known.config, known.run)
    publisher, consumer = WeightPublisher(connection, None, tmp_path), connection.consumer()
    store, topic = KafkaWeights(connection, None, tmp_path, publisher), connection.topic("model_updates")
    for version in range(2):
        store.publish("policy", some_weights(version))
        assert publisher.flush(PATIENCE_S)

    def versions():  # a commit is acknowledged before readers see what it committed
        end = get_watermarks(consumer, topic)[1]
        return [decode_headers(message).get("version") for message in read_range(consumer, topic, 0, 0, end)]

    wait_until(lambda: word(1) in versions(), "the second version")
    assert late, "no transaction was given up"
    found = versions()
    assert [version for version in found if version is not None] == [word(0), word(1)], "each once"
    assert found.count(None) >= 2, "the press left its name again after it was given up"
    consumer.close()
    publisher.close()


def test_an_inconsistent_claim_is_refused(kafka, tmp_path):
    connection = connected(kafka, claim_mb=1e-6)
    publisher = WeightPublisher(connection, None, tmp_path)
    store, partition_reader = KafkaWeights(connection, None, tmp_path, publisher), PartitionReader(connection)
    reader = KafkaWeights(connection, partition_reader, tmp_path)
    store.publish("policy", some_weights(0))
    assert publisher.flush(PATIENCE_S)
    wait_until(lambda: reader.newer_than("policy", -1) is not None)
    assert reader.newer_than("policy", -1).version == 0
    before = set(tmp_path.glob("*.weights"))
    store.publish("policy", some_weights(1))
    assert publisher.flush(PATIENCE_S)
    (fresh,) = set(tmp_path.glob("*.weights")) - before
    fresh.write_bytes(_flipped(fresh.read_bytes()))
    wait_until(lambda: reader.newer_than("policy", 0) is not None or reader.damaged)
    assert reader.newer_than("policy", 0) is None
    assert "does not match" in reader.damaged
    assert reader.newer_than("policy", -1).version == 0, "the old weights are gone"
    for version in range(2, 9):
        store.publish("policy", some_weights(version))
        assert publisher.flush(PATIENCE_S)
    assert len(list(tmp_path.glob("*.weights"))) <= 4
    publisher.close()
    partition_reader.close()


def test_invalid_messages_do_not_replace_weights(kafka, tmp_path):
    """Between two polls of a reader: messages that are no weights, have another layout or version, or are old."""
    connection = connected(kafka)
    publisher, partition_reader = WeightPublisher(connection, None, tmp_path), PartitionReader(connection)
    store, reader = (
        KafkaWeights(connection, None, tmp_path, publisher),
        KafkaWeights(connection, partition_reader, tmp_path),
    )
    for version in range(2):
        store.publish("policy", some_weights(version))
        assert publisher.flush(PATIENCE_S)
        wait_until(lambda version=version: reader.newer_than("policy", version - 1) is not None)
    store.publish("policy", some_weights(2))
    assert publisher.flush(PATIENCE_S)
    alien = Weights.from_arrays({"other": np.zeros(3, np.float32)}).stamped(version=9, updates=0, env_steps=0)
    about = {"schema": word(1), "run": connection.run.encode(), "policy": b"policy"}
    bad = [
        (b"no weights", word(9)),
        (encode_weights(some_weights(3))[:-5], word(3)),
        (encode_weights(alien), word(9)),
        (encode_weights(some_weights(3)), word(8)),
        (b"", b"7"),
    ]
    producer = connection.producer()
    for value, version in [*bad, (encode_weights(some_weights(0)), word(0))]:
        headers = list({**about, "version": version}.items())
        producer.produce(connection.topic("model_updates"), value, connection.key("policy"), 0, headers=headers)
    assert producer.flush(PATIENCE_S) == 0
    partition_reader.catch_up()
    assert reader.newer_than("policy", 1).version == 2
    store.publish("policy", some_weights(3))
    assert publisher.flush(PATIENCE_S)
    wait_until(lambda: reader.newer_than("policy", 2) is not None)
    late = KafkaWeights(connection, None, tmp_path)
    assert late.last_published_version("policy") == 3
    count = len(bad) - 1  # the one without a version is older than the existing weights
    wait_until(lambda: reader.newer_than("policy", 2) and len(dead_letters(connection)) >= count, "what is put aside")
    assert len(dead_letters(connection)) == count
    publisher.close()
    partition_reader.close()


def test_changed_topic_settings_are_reported(kafka):
    connection = connected(kafka)
    admin, kind = connection.admin(), import_kafka().admin
    other = kind.ConfigEntry("retention.ms", "1000", incremental_operation=kind.AlterConfigOpType.SET)
    topic = kind.ConfigResource(kind.ResourceType.TOPIC, connection.topic("experiences"), incremental_configs=[other])
    for answer in admin.incremental_alter_configs([topic]).values():
        answer.result()
    wait_until(lambda: ensure_topics(connection))
    (words,) = ensure_topics(connection)
    assert "retention.ms=1000 instead of 86400000" in words


@pytest.mark.slow
def test_a_deleted_topic_ends_the_reader_with_the_reason(kafka):
    connection = connected(kafka)
    with kafka_channel(connection) as (kafka_reader, writer):
        send(writer(0), RUN, 0, 0)
        polled(kafka_reader)
        admin = connection.admin()
        for answer in admin.delete_topics([connection.topic("experiences")]).values():
            answer.result()

        def told():
            try:
                kafka_reader.poll()
            except RunFailed as error:
                return "is gone" in str(error)
            return False

        wait_until(told)


def test_secrets_are_read_from_the_environment_only(monkeypatch):
    config = KafkaConfig(address="a:1", security="sasl-tls", username="u", ca="/ca.pem")
    monkeypatch.delenv("STEPPE_KAFKA_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="STEPPE_KAFKA_PASSWORD"):
        security(config)
    monkeypatch.setenv("STEPPE_KAFKA_PASSWORD", "secret")
    found = security(config)
    assert found["security.protocol"] == "sasl_ssl"
    assert (found["sasl.username"], found["sasl.password"]) == ("u", "secret")
    assert found["ssl.ca.location"] == "/ca.pem"
    assert "secret" not in config.model_dump_json()
    with pytest.raises(ConfigError, match=r"kafka\.username goes with"):
        KafkaConfig(username="u")
    with pytest.raises(ConfigError, match=r"kafka\.ca is for"):
        KafkaConfig(ca="/ca.pem")


def test_large_weights_arrive_whole(kafka, tmp_path):
    """A megabyte arrives whole, many times, at a reader that was there first."""
    connection = connected(kafka)
    publisher, partition_reader = WeightPublisher(connection, None, tmp_path), PartitionReader(connection)
    store, reader = (
        KafkaWeights(connection, None, tmp_path, publisher),
        KafkaWeights(connection, partition_reader, tmp_path),
    )
    weights = Weights.from_arrays({"flat": np.zeros(1 << 18, np.float32)})
    for version in range(5):
        weights.arrays()["flat"][:] = version
        store.publish("policy", weights.stamped(version=version, updates=0, env_steps=0))
        found = []
        wait_until(
            lambda found=found, version=version: found.append(reader.newer_than("policy", version - 1)) or found[-1]
        )
        assert (found[-1].arrays()["flat"] == version).all()
    publisher.close()
    partition_reader.close()

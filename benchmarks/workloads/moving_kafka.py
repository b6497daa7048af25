"""Sends segments of one size through a broker and times when the last has come: run by kafka.py.

One process sends and one receives. A bare client and our channel take turns, so that whatever else goes on meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

import numpy as np

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.io.codec import encode_segment
from steppe.transport.kafka.channel import KafkaReader, KafkaWriter, marks_at_end
from steppe.transport.kafka.client import KafkaConnection, PartitionReader, ensure_topics, import_kafka, partition_of

SLOTS, PARTITIONS, WARM_UPS = 256, 1, 16
Spoken = Callable[[], object]  # called when messages may come


def spec_of(nbytes: int) -> SegmentSpec:
    """Observations make up nearly all of it."""
    steps, envs = 32, 16
    width = max(1, nbytes // (4 * (steps + 1) * envs))
    return SegmentSpec(steps, envs, FieldSpec("obs", (width,), "float32"), FieldSpec("action", (), "int64"))


def filled(spec: SegmentSpec, run: str) -> Segment:
    segment = Segment.blank(spec)
    segment["obs"][...] = np.random.default_rng(0).normal(size=segment["obs"].shape).astype(np.float16)
    segment.header = SegmentHeader(run, 0, 0, 0, 0)
    return segment


def headers(connection: KafkaConnection) -> list[tuple[str, bytes]]:
    """Those of a segment."""
    numbers = ("schema", "actor", "epoch", "sequence", "version", "life")
    return [("kind", b"segment"), ("run", connection.run.encode()), *((name, bytes(8)) for name in numbers)]


def send_bare(connection: KafkaConnection, spec: SegmentSpec, count: int) -> None:
    producer, value = connection.producer(), encode_segment(filled(spec, connection.name))
    topic, home = connection.topic("experiences"), partition_of(connection.run, 0, PARTITIONS)
    key, about = connection.key(0), headers(connection)
    for _ in range(count):
        while True:
            try:
                producer.produce(topic, value, key, home, headers=about)
                break
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush(60)


def receive_bare(
    connection: KafkaConnection, spec: SegmentSpec, count: int, begun: dict, ready: Spoken
) -> tuple[float, float]:
    consumer, kafka = connection.consumer(), import_kafka()
    topic = connection.topic("experiences")
    consumer.assign([kafka.TopicPartition(topic, number, low) for number, (low, _) in begun.items()])
    times = []
    ready()
    while len(times) < count:
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            assert message.value() is not None
            times.append(time.monotonic())
    consumer.close()
    return times[WARM_UPS - 1], times[-1]


def send_ours(connection: KafkaConnection, spec: SegmentSpec, count: int) -> None:
    partition_reader = PartitionReader(connection)
    channel = KafkaWriter(connection, partition_reader, spec, 0, SLOTS, PARTITIONS)
    source = filled(spec, connection.name)
    for sequence in range(count):
        while (segment := channel.blank(0)) is None:
            partition_reader.progress(0.005)
        if sequence == 0:  # its memory is the same every time, and what fills it is not the channel's work
            for name, column in source.columns.items():
                segment[name][...] = column
        segment.header = SegmentHeader(connection.name, 0, 0, sequence, 0)
        while not channel.offer(segment):
            partition_reader.progress(0.005)
    channel.close(60)
    partition_reader.close()


def receive_ours(
    connection: KafkaConnection, spec: SegmentSpec, count: int, begun: dict, ready: Spoken
) -> tuple[float, float]:
    partition_reader = PartitionReader(connection)
    channel = KafkaReader(connection, partition_reader, spec, 1, SLOTS, begun)
    times: list[float] = []
    ready()
    while len(times) < count:
        segment = channel.poll()
        if segment is None:
            partition_reader.handle_next(0.005)
            continue
        times.append(time.monotonic())
        channel.release(segment)
    channel.close()
    partition_reader.close()
    return times[WARM_UPS - 1], times[-1]


SENDING, RECEIVING = {"bare": send_bare, "ours": send_ours}, {"bare": receive_bare, "ours": receive_ours}


def spell(config: KafkaConfig, spec: SegmentSpec, count: int, who: str, sender: subprocess.Popen[str]) -> float:
    """Megabytes per second of one turn."""
    connection = KafkaConnection(config, f"moving~{uuid.uuid4().hex[:8]}")
    assert sender.stdin is not None
    begun = marks_at_end(connection, PARTITIONS)
    line = f"{who} {connection.run} {count} {begun[0][0]}\n"

    def ready() -> None:
        sender.stdin.write(line)
        sender.stdin.flush()

    first, last = RECEIVING[who](connection, spec, count, begun, ready)
    nbytes = len(encode_segment(filled(spec, connection.name)))
    return (count - WARM_UPS) * nbytes / (last - first) / 1e6


def send_as_told(config: KafkaConfig, spec: SegmentSpec) -> None:
    for line in sys.stdin:
        who, run, count, begun = line.split()
        since = ((config.prefix + "experiences", 0, int(begun)),)  # what a run's manifest says
        SENDING[who](KafkaConnection(config, run, since), spec, int(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prefix", default=f"{uuid.uuid4().hex[:8]}.")
    parser.add_argument("--sending", action="store_true")
    given = parser.parse_args()
    config = KafkaConfig(address=given.kafka, prefix=given.prefix, partitions=PARTITIONS)
    spec = spec_of(given.nbytes)
    if given.sending:
        return send_as_told(config, spec)
    connection = KafkaConnection(config, "moving")
    ensure_topics(connection)
    words = [sys.executable, *sys.argv, "--prefix", given.prefix, "--sending"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as sender:
        rates: dict[str, list[float]] = {"bare": [], "ours": []}
        for turn in range(-1, given.turns):  # the first warms up
            for who in rates:
                rate = spell(config, spec, WARM_UPS + given.count // (4 if turn < 0 else 1), who, sender)
                rates[who] += [rate] if turn >= 0 else []
        sender.stdin.close()
        assert sender.wait(60) == 0
    admin = connection.admin()
    for answer in admin.delete_topics([connection.topic("experiences")]).values():
        answer.result()
    bare, ours = (statistics.median(rates[who]) for who in ("bare", "ours"))
    used = {"nbytes": given.nbytes, "count": given.count, "turns": given.turns, "compression": config.compression}
    print(json.dumps({"value": ours / bare, "ours_mb_s": ours, "bare_mb_s": bare, "settings": used}))
    return None


if __name__ == "__main__":
    main()

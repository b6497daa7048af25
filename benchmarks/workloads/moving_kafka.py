"""Sends segments of one size through a broker and times when the last has come: run by kafka.py."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import uuid

import numpy as np

from steppe.core.codec import encode_segment
from steppe.core.config import KafkaConfig
from steppe.core.experience import Segment, SegmentHeader
from steppe.core.specs import FieldSpec, SegmentSpec
from steppe.transport.kafka import Connection, Feed, ensure_topics, home_of, library
from steppe.transport.kafka_links import KafkaInlet, KafkaOutlet, beginning

SLOTS, PARTITIONS, WARM_UPS = 256, 1, 16


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


def send_bare(connection: Connection, spec: SegmentSpec, count: int) -> None:
    producer, value = connection.producer(), encode_segment(filled(spec, connection.name))
    topic, home = connection.topic("experiences"), home_of(connection.run, 0, PARTITIONS)
    for _ in range(count):
        while True:
            try:
                producer.produce(topic, value, b"key", home)
                break
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    producer.flush(60)


def receive_bare(connection: Connection, count: int, begun: dict) -> tuple[float, float]:
    consumer, kafka = connection.consumer(), library()
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


def send_ours(connection: Connection, spec: SegmentSpec, count: int) -> None:
    feed = Feed(connection)
    channel = KafkaOutlet(connection, feed, spec, 0, SLOTS, PARTITIONS)
    source = filled(spec, connection.name)
    for sequence in range(count):
        while (segment := channel.blank(0)) is None:
            feed.progress(0.005)
        if sequence < SLOTS:
            for name, column in source.columns.items():
                segment[name][...] = column
        segment.header = SegmentHeader(connection.name, 0, 0, sequence, 0)
        channel.offer(segment)
    channel.close(60)
    feed.close()


def receive_ours(connection: Connection, spec: SegmentSpec, count: int, begun: dict) -> tuple[float, float]:
    feed = Feed(connection)
    channel = KafkaInlet(connection, feed, spec, 1, SLOTS, begun)
    times: list[float] = []
    ready()
    while len(times) < count:
        segment = channel.poll()
        if segment is None:
            feed.one(0.005)
            continue
        times.append(time.monotonic())
        channel.release(segment)
    channel.close()
    feed.close()
    return times[WARM_UPS - 1], times[-1]


def ready() -> None:
    print("ready", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=["bare", "ours"])
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--run", default=f"moving~{uuid.uuid4().hex[:8]}")
    parser.add_argument("--sending", action="store_true")
    given = parser.parse_args()
    config = KafkaConfig(address=given.kafka, prefix=f"{given.run[-8:]}.", partitions=PARTITIONS)
    connection, spec, count = Connection(config, given.run), spec_of(given.nbytes), given.count + WARM_UPS
    if given.sending:
        (send_bare if given.who == "bare" else send_ours)(connection, spec, count)
        return
    ensure_topics(connection)
    begun = beginning(connection, PARTITIONS)
    other = subprocess.Popen([sys.executable, *sys.argv, "--run", given.run, "--sending"])
    if given.who == "bare":
        first, last = receive_bare(connection, count, begun)
    else:
        first, last = receive_ours(connection, spec, count, begun)
    assert other.wait(60) == 0
    nbytes = len(encode_segment(filled(spec, connection.name)))
    admin = connection.admin()
    for answer in admin.delete_topics([connection.topic("experiences")]).values():
        answer.result()
    rate = given.count * nbytes / (last - first) / 1e6
    print(json.dumps({"value": rate, "settings": {"nbytes": nbytes, "count": given.count, "compression": "lz4"}}))


if __name__ == "__main__":
    main()

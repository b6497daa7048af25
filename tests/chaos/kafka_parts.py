"""A writer and a reader of segments with a ledger, in processes of their own that tests kill: run by test_kafka_chaos.py.

The reader learns by writing down, in a file of its own that is replaced at once, which segments it has taken in and where it
was in the topic. Whatever it takes in behind that is forgotten when it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.segment import SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.core.io.atomic_files import read_json, write_json
from steppe.roles.scheduling import WindowBatchPolicy
from steppe.transport.kafka.channel import KafkaReader, KafkaWriter, marks_at_end
from steppe.transport.kafka.client import KafkaConnection, PartitionReader, count_partitions
from steppe.transport.kafka.weights import KafkaWeights, WeightPublisher

SPEC = SegmentSpec(4, 2, FieldSpec("obs", (16,), "float32"), FieldSpec("action", (), "int64"))
SLOTS, ACTORS, SAVE_EVERY = 2, 2, 5


def connection(words: dict) -> KafkaConnection:
    return KafkaConnection(KafkaConfig(**words["config"]), words["run"])


def write(words: dict, actor: int) -> None:
    """Send segments until a file asks for the end; then say how many there are."""
    link = connection(words)
    partition_reader, room = PartitionReader(link), Path(words["room"])
    channel = KafkaWriter(link, partition_reader, SPEC, actor, SLOTS, count_partitions(link))
    last = channel.recall(actor)
    sequence = 0 if last is None else last[0] + 1
    assert last is None or last[1] == b"%d" % last[0], "a state of another segment"
    while not (room / "finish").exists():
        segment = channel.blank(actor)
        if segment is None:
            partition_reader.progress(0.02)
            continue
        for column in segment.columns.values():
            column[...] = sequence % 2
        segment.header = SegmentHeader(link.name, actor, 0, sequence, 0)
        segment.state = b"%d" % sequence
        channel.offer(segment)
        sequence += 1
    assert channel.close(60.0)
    write_json(room / f"sent-{actor}.json", sequence)
    partition_reader.close()


def read(words: dict) -> None:
    """Take in segments until all are there that writers have said they sent."""
    link, room = connection(words), Path(words["room"])
    saved = room / "learned.json"
    known = read_json(saved) if saved.exists() else {"learned": [], "expected": {}, "dropped": {}, "version": -1}
    marks = {int(n): (low, done) for n, low, done in known.get("marks") or words["marks"]}
    partition_reader = PartitionReader(link, group=f"steppe-{link.run}")
    kafka_reader = KafkaReader(link, partition_reader, SPEC, ACTORS, SLOTS, marks)
    publisher = WeightPublisher(link, kafka_reader, room)
    store = KafkaWeights(link, None, room, publisher)
    window = WindowBatchPolicy(kafka_reader, ACTORS, 0.0, 10**9, time.monotonic)
    window.tracker.expected = {int(actor): n for actor, n in known["expected"].items()}
    window.tracker.dropped.update(known["dropped"])
    learned, version = known["learned"], max(known["version"], store.last_published_version("policy")) + 1
    weights = Weights.from_arrays({"count": np.zeros(1, np.int64)})
    takes = 0
    while not complete(room, window.tracker.expected):
        segments = window.take(0)
        if not segments:
            publisher.require()
            partition_reader.handle_next(0.02)
            continue
        for segment in segments:
            header = segment.header
            assert all(
                (column == header.sequence % 2).all() for name, column in segment.columns.items() if name != "final_obs"
            )
            learned.append([header.actor, header.sequence])
            kafka_reader.release(segment)
        takes += 1
        weights.arrays()["count"][0] = len(learned)
        store.publish("policy", weights.stamped(version=version, updates=takes, env_steps=0))
        version += 1
        if takes % SAVE_EVERY == 0:
            save(saved, learned, window, kafka_reader, version)
    save(saved, learned, window, kafka_reader, version)
    publisher.close(60.0)
    partition_reader.close()


def save(path: Path, learned: list, window: WindowBatchPolicy, kafka_reader: KafkaReader, version: int) -> None:
    expected = {str(actor): n for actor, n in window.tracker.expected.items()}
    dropped = dict(window.tracker.dropped)
    write_json(
        path,
        {"learned": learned, "expected": expected, "dropped": dropped, "version": version, **kafka_reader.mark()}
        | {"overtaken": kafka_reader.dropped["overtaken"]},
    )


def complete(room: Path, expected: dict) -> bool:
    sent = {actor: room / f"sent-{actor}.json" for actor in range(ACTORS)}
    if not all(path.exists() for path in sent.values()):
        return False
    return all(expected.get(actor, 0) >= read_json(path) for actor, path in sent.items())


def begin(link: KafkaConnection, room: Path) -> dict:
    """The words for both programs."""
    marks = [[n, low, done] for n, (low, done) in marks_at_end(link, count_partitions(link)).items()]
    return {"config": link.config.model_dump(mode="json"), "run": link.run, "room": str(room), "marks": marks}


if __name__ == "__main__":
    told = json.loads(sys.argv[2])
    if sys.argv[1] == "read":
        read(told)
    else:
        write(told, int(sys.argv[3]))

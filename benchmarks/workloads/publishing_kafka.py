"""Publishes weights through a broker and times how soon another process has them: run by kafka.py."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.weights import Weights
from steppe.testing.channel import SPEC
from steppe.transport.kafka.channel import KafkaReader, marks_at_end
from steppe.transport.kafka.client import KafkaConnection, PartitionReader, ensure_topics
from steppe.transport.kafka.weights import KafkaWeights, WeightPublisher

POLICY, WARM_UPS = "policy", 10


def watch(connection: KafkaConnection, times: int) -> None:
    """Print when each version was here."""
    partition_reader = PartitionReader(connection)
    store = KafkaWeights(connection, partition_reader, Path("/nowhere"))
    print("ready", flush=True)
    last = -1
    while last < times - 1:
        found = store.newer_than(POLICY, last)
        if found is None:
            partition_reader.progress(1.0)
            continue
        last = found.version
        print(json.dumps([last, time.monotonic()]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kafka", required=True)
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--run", default=f"publishing~{uuid.uuid4().hex[:8]}")
    parser.add_argument("--watching", action="store_true")
    given = parser.parse_args()
    connection = KafkaConnection(KafkaConfig(address=given.kafka), given.run)
    times = given.times + WARM_UPS
    if given.watching:
        return watch(connection, times)
    ensure_topics(connection)
    partition_reader = PartitionReader(connection, group=f"steppe-{given.run}")
    kafka_reader = KafkaReader(connection, partition_reader, SPEC, 1, 1, marks_at_end(connection, 16))
    publisher = WeightPublisher(connection, kafka_reader, Path("/nowhere"))
    store = KafkaWeights(connection, None, Path("/nowhere"), publisher)
    other = subprocess.Popen(
        [sys.executable, *sys.argv, "--run", given.run, "--watching"], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline().strip() == "ready"
    weights = Weights.from_arrays({"flat": np.random.default_rng(0).normal(size=given.nbytes // 4).astype(np.float32)})
    took = []
    for version in range(times):
        began = time.monotonic()
        store.publish(POLICY, weights.stamped(version=version, updates=0, env_steps=0))
        seen, when = json.loads(other.stdout.readline())
        assert seen == version
        took.append((when - began) * 1000)
        time.sleep(0.05)
    other.wait(30)
    publisher.close()
    partition_reader.close()
    kept = took[WARM_UPS:]
    used = {"nbytes": given.nbytes, "publications": given.times}
    print(json.dumps({"value": statistics.median(kept), "worst_ms": max(kept), "settings": used}))
    return None


if __name__ == "__main__":
    main()

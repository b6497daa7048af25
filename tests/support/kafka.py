"""One broker for all tests of a session, and connections to topics that no other test knows."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from pathlib import Path

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import Unreachable
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.runtimes.kafka.manifest import wire_name
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import (
    DEAD_LETTERS,
    KafkaConnection,
    ensure_topics,
    get_watermarks,
    open_consumer,
    read_range,
)
from steppe.transport.kafka.dev_broker import DevBroker, cache_directory, fetch_jars

PATIENCE_S = 240.0  # only bounds how long a failure takes


def own_broker(home: Path) -> DevBroker:
    """A broker with files of its own, not yet started."""
    return DevBroker(home, DevBroker.default().jars)


def session_home(factory) -> Path:
    """The same for all workers of one session."""
    base = factory.getbasetemp()
    return (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kafka"


def started(home: Path) -> str:
    """The address of the session's broker, which the first who asks starts."""
    home.mkdir(exist_ok=True)
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("a") as lock, (cache_directory() / "lock").open("a") as cache:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(cache, fcntl.LOCK_EX)
        fetch_jars(DevBroker.default().jars)
        fcntl.flock(cache, fcntl.LOCK_UN)
        return own_broker(home).up(0).address


def settings(address: str, **more) -> KafkaConfig:
    """Topics of one's own, with few partitions: fresh ones are created quickly."""
    return KafkaConfig(address=address, prefix=f"t{uuid.uuid4().hex[:8]}.", **{"partitions": 2, **more})


def connected(address: str, run: str = "conformance", **more) -> KafkaConnection:
    connection = KafkaConnection(settings(address, **more), f"{run}~{uuid.uuid4().hex[:8]}")
    assert ensure_topics(connection) == []
    return connection


def dead_letters(connection: KafkaConnection) -> list:
    """Everything in the dead-letter topic, oldest first."""
    topic = connection.topic(DEAD_LETTERS)
    with open_consumer(connection) as consumer:
        low, high = get_watermarks(consumer, topic)
        return read_range(consumer, topic, 0, low, high) if low < high else []


class Topics:
    """The two topics, read by a consumer that knows nothing of the service."""

    def __init__(self, config, directory):
        self._board = KafkaBoard(KafkaConnection(config, wire_name(directory)))

    def commands(self):
        return [record for _, record in self._board.read(COMMANDS) if record["command"] not in ("charter", "plan")]

    def answers(self, identity):
        found = [record["details"] for _, record in self._board.read(EVENTS) if record["kind"] == "command"]
        return [(details["obeyed"], details["message"]) for details in found if details["id"] == identity]

    def close(self):
        self._board.close()


def wait_until(true, what="it"):
    """Wait for a condition; while brokers cannot be reached it is not true yet."""
    deadline = time.monotonic() + PATIENCE_S
    while not _holds(true):
        assert time.monotonic() < deadline, f"{what} never came true"
        time.sleep(0.02)


def _holds(true):
    try:
        return true()
    except Unreachable:
        return False

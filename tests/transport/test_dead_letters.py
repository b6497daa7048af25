"""Refused messages are counted, reported at most once a second, and kept in a topic of bounded size. No broker is
needed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from steppe.core.config.run import KafkaConfig
from steppe.transport.kafka.client import DEAD_LETTERS, KafkaConnection, topic_settings
from steppe.transport.kafka.dead_letters import DeadLetterQueue

pytestmark = pytest.mark.unit


def message(topic: str) -> SimpleNamespace:
    """The attributes of a Kafka message that are read."""
    said = {"value": b"{}", "headers": [], "partition": 0, "offset": 7, "timestamp": (0, 0), "key": None}
    return SimpleNamespace(topic=lambda: topic, **{name: lambda value=value: value for name, value in said.items()})


def test_totals_are_reported_at_most_once_a_second() -> None:
    now, told = [0.0], []
    connection = KafkaConnection(KafkaConfig(address="127.0.0.1:9"), "run")
    letters = DeadLetterQueue(connection, "learner", told.append, lambda: now[0])

    def refuse(count: int) -> None:
        for _ in range(count):
            letters.refuse(message(connection.topic("events")), "no record")
            letters.progress()

    refuse(3)
    assert [details["refused"] for details in told] == [{"events": 1}], "the first at once"
    now[0] = 0.9
    refuse(4)
    assert len(told) == 1
    now[0] = 1.0
    refuse(1)
    assert [details["refused"] for details in told] == [{"events": 1}, {"events": 7}], "and then all since"
    assert told[1]["message"].startswith("7 records were refused and parked in")
    now[0] = 60.0
    letters.progress()
    assert len(told) == 2, "nothing was refused since"
    assert letters.refused == {"events": 8}
    letters.close(0.0)


def test_the_topic_is_bounded_in_time_and_size() -> None:
    connection = KafkaConnection(KafkaConfig(address="127.0.0.1:9"), "run")
    partitions, settings = topic_settings(connection)[connection.topic(DEAD_LETTERS)]
    assert (partitions, settings["cleanup.policy"]) == (1, "delete")
    assert int(settings["retention.ms"]) == 7 * 24 * 3600 * 1000
    assert int(settings["segment.bytes"]) < int(settings["retention.bytes"]) == 64 << 20

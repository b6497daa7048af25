"""Who is in the rounds of a run over Kafka, as the event log tells it; without a broker."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from steppe.roles.context import PAUSE, RUN
from steppe.roles.gates import Rounds, Window
from steppe.roles.learner import Learner
from steppe.runtimes.kafka_seat import MISSED_S, Members
from steppe.testing.channel import SPEC, send
from steppe.transport.kafka_links import KafkaInlet
from steppe.transport.local import LocalChannel

pytestmark = pytest.mark.unit


class Scene:
    """A learner that waits for two actors, and a clock."""

    def __init__(self, intake):
        self.now_s, self.asked, self.told = 0.0, RUN, []
        learner = Learner.__new__(Learner)
        learner.version, learner.intake = 7, intake
        learner.context = SimpleNamespace(
            event=lambda kind, **more: self.told.append((kind, more)), asked=lambda: self.asked
        )
        self.inlet = KafkaInlet.__new__(KafkaInlet)
        self.inlet.joined = deque()
        self.members = Members([learner], self.inlet, lambda: self.now_s)

    def look(self, after_s=0.0):
        self.now_s += after_s
        self.members.look()
        told, self.told[:] = list(self.told), []
        return told


@pytest.fixture
def rounds():
    channel = LocalChannel(SPEC, 2, 2)
    return channel, Rounds(channel, 2)


def test_who_joins_and_who_takes_a_place(rounds):
    scene = Scene(rounds[1])
    scene.inlet.joined.extend([(0, False), (1, False), (1, True)])
    told = scene.look()
    assert told == [
        ("member", {"actor": 0, "replaced": False, "version": 7}),
        ("member", {"actor": 1, "replaced": False, "version": 7}),
        ("member", {"actor": 1, "replaced": True, "version": 7}),
    ]
    assert scene.look() == []


def test_a_member_that_is_missing_is_told_once(rounds):
    channel, intake = rounds
    scene = Scene(intake)
    send(channel, "conformance", 0, 0)
    assert intake.take(0) == []
    assert scene.look() == scene.look(MISSED_S) == []
    ((kind, details),) = scene.look(1.0)
    assert kind == "warning"
    assert "actor-1" in details["message"]
    assert "actor-0" not in details["message"]
    assert scene.look(10 * MISSED_S) == []
    send(channel, "conformance", 1, 0)
    assert [segment.header.actor for segment in intake.take(0)] == [0, 1]
    assert scene.look() == []
    ((_, details),) = scene.look(MISSED_S + 1.0)
    assert "actor-0, actor-1" in details["message"]


def test_nobody_is_missing_in_a_pause_or_without_rounds(rounds):
    channel, intake = rounds
    scene = Scene(intake)
    scene.asked = PAUSE
    assert scene.look() == scene.look(2 * MISSED_S) == []
    free = Scene(Window(channel, 2, 0.0, 8, lambda: 0.0))
    assert free.look() == free.look(2 * MISSED_S) == []

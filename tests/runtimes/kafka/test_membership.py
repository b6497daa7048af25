"""Who is in the rounds of a run over Kafka, as the event log tells it; without a broker."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from steppe.core.contracts.errors import Unreachable
from steppe.core.contracts.transport import ACTORS, COMMANDS
from steppe.roles.context import PAUSE, RUN
from steppe.roles.learner import Learner
from steppe.roles.scheduling import RoundBatchPolicy, WindowBatchPolicy
from steppe.runtimes.kafka.membership import POLL_INTERVAL_S, WARN_MISSING_S, RoundMembership
from steppe.testing.channel import SPEC, send
from steppe.transport.kafka.channel import KafkaReader
from steppe.transport.local import LocalChannel

pytestmark = pytest.mark.unit


REPLAN_S = 60.0


class PostedCommands:
    """A Board of actors' signs of life, which may be out of reach."""

    def __init__(self):
        self.records, self.posted, self.reachable = [], [], True

    def sign(self, actor, state="running"):
        self.records.append({"actor": actor, "state": state})

    def end(self, topic):
        if not self.reachable:
            raise Unreachable("no broker answers")
        assert topic == ACTORS
        return len(self.records)

    def read(self, topic, after=0):
        return [(number + 1, self.records[number]) for number in range(after, self.end(topic))]

    def post(self, topic, record):
        assert (topic, record["command"]) == (COMMANDS, "plan")
        self.posted.append((record["round"], record["members"]))


class Scene:
    """A learner that waits for two actors, and a clock."""

    def __init__(self, batch_policy, replan_s=REPLAN_S):
        self.now_s, self.requested, self.events, self.board = 0.0, RUN, [], PostedCommands()
        learner = Learner.__new__(Learner)
        learner.version, learner.batch_policy = 7, batch_policy
        learner.context = SimpleNamespace(
            run="run", event=lambda kind, **more: self.events.append((kind, more)), requested=lambda: self.requested
        )
        self.kafka_reader = KafkaReader.__new__(KafkaReader)
        self.kafka_reader.joined, self.offsets = deque(), {}
        self.kafka_reader.set_round_offset = self.offsets.__setitem__
        self.members = RoundMembership([learner], self.kafka_reader, self.board, replan_s, lambda: self.now_s)

    def update(self, after_s=0.0):
        self.now_s += after_s
        self.members.update()
        events, self.events[:] = list(self.events), []
        return events


@pytest.fixture
def rounds():
    channel = LocalChannel(SPEC, 2, 2)
    return channel, RoundBatchPolicy(channel, 2)


def test_joining_and_replacing_actors_are_reported(rounds):
    scene = Scene(rounds[1])
    scene.kafka_reader.joined.extend([(0, False), (1, False), (1, True)])
    events = scene.update()
    assert events == [
        ("member", {"actor": 0, "replaced": False, "version": 7}),
        ("member", {"actor": 1, "replaced": False, "version": 7}),
        ("member", {"actor": 1, "replaced": True, "version": 7}),
    ]
    assert scene.update() == []


def test_a_missing_member_is_reported_once(rounds):
    channel, batch_policy = rounds
    scene = Scene(batch_policy, replan_s=0.0)
    send(channel, "conformance", 0, 0)
    assert batch_policy.take(0) == []
    assert scene.update() == scene.update(WARN_MISSING_S) == []
    ((kind, details),) = scene.update(1.0)
    assert kind == "warning"
    assert "actor-1" in details["message"]
    assert "actor-0" not in details["message"]
    assert scene.update(10 * WARN_MISSING_S) == []
    send(channel, "conformance", 1, 0)
    assert [segment.header.actor for segment in batch_policy.take(0)] == [0, 1]
    assert scene.update() == []
    ((_, details),) = scene.update(WARN_MISSING_S + 1.0)
    assert "actor-0, actor-1" in details["message"]


def test_nobody_is_missing_in_a_pause_or_without_rounds(rounds):
    channel, batch_policy = rounds
    scene = Scene(batch_policy)
    scene.requested = PAUSE
    assert scene.update() == scene.update(2 * WARN_MISSING_S) == []
    free = Scene(WindowBatchPolicy(channel, 2, 0.0, 8, lambda: 0.0))
    assert free.update() == free.update(2 * WARN_MISSING_S) == []


def wait(scene, seconds, alive=()):
    """Look as often as somebody listens; returns what was told meanwhile."""
    events = []
    for _ in range(int(seconds / POLL_INTERVAL_S)):
        for actor in alive:
            scene.board.sign(actor)
        events += scene.update(POLL_INTERVAL_S)
    return [(kind, details) for kind, details in events if kind == "plan"]


def test_the_round_goes_on_without_who_shows_no_life_and_waits_for_it_when_it_is_back(rounds):
    channel, batch_policy = rounds
    scene = Scene(batch_policy)
    send(channel, "conformance", 0, 0)
    assert batch_policy.take(0) == []
    assert wait(scene, REPLAN_S, alive=[0]) == []
    assert scene.board.posted == [(0, [0, 1])]
    ((_, details),) = wait(scene, 4 * POLL_INTERVAL_S, alive=[0])
    assert (details["round"], details["members"]) == (0, [0])
    assert "round 0 continues without actor-1, which has not reported for 60 s" in details["message"]
    assert [segment.header.actor for segment in batch_policy.take(0)] == [0]
    scene.kafka_reader.joined.append((1, True))
    (_, (kind, details)) = scene.update()
    assert (kind, details["round"], details["members"]) == ("plan", 1, [0, 1])
    assert "waits for actor-1 again" in details["message"]
    assert scene.offsets == {1: 1}
    assert scene.board.posted == [(0, [0, 1]), (0, [0]), (1, [0, 1])]


@pytest.mark.parametrize("why", ["it shows life", "nobody has come", "no broker answers", "it is asked to"])
def test_the_round_waits(why, rounds):
    channel, batch_policy = rounds
    scene = Scene(batch_policy, replan_s=0.0 if why == "it is asked to" else REPLAN_S)
    if why != "nobody has come":
        send(channel, "conformance", 0, 0)
    batch_policy.take(0)
    scene.board.reachable = why != "no broker answers"
    assert wait(scene, 5 * REPLAN_S, alive=[0, 1] if why == "it shows life" else [0]) == []
    assert batch_policy.members == {0, 1}


def test_a_report_of_the_state_stopped_is_no_heartbeat(rounds):
    channel, batch_policy = rounds
    scene = Scene(batch_policy)
    send(channel, "conformance", 0, 0)
    batch_policy.take(0)
    wait(scene, 4 * POLL_INTERVAL_S)
    scene.board.sign(1, "stopped")
    ((_, details),) = wait(scene, REPLAN_S)
    assert details["members"] == [0]

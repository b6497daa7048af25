"""Errors of a client that pass by themselves, as after a broker's restart, are waited for; others are told at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError as codes

from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import RunFailed, Unreachable
from steppe.core.contracts.transport import TRAINING
from steppe.runtimes.handle import Fault
from steppe.runtimes.kafka import launch as runtime
from steppe.runtimes.kafka.launch import KafkaHandle
from steppe.training.supervisor import Supervisor
from steppe.transport.kafka import client as transport
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection, get_watermarks, import_kafka, is_transient, read_range
from tests.support.kafka import connected

PASSING = (codes._UNKNOWN_PARTITION, codes.UNKNOWN_TOPIC_OR_PART, codes._TRANSPORT, codes._ALL_BROKERS_DOWN,
           codes.LEADER_NOT_AVAILABLE, codes._TIMED_OUT)  # fmt: skip


def failure(code):
    return import_kafka().KafkaException(codes(code))


class Stumbling:
    """A client whose calls fail some times, and then answer."""

    def __init__(self, code, times, answer=(3, 9), under=None):
        self._code, self._times, self._answer, self._under = code, times, answer, under
        self.tries = 0

    def __getattr__(self, name):
        return getattr(self._under, name)

    def _fail(self):
        self.tries += 1
        if self.tries <= self._times:
            raise failure(self._code)

    def get_watermark_offsets(self, place, timeout):
        self._fail()
        return self._answer

    def list_topics(self, topic, timeout):
        return SimpleNamespace(topics={})

    def produce(self, *words, **more):
        self._fail()
        self._under.produce(*words, **more)

    def assign(self, places):
        pass

    def poll(self, timeout_s=0.0):
        if self._under is not None:
            return self._under.poll(timeout_s)
        self.tries += 1
        code = self._code if self.tries <= self._times else codes._PARTITION_EOF
        return SimpleNamespace(error=lambda: codes(code), offset=lambda: 9)


@pytest.mark.unit
@pytest.mark.parametrize("code", PASSING)
def test_what_passes_by_itself_is_tried_again(code):
    assert is_transient(failure(code))
    assert get_watermarks(Stumbling(code, 3), "topic") == (3, 9)
    assert read_range(Stumbling(code, 2), "topic", 0, 3, 9) == []


@pytest.mark.unit
def test_what_does_not_is_told_at_once(monkeypatch):
    denied = Stumbling(codes.TOPIC_AUTHORIZATION_FAILED, 99)
    with pytest.raises(Unreachable):
        get_watermarks(denied, "topic")
    assert denied.tries == 1
    with pytest.raises(RunFailed):
        read_range(Stumbling(codes.TOPIC_AUTHORIZATION_FAILED, 99), "topic", 0, 3, 9)
    monkeypatch.setattr(transport, "REACH_S", 0.2)
    with pytest.raises(Unreachable, match="cannot be found"):
        get_watermarks(Stumbling(codes._UNKNOWN_PARTITION, 10**6), "topic")


class Hesitant(KafkaConnection):
    """Its producers do not know a topic at first."""

    def producer(self, **more):
        return Stumbling(codes._UNKNOWN_PARTITION, 3, under=super().producer(**more))


@pytest.mark.integration
def test_a_record_waits_for_a_broker_that_does_not_know_its_topic_yet(kafka):
    known = connected(kafka)
    board = KafkaBoard(Hesitant(known.config, known.run))
    numbers = [board.post(TRAINING, {"n": n}) for n in range(2)]
    assert [record["n"] for _, record in board.read(TRAINING)] == [0, 1]
    assert all(numbers)
    board.close()


class Unstarted(KafkaHandle):
    """A handle without processes, of a run whose brokers are away."""

    def __init__(self):
        self._connection, self._num_actors = KafkaConnection(KafkaConfig(address="127.0.0.1:9"), "run"), 1
        self._plan = SimpleNamespace(num_writers=4, config=SimpleNamespace(mode="async"))
        self._excused_restarts = {"actor-1": 0}

    @property
    def num_actors(self):
        return self._num_actors

    def excused(self, fault):
        """Whether the restart after that fault does not count, and how many did not so far."""
        return self._is_transient("actor-1", fault), self._excused_restarts["actor-1"]


@pytest.mark.unit
def test_a_run_is_not_scaled_while_no_broker_answers(monkeypatch):
    """The command is refused with one sentence, and nothing has changed."""
    monkeypatch.setattr(runtime, "SCALE_S", 0.2)
    handle = Unstarted()
    supervisor = SimpleNamespace(handle=handle)
    refusal = Supervisor._scale(supervisor, 3)
    assert refusal == "no Kafka broker answers at 127.0.0.1:9: try again when one does"
    assert handle.num_actors == 1


@pytest.mark.unit
def test_a_role_that_reached_no_broker_is_started_again_and_that_is_no_restart_of_its_own():
    handle = Unstarted()
    assert handle.excused(Fault.of("actor-1", Unreachable("no broker"))) == (True, 1)
    assert handle.excused(Fault.of("actor-1", RunFailed("its own"))) == (False, 1)

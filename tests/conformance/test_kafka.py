"""The conformance suites of Board, Channel, WeightStore and runtime over a real Kafka broker.

Parts that need a moment for what was sent to arrive are made patient here: they first take in all that the broker has."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from steppe.runtimes.kafka import launch as runtime
from steppe.testing.board import BoardConformance
from steppe.testing.channel import ChannelConformance
from steppe.testing.runtime import RuntimeConformance
from steppe.testing.weights import WeightStoreConformance
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.channel import KafkaReader, KafkaWriter, marks_at_end
from steppe.transport.kafka.client import PartitionReader, count_partitions
from steppe.transport.kafka.weights import KafkaWeights, WeightPublisher
from tests.support.kafka import PATIENCE_S, connected, settings, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


class TestKafkaBoard(BoardConformance):
    @pytest.fixture
    def board(self, kafka):
        board = KafkaBoard(connected(kafka))
        yield board
        board.close()

    def test_records_of_another_run_are_passed_over(self, kafka):
        one = connected(kafka, "one")
        other = type(one)(one.config, "other~1")
        boards = [KafkaBoard(one), KafkaBoard(other)]
        for k in range(6):
            boards[k % 2].post("events", {"k": k})
        assert [[record["k"] for _, record in board.read("events")] for board in boards] == [[0, 2, 4], [1, 3, 5]]
        assert [record["k"] for _, record in boards[0].read("events", limit=2)] == [0, 2]
        for board in boards:
            board.close()


class PatientInlet(KafkaReader):
    def poll(self):
        assert self._partition_reader.catch_up(PATIENCE_S)
        return super().poll()

    def release(self, segment):
        super().release(segment)
        assert self.close(PATIENCE_S)


class PatientOutlet(KafkaWriter):
    def blank(self, actor):
        assert self._partition_reader.catch_up(PATIENCE_S)
        return super().blank(actor)

    def offer(self, segment):
        offered = super().offer(segment)
        assert self.close(PATIENCE_S)
        return offered


class Writers:
    """A channel as writers elsewhere hold it: each actor's end begins when it is first needed."""

    def __init__(self, connection, spec, slots, partition_readers):
        self.about, self.partition_readers, self.ends = (connection, spec, slots), partition_readers, {}

    def end(self, actor):
        connection, spec, slots = self.about
        if actor not in self.ends:
            self.partition_readers.append(PartitionReader(connection))
            self.ends[actor] = PatientOutlet(
                connection, self.partition_readers[-1], spec, actor, slots, count_partitions(connection)
            )
        return self.ends[actor]

    def blank(self, actor):
        return self.end(actor).blank(actor)

    def offer(self, segment):
        return self.end(segment.header.actor).offer(segment)

    def recall(self, actor):
        return self.end(actor).recall(actor)


class TestKafkaChannel(ChannelConformance):
    random_steps = 150

    @pytest.mark.slow
    def test_a_random_life_of_several_writers(self) -> None:
        super().test_a_random_life_of_several_writers()

    @pytest.mark.slow
    def test_the_last_offer_is_recalled(self) -> None:
        super().test_the_last_offer_is_recalled()

    @pytest.fixture(autouse=True)
    def _address(self, kafka):
        self.address = kafka

    @contextmanager
    def make(self, num_actors, slots_per_actor):
        self.connection, self.slots = connected(self.address, self.run), slots_per_actor
        self.partition_readers = [PartitionReader(self.connection)]
        marks = marks_at_end(self.connection, 2)
        try:
            yield PatientInlet(
                self.connection, self.partition_readers[0], self.spec, num_actors, slots_per_actor, marks
            )
        finally:
            for partition_reader in self.partition_readers:
                partition_reader.close()

    def beside(self, channel):
        return Writers(self.connection, self.spec, self.slots, self.partition_readers)


class CountingWeights(KafkaWeights):
    """The learner's, which says what it has published."""

    def __init__(self, connection, claims, publisher):
        super().__init__(connection, None, claims, publisher)
        self.publisher, self.versions = publisher, {}

    def publish(self, policy, weights):
        super().publish(policy, weights)
        self.versions[policy] = weights.version


class PatientWeights(KafkaWeights):
    def __init__(self, connection, partition_reader, claims, store):
        super().__init__(connection, partition_reader, claims)
        self.store = store

    def newer_than(self, policy, version):
        """A commit is acknowledged before readers see what it committed."""
        assert self.store.publisher.flush(PATIENCE_S)
        due, found = self.store.versions.get(policy, -1), []
        come = super().newer_than
        wait_until(
            lambda: found.append(come(policy, version)) or due <= version or (found[-1] and found[-1].version >= due)
        )
        return found[-1]


class TestKafkaWeights(WeightStoreConformance):
    race_versions = 150
    claim_mb = 4.0

    @pytest.fixture(autouse=True)
    def _address(self, kafka, tmp_path):
        self.address, self.claims = kafka, tmp_path / "claims"

    @contextmanager
    def make(self):
        self.connection, self.partition_readers = connected(self.address, claim_mb=self.claim_mb), []
        self.publisher = WeightPublisher(self.connection, None, self.claims)
        try:
            yield CountingWeights(self.connection, self.claims, self.publisher)
        finally:
            self.publisher.close()
            for partition_reader in self.partition_readers:
                partition_reader.close()

    def beside(self, store):
        self.partition_readers.append(PartitionReader(self.connection))
        return PatientWeights(self.connection, self.partition_readers[-1], self.claims, store)


class TestClaimedWeights(TestKafkaWeights):
    """Weights of any size go through files."""

    claim_mb = 1e-6


class TestKafkaRuntime(RuntimeConformance):
    runtime = "kafka"

    @pytest.fixture(autouse=True)
    def _address(self, kafka):
        found = settings(kafka)
        self.settings = {
            **RuntimeConformance.settings,
            "kafka.address": found.address,
            "kafka.prefix": found.prefix,
            "kafka.partitions": 2,
        }

    def launch(self, plan, directory):
        return runtime.launch(plan, directory)

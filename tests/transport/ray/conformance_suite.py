"""The conformance suites of Channel and WeightStore between the processes of a Ray cluster: test_transport.py runs
this.

The driver reads segments and publishes weights; three Ray actors on two nodes hold the other ends and execute its
requests.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.weights import Weights
from steppe.core.io.codec import decode_weights, encode_weights
from steppe.testing.channel import SPEC, ChannelConformance, require_equal, send
from steppe.testing.weights import POLICY, WeightStoreConformance, publish_patterns, some_weights, watch_patterns
from steppe.transport.frames import WeightsFrame
from steppe.transport.ray.links import RayReader, RayWeights, RayWriter, import_ray

pytestmark = pytest.mark.integration
PATIENCE_S = 180.0
STORE_BYTES = 80 << 20
ray = import_ray()
holders = []


class RemoteEnd:
    """The other end: a channel's writer, a store, and a count of the returned slots."""

    def __init__(self):
        self.changed = threading.Condition()

    def kafka_writer(self, slots, last, num_envs=SPEC.num_envs):
        self.credits = 0
        self.channel = RayWriter(replace(SPEC, num_envs=num_envs), slots, self._credit, last)

    def _credit(self):
        with self.changed:
            self.credits += 1
            self.changed.notify_all()

    def take_segment(self, released):
        return self.channel.take(released)

    def blank(self, due):
        with self.changed:
            assert self.changed.wait_for(lambda: self.credits >= due, PATIENCE_S)
        return self.channel.blank(0) is not None

    def offer(self, header, columns, state):
        segment = self.channel.blank(0)
        for name, column in segment.columns.items():
            column[...] = np.frombuffer(columns[name], column.dtype).reshape(column.shape)
        segment.header, segment.state = msgspec.convert(header, SegmentHeader), state
        return self.channel.offer(segment)

    def burst(self, actor, run, num_segments):
        """Send as fast as credits arrive; every byte identifies its segment."""
        for sequence in range(num_segments):
            while (segment := self.channel.blank(0)) is None:
                with self.changed:
                    self.changed.wait(0.01)
            for column in segment.columns.values():
                column.view(np.uint8)[...] = sequence % 2
            segment.header, segment.state = SegmentHeader(run, actor, 0, sequence, 0), bytes([sequence]) * sequence
            self.channel.offer(segment)

    def store(self):
        self.weights = RayWeights(lambda: None)

    def take_weights(self, data):
        self.weights.take(data)

    def newer_than(self, policy, version):
        found = self.weights.newer_than(policy, version)
        return None if found is None else encode_weights(found)

    def watch(self, versions):
        watch_patterns(self.weights, versions)

    def done(self):
        self.channel.close()


def ask(reference):
    return ray.get(reference, timeout=PATIENCE_S)


class WaitingReader(RayReader):
    """A reader that waits for calls that it knows to be in progress, so that tests need not guess their duration."""

    def __init__(self, *sizes):
        self.changed = threading.Condition()
        self.sent = self.came = 0
        self.credits = {}
        super().__init__(*sizes, lambda: None)

    def _accept(self, writer, data):
        super()._accept(writer, data)
        with self.changed:
            self.came += 1
            self.changed.notify_all()

    def settle(self):
        with self.changed:
            assert self.changed.wait_for(lambda: self.came == self.sent, PATIENCE_S)

    def poll(self):
        self.settle()
        return super().poll()

    def release(self, segment):
        actor = segment.header.actor
        self.credits[actor] = self.credits.get(actor, 0) + 1
        super().release(segment)


class RemoteWriter:
    """A channel as each actor's process has it; segments are filled here and copied there."""

    def __init__(self, reader):
        self.reader, self.filling = reader, {}

    def blank(self, actor):
        if not ask(holders[actor].blank.remote(self.reader.credits.get(actor, 0))):
            return None
        return self.filling.setdefault(actor, Segment.blank(SPEC))

    def offer(self, segment):
        header = segment.header
        columns = {name: column.tobytes() for name, column in segment.columns.items()}
        del self.filling[header.actor]
        self.reader.sent += 1
        return ask(holders[header.actor].offer.remote(msgspec.to_builtins(header), columns, segment.state))

    def recall(self, actor):
        self.reader.settle()
        return self.reader.recall(actor)


@contextmanager
def kafka_reader(run, num_actors, slots, num_envs=SPEC.num_envs, kind=WaitingReader):
    reader = kind(replace(SPEC, num_envs=num_envs), run, num_actors, slots)
    for actor in range(num_actors):
        ask(holders[actor].kafka_writer.remote(slots, None, num_envs))
        reader.attach(actor, holders[actor].take_segment.remote)
    yield reader
    for actor in range(num_actors):
        ask(holders[actor].done.remote())


class TestChannel(ChannelConformance):
    @contextmanager
    def make(self, num_actors, slots_per_actor):
        with kafka_reader(self.run, num_actors, slots_per_actor) as reader:
            yield reader

    def beside(self, channel):
        return RemoteWriter(channel)


def spilled():
    """Return what Ray wrote to disk because its object stores were full."""
    from ray._private.internal_api import memory_summary

    told = memory_summary(stats_only=True)
    assert "Plasma memory usage" in told
    return [line for line in told.splitlines() if "Spill" in line]


def test_large_segments_arrive_whole_and_in_order_without_filling_the_store():
    """Six times the store's size passes through it, from both nodes, to a reader that keeps one segment."""
    run, num_envs = (
        "large",
        14_000,
    )  # half the store is in transit, the most that a run can have: runtimes/ray/placement.py
    num_segments = 6 * STORE_BYTES // replace(SPEC, num_envs=num_envs).nbytes // 2
    bell = threading.Event()
    with kafka_reader(run, 2, 2, num_envs, kind=lambda *sizes: RayReader(*sizes, bell.set)) as channel:
        under_way = [holders[actor].burst.remote(actor, run, num_segments) for actor in range(2)]
        expected, held = [0, 0], []
        while min(expected) < num_segments:
            bell.clear()
            if (segment := channel.poll()) is None:
                assert bell.wait(PATIENCE_S), f"nothing came after {expected} of {num_segments} segments"
                continue
            actor = segment.header.actor
            assert segment.header.sequence == expected[actor]
            assert segment.state == bytes([expected[actor]]) * expected[actor]
            assert all((column.view(np.uint8) == expected[actor] % 2).all() for column in segment.columns.values())
            expected[actor] += 1
            held.append(segment)
            if len(held) == 2:  # if both of a writer's slots were kept, it could not send its last segment
                channel.release(held.pop(0))
        for segment in held:
            channel.release(segment)
        for burst in under_way:
            ask(burst)
    assert not spilled()


def test_another_writer_continues_after_the_arrived_segments():
    """Waiting segments are not lost with their writer; late ones of the dead writer are not taken for the new writer's."""
    with kafka_reader("heirs", 2, 2) as reader:
        first = RemoteWriter(reader)
        sent = [send(first, "heirs", 0, sequence, state=bytes([sequence])) for sequence in range(2)]
        reader.settle()
        ask(holders[2].kafka_writer.remote(2, None))
        stale = Future()
        reader.attach(0, lambda _: SimpleNamespace(future=lambda: stale))  # it ends during a call
        assert reader.attach(0, holders[2].take_segment.remote) == (1, b"\1")
        stale.set_result(np.zeros(1, np.uint8))
        reader.came = reader.sent
        holders[0], holders[2] = holders[2], holders[0]
        try:
            successor = RemoteWriter(reader)
            sent += [send(successor, "heirs", 0, sequence, state=bytes([sequence])) for sequence in range(2, 4)]
            reader.credits[0] = -2  # the first two are released to a writer that has ended
            for sequence, expected in enumerate(sent):
                segment = reader.poll()
                require_equal(segment, expected, None)
                assert (segment.header.sequence, segment.state) == (sequence, bytes([sequence]))
                reader.release(segment)
            send(successor, "heirs", 0, 4)
            assert reader.poll().header.sequence == 4
        finally:
            ask(holders[2].done.remote())
            holders[0], holders[2] = holders[2], holders[0]


def test_a_segment_of_another_size_is_refused():
    with kafka_reader("damage", 1, 1) as reader:
        foreign = Future()
        foreign.set_result(np.zeros(200, np.uint8))
        reader.attach(0, lambda _: SimpleNamespace(future=lambda: foreign))
        reader.sent = reader.came
        assert reader.poll() is not None
        assert reader.dropped == {"rejected": 1}


class RemoteReader:
    def __init__(self, store, holder):
        self.store, self.holder = store, holder

    def newer_than(self, policy, version):
        deliver(self.store)
        found = ask(self.holder.newer_than.remote(policy, version))
        return None if found is None else decode_weights(found)


class WakingStore(RayWeights):
    def __init__(self):
        self.wakeup = threading.Event()
        super().__init__(self.wakeup.set)


def deliver(store):
    while not store.delivered:
        assert store.wakeup.wait(PATIENCE_S)
        store.wakeup.clear()
        store.progress()


class TestWeights(WeightStoreConformance):
    race_versions = 200

    @contextmanager
    def make(self):
        self.number, store = count(), WakingStore()
        for index, holder in enumerate(holders):
            ask(holder.store.remote())
            store.attach(str(index), holder.take_weights.remote)
        yield store
        deliver(store)

    def beside(self, store):
        return RemoteReader(store, holders[next(self.number) % len(holders)])

    def test_weights_can_be_read_where_they_were_published(self):
        self.beside = lambda store: store
        self.test_the_newest_wins()
        self.test_publishing_copies()
        self.test_the_copy_is_the_readers()

    def test_never_torn(self):
        with self.make() as store:
            watching = [holder.watch.remote(self.race_versions) for holder in holders]
            publish_patterns(store, self.race_versions)
            deliver(store)
            for watch in watching:
                ask(watch)
        assert not spilled()

    def test_a_late_reader_gets_the_newest_weights(self):
        with self.make() as store:
            store.publish(POLICY, some_weights(3))
            ask(holders[0].store.remote())
            store.attach("0", holders[0].take_weights.remote)
            assert RemoteReader(store, holders[0]).newer_than(POLICY, 2).version == 3

    def test_a_busy_reader_is_sent_no_further_weights(self):
        with self.make() as store:
            answers = []

            class Given:
                def future(self):
                    answers.append(Future())
                    return answers[-1]

            store.attach("busy", lambda _: Given())
            publish_patterns(store, 50)
            assert len(answers) == 1
            answers[0].set_result(None)
            store.progress()
            assert len(answers) == 2
            answers[1].set_result(None)

    def test_a_reader_that_polls_rarely_is_sent_the_newest_weights_as_rarely(self, monkeypatch):
        now_s, given = time.monotonic(), []
        monkeypatch.setattr(time, "monotonic", lambda: now_s)
        store = WakingStore()
        store.attach("seldom", partial(taken, given), min_interval_s=5.0)
        for version, passed_s in ((1, 0.0), (2, 4.0), (3, 4.9)):
            monkeypatch.setattr(time, "monotonic", lambda passed_s=passed_s: now_s + passed_s)
            store.publish(POLICY, some_weights(version))
        assert len(given) == 1
        assert not store.delivered
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 5.1)
        store.progress()
        assert [WeightsFrame(data).version for data in given] == [1, 3]
        assert store.delivered

    def test_small_weights_are_sent_with_the_call_and_large_ones_once_through_the_store(self):
        store, given = WakingStore(), []
        for name in "ab":
            store.attach(name, partial(taken, given))
        store.publish(POLICY, some_weights(1))
        assert [type(one) for one in given] == [np.ndarray] * 2
        store.publish(
            "large",
            Weights.from_arrays({"all": np.ones(1 << 18, np.float32)}).stamped(version=1, updates=0, env_steps=0),
        )
        first, second = given[2:]
        assert isinstance(first, ray.ObjectRef)
        assert first == second
        assert WeightsFrame(ray.get(first)).version == 1


def taken(given, what):
    """Return what a reader took that polls at once: a copy or the reference."""
    given.append(what.copy() if isinstance(what, np.ndarray) else what)
    answer = Future()
    answer.set_result(None)
    return SimpleNamespace(future=lambda: answer)


@contextmanager
def cluster():
    from ray.cluster_utils import Cluster

    found = Cluster()
    try:
        for node in range(2):
            more = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}} if node == 0 else {}
            found.add_node(num_cpus=4, object_store_memory=STORE_BYTES, resources={f"node{node}": 9}, **more)
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
    finally:
        found.shutdown()


if __name__ == "__main__":
    with cluster():
        for index in range(3):
            options = {"num_cpus": 0, "max_concurrency": 12, "resources": {f"node{index % 2}": 1}}
            holders.append(ray.remote(RemoteEnd).options(**options).remote())
        sys.modules["tests.transport.ray.conformance_suite"] = sys.modules[
            "__main__"
        ]  # as pytest names it, to avoid a second import
        code = pytest.main(["-q", "-p", "no:xdist", "--assert=plain", __file__, *sys.argv[1:]])
    sys.exit(code)

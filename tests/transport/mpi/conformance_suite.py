"""The conformance suites of Channel and WeightStore between real ranks: test_transport.py runs this under mpiexec.

The first rank runs the tests. The others execute its requests: each holds the other end of a channel or store and,
between two requests, lets messages progress as a role's rank does.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import msgspec
import numpy as np
import pytest

from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.io.codec import decode_weights, encode_weights
from steppe.testing.channel import SPEC, ChannelConformance
from steppe.testing.weights import WeightStoreConformance, publish_patterns, watch_patterns
from steppe.transport.frames import WeightsFrame
from steppe.transport.mpi.links import MpiChannel, MpiWeights, import_mpi

pytestmark = pytest.mark.integration
MPI = import_mpi()
WORLD = MPI.COMM_WORLD
OTHERS = range(1, WORLD.size)
REQUEST, REPLY = 70, 71


def send(words, rank, tag):
    WORLD.Send(msgspec.msgpack.encode(words), rank, tag)


def receive(source, tag, progress):
    status = MPI.Status()
    while (message := WORLD.Improbe(source, tag, status)) is None:
        progress()
        os.sched_yield()  # there can be more ranks than cores
    data = bytearray(status.Get_count(MPI.BYTE))
    message.Recv(data)
    return msgspec.msgpack.decode(data)


def ask(rank, what, *words, progress=lambda: None):
    """Have another rank execute a request, and let messages progress until it has."""
    send([what, *words], rank, REQUEST)
    answer = receive(rank, REPLY, progress)
    assert answer is None or not isinstance(answer, dict), answer
    return answer


class RemoteRank:
    """The objects of a rank that is not the first, and its requests."""

    def __init__(self):
        self.link = None

    def progress(self):
        if self.link is not None:
            self.link.progress()

    def channel(self, run, writers, slots, num_envs=SPEC.num_envs):
        send(None, 0, REPLY)
        self.link = MpiChannel(WORLD, replace(SPEC, num_envs=num_envs), run, writers, slots)

    def store(self):
        send(None, 0, REPLY)
        self.link = MpiWeights(WORLD, OTHERS)

    def drop(self):
        self.link.close()
        self.link = None

    def blank(self, actor):
        return self.link.blank(actor) is not None

    def offer(self, actor, header, columns, state):
        segment = self.link.blank(actor)
        for name, column in segment.columns.items():
            column[...] = np.frombuffer(columns[name], column.dtype).reshape(column.shape)
        segment.header, segment.state = msgspec.convert(header, SegmentHeader), state
        return self.link.offer(segment)

    def burst(self, actor, run, num_segments):
        """Send as fast as credits arrive; every byte identifies its segment."""
        for sequence in range(num_segments):
            while (segment := self.link.blank(actor)) is None:
                pass
            for column in segment.columns.values():
                column.view(np.uint8)[...] = sequence % 2
            segment.header, segment.state = SegmentHeader(run, actor, 0, sequence, 0), bytes([sequence]) * sequence
            self.link.offer(segment)

    def recall(self, actor):
        return self.link.recall(actor)

    def newer_than(self, policy, version):
        while self.link.receiving:
            self.link.progress()
        found = self.link.newer_than(policy, version)
        return None if found is None else encode_weights(found)

    def watch(self, versions):
        watch_patterns(self.link, versions)


def serve():
    other = RemoteRank()
    while True:
        what, *words = receive(0, REQUEST, other.progress)
        if what == "end":
            return
        try:
            answer = getattr(other, what)(*words)
        except Exception as error:  # noqa: BLE001 - the first rank fails its test with it
            answer = {"error": repr(error)}
        if what not in ("channel", "store"):  # these are executed together, after the reply
            send(answer, 0, REPLY)


@contextmanager
def together(what, make, *words):
    for rank in OTHERS:
        ask(rank, what, *words)
    link = make()
    yield link
    while not getattr(link, "settled", True):
        link.progress()
    for rank in OTHERS:
        send(["drop"], rank, REQUEST)
    link.close()
    for rank in OTHERS:
        assert receive(rank, REPLY, lambda: None) is None


class RemoteWriter:
    """A channel as the rank of each actor has it; segments are filled here and copied there."""

    def __init__(self, reader, ranks):
        self.reader, self.ranks = reader, ranks
        self.filling = {}

    def _ask(self, actor, what, *words):
        return ask(self.ranks[actor], what, *words, progress=self.reader.progress)

    def blank(self, actor):
        if not self._ask(actor, "blank", actor):
            return None
        return self.filling.setdefault(actor, Segment.blank(SPEC))

    def offer(self, segment):
        header = segment.header
        columns = {name: column.tobytes() for name, column in segment.columns.items()}
        del self.filling[header.actor]
        return self._ask(header.actor, "offer", header.actor, msgspec.to_builtins(header), columns, segment.state)

    def recall(self, actor):
        found = self._ask(actor, "recall", actor)
        return None if found is None else tuple(found)


class TestChannelWithinOneRank(ChannelConformance):
    @contextmanager
    def make(self, num_actors, slots_per_actor):
        channel = MpiChannel(MPI.COMM_SELF, self.spec, self.run, [0] * num_actors, slots_per_actor)
        yield channel
        channel.progress()
        channel.close()


class TestChannelBetweenRanks(ChannelConformance):
    @contextmanager
    def make(self, num_actors, slots_per_actor):
        self.ranks = [OTHERS[actor % len(OTHERS)] for actor in range(num_actors)]
        sizes = (self.run, self.ranks, slots_per_actor)
        with together("channel", lambda: MpiChannel(WORLD, self.spec, *sizes), *sizes) as channel:
            yield channel

    def beside(self, channel):
        while not channel.settled:  # the first credits have arrived
            channel.progress()
        return RemoteWriter(channel, self.ranks)


def test_large_segments_arrive_whole_and_in_order():
    """Larger than the buffers of MPI, so that two are in transit at once."""
    spec, run, num_segments = replace(SPEC, num_envs=4000), "large", 40
    ranks = list(OTHERS)
    with together("channel", lambda: MpiChannel(WORLD, spec, run, ranks, 3), run, ranks, 3, spec.num_envs) as channel:
        for actor, rank in enumerate(ranks):
            send(["burst", actor, run, num_segments], rank, REQUEST)
        expected = dict.fromkeys(range(len(ranks)), 0)
        while min(expected.values()) < num_segments:
            segment = channel.poll()
            if segment is None:
                continue
            sequence = expected[segment.header.actor]
            assert segment.header.sequence == sequence
            assert segment.state == bytes([sequence]) * sequence
            assert all((column.view(np.uint8) == sequence % 2).all() for column in segment.columns.values())
            channel.release(segment)
            expected[segment.header.actor] += 1
        for rank in ranks:
            assert receive(rank, REPLY, channel.progress) is None


class RemoteReader:
    def __init__(self, store, rank):
        self.store, self.rank = store, rank

    def newer_than(self, policy, version):
        while not self.store.delivered(self.rank):
            self.store.progress()
        found = ask(self.rank, "newer_than", policy, version, progress=self.store.progress)
        return None if found is None else decode_weights(found)


class TestWeightsBetweenRanks(WeightStoreConformance):
    race_versions = 300

    @contextmanager
    def make(self):
        self.number = count()
        with together("store", lambda: MpiWeights(WORLD, OTHERS)) as store:
            yield store
            for rank in OTHERS:
                RemoteReader(store, rank).newer_than("policy", 10**9)

    def beside(self, store):
        return RemoteReader(store, OTHERS[next(self.number) % len(OTHERS)])

    def test_weights_can_be_read_where_they_were_published(self):
        self.beside = lambda store: store
        self.test_the_newest_wins()
        self.test_publishing_copies()
        self.test_the_copy_is_the_readers()

    def test_never_torn(self):
        with self.make() as store:
            for rank in OTHERS:
                send(["watch", self.race_versions], rank, REQUEST)
            publish_patterns(store, self.race_versions)
            for rank in OTHERS:
                assert receive(rank, REPLY, store.progress) is None

    def test_a_busy_reader_costs_the_writer_no_memory(self, monkeypatch):
        made, blank = [], WeightsFrame.blank
        monkeypatch.setattr(WeightsFrame, "blank", lambda *words: made.append(words) or blank(*words))
        with self.make() as store:
            publish_patterns(store, 50)
            assert 0 < len(made) <= len(OTHERS) + 2


if __name__ == "__main__":
    if WORLD.rank:
        serve()
    else:
        code = pytest.main(["-q", "-p", "no:xdist", "--assert=plain", __file__, *sys.argv[1:]])
        for rank in OTHERS:
            send(["end"], rank, REQUEST)
        sys.exit(code)

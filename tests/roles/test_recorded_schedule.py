"""The parts that repeat a recorded run: each segment with its own version, each group in its turn, no weights kept for ever."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.contracts.errors import RunFailed
from steppe.core.contracts.segment import SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.records.arrivals import Arrival
from steppe.roles.recorded_schedule import (
    RecordedBatchPolicy,
    RecordedCollectPolicy,
    RecordedSchedule,
    RetainingWeightStore,
)
from steppe.transport.local import LocalChannel, LocalWeights

pytestmark = pytest.mark.unit

SPEC = SegmentSpec(2, 1, FieldSpec("obs", (1,), "float32"), FieldSpec("action", (), "int64"))


def weights(version):
    return Weights.from_arrays({"w": np.full(2, version, np.float32)}).stamped(version=version, updates=0, env_steps=0)


def script(*intakes, end=(10, 10)):
    return RecordedSchedule([[Arrival(*row) for row in intake] for intake in intakes], end)


def adopt(follower, version):
    """What an actor does at the beginning of its step."""
    newer = follower.newer_than("policy", version)
    return version if newer is None else newer.version


def test_an_actor_gets_the_version_of_each_segment_however_far_the_learner_is():
    told = script([(0, 0, 0), (1, 0, 0)], [(0, 1, 0), (1, 1, 2)], [(0, 2, 3)])
    shelf = RetainingWeightStore(LocalWeights(), told)
    follower = RecordedCollectPolicy(0, told, shelf)
    assert adopt(follower, -1) == -1, "nothing is published yet"
    for version in range(5):
        shelf.publish("policy", weights(version))
    version = adopt(follower, -1)
    collected = []
    for sequence in range(4):
        for _ in range(2):  # a step that only finds the gate closed, and the next
            version = adopt(follower, version)
            if follower.allows(sequence, version):
                collected.append((sequence, version))
                break
    assert collected == [(0, 0), (1, 0), (2, 3)], "segment 3 is not in the script"


def test_the_manager_sees_the_newest():
    shelf = RetainingWeightStore(LocalWeights(), script([(0, 0, 0)]))
    for version in range(3):
        shelf.publish("policy", weights(version))
    assert shelf.newer_than("policy", 0).version == 2
    assert shelf.newer_than("policy", 2) is None


def test_weights_go_when_the_last_of_their_readers_has_gone_on():
    told = script([(0, 0, 0), (1, 0, 0)], [(0, 1, 2), (1, 1, 2)])
    shelf = RetainingWeightStore(LocalWeights(), told)
    for version in range(3):
        shelf.publish("policy", weights(version))
    assert shelf.get(1) is None, "no segment needs it"
    actors = [RecordedCollectPolicy(actor, told, shelf) for actor in (0, 1)]
    for actor in actors:
        assert shelf.get(0) is not None
        assert adopt(actor, -1) == 0
        assert actor.allows(0, 0)
        assert not actor.allows(1, 0)
        assert adopt(actor, 0) == 2
    assert shelf.get(0) is None


def test_shelves_are_shared_within_a_script():
    told, newest = script(), LocalWeights()
    assert told.retaining_store(newest) is told.retaining_store(newest)


def offer(channel, actor, sequence, version=0):
    segment = channel.blank(actor)
    segment.header = SegmentHeader("run", actor, 0, sequence, version)
    assert channel.offer(segment)


def names(segments):
    return [(segment.header.actor, segment.header.sequence) for segment in segments]


def test_groups_come_in_the_order_of_the_script():
    channel = LocalChannel(SPEC, 2, 3)
    intake = RecordedBatchPolicy(channel, script([(1, 0, 0), (0, 0, 0)], [(0, 1, 0)], [(1, 1, 0)]))
    offer(channel, 0, 0)
    offer(channel, 0, 1)
    assert intake.take(0) == []
    offer(channel, 1, 0)
    offer(channel, 1, 1)
    assert names(intake.take(0)) == [(1, 0), (0, 0)]
    assert names(intake.take(0)) == [(0, 1)]
    assert names(intake.take(0)) == [(1, 1)]
    assert intake.tracker.expected == {0: 2, 1: 2}


def test_what_was_dropped_is_dropped_again_and_given_back():
    channel = LocalChannel(SPEC, 1, 1)
    intake = RecordedBatchPolicy(channel, script([(0, 0, 0, False)], [(0, 1, 0, True)]))
    offer(channel, 0, 0)
    assert intake.take(0) == []
    assert intake.tracker.dropped == {"too_old": 1}
    offer(channel, 0, 1)  # there is room again
    assert names(intake.take(0)) == [(0, 1)]


def test_what_can_never_come_is_an_error():
    channel = LocalChannel(SPEC, 1, 1)
    intake = RecordedBatchPolicy(channel, script([(0, 0, 3)]))
    with pytest.raises(RunFailed, match="collected with version 3, but this run has only come to version 2"):
        intake.take(2)
    with pytest.raises(RunFailed, match="its log ended"):
        RecordedBatchPolicy(channel, script()).take(0)
    told = script([(0, 3, 0)])
    with pytest.raises(RunFailed, match="how segment 2 of actor 0 was collected"):
        RecordedCollectPolicy(0, told, RetainingWeightStore(LocalWeights(), told)).allows(2, 0)


def test_the_end_waits_for_intakes_of_which_nothing_was_kept():
    """A resumed life begins behind them, so the one before must not end without them."""
    channel = LocalChannel(SPEC, 1, 1)
    told = script([(0, 0, 0)], [(0, 1, 0, False)], end=(20, 5))
    intake = RecordedBatchPolicy(channel, told)
    offer(channel, 0, 0)
    (segment,) = intake.take(0)
    channel.release(segment)
    assert not told.ended(20, 4, has_batch=True)
    assert not told.ended(19, 5, has_batch=True)
    assert told.ended(20, 5, has_batch=True), "stopped in the midst of what it had taken in: nothing came after that"
    assert not told.ended(20, 5, has_batch=False)
    offer(channel, 0, 1)
    assert intake.take(0) == []
    assert told.ended(20, 5, has_batch=False)
    assert intake.tracker.expected == {0: 2}


def test_an_early_end_leaves_the_rest():
    told = RecordedSchedule([[Arrival(0, 0, 0)]], (0, 0), may_end_early=True)
    assert told.ended(0, 0, has_batch=False)

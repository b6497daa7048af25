"""Repeating a recorded run: each segment with its version, each group in its order, and weights kept only as long as
needed.
"""

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
    """Return the version that an actor adopts at the beginning of its step."""
    newer = follower.newer_than("policy", version)
    return version if newer is None else newer.version


def test_an_actor_gets_the_version_of_each_segment_however_far_the_learner_is():
    schedule = script([(0, 0, 0), (1, 0, 0)], [(0, 1, 0), (1, 1, 2)], [(0, 2, 3)])
    store = RetainingWeightStore(LocalWeights(), schedule)
    follower = RecordedCollectPolicy(0, schedule, store)
    assert adopt(follower, -1) == -1, "nothing is published yet"
    for version in range(5):
        store.publish("policy", weights(version))
    version = adopt(follower, -1)
    collected = []
    for sequence in range(4):
        for _ in range(2):  # the first step only finds that it must wait
            version = adopt(follower, version)
            if follower.allows(sequence, version):
                collected.append((sequence, version))
                break
    assert collected == [(0, 0), (1, 0), (2, 3)], "segment 3 is not in the script"


def test_the_manager_gets_the_newest_weights():
    store = RetainingWeightStore(LocalWeights(), script([(0, 0, 0)]))
    for version in range(3):
        store.publish("policy", weights(version))
    assert store.newer_than("policy", 0).version == 2
    assert store.newer_than("policy", 2) is None


def test_weights_are_released_after_their_last_reader():
    schedule = script([(0, 0, 0), (1, 0, 0)], [(0, 1, 2), (1, 1, 2)])
    store = RetainingWeightStore(LocalWeights(), schedule)
    for version in range(3):
        store.publish("policy", weights(version))
    assert store.get(1) is None, "no segment needs it"
    actors = [RecordedCollectPolicy(actor, schedule, store) for actor in (0, 1)]
    for actor in actors:
        assert store.get(0) is not None
        assert adopt(actor, -1) == 0
        assert actor.allows(0, 0)
        assert not actor.allows(1, 0)
        assert adopt(actor, 0) == 2
    assert store.get(0) is None


def test_the_weight_store_is_shared_within_a_schedule():
    schedule, newest = script(), LocalWeights()
    assert schedule.retaining_store(newest) is schedule.retaining_store(newest)


def offer(channel, actor, sequence, version=0):
    segment = channel.blank(actor)
    segment.header = SegmentHeader("run", actor, 0, sequence, version)
    assert channel.offer(segment)


def names(segments):
    return [(segment.header.actor, segment.header.sequence) for segment in segments]


def test_groups_are_taken_in_the_recorded_order():
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


def test_dropped_segments_are_dropped_again_and_released():
    channel = LocalChannel(SPEC, 1, 1)
    intake = RecordedBatchPolicy(channel, script([(0, 0, 0, False)], [(0, 1, 0, True)]))
    offer(channel, 0, 0)
    assert intake.take(0) == []
    assert intake.tracker.dropped == {"too_old": 1}
    offer(channel, 0, 1)  # there is room again
    assert names(intake.take(0)) == [(0, 1)]


def test_impossible_schedules_are_errors():
    channel = LocalChannel(SPEC, 1, 1)
    intake = RecordedBatchPolicy(channel, script([(0, 0, 3)]))
    with pytest.raises(RunFailed, match="collected with version 3, but this run has only come to version 2"):
        intake.take(2)
    with pytest.raises(RunFailed, match="its log ended"):
        RecordedBatchPolicy(channel, script()).take(0)
    schedule = script([(0, 3, 0)])
    with pytest.raises(RunFailed, match="how segment 2 of actor 0 was collected"):
        RecordedCollectPolicy(0, schedule, RetainingWeightStore(LocalWeights(), schedule)).allows(2, 0)


def test_the_end_waits_for_groups_that_were_dropped():
    """A resumed part starts after them, so the part before must not end without them."""
    channel = LocalChannel(SPEC, 1, 1)
    schedule = script([(0, 0, 0)], [(0, 1, 0, False)], end=(20, 5))
    intake = RecordedBatchPolicy(channel, schedule)
    offer(channel, 0, 0)
    (segment,) = intake.take(0)
    channel.release(segment)
    assert not schedule.ended(20, 4, has_batch=True)
    assert not schedule.ended(19, 5, has_batch=True)
    assert schedule.ended(20, 5, has_batch=True), (
        "stopped in the midst of what it had taken in: nothing came after that"
    )
    assert not schedule.ended(20, 5, has_batch=False)
    offer(channel, 0, 1)
    assert intake.take(0) == []
    assert schedule.ended(20, 5, has_batch=False)
    assert intake.tracker.expected == {0: 2}


def test_an_early_end_skips_the_rest():
    schedule = RecordedSchedule([[Arrival(0, 0, 0)]], (0, 0), may_end_early=True)
    assert schedule.ended(0, 0, has_batch=False)

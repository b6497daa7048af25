"""Gates and intakes: which version a segment may be collected with, and which segments are taken together."""

from __future__ import annotations

import pytest

from steppe.core.io import codec
from steppe.roles.scheduling import (
    FreeCollectPolicy,
    LockstepCollectPolicy,
    RoundBatchPolicy,
    SequenceTracker,
    WindowBatchPolicy,
)
from steppe.transport.local import LocalChannel
from tests.support.role_fakes import SPEC, FakeClock, segment_of

pytestmark = pytest.mark.unit


def names(segments):
    return [(segment.header.actor, segment.header.sequence) for segment in segments]


@pytest.mark.parametrize(("sequence", "version", "opens"), [(0, -1, False), (0, 0, True), (1, 0, False), (0, 1, False), (7, 7, True)])  # fmt: skip
def test_lockstep_opens_for_version_k_alone(sequence, version, opens):
    assert LockstepCollectPolicy().allows(sequence, version) is opens


@pytest.mark.parametrize(("sequence", "version", "opens"), [(0, -1, False), (0, 0, True), (1, 0, True), (1, 1, False), (2, 0, False), (2, 1, True), (2, 2, False), (9, 8, True)])  # fmt: skip
def test_lockstep_with_one_round_ahead_opens_for_the_version_before_alone(sequence, version, opens):
    assert LockstepCollectPolicy(ahead=1).allows(sequence, version) is opens


@pytest.mark.parametrize(("ahead", "version", "opens"), [(0, 2, False), (0, 5, True), (1, 4, True), (1, 5, False)])
def test_lockstep_counts_rounds_that_went_on_without_the_actor(ahead, version, opens):
    assert LockstepCollectPolicy(ahead, lambda: 3).allows(2, version) is opens


@pytest.mark.parametrize(("sequence", "version", "opens"), [(0, -1, False), (0, 0, True), (9, 0, True), (0, 9, True)])
def test_free_opens_once_there_are_weights(sequence, version, opens):
    assert FreeCollectPolicy().allows(sequence, version) is opens


class TestLedger:
    def test_in_order_everything_is_new(self):
        channel, ledger = LocalChannel(SPEC, 2, 9), SequenceTracker()
        for actor, sequence in [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)]:
            assert ledger.accept(segment_of(channel, actor, sequence))
        assert not ledger.dropped
        assert ledger.expected == {0: 3, 1: 2}

    def test_nothing_is_accepted_twice(self):
        channel, ledger = LocalChannel(SPEC, 1, 9), SequenceTracker()
        accepted = [ledger.accept(segment_of(channel, 0, sequence)) for sequence in (0, 1, 1, 0, 2)]
        assert accepted == [True, True, False, False, True]
        assert ledger.dropped == {"repeated": 2}

    def test_a_gap_is_counted(self):
        channel, ledger = LocalChannel(SPEC, 2, 9), SequenceTracker()
        assert ledger.accept(segment_of(channel, 0, 3))
        assert ledger.accept(segment_of(channel, 0, 4))
        assert ledger.accept(segment_of(channel, 0, 6))
        assert ledger.dropped == {"missing": 4}


class TestRounds:
    def test_waits_for_all_and_orders_by_actor(self):
        channel = LocalChannel(SPEC, 3, 1)
        rounds = RoundBatchPolicy(channel, 3)
        assert rounds.take(0) == []
        segment_of(channel, 2, 0)
        segment_of(channel, 0, 0)
        assert rounds.take(0) == []
        segment_of(channel, 1, 0)
        assert names(rounds.take(0)) == [(0, 0), (1, 0), (2, 0)]
        assert rounds.take(1) == []

    def test_rounds_follow_each_other(self):
        channel = LocalChannel(SPEC, 2, 1)
        rounds = RoundBatchPolicy(channel, 2)
        for sequence in range(3):
            segment_of(channel, 1, sequence)
            segment_of(channel, 0, sequence)
            taken = rounds.take(sequence)
            assert names(taken) == [(0, sequence), (1, sequence)]
            for segment in taken:
                channel.release(segment)

    def test_a_repeated_segment_is_given_back(self):
        channel = LocalChannel(SPEC, 2, 2)
        rounds = RoundBatchPolicy(channel, 2)
        segment_of(channel, 0, 0)
        assert rounds.take(0) == []
        segment_of(channel, 0, 0)
        assert channel.blank(0) is None
        assert rounds.take(0) == []
        assert channel.blank(0) is not None
        assert rounds.tracker.dropped == {"repeated": 1}
        segment_of(channel, 1, 0)
        assert names(rounds.take(0)) == [(0, 0), (1, 0)]

    @pytest.mark.regression
    def test_a_round_that_is_not_complete_is_nobodys_yet(self):
        """What a checkpoint knows of it would be collected and learned from by nobody after a resume."""
        channel = LocalChannel(SPEC, 2, 1)
        rounds = RoundBatchPolicy(channel, 2)
        segment_of(channel, 1, 0)
        assert rounds.take(0) == []
        assert rounds.tracker.state() == {"actors": [], "dropped": {}}
        segment_of(channel, 0, 0)
        rounds.take(0)
        assert rounds.tracker.expected == {0: 1, 1: 1}

    def test_an_actor_that_is_ahead_loses_nothing(self):
        """With room for two segments, one actor's second may be there before another's first."""
        channel = LocalChannel(SPEC, 2, 2)
        rounds = RoundBatchPolicy(channel, 2)
        segment_of(channel, 1, 0)
        segment_of(channel, 1, 1)
        assert rounds.take(0) == []
        segment_of(channel, 0, 0)
        assert names(rounds.take(0)) == [(0, 0), (1, 0)]
        assert rounds.take(0) == []
        segment_of(channel, 0, 1)
        assert names(rounds.take(0)) == [(0, 1), (1, 1)]
        assert not rounds.tracker.dropped

    def test_a_repeat_of_the_second_that_waits_is_given_back(self):
        channel = LocalChannel(SPEC, 2, 3)
        rounds = RoundBatchPolicy(channel, 2)
        for sequence in (0, 1, 1):
            segment_of(channel, 1, sequence)
        assert rounds.take(0) == []
        assert rounds.tracker.dropped == {"repeated": 1}
        assert rounds.num_waiting() == 2

    def test_one_that_comes_back_with_newer_weights_is_not_late(self):
        """The learner has published version 2, and has not asked for its round yet."""
        channel = LocalChannel(SPEC, 2, 4)
        rounds = RoundBatchPolicy(channel, 2)
        rounds.leave(1)
        for number in (0, 1):
            segment_of(channel, 0, number, version=number)
            assert names(rounds.take(number)) == [(0, number)]
        segment_of(channel, 1, 0, version=2)
        assert rounds.num_waiting() == 1
        assert not rounds.tracker.dropped
        segment_of(channel, 0, 2, version=2)
        assert names(rounds.take(2)) == [(0, 2), (1, 0)]

    def test_goes_on_without_one_and_takes_it_in_again(self):
        """Actor 1 is out of rounds 1 and 2; its next segment, number 1, is for round 3."""
        channel = LocalChannel(SPEC, 2, 4)
        rounds = RoundBatchPolicy(channel, 2)
        segment_of(channel, 0, 0)
        segment_of(channel, 1, 0)
        assert names(rounds.take(0)) == [(0, 0), (1, 0)]
        rounds.leave(1)
        for number in (1, 2):
            segment_of(channel, 0, number, version=number)
            assert names(rounds.take(number)) == [(0, number)]
        rounds.join(1)
        assert rounds.round == 3
        assert rounds.tracker.round_offsets == {1: 2}
        segment_of(channel, 0, 3, version=3)
        assert rounds.take(3) == []
        assert rounds.missing() == [1]
        segment_of(channel, 1, 1, version=3)
        assert names(rounds.take(3)) == [(0, 3), (1, 1)]
        assert rounds.round == 4
        assert not rounds.tracker.dropped

    def test_the_offset_is_the_difference_between_the_round_and_the_actors_own_number(self):
        channel = LocalChannel(SPEC, 2, 4)
        rounds = RoundBatchPolicy(channel, 2)
        segment_of(channel, 0, 0)
        segment_of(channel, 1, 0)
        rounds.take(0)
        rounds.leave(1)
        for number in (1, 2, 3):
            segment_of(channel, 0, number, version=number)
            rounds.take(number)
        rounds.join(1)
        assert (rounds.round, rounds.tracker.round_offsets) == (4, {1: 3})

    def test_nothing_is_late_before_anything_was_taken(self):
        channel = LocalChannel(SPEC, 2, 4)
        rounds = RoundBatchPolicy(channel, 2)
        rounds.leave(1)
        segment_of(channel, 1, 0)
        assert rounds.num_waiting() == 1
        assert not rounds.tracker.dropped

    def test_what_comes_too_late_is_left_out_and_its_actor_is_in_the_next_round(self):
        channel = LocalChannel(SPEC, 2, 4)
        rounds = RoundBatchPolicy(channel, 2)
        rounds.leave(1)
        segment_of(channel, 0, 0)
        assert names(rounds.take(0)) == [(0, 0)]
        segment_of(channel, 0, 1, version=1)
        segment_of(channel, 1, 0, version=0)  # for the round that went on without it
        assert rounds.take(1) == []
        assert rounds.tracker.dropped == {"left_out": 1}
        assert rounds.tracker.round_offsets == {1: 0}
        segment_of(channel, 1, 1, version=1)
        assert names(rounds.take(1)) == [(0, 1), (1, 1)]

    def test_a_segment_in_time_keeps_its_actor_in_the_rounds(self):
        channel = LocalChannel(SPEC, 3, 4)
        rounds = RoundBatchPolicy(channel, 3)
        rounds.leave(1)
        segment_of(channel, 0, 0)
        segment_of(channel, 1, 0)
        assert rounds.take(0) == []
        segment_of(channel, 2, 0)
        assert names(rounds.take(0)) == [(0, 0), (1, 0), (2, 0)]
        assert not rounds.tracker.dropped

    def test_a_resumed_run_knows_which_round_each_is_at(self):
        channel = LocalChannel(SPEC, 2, 4)
        rounds, again = RoundBatchPolicy(channel, 2), RoundBatchPolicy(channel, 2)
        rounds.leave(1)
        segment_of(channel, 0, 0)
        rounds.take(0)
        rounds.join(1)
        again.tracker.restore(codec.unpack(codec.pack(rounds.tracker.state())))
        assert (again.round, again.tracker.round_offsets, again.members) == (1, {1: 1}, {0, 1})

    def test_what_nobody_took_is_counted(self):
        channel = LocalChannel(SPEC, 2, 2)
        rounds = RoundBatchPolicy(channel, 2)
        assert rounds.num_waiting() == 0
        segment_of(channel, 1, 0)
        rounds.take(0)
        segment_of(channel, 1, 1)
        assert rounds.num_waiting() == 2
        assert rounds.num_waiting() == 2
        segment_of(channel, 0, 0)
        assert names(rounds.take(0)) == [(0, 0), (1, 0)]
        assert rounds.num_waiting() == 1


class TestWindow:
    def make(self, num_actors=2, slots=2, window_s=0.5, max_lag=2):
        self.channel, self.clock = LocalChannel(SPEC, num_actors, slots), FakeClock()
        return WindowBatchPolicy(self.channel, num_actors, window_s, max_lag, self.clock)

    def test_waits_for_its_time_from_the_first_arrival(self):
        window = self.make()
        self.clock.now_s = 1000.0
        assert window.take(0) == []
        segment_of(self.channel, 1, 0)
        assert window.take(0) == []
        self.clock.now_s += 0.4
        segment_of(self.channel, 1, 1)  # does not open the window anew
        assert window.take(0) == []
        self.clock.now_s += 0.1
        assert window.num_waiting() == 0, "there are no rounds"
        assert names(window.take(0)) == [(1, 0), (1, 1)]
        assert window.take(0) == []

    def test_does_not_wait_when_every_actor_is_there(self):
        window = self.make()
        segment_of(self.channel, 1, 0)
        assert window.take(0) == []
        segment_of(self.channel, 0, 0)
        assert names(window.take(0)) == [(1, 0), (0, 0)]

    @pytest.mark.regression
    def test_two_segments_of_one_actor_are_not_two_actors(self):
        window = self.make()
        segment_of(self.channel, 0, 0)
        segment_of(self.channel, 0, 1)
        assert window.take(0) == []
        self.clock.now_s += 0.5
        assert names(window.take(0)) == [(0, 0), (0, 1)]

    def test_what_arrives_later_opens_a_window_of_its_own(self):
        window = self.make()
        segment_of(self.channel, 0, 0)
        window.take(0)
        self.clock.now_s += 0.5
        window.take(0)
        self.clock.now_s += 10
        segment_of(self.channel, 0, 1)
        assert window.take(0) == []
        self.clock.now_s += 0.5
        assert names(window.take(0)) == [(0, 1)]

    def test_no_window_takes_at_once(self):
        window = self.make(window_s=0.0)
        segment_of(self.channel, 1, 0)
        assert names(window.take(0)) == [(1, 0)]

    def test_the_too_old_are_dropped_counted_and_given_back(self):
        window = self.make(num_actors=3, slots=1, max_lag=2)
        segment_of(self.channel, 0, 0, version=4)
        segment_of(self.channel, 1, 0, version=5)
        segment_of(self.channel, 2, 0, version=7)
        assert names(window.take(7)) == [(1, 0), (2, 0)]
        assert window.tracker.dropped == {"too_old": 1}
        assert self.channel.blank(0) is not None
        assert self.channel.blank(1) is None

    def test_a_dropped_segment_is_not_missing_later(self):
        window = self.make(num_actors=1, slots=2, max_lag=0)
        segment_of(self.channel, 0, 0, version=0)
        assert window.take(5) == []
        segment_of(self.channel, 0, 1, version=5)
        assert names(window.take(5)) == [(0, 1)]
        assert window.tracker.dropped == {"too_old": 1}

    def test_a_repeated_segment_is_counted_once(self):
        window = self.make(num_actors=1, slots=2, max_lag=0)
        segment_of(self.channel, 0, 0, version=5)
        window.take(5)
        segment_of(self.channel, 0, 0, version=0)
        assert window.take(5) == []
        assert window.tracker.dropped == {"repeated": 1}

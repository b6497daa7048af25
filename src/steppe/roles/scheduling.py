"""Which version a segment may be collected with, and which segments the learner takes together.

This is what differs between the train modes. `sync` (and `single`, its case of one actor in the learner's process):
Lockstep and Rounds. `async`: Free and Window.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.transport import Channel
from steppe.records.arrivals import Arrival


class CollectPolicy(Protocol):
    """An actor asks before each segment."""

    def open(self, sequence: int, version: int) -> bool:
        """Whether segment number `sequence` may be collected with weights `version`."""


class LockstepCollectPolicy:
    """Segment k only with version k, or, a round ahead of the learner, only with version k − 1 (0 for the first).

    For an actor that rounds went on without, k is the round that its segment is for.
    """

    def __init__(self, ahead: int = 0, shift: Callable[[], int] = lambda: 0) -> None:
        self._ahead, self._shift = ahead, shift

    def open(self, sequence: int, version: int) -> bool:
        return version == max(0, sequence + self._shift() - self._ahead)


class FreeCollectPolicy:
    """Any segment with any version."""

    def open(self, sequence: int, version: int) -> bool:
        return version >= 0


class SequenceTracker:
    """The next sequence number expected of each actor, and the state it goes on from: nothing is learned twice, and a
    gap is seen."""

    def __init__(self) -> None:
        self.expected: dict[int, int] = {}
        self.states: dict[int, bytes | None] = {}
        self.dropped: Counter[str] = Counter()
        self.round_offsets: dict[
            int, int
        ] = {}  # of actors that rounds went on without: the round, less the segment's number

    def accept(self, segment: Segment) -> bool:
        """Whether this segment is new; counts what is refused or missing."""
        header = segment.header
        assert header is not None
        expected = self.expected.get(header.actor, 0)
        if header.sequence < expected:
            self.dropped["repeated"] += 1
            return False
        if header.sequence > expected:
            self.dropped["missing"] += header.sequence - expected
        self.expected[header.actor] = header.sequence + 1
        self.states[header.actor] = segment.state
        return True

    def count_skipped(self, segment: Segment) -> None:
        """Count a segment whose round went on without it; its actor goes on behind it."""
        self.dropped["left_out"] += self.accept(segment)

    def state(self) -> Tree:
        """Everything, for a checkpoint."""
        actors = [[actor, expected, self.states.get(actor)] for actor, expected in sorted(self.expected.items())]
        shifts = {"shifts": dict(self.round_offsets)} if self.round_offsets else {}
        return {"actors": actors, "dropped": dict(self.dropped), **shifts}

    def restore(self, state: Tree) -> None:
        """Take over what `state` returned."""
        self.expected = {actor: expected for actor, expected, _ in state["actors"]}
        self.states = {actor: kept for actor, _, kept in state["actors"]}
        self.dropped, self.round_offsets = Counter(state["dropped"]), dict(state.get("shifts", {}))


class BatchPolicy(Protocol):
    """The learner asks for the segments to learn from next."""

    ledger: SequenceTracker

    def take(self, version: int) -> list[Segment]:
        """What is complete now, given that the learner is at `version`; empty when nothing is. The caller releases them."""

    def left(self) -> int:
        """How many segments have come for rounds that were not taken; 0 where there are no rounds."""


class RoundBatchPolicy:
    """Waits for one segment of every member and hands them over in the order of the actors; later ones wait their turn.

    All actors are members, until somebody decides that the rounds go on without one. One that shows up again is a member
    of the round that is waited for; what it had collected for an earlier one is left out.
    """

    def __init__(self, channel: Channel, num_actors: int) -> None:
        self.ledger = SequenceTracker()
        self.members = set(range(num_actors))
        self._channel, self._version = channel, -1
        self._waiting: list[deque[Segment]] = [deque() for _ in range(num_actors)]

    @property
    def round(self) -> int:
        """The number of the round that is waited for."""
        known = self.ledger.expected
        return max(known.get(actor, 0) + self.ledger.round_offsets.get(actor, 0) for actor in range(len(self._waiting)))

    def part(self, actor: int) -> None:
        """Go on without this actor."""
        self.members.discard(actor)

    def join(self, actor: int) -> None:
        """Wait for this actor again: its next segment is for the round that is waited for."""
        self.ledger.round_offsets[actor] = self.round - self._due(actor)
        self.members.add(actor)

    def take(self, version: int) -> list[Segment]:
        self._version = version
        self._poll_channel()
        members = [self._waiting[actor] for actor in sorted(self.members)]
        if not all(members):
            return []
        complete = [segments.popleft() for segments in members]
        for segment in complete:
            self.ledger.accept(segment)  # not before: what a checkpoint counts as taken is never collected again
        return complete

    def left(self) -> int:
        self._poll_channel()
        return sum(len(segments) for segments in self._waiting)

    def missing(self) -> list[int]:
        """The actors that the round waits for."""
        return [actor for actor in sorted(self.members) if not self._waiting[actor]]

    def _poll_channel(self) -> None:
        while (segment := self._channel.poll()) is not None:
            assert segment.header is not None
            actor, sequence = segment.header.actor, segment.header.sequence
            if sequence < self._due(actor):
                self.ledger.dropped["repeated"] += 1
                self._channel.release(segment)
            elif self._late(actor, segment.header.version):
                self.ledger.count_skipped(segment)
                self._channel.release(segment)
                self.join(actor)
            else:
                if actor not in self.members:
                    self.join(actor)
                self._waiting[actor].append(segment)

    def _late(self, actor: int, version: int) -> bool:
        """Whether the round that a segment was collected for has gone on without it."""
        always_there = actor in self.members and actor not in self.ledger.round_offsets
        return not always_there and version < self._version

    def _due(self, actor: int) -> int:
        """The number of the actor's segment that is to come next."""
        newest = self._waiting[actor][-1].header if self._waiting[actor] else None
        return self.ledger.expected.get(actor, 0) if newest is None else newest.sequence + 1


class WindowBatchPolicy:
    """Hands over what arrived within `window_s` of the first arrival, or sooner when every actor is there.

    Segments collected more than `max_lag` versions ago are dropped and counted. `record` hears of every intake.
    """

    def __init__(
        self, channel: Channel, num_actors: int, window_s: float, max_lag: int, clock: Callable[[], float]
    ) -> None:
        self.ledger = SequenceTracker()
        self._channel, self._num_actors = channel, num_actors
        self._window_s, self._max_lag, self._clock = window_s, max_lag, clock
        self.record: Callable[[Sequence[Arrival]], object] = lambda arrivals: None
        self._waiting: list[Segment] = []
        self._opened_s = 0.0

    def take(self, version: int) -> list[Segment]:
        while (segment := self._channel.poll()) is not None:
            if not self._waiting:
                self._opened_s = self._clock()
            self._waiting.append(segment)
        if not self._waiting:
            return []
        here = {segment.header.actor for segment in self._waiting if segment.header is not None}
        if len(here) < self._num_actors and self._clock() - self._opened_s < self._window_s:
            return []
        taken, self._waiting = self._waiting, []
        arrivals: list[Arrival] = []
        kept = [segment for segment in taken if self._keep(segment, version, arrivals)]
        self.record(arrivals)
        return kept

    def left(self) -> int:
        return 0

    def _keep(self, segment: Segment, version: int, arrivals: list[Arrival]) -> bool:
        header = segment.header
        assert header is not None
        if self.ledger.accept(segment):
            young = version - header.version <= self._max_lag
            arrivals.append(Arrival(header.actor, header.sequence, header.version, young))
            if young:
                return True
            self.ledger.dropped["too_old"] += 1
        self._channel.release(segment)
        return False

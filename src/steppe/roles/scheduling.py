"""With which weights version an actor may collect a segment, and which segments the learner takes as a batch.

This is what differs between the train modes. `sync` (and `single`, its case of one actor in the learner's process):
LockstepCollectPolicy and RoundBatchPolicy. `async`: FreeCollectPolicy and WindowBatchPolicy.
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
    """Decides whether an actor may collect its next segment."""

    def allows(self, sequence: int, version: int) -> bool:
        """Whether segment number `sequence` may be collected with weights `version`."""


class LockstepCollectPolicy:
    """Allow segment k only with version k, or, with `ahead` 1, only with version k − 1 (0 for the first).

    For an actor that was left out of rounds, k is the round of the segment: its number plus the `round_offset()`.
    """

    def __init__(self, ahead: int = 0, round_offset: Callable[[], int] = lambda: 0) -> None:
        self._ahead, self._round_offset = ahead, round_offset

    def allows(self, sequence: int, version: int) -> bool:
        return version == max(0, sequence + self._round_offset() - self._ahead)


class FreeCollectPolicy:
    """Allow any segment with any published version."""

    def allows(self, sequence: int, version: int) -> bool:
        return version >= 0


class SequenceTracker:
    """Track the next expected sequence number and the newest state of each actor, to drop repeated segments and count
    missing ones."""

    def __init__(self) -> None:
        self.expected: dict[int, int] = {}
        self.states: dict[int, bytes | None] = {}
        self.dropped: Counter[str] = Counter()
        # Of actors that were left out of rounds: round number minus sequence number.
        self.round_offsets: dict[int, int] = {}

    def accept(self, segment: Segment) -> bool:
        """Record a segment and return whether it is new; count repeated and missing segments."""
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
        """Record a segment that came too late for its round; its actor continues after it."""
        self.dropped["left_out"] += self.accept(segment)

    def state(self) -> Tree:
        """Return the state for a checkpoint."""
        actors = [[actor, expected, self.states.get(actor)] for actor, expected in sorted(self.expected.items())]
        shifts = {"shifts": dict(self.round_offsets)} if self.round_offsets else {}
        return {"actors": actors, "dropped": dict(self.dropped), **shifts}

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned."""
        self.expected = {actor: expected for actor, expected, _ in state["actors"]}
        self.states = {actor: kept for actor, _, kept in state["actors"]}
        self.dropped, self.round_offsets = Counter(state["dropped"]), dict(state.get("shifts", {}))


class BatchPolicy(Protocol):
    """Decides which segments the learner takes next."""

    tracker: SequenceTracker

    def take(self, version: int) -> list[Segment]:
        """Return a complete batch for a learner at `version`, or an empty list. The caller releases the segments."""

    def num_waiting(self) -> int:
        """Return how many segments have arrived for later rounds; 0 without rounds."""


class RoundBatchPolicy:
    """Wait for one segment of every member and return them in the order of the actors; segments of later rounds wait.

    All actors are members until `leave` removes one. A removed actor that sends again becomes a member of the current
    round; segments that it collected for earlier rounds are dropped.
    """

    def __init__(self, channel: Channel, num_actors: int) -> None:
        self.tracker = SequenceTracker()
        self.members = set(range(num_actors))
        self._channel, self._version = channel, -1
        self._waiting: list[deque[Segment]] = [deque() for _ in range(num_actors)]

    @property
    def round(self) -> int:
        """The number of the current round."""
        known = self.tracker.expected
        return max(
            known.get(actor, 0) + self.tracker.round_offsets.get(actor, 0) for actor in range(len(self._waiting))
        )

    def leave(self, actor: int) -> None:
        """Remove this actor from the rounds."""
        self.members.discard(actor)

    def join(self, actor: int) -> None:
        """Add this actor to the rounds again: its next segment belongs to the current round."""
        self.tracker.round_offsets[actor] = self.round - self._due(actor)
        self.members.add(actor)

    def take(self, version: int) -> list[Segment]:
        self._version = version
        self._poll_channel()
        members = [self._waiting[actor] for actor in sorted(self.members)]
        if not all(members):
            return []
        complete = [segments.popleft() for segments in members]
        for segment in complete:
            self.tracker.accept(segment)  # only now: segments counted in a checkpoint are never collected again
        return complete

    def num_waiting(self) -> int:
        self._poll_channel()
        return sum(len(segments) for segments in self._waiting)

    def missing(self) -> list[int]:
        """Return the members whose segment of the current round has not arrived."""
        return [actor for actor in sorted(self.members) if not self._waiting[actor]]

    def _poll_channel(self) -> None:
        while (segment := self._channel.poll()) is not None:
            assert segment.header is not None
            actor, sequence = segment.header.actor, segment.header.sequence
            if sequence < self._due(actor):
                self.tracker.dropped["repeated"] += 1
                self._channel.release(segment)
            elif self._late(actor, segment.header.version):
                self.tracker.count_skipped(segment)
                self._channel.release(segment)
                self.join(actor)
            else:
                if actor not in self.members:
                    self.join(actor)
                self._waiting[actor].append(segment)

    def _late(self, actor: int, version: int) -> bool:
        """Whether a segment collected with `version` is too late for its round."""
        never_left_out = actor in self.members and actor not in self.tracker.round_offsets
        return not never_left_out and version < self._version

    def _due(self, actor: int) -> int:
        """Return the sequence number of the actor's next segment."""
        newest = self._waiting[actor][-1].header if self._waiting[actor] else None
        return self.tracker.expected.get(actor, 0) if newest is None else newest.sequence + 1


class WindowBatchPolicy:
    """Return what arrived within `window_s` seconds of the first arrival; earlier if every actor has sent a segment.

    Segments collected more than `max_lag` versions ago are dropped and counted. `record` is called with every batch's
    arrivals.
    """

    def __init__(
        self, channel: Channel, num_actors: int, window_s: float, max_lag: int, clock: Callable[[], float]
    ) -> None:
        self.tracker = SequenceTracker()
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
        arrived = {segment.header.actor for segment in self._waiting if segment.header is not None}
        if len(arrived) < self._num_actors and self._clock() - self._opened_s < self._window_s:
            return []
        taken, self._waiting = self._waiting, []
        arrivals: list[Arrival] = []
        kept = [segment for segment in taken if self._keep(segment, version, arrivals)]
        self.record(arrivals)
        return kept

    def num_waiting(self) -> int:
        return 0

    def _keep(self, segment: Segment, version: int, arrivals: list[Arrival]) -> bool:
        header = segment.header
        assert header is not None
        if self.tracker.accept(segment):
            fresh = version - header.version <= self._max_lag
            arrivals.append(Arrival(header.actor, header.sequence, header.version, fresh))
            if fresh:
                return True
            self.tracker.dropped["too_old"] += 1
        self._channel.release(segment)
        return False

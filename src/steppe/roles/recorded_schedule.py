"""Repeat a recorded async run: replacements for collect policy, batch policy and weight store.

An actor collects each segment with the version in the log, however far the learner is by then. The learner takes the
batches in the log in their order, and applies the hyperparameters that were set during the run. Everything else follows
from these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steppe.core.contracts.errors import RunFailed
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.transport import Channel, WeightStore
from steppe.core.contracts.weights import Weights
from steppe.records.arrivals import Arrival
from steppe.roles.learner import Learner
from steppe.roles.scheduling import SequenceTracker


@dataclass(frozen=True)
class HyperparameterUpdate:
    """Live hyperparameters that a recorded learner applied, and its counts just before the next step."""

    values: Mapping[str, Any]
    env_steps: int
    updates: int
    version: int


class RecordedSchedule:
    """One attempt of a recorded run: its batches, and the (env_steps, updates) at which it ended.

    `may_end_early` allows the attempt to end before all its batches were taken. `changes` are the pending hyperparameter
    updates, oldest first; the attempts of a run share the list.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Arrival]],
        end: tuple[int, int],
        *,
        may_end_early: bool = False,
        changes: list[HyperparameterUpdate] | None = None,
    ) -> None:
        self.batches, self.end, self.may_end_early = batches, end, may_end_early
        self.changes = [] if changes is None else changes
        self.remaining = list(reversed(batches))  # batches still to be taken, the next one last
        self._store: RetainingWeightStore | None = None

    def ended(self, env_steps: int, updates: int, *, has_batch: bool) -> bool:
        """Whether a learner with these counts is where the recorded one ended.

        Batches whose segments were all dropped change no count, but advance the actors, so they must be taken too.
        """
        at_end = env_steps >= self.end[0] and updates >= self.end[1]
        return at_end and (has_batch or self.may_end_early or not self.remaining)

    def retaining_store(self, newest: WeightStore) -> RetainingWeightStore:
        """Return the weight store that actors and learner of the attempt share; other roles read `newest`."""
        if self._store is None:
            self._store = RetainingWeightStore(newest, self)
        return self._store

    def versions(self, actor: int) -> dict[int, int]:
        """Return the weights version of each segment of an actor, by sequence number."""
        rows = [row for batch in self.batches for row in batch if row.actor == actor]
        return {row.sequence: row.version for row in rows}


class RetainingWeightStore:
    """A WeightStore that keeps every version until all actors that need it have moved to newer ones."""

    def __init__(self, newest: WeightStore, schedule: RecordedSchedule) -> None:
        self._newest = newest
        self._readers: defaultdict[int, set[int]] = defaultdict(set)
        for batch in schedule.batches:
            for row in batch:
                self._readers[row.version].add(row.actor)
        self._kept: dict[int, Weights] = {}

    def publish(self, policy: str, weights: Weights) -> None:
        self._newest.publish(policy, weights)
        if self._readers.get(weights.version):
            self._kept[weights.version] = weights.copy()

    def newer_than(self, policy: str, version: int) -> Weights | None:
        return self._newest.newer_than(policy, version)

    def get(self, version: int) -> Weights | None:
        """Return the weights of that version, or None if they are not published yet."""
        return self._kept.get(version)

    def release_version(self, version: int, actor: int) -> None:
        """Note that the actor no longer needs this version, and drop it if no actor does."""
        self._readers[version].discard(actor)
        if not self._readers[version]:
            self._kept.pop(version, None)


class RecordedCollectPolicy:
    """One actor's collect policy and weight store: allows a segment exactly when the actor has the recorded version."""

    def __init__(self, actor: int, schedule: RecordedSchedule, store: RetainingWeightStore) -> None:
        self._actor, self._store = actor, store
        self._versions = schedule.versions(actor)
        self._sequence = min(self._versions, default=0)

    def allows(self, sequence: int, version: int) -> bool:
        self._sequence = sequence
        if sequence < min(self._versions, default=0):
            raise RunFailed(f"the log does not record how segment {sequence} of actor {self._actor} was collected")
        return self._versions.get(sequence) == version

    def newer_than(self, policy: str, version: int) -> Weights | None:
        needed_version = self._versions.get(self._sequence, version)
        if needed_version == version or (weights := self._store.get(needed_version)) is None:
            return None
        self._store.release_version(version, self._actor)
        return weights

    def publish(self, policy: str, weights: Weights) -> None:
        raise NotImplementedError("an actor publishes no weights")


class RecordedLearner(Learner):
    """A learner that applies live hyperparameters at the same counts as the recorded one."""

    changes: list[HyperparameterUpdate]

    def step(self) -> bool:
        while self.changes and self._reached(self.changes[0]):
            change = self.changes.pop(0)
            self._apply_command({"values": change.values, "live": sorted(change.values)})
        return super().step()

    def _reached(self, change: HyperparameterUpdate) -> bool:
        counts = self.env_steps, self.updates, self.version
        return all(
            now >= target
            for now, target in zip(counts, (change.env_steps, change.updates, change.version), strict=True)
        )


class RecordedBatchPolicy:
    """A batch policy that returns the recorded batches in order, each when all its segments have arrived."""

    def __init__(self, channel: Channel, schedule: RecordedSchedule) -> None:
        self.tracker = SequenceTracker()
        self._channel = channel
        self._batches = schedule.remaining
        self._waiting: dict[tuple[int, int], Segment] = {}

    def take(self, version: int) -> list[Segment]:
        while (segment := self._channel.poll()) is not None:
            assert segment.header is not None
            self._waiting[segment.header.actor, segment.header.sequence] = segment
        if not self._batches:
            raise RunFailed(
                "the recorded run cannot be repeated here: its log ended, but this run is not at the same point"
            )
        kept: list[Segment] = []
        while not kept and self._batches and self._complete(self._batches[-1], version):
            kept = self._accept_all(self._batches.pop())
        return kept

    def num_waiting(self) -> int:
        return 0

    def _complete(self, batch: Sequence[Arrival], version: int) -> bool:
        missing = [row for row in batch if (row.actor, row.sequence) not in self._waiting]
        for row in missing:
            if row.version > version:  # the learner waits for these segments, so it cannot reach this version
                raise RunFailed(
                    f"the recorded run cannot be repeated here: segment {row.sequence} of actor {row.actor} was collected "
                    f"with version {row.version}, but this run has only come to version {version} by then"
                )
        return not missing

    def _accept_all(self, batch: Sequence[Arrival]) -> list[Segment]:
        kept = []
        for row in batch:
            segment = self._waiting.pop((row.actor, row.sequence))
            self.tracker.accept(segment)
            if row.kept:
                kept.append(segment)
            else:
                self.tracker.dropped["too_old"] += 1
                self._channel.release(segment)
        return kept

"""Transport within one process: segments and weights never leave its memory. Tests use it as the fake transport."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.weights import Weights


class LocalChannel:
    """A Channel over deques. Each actor owns its segments, so one actor cannot use up another's share."""

    def __init__(self, spec: SegmentSpec, num_actors: int, slots_per_actor: int = 1) -> None:
        self._free = [deque(Segment.blank(spec) for _ in range(slots_per_actor)) for _ in range(num_actors)]
        self._held: list[Segment | None] = [None] * num_actors
        self._ready: deque[Segment] = deque()
        self._last: dict[int, tuple[int, bytes | None]] = {}

    def blank(self, actor: int) -> Segment | None:
        if self._held[actor] is None and self._free[actor]:
            self._held[actor] = self._free[actor].popleft()
        return self._held[actor]

    def offer(self, segment: Segment) -> bool:
        assert segment.header is not None, "a segment is offered with its header set"
        self._held[segment.header.actor] = None
        self._last[segment.header.actor] = (segment.header.sequence, segment.state)
        self._ready.append(segment)
        return True

    def poll(self) -> Segment | None:
        return self._ready.popleft() if self._ready else None

    def release(self, segment: Segment) -> None:
        assert segment.header is not None
        self._free[segment.header.actor].append(segment)

    def recall(self, actor: int) -> tuple[int, bytes | None] | None:
        return self._last.get(actor)

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        self._last[actor] = (sequence, state)


class LocalWeights:
    """A WeightStore in a dictionary."""

    def __init__(self) -> None:
        self._newest: dict[str, Weights] = {}

    def publish(self, policy: str, weights: Weights) -> None:
        newest = self._newest.get(policy)
        if newest is not None and weights.version <= newest.version:
            raise ValueError(f"version {weights.version} is not newer than {newest.version}")
        if newest is not None:
            weights.require(newest.layout, "those published before")
        self._newest[policy] = weights.copy()

    def newer_than(self, policy: str, version: int) -> Weights | None:
        newest = self._newest.get(policy)
        return newest.copy() if newest is not None and newest.version > version else None


class LocalBoard:
    """A Board in memory, for tests and for runs that record nothing."""

    def __init__(self) -> None:
        self._topics: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def post(self, topic: str, record: dict[str, Any]) -> int:
        self._topics[topic].append(dict(record))
        return len(self._topics[topic])

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        records = self._topics[topic][after : after + limit]
        return [(after + number, record) for number, record in enumerate(records, start=1)]

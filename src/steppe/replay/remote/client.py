"""A pool whose buffers lie elsewhere, one in each replay role, seen from the learner: same writes, same draws, same bits.

    learner   routes rows to shelves · draws numbers, and by the shelves' sums whose they are · puts the batch together
    shelf     owns the rows of one buffer and their tree (server.py) · finds what lies so far into its sum · writes it down

The learner alone asks, each shelf answers in the order it was asked, and says with every answer how large its sum is. So all
that a draw depends on is known here, and a batch is the one that a ReplayBufferPool of as many buffers would have given,
whoever is faster. At most MOST questions to a shelf are under way: a slow shelf slows the learner, and that its actors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import DamagedFile, DiskFull, RunFailed, UsageError
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import FieldSpec
from steppe.core.contracts.transport import RpcClient
from steppe.core.io import codec
from steppe.core.io.rings import NestedBundle
from steppe.replay.kernels.ring_index import SIZE, compute_importance_weights, sample_uniform
from steppe.replay.kernels.sumtree import NO_PREFETCH, choose_parts
from steppe.replay.store.gather import BatchBuffer, BatchGatherer

MAX_IN_FLIGHT = 2  # questions to one shelf that wait for their answers
ERROR_TYPES: dict[str, Callable[[str], Exception]] = {
    "DiskFull": DiskFull, "DamagedFile": DamagedFile, "UsageError": UsageError, "MemoryError": MemoryError,
}  # fmt: skip


class _ShardClient:
    """One shelf: what was asked and not answered yet, and what it said of itself last."""

    def __init__(self, line: RpcClient) -> None:
        self._line, self._waiting = line, 0
        self.total, self.size, self.stale = 0.0, 0, 0

    def ask(self, **question: Any) -> None:
        """Ask without waiting for the answer, if there is room for another question."""
        while self._waiting >= MAX_IN_FLIGHT:
            self._hear()
        self._line.send(codec.pack(question, sealed=False))
        self._waiting += 1

    def answer(self) -> Tree:
        """What it said to the last question, when it has answered them all."""
        told: Tree = {}
        while self._waiting:
            told = self._hear()
        return told

    def _hear(self) -> Tree:
        told: Tree = codec.unpack(self._line.receive(), copy=False, sealed=False)
        self._waiting -= 1
        if "error" in told:
            raise ERROR_TYPES.get(told["error"], RunFailed)(f"{self._line.name}: {told['message']}")
        self.total, self.size, self.stale = told["total"], told["size"], told["stale"]
        return told


class RemoteReplayStore:
    """What a Store is to a learner's memory, over shelves of `capacity` rows each."""

    def __init__(self, lines: Sequence[RpcClient], capacity: int, alpha: float | None) -> None:
        self.capacity, self.num_parts, self.alpha = capacity, len(lines), alpha
        self.shift = (len(lines) - 1).bit_length()
        self.lock = threading.RLock()
        self.fields: tuple[FieldSpec, ...] = ()
        self.columns: dict[str, np.ndarray] = {}  # one row each, to say how batches lie
        self.stacked: tuple[str, ...] = ()
        self.frames, self.disk = None, None
        self.max_priority = 1.0
        self._lines, self._shards = tuple(lines), [_ShardClient(line) for line in lines]

    def __len__(self) -> int:
        self._settle()
        return sum(shelf.size for shelf in self._shards)

    @property
    def stale(self) -> int:
        """Priorities that came too late, as far as is known."""
        return sum(shelf.stale for shelf in self._shards)

    @property
    def can_sample(self) -> bool:
        """Whether a row has a priority above 0."""
        self._settle()
        return any(shelf.total > 0 for shelf in self._shards)

    def allocate(self, fields: Sequence[FieldSpec]) -> None:
        """Take note of the columns; the shelves have made theirs by the same configuration."""
        self.fields = tuple(fields)
        self.columns = {f.name: np.empty((1, *f.shape), f.dtype) for f in fields}

    def batch_buffer(self, count: int) -> BatchBuffer:
        """Memory for `count` rows."""
        return BatchGatherer(self.fields, self.columns, (), None).batch_buffer(count)

    def write(self, part: int, block: Mapping[str, np.ndarray], priorities: np.ndarray | None = None) -> int:
        """Append rows to one shelf; see Store.write."""
        rows = {f.name: block[f.name] for f in self.fields}
        self._shards[part].ask(do="write", rows=rows, priorities=priorities, largest=self.max_priority)
        if priorities is not None:
            self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        return len(block[self.fields[0].name])

    def batch(self, stream: np.random.Generator, count: int, batch_buffer: BatchBuffer, beta: float) -> Batch:
        """`count` draws over the rows of all shelves; see Store.batch."""
        leaves, indices = np.empty(count, np.float32), np.empty(count, np.int64)
        for places, told in self.draw(stream, count, leaves, indices):
            for name, rows in told["columns"].items():
                batch_buffer.columns[name][places] = rows
        if self.alpha is None:
            return Batch(batch_buffer.columns)
        return Batch(batch_buffer.columns, weights=self.weights(leaves, beta), indices=indices)

    def draw(
        self, stream: np.random.Generator, count: int, leaves: np.ndarray, indices: np.ndarray
    ) -> Iterator[tuple[np.ndarray, Tree]]:
        """For each shelf that something was drawn from: which of the draws, and what it told of them."""
        self._settle()
        parts, at = self._choose(stream.random(count))
        places = [np.flatnonzero(parts == part) for part in range(self.num_parts)]
        asked = [part for part in range(self.num_parts) if len(places[part])]
        for part in asked:
            self._shards[part].ask(do="draw", at=at[places[part]])
        for part in asked:
            told = self._shards[part].answer()
            indices[places[part]] = (told["indices"] << self.shift) + part
            if self.alpha is not None:
                leaves[places[part]] = told["leaves"]
            yield places[part], told

    def _choose(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose each of the draws (uniform in [0, 1)) is, and how far into its sum, or which of its rows."""
        if self.alpha is None:
            rings, slots = np.zeros((4, self.num_parts), np.int64), np.empty(len(draws), np.int64)
            rings[SIZE] = [shelf.size for shelf in self._shards]
            sample_uniform(rings, self.capacity, 0, self.num_parts, draws, NO_PREFETCH, slots)
            return slots // self.capacity, slots % self.capacity
        totals = np.array([[shelf.total] for shelf in self._shards])
        parts, rests = np.empty(len(draws), np.int64), np.empty(len(draws))
        if not choose_parts(totals, 0, 0, self.num_parts, draws, parts, rests):
            raise UsageError("every priority is 0, so nothing can be drawn: give one that is positive")
        return parts, rests

    def weights(self, leaves: np.ndarray, beta: float) -> np.ndarray:
        """The importance weights of a batch."""
        weights = np.empty(len(leaves), np.float32)
        compute_importance_weights(leaves, beta, weights)
        return weights

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Give rows new priorities by their indices; see Store.prioritize."""
        parts, rows = indices & ((1 << self.shift) - 1), indices >> self.shift
        for part, shelf in enumerate(self._shards):
            if len(own := np.flatnonzero(parts == part)):
                shelf.ask(do="prioritize", indices=rows[own], priorities=priorities[own])
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))

    def load(self) -> None:
        """Bring compiled code into memory now; the shelves do so when they are made."""
        if self.alpha is None:
            sample_uniform(np.zeros((4, 1), np.int64), 1, 0, 1, np.empty(0), NO_PREFETCH, np.empty(0, np.int64))
        else:
            choose_parts(np.ones((1, 1)), 0, 0, 1, np.empty(0), np.empty(0, np.int64), np.empty(0))
            self.weights(np.empty(0, np.float32), 1.0)

    def state(self) -> Tree:
        """Copies of everything that the shelves hold."""
        for shelf in self._shards:
            shelf.ask(do="state")
        return {"shelves": [shelf.answer()["state"] for shelf in self._shards], "max_priority": self.max_priority}

    def live_state(self) -> Tree:
        """The same for a checkpoint, into which each shelf writes its own rows."""
        rows = [NestedBundle(line.name, partial(self._save, part)) for part, line in enumerate(self._lines)]
        return {"shelves": rows, "max_priority": self.max_priority}

    def _save(self, part: int, save: Path, before: Path | None) -> Callable[[], object]:
        self._shards[part].ask(do="save", save=str(save), before=None if before is None else str(before))
        return self._shards[part].answer

    def restore(self, state: Tree) -> None:
        """Let the shelves take over what they wrote down, or told."""
        saved = state.get("shelves", ())
        if len(saved) != self.num_parts:
            raise UsageError(f"the saved replay lies in {len(saved)} roles, not {self.num_parts}: use as many")
        for shelf, one in zip(self._shards, saved, strict=True):
            where = {"save": str(one)} if isinstance(one, Path) else {"state": one}
            shelf.ask(do="restore", **where)
        self._settle()
        self.max_priority = float(state["max_priority"])

    def _settle(self) -> None:
        """Wait until every question is answered."""
        for shelf in self._shards:
            shelf.answer()


class RemoteReplayPool:
    """What a ReplayBufferPool is to a learner's memory, over shelves: rows go to each in turn."""

    routing = "round_robin"
    experience_keys: tuple[str, ...] | None = None

    def __init__(self, lines: Sequence[RpcClient], buffer_capacity: int, *, alpha: float | None) -> None:
        self.num_buffers, self.buffer_capacity = len(lines), buffer_capacity
        self.use_prioritized = alpha is not None
        self.store = RemoteReplayStore(lines, buffer_capacity, alpha)
        self.turn = 0

    def route(self, source: int | None = None) -> int:
        """The shelf that the next rows belong on."""
        return self.turn

    def routed(self) -> None:
        """Count a block that went where `route` said."""
        self.turn = (self.turn + 1) % self.num_buffers

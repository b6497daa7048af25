"""The learner's client of a remote replay pool, with one buffer (shard) per replay role.

    learner   routes rows to shards · maps random numbers to shards by their priority sums · assembles the batch
    shard     owns the rows of one buffer and their sum tree (server.py) · finds rows by offset in its sum · saves them

Only the learner sends requests. A shard replies in order, and every reply contains its current priority sum. The
learner therefore knows everything that sampling depends on: a batch is bit-identical to that of a local
ReplayBufferPool with as many buffers, independent of timing. At most MAX_IN_FLIGHT requests per shard are in flight:
this is backpressure from a slow shard to the learner, and from the learner to its actors.
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

MAX_IN_FLIGHT = 2  # requests to one shard without a reply yet
ERROR_TYPES: dict[str, Callable[[str], Exception]] = {
    "DiskFull": DiskFull, "DamagedFile": DamagedFile, "UsageError": UsageError, "MemoryError": MemoryError,
}  # fmt: skip


class _ShardClient:
    """Client of one shard: counts requests in flight and keeps the statistics of the last reply."""

    def __init__(self, line: RpcClient) -> None:
        self._line, self._waiting = line, 0
        self.total, self.size, self.stale = 0.0, 0, 0

    def ask(self, **question: Any) -> None:
        """Send a request without waiting for its reply; block while MAX_IN_FLIGHT requests are in flight."""
        while self._waiting >= MAX_IN_FLIGHT:
            self._hear()
        self._line.send(codec.pack(question, sealed=False))
        self._waiting += 1

    def answer(self) -> Tree:
        """Wait for all pending replies; return the last one, or an empty dictionary if none was pending."""
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
    """The part of ReplayStore that the learner's memory uses, over remote shards of `capacity` rows each."""

    def __init__(self, lines: Sequence[RpcClient], capacity: int, alpha: float | None) -> None:
        self.capacity, self.num_parts, self.alpha = capacity, len(lines), alpha
        self.shift = (len(lines) - 1).bit_length()
        self.lock = threading.RLock()
        self.fields: tuple[FieldSpec, ...] = ()
        self.columns: dict[str, np.ndarray] = {}  # one row each, only to define the layout of batches
        self.stacked: tuple[str, ...] = ()
        self.frames, self.disk = None, None
        self.max_priority = 1.0
        self._lines, self._shards = tuple(lines), [_ShardClient(line) for line in lines]

    def __len__(self) -> int:
        self._settle()
        return sum(shelf.size for shelf in self._shards)

    @property
    def stale(self) -> int:
        """Number of stale priority updates, as of the last replies."""
        return sum(shelf.stale for shelf in self._shards)

    @property
    def can_sample(self) -> bool:
        """Whether a row has a priority above 0."""
        self._settle()
        return any(shelf.total > 0 for shelf in self._shards)

    def allocate(self, fields: Sequence[FieldSpec]) -> None:
        """Record the columns; the shards allocate theirs from the same configuration."""
        self.fields = tuple(fields)
        self.columns = {f.name: np.empty((1, *f.shape), f.dtype) for f in fields}

    def batch_buffer(self, count: int) -> BatchBuffer:
        """Return reusable arrays for `count` rows."""
        return BatchGatherer(self.fields, self.columns, (), None).batch_buffer(count)

    def write(self, part: int, block: Mapping[str, np.ndarray], priorities: np.ndarray | None = None) -> int:
        """Append rows to one shard; see ReplayStore.write."""
        rows = {f.name: block[f.name] for f in self.fields}
        self._shards[part].ask(do="write", rows=rows, priorities=priorities, largest=self.max_priority)
        if priorities is not None:
            self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        return len(block[self.fields[0].name])

    def batch(self, stream: np.random.Generator, count: int, batch_buffer: BatchBuffer, beta: float) -> Batch:
        """Sample `count` rows over all shards; see ReplayStore.batch."""
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
        """Sample `count` rows; yield, for each shard involved, their positions in the batch and the shard's reply.

        Fills `indices` and, with priorities, `leaves`.
        """
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
        """Map draws (uniform in [0, 1)) to a shard each, and an offset into its sum or, without priorities, a row."""
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
        """Return the importance weights of a batch."""
        weights = np.empty(len(leaves), np.float32)
        compute_importance_weights(leaves, beta, weights)
        return weights

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of rows by their indices; see ReplayStore.update_priorities."""
        parts, rows = indices & ((1 << self.shift) - 1), indices >> self.shift
        for part, shelf in enumerate(self._shards):
            if len(own := np.flatnonzero(parts == part)):
                shelf.ask(do="prioritize", indices=rows[own], priorities=priorities[own])
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))

    def load(self) -> None:
        """Load the compiled kernels now, not with the first batch; shards do so when they are created."""
        if self.alpha is None:
            sample_uniform(np.zeros((4, 1), np.int64), 1, 0, 1, np.empty(0), NO_PREFETCH, np.empty(0, np.int64))
        else:
            choose_parts(np.ones((1, 1)), 0, 0, 1, np.empty(0), np.empty(0, np.int64), np.empty(0))
            self.weights(np.empty(0, np.float32), 1.0)

    def state(self) -> Tree:
        """Return copies of everything that the shards hold."""
        for shelf in self._shards:
            shelf.ask(do="state")
        return {"shelves": [shelf.answer()["state"] for shelf in self._shards], "max_priority": self.max_priority}

    def live_state(self) -> Tree:
        """Return the state for a checkpoint, into which each shard writes its own rows."""
        rows = [NestedBundle(line.name, partial(self._save, part)) for part, line in enumerate(self._lines)]
        return {"shelves": rows, "max_priority": self.max_priority}

    def _save(self, part: int, save: Path, before: Path | None) -> Callable[[], object]:
        self._shards[part].ask(do="save", save=str(save), before=None if before is None else str(before))
        return self._shards[part].answer

    def restore(self, state: Tree) -> None:
        """Let the shards restore what `state` returned or what they saved for `live_state`."""
        saved = state.get("shelves", ())
        if len(saved) != self.num_parts:
            raise UsageError(f"the saved replay lies in {len(saved)} roles, not {self.num_parts}: use as many")
        for shelf, one in zip(self._shards, saved, strict=True):
            where = {"save": str(one)} if isinstance(one, Path) else {"state": one}
            shelf.ask(do="restore", **where)
        self._settle()
        self.max_priority = float(state["max_priority"])

    def _settle(self) -> None:
        """Wait for the replies to all requests."""
        for shelf in self._shards:
            shelf.answer()


class RemoteReplayPool:
    """The part of ReplayBufferPool that the learner's memory uses, over remote shards with round-robin routing."""

    routing = "round_robin"
    experience_keys: tuple[str, ...] | None = None

    def __init__(self, lines: Sequence[RpcClient], buffer_capacity: int, *, alpha: float | None) -> None:
        self.num_buffers, self.buffer_capacity = len(lines), buffer_capacity
        self.use_prioritized = alpha is not None
        self.store = RemoteReplayStore(lines, buffer_capacity, alpha)
        self.turn = 0

    def route(self, source: int | None = None) -> int:
        """Return the shard for the next rows."""
        return self.turn

    def routed(self) -> None:
        """Advance the round-robin routing after a block was written to the shard that `route` returned."""
        self.turn = (self.turn + 1) % self.num_buffers

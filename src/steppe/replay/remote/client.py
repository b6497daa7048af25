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

    def __init__(self, client: RpcClient) -> None:
        self._client, self._num_pending = client, 0
        self.total, self.size, self.stale = 0.0, 0, 0

    def send(self, **request: Any) -> None:
        """Send a request without waiting for its reply; block while MAX_IN_FLIGHT requests are in flight."""
        while self._num_pending >= MAX_IN_FLIGHT:
            self._receive()
        self._client.send(codec.pack(request, sealed=False))
        self._num_pending += 1

    def wait(self) -> Tree:
        """Wait for all pending replies; return the last one, or an empty dictionary if none was pending."""
        reply: Tree = {}
        while self._num_pending:
            reply = self._receive()
        return reply

    def _receive(self) -> Tree:
        reply: Tree = codec.unpack(self._client.receive(), copy=False, sealed=False)
        self._num_pending -= 1
        if "error" in reply:
            raise ERROR_TYPES.get(reply["error"], RunFailed)(f"{self._client.name}: {reply['message']}")
        self.total, self.size, self.stale = reply["total"], reply["size"], reply["stale"]
        return reply


class RemoteReplayStore:
    """The part of ReplayStore that the learner's memory uses, over remote shards of `capacity` rows each."""

    def __init__(self, clients: Sequence[RpcClient], capacity: int, alpha: float | None) -> None:
        self.capacity, self.num_parts, self.alpha = capacity, len(clients), alpha
        self.shift = (len(clients) - 1).bit_length()
        self.lock = threading.RLock()
        self.fields: tuple[FieldSpec, ...] = ()
        self.columns: dict[str, np.ndarray] = {}  # one row each, only to define the layout of batches
        self.stacked: tuple[str, ...] = ()
        self.frames, self.disk = None, None
        self.max_priority = 1.0
        self._clients, self._shards = tuple(clients), [_ShardClient(client) for client in clients]

    def __len__(self) -> int:
        self._settle()
        return sum(shard.size for shard in self._shards)

    @property
    def stale(self) -> int:
        """Number of stale priority updates, as of the last replies."""
        return sum(shard.stale for shard in self._shards)

    @property
    def can_sample(self) -> bool:
        """Whether a row has a priority above 0."""
        self._settle()
        return any(shard.total > 0 for shard in self._shards)

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
        self._shards[part].send(do="write", rows=rows, priorities=priorities, largest=self.max_priority)
        if priorities is not None:
            self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        return len(block[self.fields[0].name])

    def batch(self, stream: np.random.Generator, count: int, batch_buffer: BatchBuffer, beta: float) -> Batch:
        """Sample `count` rows over all shards; see ReplayStore.batch."""
        leaves, indices = np.empty(count, np.float32), np.empty(count, np.int64)
        for positions, reply in self.draw(stream, count, leaves, indices):
            for name, rows in reply["columns"].items():
                batch_buffer.columns[name][positions] = rows
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
        parts, at = self._choose_shards(stream.random(count))
        positions = [np.flatnonzero(parts == part) for part in range(self.num_parts)]
        involved = [part for part in range(self.num_parts) if len(positions[part])]
        for part in involved:
            self._shards[part].send(do="draw", at=at[positions[part]])
        for part in involved:
            reply = self._shards[part].wait()
            indices[positions[part]] = (reply["indices"] << self.shift) + part
            if self.alpha is not None:
                leaves[positions[part]] = reply["leaves"]
            yield positions[part], reply

    def _choose_shards(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Map draws (uniform in [0, 1)) to a shard each, and an offset into its sum or, without priorities, a row."""
        if self.alpha is None:
            rings, slots = np.zeros((4, self.num_parts), np.int64), np.empty(len(draws), np.int64)
            rings[SIZE] = [shard.size for shard in self._shards]
            sample_uniform(rings, self.capacity, 0, self.num_parts, draws, NO_PREFETCH, slots)
            return slots // self.capacity, slots % self.capacity
        totals = np.array([[shard.total] for shard in self._shards])
        parts, offsets = np.empty(len(draws), np.int64), np.empty(len(draws))
        if not choose_parts(totals, 0, 0, self.num_parts, draws, parts, offsets):
            raise UsageError("every priority is 0, so nothing can be drawn: give one that is positive")
        return parts, offsets

    def weights(self, leaves: np.ndarray, beta: float) -> np.ndarray:
        """Return the importance weights of a batch."""
        weights = np.empty(len(leaves), np.float32)
        compute_importance_weights(leaves, beta, weights)
        return weights

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of rows by their indices; see ReplayStore.update_priorities."""
        parts, rows = indices & ((1 << self.shift) - 1), indices >> self.shift
        for part, shard in enumerate(self._shards):
            if len(own := np.flatnonzero(parts == part)):
                shard.send(do="prioritize", indices=rows[own], priorities=priorities[own])
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
        for shard in self._shards:
            shard.send(do="state")
        return {"shelves": [shard.wait()["state"] for shard in self._shards], "max_priority": self.max_priority}

    def live_state(self) -> Tree:
        """Return the state for a checkpoint, into which each shard writes its own rows."""
        rows = [NestedBundle(client.name, partial(self._save, part)) for part, client in enumerate(self._clients)]
        return {"shelves": rows, "max_priority": self.max_priority}

    def _save(self, part: int, save: Path, before: Path | None) -> Callable[[], object]:
        self._shards[part].send(do="save", save=str(save), before=None if before is None else str(before))
        return self._shards[part].wait

    def restore(self, state: Tree) -> None:
        """Let the shards restore what `state` returned or what they saved for `live_state`."""
        saved = state.get("shelves", ())
        if len(saved) != self.num_parts:
            raise UsageError(f"the saved replay is in {len(saved)} roles, not {self.num_parts}: use as many")
        for shard, saved_shard in zip(self._shards, saved, strict=True):
            source = {"save": str(saved_shard)} if isinstance(saved_shard, Path) else {"state": saved_shard}
            shard.send(do="restore", **source)
        self._settle()
        self.max_priority = float(state["max_priority"])

    def _settle(self) -> None:
        """Wait for the replies to all requests."""
        for shard in self._shards:
            shard.wait()


class RemoteReplayPool:
    """The part of ReplayBufferPool that the learner's memory uses, over remote shards with round-robin routing."""

    routing = "round_robin"
    experience_keys: tuple[str, ...] | None = None

    def __init__(self, clients: Sequence[RpcClient], buffer_capacity: int, *, alpha: float | None) -> None:
        self.num_buffers, self.buffer_capacity = len(clients), buffer_capacity
        self.use_prioritized = alpha is not None
        self.store = RemoteReplayStore(clients, buffer_capacity, alpha)
        self.turn = 0

    def route(self, source: int | None = None) -> int:
        """Return the shard for the next rows."""
        return self.turn

    def routed(self) -> None:
        """Advance the round-robin routing after a block was written to the shard that `route` returned."""
        self.turn = (self.turn + 1) % self.num_buffers

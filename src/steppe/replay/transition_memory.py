"""The memory of off-policy agents: stores segments as transitions in a pool and samples rate-limited batches.

It wants data exactly when it is not ready to sample, so the number of updates depends only on the inserted data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from steppe.core.contracts.algorithm import Learned, Tree
from steppe.core.contracts.errors import ConfigError, NotFinite, UsageError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.replay.nstep import NStepAccumulator, transition_fields
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.prefetch import BatchPrefetcher
from steppe.replay.rate_limiter import RateLimiter
from steppe.replay.remote.client import RemoteReplayPool
from steppe.replay.store.gather import BatchBuffer

MIN_PRIORITY = 1e-6  # a transition with TD error 0 must still be sampled sometimes (Schaul et al. 2016, 3.3)


@dataclass(frozen=True)
class SamplingConfig:
    """How many transitions are sampled, and when, and how n-step transitions are built."""

    batch_size: int
    learning_starts: int = 0
    samples_per_insert: float = 1.0
    n_step: int = 1
    gamma: float = 0.99
    beta: float = 0.4  # rises to 1 over total_steps
    total_steps: int | None = None


class ReplayMemory:
    """Store n-step transitions in a pool; the next `sample` reuses the sampled arrays."""

    def __init__(
        self,
        spec: SegmentSpec,
        pool: ReplayBufferPool | RemoteReplayPool,
        draws: SamplingConfig,
        *,
        stream: np.random.Generator,
    ) -> None:
        self.spec, self.pool, self.draws = spec, pool, draws
        self.limiter = RateLimiter(draws.learning_starts, draws.samples_per_insert)
        self._stream = stream
        self._nstep = NStepAccumulator(spec, draws.n_step, draws.gamma)
        ensure_columns(pool, transition_fields(spec), draws.batch_size)
        self._batch_buffers = pool.store.batch_buffer(draws.batch_size), pool.store.batch_buffer(draws.batch_size)
        self._prefetch = BatchPrefetcher(self._batch_buffers[0].block.nbytes)
        self._has_full_batch = False
        pool.store.load()

    @property
    def inserted(self) -> int:
        """Number of transitions ever stored."""
        return self.limiter.inserted

    @property
    def sampled(self) -> int:
        """Number of transitions in all batches that were learned from."""
        return self.limiter.sampled

    def add(self, segments: Sequence[Segment]) -> None:
        """Store every transition that these segments complete; windows of different actors are never mixed."""
        pool = self.pool
        for segment in segments:
            if segment.spec != self.spec:
                raise UsageError(f"a segment of {segment.spec} does not fit a memory of {self.spec}")
            for block in self._nstep.transitions(segment):
                assert segment.header is not None
                if pool.routing == "least_filled":
                    self._prefetch.settle()
                self._prefetch.submit(partial(pool.store.write, pool.route(segment.header.actor), block))
                pool.routed()
                self.limiter.inserted += len(block["reward"])

    def ready(self) -> bool:
        if not self.limiter.allows():
            return False
        if not self._has_full_batch:  # once true, it stays true
            self._prefetch.settle()
            self._has_full_batch = len(self.pool.store) >= self.draws.batch_size
        return self._has_full_batch

    def wants_data(self) -> bool:
        return not self.ready()

    def sample(self) -> Batch:
        """Return the next batch of `batch_size` transitions, with importance weights if the pool is prioritized."""
        return self._prefetch.take(self._draw, more=self.limiter.allows(self.draws.batch_size))

    def _draw(self) -> Callable[[], Batch]:
        """Return a job that samples one batch, into the arrays that the last returned batch does not use."""
        self._batch_buffers = self._batch_buffers[::-1] if self._prefetch.threaded else self._batch_buffers
        return partial(self._drawn, self._batch_buffers[0], self.beta)

    def _drawn(self, batch_buffer: BatchBuffer, beta: float) -> Batch:
        store, size = self.pool.store, self.draws.batch_size
        with store.lock:
            if len(store) < size:
                raise UsageError(f"a batch of {size} cannot be drawn from {len(store)} transitions")
            return store.batch(self._stream, size, batch_buffer, beta)

    @property
    def beta(self) -> float:
        """Current exponent of the importance weights."""
        total = self.draws.total_steps
        progress = min(1.0, self.inserted / total) if total else 0.0
        return self.draws.beta + (1.0 - self.draws.beta) * progress

    def update(self, batch: Batch, learned: Learned) -> None:
        self.limiter.sampled += self.draws.batch_size
        if self.pool.use_prioritized:
            self._prefetch.submit(partial(self.pool.store.update_priorities, *extract_priorities(batch, learned)))

    def stats(self) -> dict[str, float]:
        """Return the transitions stored, inserted and sampled; samples_per_insert counts from learning_starts on."""
        self._prefetch.settle()
        stats = {"size": float(len(self.pool.store)), **self.limiter.stats()}
        if self.pool.store.stale:
            stats["stale_updates"] = float(self.pool.store.stale)
        return stats

    def settle(self) -> None:
        """Wait until all pending writes and priority updates are done; call this before reading the store directly."""
        self._prefetch.settle()

    def state(self) -> Tree:
        """Return transitions, priorities, open windows, counters and random state: they determine all later batches."""
        self.settle()
        return self._state(self.pool.store.state())

    def live_state(self) -> Tree:
        self.settle()
        return self._state(self.pool.store.live_state())

    def _state(self, store: Tree) -> Tree:
        ahead = self._prefetch.state()
        return {
            "store": store,
            "windows": self._nstep.state(),
            "turn": self.pool.turn,
            **self.limiter.state(),
            "stream": self._stream.bit_generator.state,
            **({"ahead": ahead} if ahead is not None else {}),
        }

    def restore(self, state: Tree) -> None:
        self._prefetch.restore(state.get("ahead"))
        self.pool.store.restore(state["store"])
        self._nstep.restore(state["windows"])
        self.pool.turn = state["turn"]
        self.limiter.restore(state)
        self._stream.bit_generator.state = state["stream"]
        self._has_full_batch = False


def ensure_columns(pool: ReplayBufferPool | RemoteReplayPool, fields: Sequence[FieldSpec], batch_size: int) -> None:
    """Allocate these columns in an empty pool; raise if it has others, or a capacity below one batch."""
    capacity = pool.num_buffers * pool.buffer_capacity
    if batch_size > capacity:
        raise ConfigError(f"batches of {batch_size} cannot be drawn from {capacity} transitions")
    keys_fit = pool.experience_keys is None or set(pool.experience_keys) == {f.name for f in fields}
    if keys_fit and not pool.store.fields:
        pool.store.allocate(fields)
    if not keys_fit or {f.name: f for f in pool.store.fields} != {f.name: f for f in fields}:
        required = ", ".join(f.name for f in fields)
        raise UsageError(f"the pool has other columns than the agent needs ({required}): give it no experience_keys")


def extract_priorities(batch: Batch, learned: Learned) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and new priorities of a learned batch; raise if there are none or they are not finite."""
    if learned.priorities is None or batch.indices is None:
        raise UsageError("prioritized replay needs an agent that returns priorities: set prioritized=false")
    priorities = np.asarray(learned.priorities, np.float64)
    if not np.isfinite(priorities).all():
        raise NotFinite("priorities are not finite: the errors that the agent learned from are NaN or infinite")
    return batch.indices, np.maximum(priorities, MIN_PRIORITY)

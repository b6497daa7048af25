"""The memory of recurrent agents: stores segments as sequences in a pool and samples rate-limited batches of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from steppe.core.contracts.algorithm import Learned, Tree
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.prefetch import BatchPrefetcher
from steppe.replay.rate_limiter import RateLimiter
from steppe.replay.remote.client import RemoteReplayPool
from steppe.replay.remote.sequence_client import RemoteSequenceReplay
from steppe.replay.segment_streams import EpisodeFragment, SegmentSplitter
from steppe.replay.sequence_windows import SequenceReplay, Windowing, step_fields
from steppe.replay.transition_memory import ensure_columns, extract_priorities


@dataclass(frozen=True)
class SequenceSamplingConfig:
    """How many sequences are sampled, and when; the rate limiter counts `length` steps per sequence."""

    batch_size: int
    windowing: Windowing = field(default_factory=Windowing)
    learning_starts: int = 0
    samples_per_insert: float = 1.0
    beta: float = 0.4  # rises to 1 over total_steps
    total_steps: int | None = None


class SequenceMemory:
    """Sample sequences of steps by priority; the next `sample` reuses the sampled arrays.

    With a column q_val, initial priorities are the actor's own TD errors; otherwise they are the largest priority so
    far.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        pool: ReplayBufferPool | RemoteReplayPool,
        draws: SequenceSamplingConfig,
        *,
        stream: np.random.Generator,
    ) -> None:
        self.spec, self.pool, self.draws = spec, pool, draws
        self.limiter = RateLimiter(draws.learning_starts, draws.samples_per_insert)
        self._streams = SegmentSplitter(spec, draws.windowing)
        self._stream = stream
        ensure_columns(pool, step_fields(spec), 1)
        if pool.buffer_capacity <= self._streams.limit:
            raise ConfigError(
                f"these sequences are stored in pieces of up to {self._streams.limit} steps: give each buffer more room "
                f"than {pool.buffer_capacity}"
            )
        kind = RemoteSequenceReplay if isinstance(pool, RemoteReplayPool) else SequenceReplay
        self.replay = kind(pool, draws.windowing)
        self._sequence_buffers = self.replay.batch_buffer(draws.batch_size), self.replay.batch_buffer(draws.batch_size)
        self._prefetch = BatchPrefetcher(self._sequence_buffers[0].batch_buffer.block.nbytes)
        self._steps_per_batch = draws.batch_size * draws.windowing.length
        self._can_sample = False
        pool.store.load()

    def add(self, segments: Sequence[Segment]) -> None:
        """Store the sequences that these segments complete; a sequence never spans two episodes."""
        for segment in segments:
            if segment.spec != self.spec:
                raise UsageError(f"a segment of {segment.spec} does not fit a memory of {self.spec}")
            assert segment.header is not None
            for fragment in self._streams.split(segment):
                self._prefetch.submit(partial(self._write, fragment, segment.header.actor))
            self.limiter.inserted += segment.env_steps

    def _write(self, fragment: EpisodeFragment, actor: int) -> None:
        rows, starts, complete = fragment
        self.replay.write(rows, starts, actor, self.replay.initial_priorities(rows, starts, complete=complete))

    def ready(self) -> bool:
        if not self.limiter.allows():
            return False
        if not self._can_sample:
            self._prefetch.settle()
            self._can_sample = self.replay.can_sample
        return self._can_sample

    def wants_data(self) -> bool:
        return not self.ready()

    def sample(self) -> Batch:
        """Return the next batch of `batch_size` sequences."""
        return self._prefetch.take(self._draw, more=self.limiter.allows(self._steps_per_batch))

    def _draw(self) -> Callable[[], Batch]:
        self._sequence_buffers = self._sequence_buffers[::-1] if self._prefetch.threaded else self._sequence_buffers
        return partial(self.replay.draw, self._stream, self._sequence_buffers[0], self.beta)

    @property
    def beta(self) -> float:
        """Current exponent of the importance weights."""
        total = self.draws.total_steps
        progress = min(1.0, self.limiter.inserted / total) if total else 0.0
        return self.draws.beta + (1.0 - self.draws.beta) * progress

    def update(self, batch: Batch, learned: Learned) -> None:
        self.limiter.sampled += self._steps_per_batch
        if self.pool.store.alpha:
            self._prefetch.submit(partial(self.pool.store.update_priorities, *extract_priorities(batch, learned)))

    def stats(self) -> dict[str, float]:
        """Return the stored rows (steps, and an observation per episode), sequences ever stored, and limiter counts."""
        self._prefetch.settle()
        return {
            "size": float(len(self.pool.store)),
            "sequences": float(self.replay.sequences),
            "stale_updates": float(self.pool.store.stale),
            **self.limiter.stats(),
        }

    def settle(self) -> None:
        """Wait until all pending writes and priority updates are done; call this before reading the store directly."""
        self._prefetch.settle()

    def state(self) -> Tree:
        """Return steps, priorities, open fragments, counters and random state, which determine all later batches."""
        self.settle()
        return self._state(self.pool.store.state())

    def live_state(self) -> Tree:
        self.settle()
        return self._state(self.pool.store.live_state())

    def _state(self, store: Tree) -> Tree:
        ahead = self._prefetch.state()
        return {
            "store": store,
            "streams": self._streams.state(),
            "turn": self.pool.turn,
            "sequences": self.replay.sequences,
            **self.limiter.state(),
            "stream": self._stream.bit_generator.state,
            **({"ahead": ahead} if ahead is not None else {}),
        }

    def restore(self, state: Tree) -> None:
        self._prefetch.restore(state.get("ahead"))
        self.pool.store.restore(state["store"])
        self._streams.restore(state["streams"])
        self.pool.turn, self.replay.sequences = state["turn"], state["sequences"]
        self.limiter.restore(state)
        self._stream.bit_generator.state = state["stream"]
        self._can_sample = False

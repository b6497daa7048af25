"""The memory of replay agents: segments become transitions in a pool, batches come out at a measured rate.

The limiter counts transitions: after `learning_starts` of them, each further one pays for `samples_per_insert` draws. It is
hungry exactly when it is not ready, so the updates that follow an intake are a function of what was taken in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steppe.core.agent import Learned, Tree
from steppe.core.errors import ConfigError, NotFinite, UsageError
from steppe.core.experience import Batch, Segment
from steppe.core.specs import SegmentSpec
from steppe.replay.nstep import Windows, transition_fields
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.storage import importance

LEAST_PRIORITY = 1e-6  # an error of exactly 0 must not bury a transition for ever (Schaul et al. 2016, 3.3)


@dataclass(frozen=True)
class Draws:
    """How much is drawn and when, and what a transition is."""

    batch_size: int
    learning_starts: int = 0
    samples_per_insert: float = 1.0
    n_step: int = 1
    gamma: float = 0.99
    beta: float = 0.4  # rises to 1 over total_steps
    total_steps: int | None = None


class ReplayMemory:
    """n-step transitions in a pool; sampled arrays are reused by the next `sample`."""

    def __init__(self, spec: SegmentSpec, pool: ReplayBufferPool, draws: Draws, *, stream: np.random.Generator) -> None:
        self.spec, self.pool, self.draws = spec, pool, draws
        self.inserted = 0  # transitions ever
        self.sampled = 0  # rows of the batches that were learned from
        self._stream = stream
        self._windows = Windows(spec, draws.n_step, draws.gamma)
        fields = transition_fields(spec)
        capacity = pool.num_buffers * pool.buffer_capacity
        if draws.batch_size > capacity:
            raise ConfigError(f"batches of {draws.batch_size} cannot be drawn from {capacity} transitions")
        names = {f.name for f in fields}
        keys_fit = pool.experience_keys is None or set(pool.experience_keys) == names
        if keys_fit and not pool.store.fields:
            pool.store.allocate(fields)
        if not keys_fit or {f.name: f for f in pool.store.fields} != {f.name: f for f in fields}:
            wanted = ", ".join(f.name for f in fields)
            raise UsageError(f"the pool has other columns than the agent needs ({wanted}): give it no experience_keys")
        self._out = {f.name: np.empty((draws.batch_size, *f.shape), f.dtype) for f in fields}

    def add(self, segments: Sequence[Segment]) -> None:
        """Store every transition that these segments complete; actors' windows are never mixed."""
        store, pool = self.pool.store, self.pool
        for segment in segments:
            if segment.spec != self.spec:
                raise UsageError(f"a segment of {segment.spec} does not fit a memory of {self.spec}")
            for block in self._windows.transitions(segment):
                store.write(pool.turn, block)
                pool.turn = (pool.turn + 1) % pool.num_buffers
                self.inserted += len(block["reward"])

    def ready(self) -> bool:
        allowed = (self.inserted - self.draws.learning_starts) * self.draws.samples_per_insert
        return self.sampled < allowed and len(self.pool.store) >= self.draws.batch_size

    def hungry(self) -> bool:
        return not self.ready()

    def sample(self) -> Batch:
        """One draw of `batch_size` transitions, with importance weights if the pool is prioritized."""
        store = self.pool.store
        if len(store) < self.draws.batch_size:
            raise UsageError(f"a batch of {self.draws.batch_size} cannot be drawn from {len(store)} transitions")
        slots, leaves = store.draw(self._stream, self.draws.batch_size)
        weights = importance(leaves, self.beta) if self.pool.use_prioritized else None
        return Batch(store.gather(slots, self._out), weights=weights, indices=slots)

    @property
    def beta(self) -> float:
        """The importance correction now."""
        total = self.draws.total_steps
        progress = min(1.0, self.inserted / total) if total else 0.0
        return self.draws.beta + (1.0 - self.draws.beta) * progress

    def update(self, batch: Batch, learned: Learned) -> None:
        self.sampled += self.draws.batch_size
        if not self.pool.use_prioritized:
            return
        if learned.priorities is None or batch.indices is None:
            raise UsageError("prioritized replay needs an agent that returns priorities: set prioritized=false")
        priorities = np.asarray(learned.priorities, np.float64)
        if not np.isfinite(priorities).all():
            raise NotFinite("priorities are not finite: the errors that the agent learned from are NaN or infinite")
        self.pool.store.prioritize(batch.indices, np.maximum(priorities, LEAST_PRIORITY))

    def stats(self) -> dict[str, float]:
        """Transitions stored, inserted and sampled so far; samples_per_insert counts from learning_starts on."""
        paid = self.inserted - self.draws.learning_starts
        return {
            "size": float(len(self.pool.store)),
            "inserted": float(self.inserted),
            "sampled": float(self.sampled),
            "samples_per_insert": self.sampled / paid if paid > 0 else 0.0,
        }

    def state(self) -> Tree:
        """Transitions, priorities, open windows, counters and the random stream: the next batches follow from it exactly."""
        return {
            "store": self.pool.store.state(),
            "windows": self._windows.state(),
            "turn": self.pool.turn,
            "inserted": self.inserted,
            "sampled": self.sampled,
            "stream": self._stream.bit_generator.state,
        }

    def restore(self, state: Tree) -> None:
        self.pool.store.restore(state["store"])
        self._windows.restore(state["windows"])
        self.pool.turn = state["turn"]
        self.inserted, self.sampled = state["inserted"], state["sampled"]
        self._stream.bit_generator.state = state["stream"]

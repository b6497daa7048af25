"""Public replay buffers that store experience dictionaries in a ReplayStore. ingest.py validates the experiences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from steppe.core.contracts.errors import UsageError
from steppe.core.system.typecheck import typechecked
from steppe.replay.ingest import Experience, Experiences, ExperienceWriter
from steppe.replay.store.store import ArrayLike, ReplayStore


class ReplayBuffer:
    """Keep the newest `capacity` experiences and sample them uniformly, with replacement.

    With `frame_stack`, a column with that many frames along its first axis (three axes or more) stores each frame once.
    `store` holds the columns; the buffers of a pool share one store.
    """

    @typechecked
    def __init__(
        self,
        capacity: int,
        experience_keys: Iterable[str] | None,
        *,
        frame_stack: int = 1,
        seed: int | None = None,
        disk_path: str | Path | None = None,
    ) -> None:
        """Create an empty buffer. With `disk_path`, a directory, it is stored on disk and may exceed the memory."""
        store = ReplayStore(capacity, disk=None if disk_path is None else Path(disk_path))
        self._open(ExperienceWriter(store, experience_keys, frame_stack), 0, np.random.default_rng(seed))

    def _open(self, writing: ExperienceWriter, part: int, stream: np.random.Generator) -> None:
        self.capacity = writing.store.capacity
        self.experience_keys = writing.keys
        self._writer, self.store, self._part, self._stream = writing, writing.store, part, stream

    @classmethod
    def over(cls, writing: ExperienceWriter, part: int, stream: np.random.Generator) -> Self:
        """Return a buffer over one part of a shared store."""
        buffer = cls.__new__(cls)
        buffer._open(writing, part, stream)
        return buffer

    @typechecked
    def add(self, experience: Experience) -> None:
        """Append one experience; a full buffer overwrites its oldest one."""
        self.add_batch([experience])

    def add_batch(self, experiences: Experiences) -> None:
        """Append several experiences, all or none.

        Exception: if frame stacks share too few frames, the first experiences may be stored. The error says how many.
        """
        self._writer.write(self._part, experiences)

    @typechecked
    def sample(self, batch_size: int) -> Any:
        """Sample `batch_size` experiences with replacement, as a dictionary of new arrays."""
        return self.store.take(self._stream, batch_size, 1.0, self._part)[0]

    def clear(self) -> None:
        """Remove all experiences; the columns keep their shapes and dtypes."""
        self.store.clear(self._part)

    def size(self) -> int:
        """Return the number of stored experiences."""
        return self.store.size.item(self._part)

    def is_full(self) -> bool:
        """Return whether the next experience overwrites the oldest one."""
        return self.size() == self.capacity

    def __len__(self) -> int:
        return self.size()


class PrioritizedReplayBuffer(ReplayBuffer):
    """Sample experiences in proportion to priority ** alpha, with importance weights (Schaul et al. 2016).

    Every call of `sample` raises `beta` by `beta_increment`, up to 1.
    """

    beta = 0.4
    beta_increment = 0.001

    @typechecked
    def __init__(
        self,
        capacity: int,
        experience_keys: Iterable[str] | None,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_increment: float = 0.001,
        *,
        frame_stack: int = 1,
        seed: int | None = None,
        disk_path: str | Path | None = None,
    ) -> None:
        if not (0 <= alpha <= 1 and 0 <= beta <= 1 and beta_increment >= 0):
            raise UsageError(
                f"alpha and beta must be in [0, 1], and beta must not fall: {alpha=}, {beta=}, {beta_increment=}"
            )
        self.beta, self.beta_increment = beta, beta_increment
        store = ReplayStore(capacity, alpha=alpha, disk=None if disk_path is None else Path(disk_path))
        writing = ExperienceWriter(store, experience_keys, frame_stack)
        self._open(writing, 0, np.random.default_rng(seed))

    @property
    def stale_updates(self) -> int:
        """Number of priority updates that were ignored because their experiences had been overwritten."""
        return self.store.stale

    @typechecked
    def add(self, experience: Experience, priority: float = 1.0) -> None:
        """Append one experience; with a priority of 0 it is never sampled."""
        self._writer.write(self._part, [experience], np.array([priority], np.float64))

    def add_batch(self, experiences: Experiences, priorities: ArrayLike | None = None) -> None:
        """Append several experiences, all or none; without `priorities`, each gets the largest priority so far."""
        self._writer.write(self._part, experiences, priorities)

    @typechecked
    def sample(self, batch_size: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Return experiences as a dictionary of arrays, importance weights (maximum 1), and indices.

        Pass the indices to `update_priorities`. They number the experiences in insertion order and are never reused.
        """
        store = self.store
        batch, weights, indices = store.take(self._stream, batch_size, self.beta, self._part)
        assert weights is not None
        assert indices is not None
        self.beta = min(1.0, self.beta + self.beta_increment)
        return batch, weights, indices >> store.shift if store.shift else indices

    @typechecked
    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the priorities of sampled experiences; the last one wins if an index occurs twice.

        Updates of experiences that were overwritten since sampling are ignored and counted in `stale_updates`.
        """
        self.store.update_priorities(indices, priorities, self._part)


class ExperienceBuffer:
    """Keep the newest `capacity` steps as (state, action, reward, next_state, done) tuples, for small learners."""

    KEYS = ("state", "action", "reward", "next_state", "done")

    @typechecked
    def __init__(self, capacity: int = 10000, *, seed: int | None = None) -> None:
        self.capacity = capacity
        self._buffer = ReplayBuffer(capacity, self.KEYS)
        self.buffer = TransitionView(self._buffer, self.KEYS)
        self._stream = np.random.default_rng(seed)

    @typechecked
    def push(self, state: Any, action: Any, reward: float, next_state: Any, done: bool) -> None:
        """Append one step; a full buffer overwrites its oldest one."""
        self._buffer.add(dict(zip(self.KEYS, (state, action, reward, next_state, done), strict=True)))

    @typechecked
    def sample(self, batch_size: int) -> list[tuple[Any, ...]]:
        """Return `batch_size` distinct steps in random order, or all steps, oldest first, if there are fewer."""
        slots = self._buffer.store.slots_oldest_first(0)
        if len(slots) >= batch_size:
            slots = self._stream.choice(slots, batch_size, replace=False)
        return self.buffer.rows(slots)

    @property
    def position(self) -> int:
        """Position of the next step in the ring of `capacity` steps."""
        return int(self._buffer.store.added[0]) % self.capacity

    def __len__(self) -> int:
        return len(self._buffer)


class TransitionView(Sequence[tuple[Any, ...]]):
    """Read-only sequence of an ExperienceBuffer's steps as tuples, oldest first. Use `push` to add."""

    def __init__(self, buffer: ReplayBuffer, keys: tuple[str, ...]) -> None:
        self._store, self._keys, self.maxlen = buffer.store, keys, buffer.capacity

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: Any) -> Any:
        found = self._store.slots_oldest_first(0)[index]
        return self.rows(found) if isinstance(index, slice) else self.rows(np.array([found]))[0]

    def rows(self, slots: np.ndarray) -> list[tuple[Any, ...]]:
        """Return the steps at these slots of the store."""
        if not len(slots):
            return []
        columns = self._store.gather(slots)
        rows = [columns[key].tolist() if columns[key].ndim == 1 else list(columns[key]) for key in self._keys]
        return list(zip(*rows, strict=True))

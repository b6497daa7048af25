"""Buffers of experience dictionaries: the public, friendly face of one Store, where dictionaries become columns and back.

Columns take their shapes and dtypes from the first experience; whatever does not fit them afterwards is refused whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from steppe.core.checked import checked
from steppe.core.errors import UsageError, nearest
from steppe.core.specs import FieldSpec
from steppe.replay.storage import Block, Store, importance

Experience = Mapping[str, Any]
Experiences = Sequence[Experience] | Mapping[str, Any]  # one dictionary per step, or one of arrays with a common length


class ReplayBuffer:
    """Keeps the newest `capacity` experiences and draws them uniformly, each draw independent of the others."""

    @checked
    def __init__(self, capacity: int, experience_keys: Iterable[str] | None, *, seed: int | None = None) -> None:
        self._open(Store(capacity), 0, experience_keys, np.random.default_rng(seed))

    def _open(self, store: Store, part: int, keys: Iterable[str] | None, stream: np.random.Generator) -> None:
        self.capacity = store.capacity
        self.experience_keys = None if keys is None else tuple(keys)
        self._store, self._part, self._stream = store, part, stream

    @classmethod
    def over(cls, store: Store, part: int, keys: Iterable[str] | None, stream: np.random.Generator) -> Self:
        """A buffer that is one part of a store that others share."""
        buffer = cls.__new__(cls)
        buffer._open(store, part, keys, stream)
        return buffer

    def add(self, experience: Experience) -> None:
        """Append one experience, over the oldest one when full."""
        self.add_batch([experience])

    def add_batch(self, experiences: Experiences) -> None:
        """Append several experiences, all or none."""
        self._write(experiences, None)

    @checked
    def sample(self, batch_size: int) -> Any:
        """`batch_size` experiences as a dictionary of new arrays; the same one may come more than once."""
        self._require(batch_size)
        slots, _ = self._store.draw(self._stream, batch_size, self._part)
        return self._store.gather(slots)

    def clear(self) -> None:
        """Forget all experiences; their shapes stay agreed."""
        self._store.clear(self._part)

    def size(self) -> int:
        """How many experiences are stored."""
        return int(self._store.size[self._part])

    def is_full(self) -> bool:
        """Whether the next experience takes the place of the oldest one."""
        return self.size() == self.capacity

    def __len__(self) -> int:
        return self.size()

    def _write(self, experiences: Experiences, priorities: np.ndarray | None) -> None:
        block = as_block(experiences, self.experience_keys)
        if block:
            store_block(self._store, self._part, block, priorities)

    def _require(self, batch_size: int) -> None:
        require_enough(batch_size, self.size())


class PrioritizedReplayBuffer(ReplayBuffer):
    """Draws experiences in proportion to priority ** alpha, and says how to weigh them (Schaul et al. 2016).

    `beta` grows by `beta_increment` with every sample, up to 1.
    """

    beta = 0.4
    beta_increment = 0.001

    @checked
    def __init__(
        self,
        capacity: int,
        experience_keys: Iterable[str] | None,
        alpha: float = 0.6,
        beta: float = 0.4,
        beta_increment: float = 0.001,
        *,
        seed: int | None = None,
    ) -> None:
        if not (0 <= alpha <= 1 and 0 <= beta <= 1 and beta_increment >= 0):
            raise UsageError(f"alpha and beta lie in [0, 1] and beta never falls: {alpha=}, {beta=}, {beta_increment=}")
        self.beta, self.beta_increment = beta, beta_increment
        self._open(Store(capacity, alpha=alpha), 0, experience_keys, np.random.default_rng(seed))

    def add(self, experience: Experience, priority: float = 1.0) -> None:
        """Append one experience; a priority of 0 keeps it from being drawn."""
        self._write([experience], np.array([priority], np.float64))

    def add_batch(self, experiences: Experiences, priorities: np.ndarray | None = None) -> None:
        """Append several experiences, all or none, with the largest priority so far unless priorities are given."""
        self._write(experiences, priorities)

    @checked
    def sample(self, batch_size: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Experiences as a dictionary of arrays, importance weights (the largest is 1), and indices for `update_priorities`."""
        self._require(batch_size)
        slots, leaves = self._store.draw(self._stream, batch_size, self._part)
        weights = importance(leaves, self.beta)
        self.beta = min(1.0, self.beta + self.beta_increment)
        return self._store.gather(slots), weights, slots - self._part * self.capacity

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of sampled experiences; of an index given twice the last one counts."""
        indices = np.asarray(indices, np.int64)
        if indices.size and not (indices.min() >= 0 and indices.max() < self.capacity):
            raise UsageError(f"indices lie in [0, {self.capacity}), as sample() gave them")
        self._store.prioritize(indices + self._part * self.capacity, priorities)


class ExperienceBuffer:
    """Keeps the newest `capacity` steps as (state, action, reward, next_state, done), for small learners."""

    KEYS = ("state", "action", "reward", "next_state", "done")

    @checked
    def __init__(self, capacity: int = 10000, *, seed: int | None = None) -> None:
        self.capacity = capacity
        self._buffer = ReplayBuffer(capacity, self.KEYS)
        self._stream = np.random.default_rng(seed)

    @checked
    def push(self, state: Any, action: Any, reward: float, next_state: Any, done: bool) -> None:
        """Append one step, over the oldest one when full."""
        self._buffer.add(dict(zip(self.KEYS, (state, action, reward, next_state, done), strict=True)))

    @checked
    def sample(self, batch_size: int) -> list[tuple[Any, ...]]:
        """`batch_size` different steps in random order, or every step, oldest first, when there are fewer."""
        store = self._buffer._store
        slots = store.ordered(0)
        if len(slots) >= batch_size:
            slots = self._stream.choice(slots, batch_size, replace=False)
        if not len(slots):
            return []
        columns = store.gather(slots)
        rows = [columns[key].tolist() if columns[key].ndim == 1 else list(columns[key]) for key in self.KEYS]
        return list(zip(*rows, strict=True))

    def __len__(self) -> int:
        return len(self._buffer)


def require_enough(batch_size: int, size: int) -> None:
    """Raise unless `batch_size` experiences can be drawn from `size`."""
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, not {batch_size}")
    if size < batch_size:
        raise UsageError(f"cannot draw {batch_size} experiences from {size}: add more first, or ask for fewer")


def as_block(experiences: Experiences, keys: tuple[str, ...] | None) -> dict[str, np.ndarray]:
    """Experiences as columns with a common length; empty when there are none."""
    if isinstance(experiences, Mapping):
        require_keys(experiences, keys or tuple(experiences))
        block = {key: _column(key, experiences[key]) for key in keys or experiences}
        lengths = {key: len(rows) if rows.ndim else -1 for key, rows in block.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            raise UsageError(
                f"columns of experiences need one common length, not {lengths}; wrap a single one in a list"
            )
        return block if next(iter(lengths.values())) else {}
    if not len(experiences):
        return {}
    keys = keys or tuple(experiences[0])
    for experience in experiences:
        require_keys(experience, keys)
    return {key: _column(key, [experience[key] for experience in experiences]) for key in keys}


def store_block(store: Store, part: int, block: Block, priorities: np.ndarray | None = None) -> None:
    """Write checked columns; the first ones decide the store's fields."""
    if not store.fields:
        store.allocate([FieldSpec(key, rows.shape[1:], _dtype(key, rows).name) for key, rows in block.items()])
    require_keys(block, tuple(store.columns))
    for field in store.fields:
        _require_fit(field, block[field.name])
    store.write(part, block, priorities)


def require_keys(experience: Experience, keys: tuple[str, ...]) -> None:
    """Raise unless an experience has exactly these keys."""
    if not isinstance(experience, Mapping):
        raise UsageError(f"an experience is a dictionary with {', '.join(keys)}, not a {type(experience).__name__}")
    missing = [key for key in keys if key not in experience]
    unknown = [str(key) for key in experience if key not in keys]
    if missing or unknown:
        hint = nearest(unknown[0], missing) if missing and unknown else ""
        parts = [
            f"{word} {', '.join(names)}" for word, names in (("lacks", missing), ("has unknown", unknown)) if names
        ]
        raise UsageError(f"an experience {' and '.join(parts)}; this buffer's keys are {', '.join(keys)}.{hint}")


def _column(key: str, values: Any) -> np.ndarray:
    try:
        rows = np.asarray(values)
    except ValueError:
        shapes = sorted({np.shape(value) for value in values})
        raise UsageError(f"{key!r} comes in different shapes: {', '.join(map(str, shapes))}") from None
    if rows.dtype.kind not in "biuf":
        raise UsageError(f"{key!r} holds {rows.dtype} values; a buffer keeps numbers and arrays of numbers")
    return rows


def _dtype(key: str, rows: np.ndarray) -> np.dtype[Any]:
    # A first reward of 0 must not make every later reward a whole number.
    return np.dtype(np.float64) if key == "reward" and rows.dtype.kind in "biu" else rows.dtype


def _require_fit(field: FieldSpec, rows: np.ndarray) -> None:
    if rows.shape[1:] != field.shape:
        raise UsageError(f"{field.name!r} has shape {rows.shape[1:]}, but this buffer's column has {field.shape}")
    fits = np.can_cast(rows.dtype, field.dtype, "same_kind")
    if fits and field.dtype != rows.dtype and np.dtype(field.dtype).kind in "iu":
        fits = np.array_equal(rows.astype(field.dtype), rows)
    if not fits:
        raise UsageError(f"{field.name!r} is {rows.dtype}, which does not fit this buffer's {field.dtype} column")

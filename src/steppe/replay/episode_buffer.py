"""Recurrent replay of whole episodes, with the class names of the pathfinding project.

A LocalBuffer collects one episode, a GlobalBuffer stores many. Both are thin: an episode is a fragment of sequence
replay (sequence_windows.py), and the global buffer is a pool with one buffer. An episode is validated once, when it
enters the global buffer, because compiled code reads it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from steppe.core.array_checks import as_column, as_numeric_array, require_below, require_finite, require_flags
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.specs import FieldSpec
from steppe.core.system.typecheck import typechecked
from steppe.replay.factory import MAX_MEMORY_SHARE, available_bytes
from steppe.replay.ingest import as_block, fit_block
from steppe.replay.pool import ReplayBufferPool
from steppe.replay.sequence_windows import POSITION_FIELDS, SequenceBatchBuffer, SequenceReplay, Windowing

Episode = dict[str, np.ndarray]  # one row per step, and a last row that has only the final observation
LEADING_COLUMNS = ("obs", "action", "reward", "terminated")  # first columns when a batch is unpacked
STEP_COLUMNS = ("action", "reward", "hidden", "comm_mask", "q_val")
WINDOW_BYTES = 32  # bytes that a SequenceBatchBuffer adds to each row of a batch
# Columns of batches that are computed when sampling: an episode must not have them.
DERIVED_COLUMNS = (
    "before",
    "after",
    "discount",
    "following",
    "valid",
    "learn",
)


class LocalBuffer:
    """Collect the steps of one episode, from its first observation `obs` (num_agents, *obs_shape) to `finish`."""

    def __init__(self, obs: Any) -> None:
        self._obs = [_finite_array(obs, "obs", "the first observation")]
        self._rows: list[tuple[np.ndarray, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, action: Any, reward: float, next_obs: Any, hidden: Any, comm_mask: Any, q_val: Any) -> None:
        """Append a step.

        `hidden` is the recurrent state with which the policy received the observation before this step, `q_val` its
        action values for that observation.
        """
        where = f"step {len(self._rows)}"
        given = zip(STEP_COLUMNS, (action, reward, hidden, comm_mask, q_val), strict=True)
        row = [_finite_array(value, name, where) for name, value in given]
        row[:2] = [value.reshape(()) if value.shape == (1,) else value for value in row[:2]]  # (1,) counts as a scalar
        row[1] = _finite_array(row[1], "reward", where, np.float32)
        seen = _finite_array(next_obs, "next_obs", where)
        before = (*self._rows[0], self._obs[0]) if self._rows else (*row, self._obs[0])
        for name, value, first in zip((*STEP_COLUMNS, "next_obs"), (*row, seen), before, strict=True):
            if value.shape != first.shape:
                raise UsageError(f"{name} of {where} has shape {value.shape}, but it was {first.shape} before")
        self._rows.append(tuple(row))
        self._obs.append(seen)

    @typechecked
    def finish(self, *, terminated: bool) -> Episode:
        """Return the whole episode; pass `terminated=False` if a time limit truncated it."""
        if not self._rows:
            raise UsageError("an episode without a step cannot be kept: add one first")
        of_each = self._rows[0][1].shape  # () or (num_agents,): whether each agent has its own reward
        ends = np.zeros((len(self._rows) + 1, *of_each), bool)
        ends[-2] = terminated
        episode = {"obs": np.stack(self._obs), "terminated": ends}
        for name, values in zip(STEP_COLUMNS, zip(*self._rows, strict=True), strict=True):
            rows = np.stack(values)
            episode[name] = np.concatenate([rows, np.zeros_like(rows[:1])])
        return episode


class GlobalBuffer:
    """Store the episodes of all actors, up to `capacity` steps, and sample sequences by priority.

    Batches have the layout of sequence_windows.py: time first, and `following` is the row of a step's bootstrap
    observation. They can be unpacked: `obs, action, reward, terminated, *rest = buffer.get_batch()`.
    """

    @typechecked
    def __init__(
        self,
        capacity: int = 2048 * 256,
        windowing: Windowing | None = None,
        batch_size: int = 192,
        *,
        alpha: float = 0.6,
        beta: float = 0.4,
        seed: int | None = None,
    ) -> None:
        self.windowing = windowing or Windowing(length=16, n_step=2)
        self.batch_size, self.beta = batch_size, beta
        self.pool = ReplayBufferPool(1, capacity, use_prioritized=True, alpha=alpha)
        self._stream = np.random.default_rng(seed)
        self._replay: SequenceReplay | None = None
        self._sequence_buffers: dict[int, SequenceBatchBuffer] = {}

    def __len__(self) -> int:
        """Return the number of stored rows: steps, and one final observation per episode."""
        return len(self.pool.store)

    def add(self, episode: Mapping[str, Any]) -> None:
        """Store an episode that `LocalBuffer.finish` returned.

        With `q_val`, its sequences get initial priorities from the actor's own TD errors. Raises UsageError or
        NotFinite, and stores nothing, if the episode is invalid or does not match the columns of earlier episodes.
        """
        store = self.pool.store
        known = [field for field in store.fields if field not in POSITION_FIELDS]
        columns = validate_episode(episode, known)
        count = len(columns["reward"])
        if count > store.capacity:  # checked before the first episode defines the columns
            raise ConfigError(f"an episode of {count} rows does not fit a buffer of {store.capacity}")
        if self._replay is None:
            fields = [FieldSpec(name, rows.shape[1:], rows.dtype.name) for name, rows in columns.items()]
            store.allocate([*fields, *POSITION_FIELDS])
            self._replay = SequenceReplay(self.pool, self.windowing)
        starts = np.arange(0, count - 1, self.windowing.step)
        with np.errstate(over="ignore", invalid="ignore"):  # non-finite estimates are replaced
            priorities = self._replay.initial_priorities(columns, starts, complete=True)
        self._replay.write(columns, starts, 0, priorities)

    def get_data(self) -> Batch:
        """Return the next batch of `self.batch_size` sequences."""
        return self.get_batch(self.batch_size)

    @typechecked
    def get_batch(self, batch_size: int | None = None) -> Batch:
        """Sample a batch of sequences with weights and indices; `batch_size` defaults to `self.batch_size`.

        The next batch of the same size reuses its arrays.
        """
        if self._replay is None:
            raise UsageError("there is no episode yet: add one first")
        batch_size = self.batch_size if batch_size is None else batch_size
        if batch_size not in self._sequence_buffers:
            self._require_room(batch_size)
            self._sequence_buffers[batch_size] = self._replay.batch_buffer(batch_size)
        drawn = self._replay.draw(self._stream, self._sequence_buffers[batch_size], self.beta)
        first = {name: drawn.columns[name] for name in LEADING_COLUMNS}
        return Batch({**first, **drawn.columns}, drawn.weights, drawn.indices)

    def _require_room(self, batch_size: int) -> None:
        """Raise UsageError unless `batch_size` is at least 1 and the batch fits into the available memory."""
        row_bytes = WINDOW_BYTES + sum(field.nbytes for field in self.pool.store.fields)
        most = int(MAX_MEMORY_SHARE * available_bytes() / (row_bytes * self.windowing.rows))
        if not 1 <= batch_size <= most:
            raise UsageError(f"batch_size={batch_size}: must be at least 1, and memory has room for {most:,} sequences")

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """Set the priorities of sequences by the indices of a batch; raise UsageError if an index is not a start.

        Updates of rows that were overwritten since sampling are ignored; `pool.get_buffer_stats()` counts them as
        `stale_updates`.
        """
        store, indices = self.pool.store, as_column(indices, "indices", np.int64)
        with store.lock:
            if self._replay is not None and indices.ndim == 1:
                self._require_starts(indices)
            store.update_priorities(indices, priorities)

    def _require_starts(self, indices: np.ndarray) -> None:
        """Raise UsageError if a row is not the start of a sequence; overwritten rows are skipped."""
        store = self.pool.store
        slots = store.slots_of(indices)
        before, after = (store.columns[field.name][slots] for field in POSITION_FIELDS)
        wrong = (slots >= 0) & ((before % self.windowing.step != 0) | (after == 0))
        if wrong.any():
            raise UsageError(
                f"index {indices[wrong.argmax()]} is of a row that begins no sequence: use the indices that came with a batch"
            )


def validate_episode(episode: Mapping[str, Any], known: Sequence[FieldSpec]) -> Episode:
    """Return an episode's columns, validated for compiled code and `estimate_priorities`, cast to the `known` fields.

    Columns have shape [rows, …] with at least two rows. Numbers must be finite, `terminated` must have the shape of
    `reward` (one agent or several), and actions must be valid indices into `q_val` if it is present.
    """
    if not isinstance(episode, Mapping):
        raise UsageError(f"an episode is a dictionary of columns, not a {type(episode).__name__}")
    missing, made = (
        [name for name in LEADING_COLUMNS if name not in episode],
        [name for name in DERIVED_COLUMNS if name in episode],
    )
    if missing or made:
        problem = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(made)}, which is made when it is drawn"
        raise UsageError(f"the episode {problem}: LocalBuffer.finish gives what is needed")
    given = as_block(episode, None)
    if len(given.get("reward", ())) < 2:
        raise UsageError("an episode without a step cannot be kept: it has a row for each step and one more")
    dtypes = {name: rows.dtype.name for name, rows in given.items()} | {"reward": "float32", "terminated": "bool"}
    dtypes |= {"live": "bool"} if "live" in given else {}
    dtypes |= {"action": "int64"} if "q_val" in given else {}
    dtypes |= {field.name: field.dtype for field in known if field.name in given}
    columns = {name: as_column(rows, name, dtypes[name]) for name, rows in given.items()}
    if known:
        fit_block(columns, known)
    for name, rows in columns.items():
        if rows.dtype.kind == "f":
            require_finite(rows, name)
        elif rows.dtype.kind == "b":
            require_flags(rows, name)
    _require_shapes(columns)
    return columns


def _require_shapes(columns: Episode) -> None:
    """Raise UsageError unless all per-agent columns have the same number of agents."""
    reward, terminated = columns["reward"].shape, columns["terminated"].shape
    if terminated != reward:
        raise UsageError(f"an episode has a 'terminated' for every 'reward', not shapes {terminated} and {reward}")
    if len(reward) > 2 or 0 in reward:
        raise UsageError(f"'reward' has shape {reward}, where (rows,) or (rows, agents) is needed")
    if "q_val" not in columns:
        return
    values = columns["q_val"].shape
    if len(values) not in (2, 3) or 0 in values:
        raise UsageError(f"'q_val' has shape {values}, where (rows, actions) or (rows, agents, actions) is needed")
    agents = 1 if len(values) == 2 else values[1]
    one = ((values[0],), (values[0], 1))  # a scalar per row may have either shape
    each = one if agents == 1 else ((values[0], agents),)
    for name, shapes in (("action", each), ("live", each), ("reward", (*each, *one))):
        if name in columns and columns[name].shape not in shapes:
            raise UsageError(f"{name!r} has shape {columns[name].shape}, but 'q_val' has {values}")
    require_below(columns["action"], "action", (values[-1],))


def _finite_array(value: Any, name: str, where: str, dtype: Any = None) -> np.ndarray:
    """Return a copy, because environments may reuse their arrays; raise UsageError unless it is finite or boolean."""
    with np.errstate(over="ignore"):
        found = np.array(as_numeric_array(value, name), dtype, order="C")
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise UsageError(f"{name} of {where} has NaN or infinity: leave this episode out")
    if found.dtype.kind == "b":
        require_flags(found, name)
    return found

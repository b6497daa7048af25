"""ReplayBufferPool: several buffers over one store, so that sampling from the pool is sampling from one large buffer.

Writes are routed by `routing` unless they name a buffer. The learner's replay memory writes to and samples from the
same store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import DamagedFile, UsageError
from steppe.core.system.typecheck import typechecked
from steppe.replay.buffer import PrioritizedReplayBuffer, ReplayBuffer
from steppe.replay.ingest import Experiences, ExperienceWriter
from steppe.replay.store.files import FORMAT, PoolDescription, column_names, load_state, save_state
from steppe.replay.store.store import ArrayLike, ReplayStore

ALPHA = 0.6
BETA = 0.4
Routing = Literal["round_robin", "least_filled", "by_source"]


class RunMemory(Protocol):
    """Reports of a run whose learner keeps the experience in another process, as a RunView has them."""

    @property
    def memory(self) -> Mapping[str, float]: ...


class ReplayBufferPool:
    """`num_buffers` rings of `buffer_capacity` experiences each; `buffers[i]` gives access to one of them.

    A batch is sampled over the experiences of all buffers together, however unevenly they are filled. With
    `use_prioritized`, a sampled batch also has "weights" and "indices", and new experience gets the largest priority so
    far. The caller may raise `beta`, the exponent of the weights. `frame_stack` is as in ReplayBuffer. With
    `disk_path`, a directory, experience is stored on disk and may exceed the memory; it is deleted with the pool,
    unlike what `save_buffers` writes.
    """

    @typechecked
    def __init__(
        self,
        num_buffers: int = 4,
        buffer_capacity: int = 100_000,
        experience_keys: Iterable[str] | None = None,
        use_prioritized: bool = False,
        save_path: str | Path | None = None,
        *,
        alpha: float = ALPHA,
        routing: Routing = "round_robin",
        frame_stack: int = 1,
        seed: int | None = None,
        disk_path: str | Path | None = None,
    ) -> None:
        self.num_buffers = num_buffers
        self.buffer_capacity = buffer_capacity
        self.experience_keys = None if experience_keys is None else tuple(experience_keys)
        self.use_prioritized = use_prioritized
        self.save_path = None if save_path is None else Path(save_path)
        self.routing = routing
        self.beta = BETA
        self._run: RunMemory | None = None
        disk = None if disk_path is None else Path(disk_path)
        self.store = ReplayStore(buffer_capacity, num_buffers, alpha=alpha if use_prioritized else None, disk=disk)
        self.turn = 0  # the next buffer in round-robin routing
        self._stream = np.random.default_rng(seed)
        self._writer = ExperienceWriter(self.store, self.experience_keys, frame_stack)
        kind = PrioritizedReplayBuffer if use_prioritized else ReplayBuffer
        self.buffers = [kind.over(self._writer, part, self._stream) for part in range(num_buffers)]

    @typechecked
    def add_experiences(
        self,
        experiences: Experiences,
        buffer_id: int | None = None,
        *,
        source: int | None = None,
        priorities: ArrayLike | None = None,
    ) -> None:
        """Append experiences (a list of dictionaries, or a dictionary of arrays) to one buffer, all or none.

        `source` is the number of the actor that collected them, for routing by source. `priorities` are initial
        priorities.
        """
        if buffer_id is not None:
            self._require_buffer(buffer_id)
        with self.store.lock:  # two writers must not get the same round-robin turn
            part = self.route(source) if buffer_id is None else buffer_id
            written = self._writer.write(part, experiences, priorities)
            if written and buffer_id is None:
                self.routed()

    def route(self, source: int | None = None) -> int:
        """Return the buffer for the next experiences of `source`."""
        if self.routing == "least_filled":
            return int(np.argmin(self.store.size))
        if self.routing == "by_source":
            if source is None:
                raise UsageError("this pool routes by source: say who gathered the experiences with source=…")
            return source % self.num_buffers
        return self.turn

    def routed(self) -> None:
        """Advance the round-robin routing after a block was written to the buffer that `route` returned."""
        self.turn = (self.turn + 1) % self.num_buffers

    @typechecked
    def sample_batch(self, batch_size: int, buffer_id: int | None = None) -> dict[str, np.ndarray]:
        """Sample `batch_size` experiences with replacement from the whole pool, or from one buffer, as new arrays."""
        if buffer_id is not None:
            self._require_buffer(buffer_id)
        batch, weights, indices = self.store.take(self._stream, batch_size, self.beta, buffer_id)
        return batch if indices is None or weights is None else {**batch, "indices": indices, "weights": weights}

    @typechecked
    def update_priorities(self, indices: ArrayLike, priorities: ArrayLike) -> None:
        """Set the priorities of experiences by the "indices" of a batch; `get_buffer_stats` counts stale updates."""
        self.store.update_priorities(indices, priorities)

    def follow_run(self, run: RunMemory | None) -> None:
        """Include in the statistics what a run's learner reports of its own buffer; None: this pool is in use itself."""
        self._run = run

    def get_buffer_stats(self) -> dict[str, Any]:
        """Return the fill of the pool and of each buffer; `added` counts all writes, including overwritten experience.

        `stale_updates` counts priority updates that were ignored because their experience had been overwritten. `run`, if the newest run has its learner in another process, is what that learner last reported of
        its buffer; this pool is only the description of it, and stays as it is.
        """
        buffers = [
            {
                "size": buffer.size(),
                "capacity": buffer.capacity,
                "utilization": buffer.size() / buffer.capacity,
                "is_full": buffer.is_full(),
                "added": int(self.store.added[part]),
            }
            for part, buffer in enumerate(self.buffers)
        ]
        capacity = self.num_buffers * self.buffer_capacity
        total = self.get_total_experiences()
        return {
            "num_buffers": self.num_buffers,
            "total_experiences": total,
            "total_capacity": capacity,
            "utilization": total / capacity,
            "stale_updates": self.store.stale,
            "buffers": buffers,
        } | ({} if self._run is None else {"run": dict(self._run.memory)})

    def get_total_experiences(self) -> int:
        """Return the number of experiences in all buffers."""
        return len(self.store)

    def clear_all_buffers(self) -> None:
        """Remove all experiences; the columns keep their shapes and dtypes."""
        self.store.clear()
        self.turn = 0

    def balance_buffers(self) -> None:
        """Even out the fill to within one experience by moving the oldest experiences of fuller buffers.

        Indices change; sampling probabilities do not.
        """
        store = self.store
        with store.lock:
            sizes = store.size.copy()
            share, rest = divmod(len(store), self.num_buffers)
            target_sizes = np.full(self.num_buffers, share)
            target_sizes[np.argsort(-sizes, kind="stable")[:rest]] += 1
            ordered = [store.slots_oldest_first(part) for part in range(self.num_buffers)]
            surplus = np.maximum(0, sizes - target_sizes)
            moved = np.concatenate([slots[:more] for slots, more in zip(ordered, surplus, strict=True)])
            content, taken = {}, 0
            for part in range(self.num_buffers):
                kept = ordered[part][surplus[part] :]
                num_wanted = int(target_sizes[part]) - len(kept)
                if num_wanted or surplus[part]:
                    content[part] = store.rows(np.concatenate([moved[taken : taken + num_wanted], kept]))
                taken += num_wanted
            store.exchange(content)

    @typechecked
    def save_buffers(self, path: str | Path | None = None) -> None:
        """Write content, priorities and the state of the random generator to a directory, atomically.

        Saving to the same directory again writes only what has changed.
        """
        if not self.store.fields:
            raise UsageError("there is nothing to save: no experience was ever added")
        description = PoolDescription(FORMAT, self.num_buffers, self.buffer_capacity, self.use_prioritized)
        with self.store.lock:  # no rows may be written during the save
            state: Tree = {"store": self.store.live_state(), "turn": self.turn, "beta": self.beta}
            state["stream"] = self._stream.bit_generator.state
            state["betas"] = [b.beta for b in self.buffers if isinstance(b, PrioritizedReplayBuffer)]
            save_state(self._path(path), state, description)

    @typechecked
    def load_buffers(self, path: str | Path | None = None) -> None:
        """Restore what `save_buffers` wrote, all or nothing; the next batches equal those of the saved pool."""
        where = self._path(path)
        state, saved = load_state(where)
        own = (self.num_buffers, self.buffer_capacity, self.use_prioritized)
        saved_shape = (saved.num_buffers, saved.capacity, saved.prioritized)
        if saved_shape != own:
            raise UsageError(f"the saved pool has (buffers, capacity, prioritized) = {saved_shape}, this one {own}")
        try:
            self._require_keys(column_names(state["store"]))
            turn, beta = int(state["turn"]) % self.num_buffers, float(state.get("beta", self.beta))
            betas = [float(beta) for beta in state.get("betas", ())]
            np.random.default_rng(0).bit_generator.state = state["stream"]
            self.store.restore(state["store"])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DamagedFile(f"the saved buffers at {where} are damaged: {type(error).__name__} {error}") from None
        self.turn, self.beta = turn, beta
        self._stream.bit_generator.state = state["stream"]
        for buffer, buffer_beta in zip(self.buffers, betas, strict=False):
            buffer.beta = buffer_beta  # type: ignore[attr-defined]

    def _require_keys(self, names: Sequence[str]) -> None:
        if self.experience_keys is not None and set(self.experience_keys) != set(names):
            raise UsageError(f"the saved pool has the keys {', '.join(names)}, not those of this one")

    def _path(self, path: str | Path | None) -> Path:
        chosen = self.save_path if path is None else Path(path)
        if chosen is None:
            raise UsageError("say where: give a path, or make the pool with save_path=…")
        return chosen

    def _require_buffer(self, buffer_id: int) -> None:
        if not 0 <= buffer_id < self.num_buffers:
            raise UsageError(f"there is no buffer {buffer_id}: ids are 0 to {self.num_buffers - 1}")

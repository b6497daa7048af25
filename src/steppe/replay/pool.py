"""ReplayBufferPool: several buffers over one store, so that drawing from the pool is drawing from one big buffer.

Writers are routed as `routing` says unless they name a buffer. The learner's replay memory fills and draws from the same store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from steppe.core.checked import checked
from steppe.core.errors import UsageError
from steppe.replay.buffer import PrioritizedReplayBuffer, ReplayBuffer, require_enough
from steppe.replay.files import load_state, save_state
from steppe.replay.ringing import importance
from steppe.replay.storage import Store
from steppe.replay.writing import Experiences, Writing

ALPHA = 0.6
BETA = 0.4
Routing = Literal["round_robin", "least_filled", "by_source"]


class ReplayBufferPool:
    """`num_buffers` rings of `buffer_capacity` experiences each; `buffers[i]` gives access to one of them.

    A batch is drawn over the experiences of all buffers alike, however unevenly these are filled. With `use_prioritized`,
    a sampled batch also has "weights" and "indices", and experience enters with the largest priority so far. `beta`, the
    exponent of the weights, is the caller's to raise. `frame_stack` is a buffer's.
    """

    @checked
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
    ) -> None:
        self.num_buffers = num_buffers
        self.buffer_capacity = buffer_capacity
        self.experience_keys = None if experience_keys is None else tuple(experience_keys)
        self.use_prioritized = use_prioritized
        self.save_path = None if save_path is None else Path(save_path)
        self.routing = routing
        self.beta = BETA
        self.store = Store(buffer_capacity, num_buffers, alpha=alpha if use_prioritized else None)
        self.turn = 0  # which buffer the next experiences go to in round robin
        self._stream = np.random.default_rng(seed)
        self._writing = Writing(self.store, self.experience_keys, frame_stack)
        kind = PrioritizedReplayBuffer if use_prioritized else ReplayBuffer
        self.buffers = [kind.over(self._writing, part, self._stream) for part in range(num_buffers)]

    def add_experiences(
        self,
        experiences: Experiences,
        buffer_id: int | None = None,
        *,
        source: int | None = None,
        priorities: np.ndarray | None = None,
    ) -> None:
        """Append experiences (a list of dictionaries, or a dictionary of arrays), all of them to one buffer or none.

        `source` says who gathered them, for routing by source; `priorities` are the gatherer's own estimates.
        """
        if buffer_id is not None:
            self._require_buffer(buffer_id)
        with self.store.lock:  # two writers never take the same turn
            part = self.route(source) if buffer_id is None else buffer_id
            written = self._writing(part, experiences, priorities)
            if written and buffer_id is None:
                self.routed()

    def route(self, source: int | None = None) -> int:
        """The buffer that the next experiences of `source` belong in."""
        if self.routing == "least_filled":
            return int(np.argmin(self.store.size))
        if self.routing == "by_source":
            if source is None:
                raise UsageError("this pool routes by source: say who gathered the experiences with source=…")
            return source % self.num_buffers
        return self.turn

    def routed(self) -> None:
        """Count a block that went where `route` said."""
        self.turn = (self.turn + 1) % self.num_buffers

    @checked
    def sample_batch(self, batch_size: int, buffer_id: int | None = None) -> dict[str, np.ndarray]:
        """`batch_size` independent draws over the whole pool, or over one buffer, as new arrays."""
        if buffer_id is not None:
            self._require_buffer(buffer_id)
        with self.store.lock:
            require_enough(batch_size, len(self.store if buffer_id is None else self.buffers[buffer_id]))
            slots, leaves = self.store.draw(self._stream, batch_size, buffer_id)
            batch = self.store.gather(slots)
            if self.use_prioritized:
                batch |= {"weights": importance(leaves, self.beta), "indices": self.store.indices(slots)}
        return batch

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Set the priorities of experiences by the "indices" of a sampled batch; see `stale_updates` in the statistics."""
        self.store.prioritize(indices, priorities)

    def get_buffer_stats(self) -> dict[str, Any]:
        """Fill of the pool and of each buffer; `added` counts what was ever written, overwritten experience included.

        `stale_updates` counts priorities that came after their experience had been overwritten, and changed nothing.
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
        }

    def get_total_experiences(self) -> int:
        """How many experiences all buffers hold together."""
        return len(self.store)

    def clear_all_buffers(self) -> None:
        """Forget everything; shapes stay agreed."""
        self.store.clear()
        self.turn = 0

    def balance_buffers(self) -> None:
        """Even out the fill, to within one experience, by moving the oldest of fuller buffers; indices change, odds do not."""
        store = self.store
        with store.lock:
            sizes = store.size.copy()
            share, rest = divmod(len(store), self.num_buffers)
            goal = np.full(self.num_buffers, share)
            goal[np.argsort(-sizes, kind="stable")[:rest]] += 1
            ordered = [store.ordered(part) for part in range(self.num_buffers)]
            surplus = np.maximum(0, sizes - goal)
            moving = np.concatenate([slots[:more] for slots, more in zip(ordered, surplus, strict=True)])
            content, taken = {}, 0
            for part in range(self.num_buffers):
                kept = ordered[part][surplus[part] :]
                wanted = int(goal[part]) - len(kept)
                if wanted or surplus[part]:
                    content[part] = store.rows(np.concatenate([moving[taken : taken + wanted], kept]))
                taken += wanted
            store.exchange(content)

    def save_buffers(self, path: str | Path | None = None) -> None:
        """Write content, priorities and the state of the random stream to a directory, atomically."""
        if not self.store.fields:
            raise UsageError("there is nothing to save: no experience was ever added")
        extra = json.dumps({"turn": self.turn, "stream": self._stream.bit_generator.state})
        save_state(self._path(path), self.store.state(), self.buffer_capacity, extra)

    def load_buffers(self, path: str | Path | None = None) -> None:
        """Take over what `save_buffers` wrote, all or nothing: the next batches are those that the saved pool would draw."""
        state, saved = load_state(self._path(path))
        mine = (self.num_buffers, self.buffer_capacity, self.use_prioritized)
        theirs = (len(saved.rings), saved.capacity, saved.prioritized)
        if theirs != mine:
            raise UsageError(f"the saved pool has (buffers, capacity, prioritized) = {theirs}, this one {mine}")
        if self.experience_keys is not None and set(self.experience_keys) != set(state["columns"]):
            raise UsageError(f"the saved pool has the keys {', '.join(state['columns'])}, not those of this one")
        self.store.restore(state)
        extra = json.loads(saved.extra)
        self.turn = extra["turn"]
        self._stream.bit_generator.state = extra["stream"]

    def _path(self, path: str | Path | None) -> Path:
        chosen = self.save_path if path is None else Path(path)
        if chosen is None:
            raise UsageError("say where: give a path, or make the pool with save_path=…")
        return chosen

    def _require_buffer(self, buffer_id: int) -> None:
        if not 0 <= buffer_id < self.num_buffers:
            raise UsageError(f"there is no buffer {buffer_id}: ids are 0 to {self.num_buffers - 1}")

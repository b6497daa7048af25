"""Our replay buffers, and plain NumPy columns, at the tasks of peers/replaying.py: run by replay.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from steppe import PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferPool

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))

from protocol import Request
from replaying import tasks

KEYS = ("obs", "action", "reward", "next_obs", "done")
Columns = dict[str, np.ndarray]


class Prioritized:
    """A buffer of ours; dictionaries of arrays go in as they are."""

    about = "PrioritizedReplayBuffer"

    def __init__(self, settings: dict[str, Any]) -> None:
        self.buffer, self.batch = PrioritizedReplayBuffer(settings["capacity"], KEYS, seed=1), settings["batch"]

    def prepare(self, columns: Columns) -> Columns:
        return columns

    def add(self, block: Columns) -> None:
        self.buffer.add_batch(block)

    def sample(self) -> tuple[Columns, np.ndarray, np.ndarray]:
        return self.buffer.sample(self.batch)

    def update(self, batch: tuple[Columns, np.ndarray, np.ndarray], priorities: np.ndarray) -> None:
        self.buffer.update_priorities(batch[2], priorities)


class Pool:
    """The same through a pool of `buffers` of them."""

    def __init__(self, settings: dict[str, Any], buffers: int) -> None:
        self.about, self.batch = f"ReplayBufferPool of {buffers}, prioritized", settings["batch"]
        self.pool = ReplayBufferPool(buffers, settings["capacity"] // buffers, use_prioritized=True, seed=1)

    def prepare(self, columns: Columns) -> Columns:
        return columns

    def add(self, block: Columns) -> None:
        self.pool.add_experiences(block)

    def sample(self) -> Columns:
        return self.pool.sample_batch(self.batch)

    def update(self, batch: Columns, priorities: np.ndarray) -> None:
        self.pool.update_priorities(batch["indices"], priorities)

    def save(self, path: Path) -> None:
        self.pool.save_buffers(path / "pool")

    def load(self, path: Path) -> None:
        self.pool.load_buffers(path / "pool")


class Uniform:
    """A buffer of ours without priorities."""

    about = "ReplayBuffer"

    def __init__(self, settings: dict[str, Any], **options: Any) -> None:
        self.buffer, self.batch = ReplayBuffer(settings["capacity"], KEYS, seed=1, **options), settings["batch"]

    def prepare(self, columns: Columns) -> Columns:
        return columns

    def add(self, block: Columns) -> None:
        self.buffer.add_batch(block)

    def sample(self) -> Columns:
        return self.buffer.sample(self.batch)


class Stacks(Uniform):
    about = "ReplayBuffer, frame_stack=4"

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings, frame_stack=4)


class Plain:
    """Columns written by slices and read by fancy indices: what there is without a buffer."""

    about = "NumPy columns"

    def __init__(self, settings: dict[str, Any]) -> None:
        self.capacity, self.batch = settings["capacity"], settings["batch"]
        self.columns: Columns = {}
        self.stream, self.cursor, self.size = np.random.default_rng(1), 0, 0

    def prepare(self, columns: Columns) -> Columns:
        if not self.columns:
            self.columns = {name: np.zeros((self.capacity, *c.shape[1:]), c.dtype) for name, c in columns.items()}
        return columns

    def add(self, block: Columns) -> None:
        rows = len(block["done"])
        cursor, self.cursor = self.cursor, (self.cursor + rows) % self.capacity
        first = min(rows, self.capacity - cursor)
        for name, column in self.columns.items():
            column[cursor : cursor + first] = block[name][:first]
            if first < rows:
                column[: rows - first] = block[name][first:]
        self.size = min(self.capacity, self.size + rows)

    def sample(self) -> Columns:
        rows = self.stream.integers(0, self.size, self.batch)
        return {name: column[rows] for name, column in self.columns.items()}

    def save(self, path: Path) -> None:
        """Written and synced, not hashed."""
        for name, column in self.columns.items():
            with (path / name).open("wb") as file:
                column.tofile(file)
                file.flush()
                os.fsync(file.fileno())
        (path / "shapes.json").write_text(json.dumps({n: [c.dtype.str, c.shape] for n, c in self.columns.items()}))

    def load(self, path: Path) -> None:
        shapes = json.loads((path / "shapes.json").read_text())
        self.columns = {name: np.fromfile(path / name, dtype).reshape(shape) for name, (dtype, shape) in shapes.items()}


SIDES = {
    "steppe": tasks(Prioritized, Uniform, Stacks),
    "one": tasks(lambda settings: Pool(settings, 1)),
    "eight": tasks(lambda settings: Pool(settings, 8)),
    "numpy": tasks(uniform=Plain, images=Plain),
}
for unsaved in ("steppe", "eight"):  # a pool of one is what is saved
    del SIDES[unsaved]["replay-save"]


def main() -> None:
    side, task, *pairs = sys.argv[1:]
    request = Request(task, None, 1, dict(pair.split("=", 1) for pair in pairs))
    result = SIDES[side][task](request)
    value = result.seconds if task == "replay-save" else result.steps / result.seconds
    print(json.dumps({"value": value, "settings": result.settings, **result.extra}))


if __name__ == "__main__":
    main()

"""cpprb: its replay buffers, filled and drawn from as `replaying.py` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol import run

# isort: split
import numpy as np
from cpprb import PrioritizedReplayBuffer, ReplayBuffer
from replaying import SIDE, STACK, tasks

COLUMNS = {
    "obs": {"shape": 8, "dtype": np.float32},
    "action": {"dtype": np.int64},
    "reward": {"dtype": np.float32},
    "next_obs": {"shape": 8, "dtype": np.float32},
    "done": {"dtype": np.bool_},
}
PICTURE = {"shape": (SIDE, SIDE, STACK), "dtype": np.uint8}
FILE = "buffer.npz"


class Cpprb:
    """Columns go in as keyword arguments, as its documentation has it."""

    def __init__(self, buffer: Any, batch: int, about: str) -> None:
        self.buffer, self.batch, self.about = buffer, batch, about

    def prepare(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if columns["obs"].ndim > 2:  # it wants the stack last
            turned = {key: np.ascontiguousarray(columns[key].transpose(0, 2, 3, 1)) for key in ("obs", "next_obs")}
            return columns | turned
        return columns

    def add(self, block: dict[str, np.ndarray]) -> None:
        self.buffer.add(**block)

    def sample(self) -> dict[str, np.ndarray]:
        return self.buffer.sample(self.batch)

    def update(self, batch: dict[str, np.ndarray], priorities: np.ndarray) -> None:
        self.buffer.update_priorities(batch["indexes"], priorities)

    def save(self, path: Path) -> None:
        self.buffer.save_transitions(str(path / FILE))

    def load(self, path: Path) -> None:
        self.buffer.load_transitions(str(path / FILE))


def prioritized(settings: dict[str, Any]) -> Cpprb:
    buffer = PrioritizedReplayBuffer(settings["capacity"], COLUMNS, alpha=0.6)
    return Cpprb(buffer, settings["batch"], "PrioritizedReplayBuffer")


def uniform(settings: dict[str, Any]) -> Cpprb:
    return Cpprb(ReplayBuffer(settings["capacity"], COLUMNS), settings["batch"], "ReplayBuffer")


def images(settings: dict[str, Any]) -> Cpprb:
    buffer = ReplayBuffer(settings["capacity"], COLUMNS | {"obs": PICTURE, "next_obs": PICTURE})
    return Cpprb(buffer, settings["batch"], "ReplayBuffer, stacks as they are")


def compressed(settings: dict[str, Any]) -> Cpprb:
    columns = {key: kind for key, kind in COLUMNS.items() if key != "next_obs"} | {"obs": PICTURE}
    buffer = ReplayBuffer(settings["capacity"], columns, next_of="obs", stack_compress="obs")
    return Cpprb(buffer, settings["batch"], 'ReplayBuffer, next_of="obs", stack_compress="obs"')


if __name__ == "__main__":
    found = tasks(prioritized, uniform, images)
    found["replay-images-compressed"] = tasks(images=compressed)["replay-images"]
    run("cpprb", {"cpprb": "cpprb", "numpy": "numpy"}, found)

"""Reverb: a server in the process and its client on loopback, filled and drawn from as `replaying.py` says."""

from __future__ import annotations

import os
from typing import Any

from protocol import run

# isort: split
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import reverb
from replaying import tasks

TABLE = "replay"


class Reverb:
    """Items of one step each; a block is written through one writer and is there when `add` returns."""

    def __init__(self, settings: dict[str, Any], sampler: Any, about: str) -> None:
        table = reverb.Table(
            TABLE, sampler, reverb.selectors.Fifo(), settings["capacity"], reverb.rate_limiters.MinSize(1)
        )
        self.server = reverb.Server([table])
        self.client = reverb.Client(f"localhost:{self.server.port}")
        self.batch, self.about = settings["batch"], about

    def prepare(self, columns: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        rows = range(len(columns["done"]))
        return [{name: np.asarray(column[row]) for name, column in columns.items()} for row in rows]

    def add(self, block: list[dict[str, np.ndarray]]) -> None:
        with self.client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for row in block:
                writer.append(row)
                last = {name: column[-1:] for name, column in writer.history.items()}
                writer.create_item(TABLE, 1.0, last)
            writer.flush()

    def sample(self) -> tuple[list[np.ndarray], list[int]]:
        found = list(self.client.sample(TABLE, self.batch, emit_timesteps=False))
        columns = zip(*(item.data for item in found), strict=True)
        return [np.concatenate(rows) for rows in columns], [item.info.key for item in found]

    def update(self, batch: tuple[list[np.ndarray], list[int]], priorities: np.ndarray) -> None:
        self.client.mutate_priorities(TABLE, dict(zip(batch[1], priorities.tolist(), strict=True)))


def prioritized(settings: dict[str, Any]) -> Reverb:
    return Reverb(settings, reverb.selectors.Prioritized(0.6), "a table with the prioritized selector, client.sample")


def uniform(settings: dict[str, Any]) -> Reverb:
    return Reverb(settings, reverb.selectors.Uniform(), "a table with the uniform selector, client.sample")


if __name__ == "__main__":
    run("reverb", {"reverb": "dm-reverb", "tensorflow": "tensorflow", "numpy": "numpy"}, tasks(prioritized, uniform))

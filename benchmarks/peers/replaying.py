"""What every replay buffer is asked to do, and how it is timed: the same for all sides, which differ in their `Side` only.

A side turns columns into the form that its own `add` takes before the clock starts, and may keep whatever `sample` gave to
update it later. Every figure is a rate over `seconds`, after the buffer was filled.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from protocol import Request, Result, Task

SETTINGS = {"capacity": 1_000_000, "block": 64, "batch": 256, "seconds": 2.0, "fill_s": 20.0}
IMAGES = SETTINGS | {"capacity": 50_000}
STACK, SIDE = 4, 84
PAGE = os.sysconf("SC_PAGE_SIZE")


class Side(Protocol):
    """A buffer behind its own interface."""

    about: str  # which of its classes, and how it was set up

    def prepare(self, columns: dict[str, np.ndarray]) -> Any:
        """A block in the form that `add` takes; not timed."""

    def add(self, block: Any) -> None:
        """Append a block."""

    def sample(self) -> Any:
        """Draw a batch."""

    def update(self, batch: Any, priorities: np.ndarray) -> None:
        """Give what was drawn new priorities."""

    def save(self, path: Path) -> None:
        """Write everything into a directory, in the way the buffer has for that."""

    def load(self, path: Path) -> None:
        """Take over what `save` wrote."""


Make = Callable[[dict[str, Any]], Side]


def tasks(prioritized: Make | None = None, uniform: Make | None = None, images: Make | None = None) -> dict[str, Task]:
    """The tasks of a peer that has these kinds of buffers."""
    found: dict[str, Task] = {}
    if prioritized is not None:
        found["replay-prioritized"] = lambda request: measure_prioritized(prioritized, request)
    if uniform is not None:
        found["replay-uniform"] = lambda request: measure_uniform(uniform, request)
    if images is not None:
        found["replay-images"] = lambda request: measure_images(images, request)
    kept = prioritized or uniform
    if kept is not None:
        found["replay-save"] = lambda request: measure_saving(kept, request)
    return found


def transitions(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Columns as of a classic-control world."""
    draw = np.random.default_rng(seed)
    return {
        "obs": draw.standard_normal((rows, 8), np.float32),
        "action": draw.integers(0, 4, rows),
        "reward": draw.standard_normal(rows, np.float32),
        "next_obs": draw.standard_normal((rows, 8), np.float32),
        "done": draw.random(rows) < 0.01,
    }


class Frames:
    """Transitions of one long episode of images, frame stacks first axis first; every frame is like no other."""

    def __init__(self, seed: int) -> None:
        self._picture = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE), np.uint8)
        self._next = 0

    def transitions(self, rows: int) -> dict[str, np.ndarray]:
        frames = np.repeat(self._picture[None], rows + STACK, 0)
        numbers = np.arange(self._next, self._next + rows + STACK, dtype=np.int64)
        frames[:, 0, :8] = numbers.view(np.uint8).reshape(-1, 8)
        self._next += rows
        stacks = np.lib.stride_tricks.sliding_window_view(frames, STACK, axis=0).transpose(0, 3, 1, 2)
        return {
            "obs": np.ascontiguousarray(stacks[:rows]),
            "action": numbers[:rows] % 6,
            "reward": np.zeros(rows, np.float32),
            "next_obs": np.ascontiguousarray(stacks[1 : rows + 1]),
            "done": np.zeros(rows, bool),
        }


def measure_prioritized(make: Make, request: Request) -> Result:
    """Adding, drawing, updating, and the cycle of all three."""
    settings = request.settings(SETTINGS)
    side, blocks, found = filled(make, settings, request.seed)
    draw = np.random.default_rng(request.seed)
    priorities = cycle([draw.random(settings["batch"]) + 0.01 for _ in range(16)])
    batch = side.sample()

    def whole() -> None:
        side.add(next(blocks))
        side.update(side.sample(), next(priorities))

    seconds = settings["seconds"]
    cycles, took = rate(whole, 2 * seconds)
    found["adds_per_s"] = settings["block"] * per_s(lambda: side.add(next(blocks)), seconds)
    found["batches_per_s"] = per_s(side.sample, seconds)
    batch = side.sample()
    found["updates_per_s"] = per_s(lambda: side.update(batch, next(priorities)), seconds)
    return Result(cycles, took, report(side, settings), found)


def measure_uniform(make: Make, request: Request) -> Result:
    """Adding in small and in large blocks, and drawing."""
    settings = request.settings(SETTINGS)
    side, blocks, found = filled(make, settings, request.seed)
    seconds = settings["seconds"]
    batches, took = rate(side.sample, 2 * seconds)
    found["adds_per_s"] = settings["block"] * per_s(lambda: side.add(next(blocks)), seconds)
    side, blocks, _ = filled(make, settings | {"block": 1024}, request.seed)
    found["adds_1024_per_s"] = 1024 * per_s(lambda: side.add(next(blocks)), seconds)
    return Result(batches, took, report(side, settings), found)


def measure_images(make: Make, request: Request) -> Result:
    """Drawing stacks of images, and what they take of the memory."""
    settings = request.settings(IMAGES)
    before = resident_mib()
    side, frames = make(settings), Frames(request.seed)
    for _ in range(-(-settings["capacity"] // settings["block"])):
        side.add(side.prepare(frames.transitions(settings["block"])))
    found = {"rss_mib": resident_mib(), "grown_mib": resident_mib() - before}
    batches, took = rate(side.sample, 2 * settings["seconds"])
    return Result(batches, took, report(side, settings), found)


def measure_saving(make: Make, request: Request) -> Result:
    """Seconds to save a full buffer and to load it into an empty one; the fastest of three, as disks are moody."""
    settings = request.settings(SETTINGS)
    side, _, found = filled(make, settings | {"block": 1000, "fill_s": 600.0}, request.seed)
    times: dict[str, list[float]] = {"save_s": [], "load_s": []}
    for _ in range(3):
        path = Path(tempfile.mkdtemp(dir="."))
        os.sync()  # what others have yet to write is not this one's to wait for
        times["save_s"].append(seconds_of(lambda path=path: side.save(path)))
        empty = make(settings)
        times["load_s"].append(seconds_of(lambda path=path, empty=empty: empty.load(path)))
    found |= {name: min(values) for name, values in times.items()}
    found["saved_mib"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 2**20
    found["save_and_load_s"] = found["save_s"] + found["load_s"]
    return Result(settings["capacity"], found["save_and_load_s"], report(side, settings), found)


def filled(make: Make, settings: Mapping[str, Any], seed: int) -> tuple[Side, Any, dict[str, float]]:
    """A buffer that is full, or as full as it became within `fill_s`; blocks to go on with; and its memory."""
    before = resident_mib()
    side = make(dict(settings))
    rows = settings["block"]
    blocks = cycle([side.prepare(transitions(rows, seed * 1000 + number)) for number in range(32)])
    until, added = time.perf_counter() + settings["fill_s"], 0
    while added < settings["capacity"] and time.perf_counter() < until:
        side.add(next(blocks))
        added += rows
    return side, blocks, {"filled": added, "rss_mib": resident_mib(), "grown_mib": resident_mib() - before}


def rate(call: Callable[[], object], seconds: float) -> tuple[int, float]:
    """How often something was done in about so many seconds, after a few times that do not count."""
    for _ in range(3):
        call()
    once = seconds_of(call)
    group, count, began = max(1, int(seconds / 20 / max(once, 1e-7))), 0, time.perf_counter()
    while True:
        for _ in range(group):
            call()
        count += group
        took = time.perf_counter() - began
        if took >= seconds:
            return count, took


def per_s(call: Callable[[], object], seconds: float) -> float:
    """The same as a rate."""
    count, took = rate(call, seconds)
    return count / took


def seconds_of(call: Callable[[], object]) -> float:
    """What one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def resident_mib() -> float:
    """This process's memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20


def report(side: Side, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed beside the figures."""
    return {"buffer": side.about, "threads": 1} | {key: settings[key] for key in ("capacity", "block", "batch")}

"""Combines many workers' updates and times it beside the obvious way, in turn in one process: run by params.py."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from steppe.params.aggregation import Aggregation
from steppe.params.privacy import PrivacyPlan, PrivateSum

Timed = Callable[[], object]
TRIM = 0.1


def updates_of(count: int, size: int) -> np.ndarray:
    stream = np.random.default_rng(0)
    found = np.empty((count, size), np.float32)
    for row in found:
        row[:] = stream.standard_normal(size, dtype=np.float32)
    return found


def numpy_trimmed_mean(updates: np.ndarray) -> np.ndarray:
    count = len(updates)
    cut = int(TRIM * count)
    return np.partition(updates, (cut, count - cut - 1), axis=0)[cut : count - cut].mean(axis=0)


def pair(method: str, updates: np.ndarray, directory: Path) -> tuple[Timed, Timed]:
    """Ours and what it is held against."""
    if method == "privacy":
        private = PrivateSum(PrivacyPlan(directory / "ledger.json", epsilon=1e9, expected_clients=len(updates)), 1.0)
        return lambda: private.release(updates), lambda: Aggregation("average").combine(updates)
    ours = Aggregation(method, trim=TRIM)
    if method == "average":
        copied = np.empty_like(updates)
        return lambda: ours.combine(updates), lambda: np.copyto(copied, updates)
    theirs = {"median": lambda: np.median(updates, axis=0), "trimmed_mean": lambda: numpy_trimmed_mean(updates)}
    return lambda: ours.combine(updates), theirs[method]


def seconds(run: Timed) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["average", "median", "trimmed_mean", "privacy"], required=True)
    parser.add_argument("--updates", type=int, default=64)
    parser.add_argument("--parameters", type=int, default=2_000_000)
    parser.add_argument("--times", type=int, default=3)
    given = parser.parse_args()
    updates = updates_of(given.updates, given.parameters)
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = pair(given.method, updates, Path(directory))
        ours()  # compiles, and touches all memory
        seconds(theirs) if given.method == "average" else None
        timed = [(seconds(ours), seconds(theirs)) for _ in range(given.times)]
    mine, other = (statistics.median(column) for column in zip(*timed, strict=True))
    # Copying reads and writes every byte, averaging only reads it: as shares of bandwidth, half the ratio of the times.
    value = {"average": other / mine / 2, "privacy": mine / other}.get(given.method, other / mine)
    used = {"updates": given.updates, "parameters": given.parameters, "times": given.times, "threads": 1}
    print(json.dumps({"value": value, "ours_ms": 1000 * mine, "theirs_ms": 1000 * other, "settings": used}))


if __name__ == "__main__":
    main()

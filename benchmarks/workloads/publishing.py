"""Publishes weights to readers in other processes and times how soon each has them: run by weights.py and scaling.py."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from steppe.core.contracts.weights import Weights
from steppe.core.system.shared_dir import Wakeup, make_shared_dir, remove_shared_dir
from steppe.transport.shm import ShmWeights

POLICY = "policy"
WARM_UPS = 3


def read(shared_dir: Path, name: str, times: int, answers: Connection) -> None:
    """Wake at each publication, fetch it, and answer with the moment at which it was there."""
    wakeup, store = Wakeup(shared_dir / f"wakeup-{name}"), ShmWeights(shared_dir)
    answers.send((-1, 0))
    version = -1
    while version < times - 1:
        wakeup.wait(1.0)
        found = store.newer_than(POLICY, version)
        if found is not None:
            at, version = time.monotonic_ns(), found.version
            answers.send((version, at))
    wakeup.close()
    store.close()


def publish(nbytes: int, readers: int, times: int, pause_s: float) -> dict[str, list[float]]:
    """Milliseconds of each publication: until it returned, and until each reader had it."""
    shared_dir = make_shared_dir("bench", 4 * nbytes + (1 << 20))
    names = tuple(f"actor-{index}" for index in range(readers))
    context = mp.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in names]
    processes = [
        context.Process(target=read, args=(shared_dir, name, times, sending))
        for name, (_, sending) in zip(names, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    receiving = [pipe for pipe, _ in pipes]
    for pipe in receiving:
        pipe.recv()
    store = ShmWeights(shared_dir, names)
    weights = Weights.from_arrays({"flat": np.zeros(nbytes // 4, np.float32)})
    found: dict[str, list[float]] = {"publish_ms": [], "single_ms": [], "both_ms": []}
    for version in range(times):
        weights.buffer[:8] = version % 251
        began = time.monotonic_ns()
        store.publish(POLICY, weights.stamped(version=version, updates=version, env_steps=0))
        took = time.monotonic_ns() - began
        arrived = [(pipe.recv()[1] - began) / 1e6 for pipe in receiving]
        if version >= WARM_UPS:
            found["publish_ms"].append(took / 1e6)
            found["single_ms"] += arrived
            found["both_ms"].append(max(arrived))
        time.sleep(pause_s)
    for process in processes:
        process.join()
    store.close()
    remove_shared_dir(shared_dir)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--pause-s", type=float, default=0.02)
    given = parser.parse_args()
    found = publish(given.nbytes, given.readers, given.times + WARM_UPS, given.pause_s)
    medians = {name: statistics.median(values) for name, values in found.items()}
    used = {"nbytes": given.nbytes, "readers": given.readers, "publications": given.times, "pause_s": given.pause_s}
    figures = {"value": medians.pop("both_ms"), "worst_ms": max(found["both_ms"]), **medians}
    print(json.dumps({**figures, "settings": used}))


if __name__ == "__main__":
    main()

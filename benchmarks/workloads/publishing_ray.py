"""Publishes weights to Ray actors and times how soon each has them: run by ray_runtime.py."""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from typing import Any

import numpy as np

from steppe.core.contracts.weights import Weights
from steppe.transport.ray.links import RayWeights, import_ray

POLICY = "policy"
WARM_UPS = 5


class Reader:
    """The other end of a store, which fetches whatever comes and remembers when it had it."""

    def __init__(self) -> None:
        self.store, self.arrived = RayWeights(lambda: None), {}

    def ready(self) -> None:
        """Returns when this process is up."""

    def take_weights(self, data: np.ndarray) -> None:
        self.store.take(data)
        found = self.store.newer_than(POLICY, max(self.arrived, default=-1))
        if found is not None:
            self.arrived[found.version] = time.monotonic_ns()

    def times(self) -> dict[int, int]:
        return self.arrived


def publish(ray: Any, nbytes: int, readers: int, times: int, pause_s: float) -> dict[str, list[float]]:
    """Milliseconds of each publication: until it returned, and until each reader had it."""
    actors = [ray.remote(Reader).options(num_cpus=0, max_concurrency=4).remote() for _ in range(readers)]
    ray.get([actor.ready.remote() for actor in actors])
    bell = threading.Event()
    store = RayWeights(bell.set)
    for index, actor in enumerate(actors):
        store.attach(str(index), actor.take_weights.remote)
    weights = Weights.from_arrays({"flat": np.zeros(nbytes // 4, np.float32)})
    began, took = [], []
    for version in range(times):
        weights.buffer[:8] = version % 251
        began.append(time.monotonic_ns())
        store.publish(POLICY, weights.stamped(version=version, updates=version, env_steps=0))
        took.append((time.monotonic_ns() - began[-1]) / 1e6)
        while not store.delivered:
            bell.wait()
            bell.clear()
            store.progress()
        time.sleep(pause_s)
    arrived = ray.get([actor.times.remote() for actor in actors])
    each = [[(one[version] - began[version]) / 1e6 for one in arrived] for version in range(WARM_UPS, times)]
    return {
        "publish_ms": took[WARM_UPS:],
        "single_ms": [value for values in each for value in values],
        "all_ms": [max(values) for values in each],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--pause-s", type=float, default=0.05)
    given = parser.parse_args()
    ray = import_ray()
    options = {"address": "local", "num_cpus": 2, "object_store_memory": 256 << 20, "include_dashboard": False}
    ray.init(**options, log_to_driver=False, logging_level="ERROR")
    found = publish(ray, given.nbytes, given.readers, given.times + WARM_UPS, given.pause_s)
    ray.shutdown()
    medians = {name: statistics.median(values) for name, values in found.items()}
    used = {"nbytes": given.nbytes, "readers": given.readers, "publications": given.times, "pause_s": given.pause_s}
    figures = {"value": medians.pop("all_ms"), "worst_ms": max(found["all_ms"]), **medians}
    print(json.dumps({**figures, "settings": used}))


if __name__ == "__main__":
    main()

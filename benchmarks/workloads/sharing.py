"""Pushes gradients to a parameter server in another process through shared memory, beside memcpy, and asks for newer versions
when there are none: run by params.py."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from steppe import ParameterClient, ParameterServer
from steppe.params.optimizers import Optimizer


def serve(size: int, pipe: Connection) -> None:
    """A parameter server that applies every push at once."""
    optimizer = Optimizer("sgd", 1e-3)
    server = ParameterServer({"w": np.zeros(size, np.float32)}, update_frequency=1, optimizer=optimizer)
    pipe.send(server.share())
    pipe.recv()
    server.close()


def pushing(client: ParameterClient, size: int, times: int) -> dict[str, float]:
    """Seconds per push, checked and applied, and per copy of the same bytes, in turn."""
    update, copied = {"w": np.ones(size, np.float32)}, np.ones(size, np.float32)
    found: list[tuple[float, float]] = []
    for _ in range(times + 3):
        began = time.perf_counter()
        assert client.push_gradients("a", update)
        between = time.perf_counter()
        np.copyto(copied, update["w"])
        found.append((between - began, time.perf_counter() - between))
    ours, theirs = (statistics.median(column) for column in zip(*found[3:], strict=True))
    return {"value": theirs / ours, "ours_ms": 1000 * ours, "theirs_ms": 1000 * theirs}


def asking(client: ParameterClient, times: int) -> dict[str, float]:
    """Microseconds for hearing that there is no newer version: the median of runs of a thousand."""
    version = client.pull("a").version
    found = []
    for _ in range(times):
        began = time.perf_counter()
        for _ in range(1000):
            client.pull_newer("a", version)
        found.append(1000 * (time.perf_counter() - began))
    return {"value": statistics.median(found)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nbytes", type=int, default=20_000_000)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--ask", action="store_true")
    given = parser.parse_args()
    context = mp.get_context("spawn")
    end, other = context.Pipe()
    process = context.Process(target=serve, args=(given.nbytes // 4, other))
    process.start()
    with ParameterClient(end.recv()) as client:
        client.register_worker("a")
        found = asking(client, given.times) if given.ask else pushing(client, given.nbytes // 4, given.times)
    end.send(None)
    process.join()
    used = {"nbytes": given.nbytes, "pushes": given.times}
    print(json.dumps({**found, "settings": used}))


if __name__ == "__main__":
    main()

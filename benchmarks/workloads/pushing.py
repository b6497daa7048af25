"""Pushes gradients to a parameter server in another process over gRPC on loopback, beside a bare socket: run by params.py."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

from steppe import ParameterClient, ParameterServer
from steppe.params.optimizers import Optimizer


def serve(size: int, pipe: Connection) -> None:
    """A parameter server that applies every push at once."""
    optimizer = Optimizer("sgd", 1e-3)
    server = ParameterServer({"w": np.zeros(size, np.float32)}, update_frequency=1, optimizer=optimizer)
    pipe.send(server.start_server(port=0))
    pipe.recv()
    server.close()


def swallow(nbytes: int, pipe: Connection) -> None:
    """Read `nbytes` at a time from one connection and answer each with a byte."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection, _ = listening.accept()
        into = memoryview(bytearray(nbytes))
        while True:
            read = 0
            while read < nbytes:
                more = connection.recv_into(into[read:])
                if not more:
                    return
                read += more
            connection.sendall(b"k")


def throughput(nbytes: int, times: int) -> dict[str, float]:
    """Seconds per push of `nbytes`, over gRPC and over a socket, in turn."""
    context = mp.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    targets = [(serve, nbytes // 4), (swallow, nbytes)]
    processes = [
        context.Process(target=run, args=(size, end[1])) for (run, size), end in zip(targets, ends, strict=True)
    ]
    for process in processes:
        process.start()
    port, plain = (end[0].recv() for end in ends)
    update = {"w": np.ones(nbytes // 4, np.float32)}
    data = update["w"].tobytes()  # not zeros, which would be one page of memory again and again
    found: list[tuple[float, float]] = []
    with ParameterClient(f"grpc://localhost:{port}") as client, socket.create_connection(("127.0.0.1", plain)) as bare:
        client.register_worker("a")
        for _ in range(times + 2):
            began = time.perf_counter()
            assert client.push_gradients("a", update)
            between = time.perf_counter()
            bare.sendall(data)
            bare.recv(1)
            found.append((between - began, time.perf_counter() - between))
    ends[0][0].send(None)
    for process in processes:
        process.join()
    ours, theirs = (statistics.median(column) for column in zip(*found[2:], strict=True))
    return {"value": theirs / ours, "ours_mb_per_s": nbytes / ours / 1e6, "theirs_mb_per_s": nbytes / theirs / 1e6}


def crowd(nbytes: int, workers: int, times: int) -> dict[str, float]:
    """The 99th percentile over the median of all pushes' times, with all workers pushing at once."""
    context = mp.get_context("spawn")
    end, other = context.Pipe()
    process = context.Process(target=serve, args=(nbytes // 4, other))
    process.start()
    url, took, failed = f"grpc://localhost:{end.recv()}", [], []
    update = {"w": np.ones(nbytes // 4, np.float32)}
    together = threading.Barrier(workers)

    def work(name: str) -> None:
        with ParameterClient(url) as client:
            client.register_worker(name)
            together.wait()
            for _ in range(times):
                began = time.perf_counter()
                failed.extend([] if client.push_gradients(name, update) else [name])
                took.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end.send(None)
    process.join()
    assert not failed, f"{len(failed)} pushes were refused"
    assert len(took) == workers * times, "a worker failed"
    late = float(np.quantile(took, 0.99))
    middle = statistics.median(took)
    return {"value": late / middle, "median_ms": 1000 * middle, "p99_ms": 1000 * late}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nbytes", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ["STEPPE_HOME"] = home
        one = given.workers == 1
        found = throughput(given.nbytes, given.times) if one else crowd(given.nbytes, given.workers, given.times)
    used = {"nbytes": given.nbytes, "workers": given.workers, "pushes": given.times}
    print(json.dumps({**found, "settings": used}))


if __name__ == "__main__":
    main()

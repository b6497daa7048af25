"""How soon `steppe serve` answers /healthz while connections that do nothing, or send slowly, crowd it. Run by control.py."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from serving import SERVE, await_service

DESCRIPTORS = 1_024  # that the service may have open
PART_OF_A_REQUEST = b"GET /api/v1/runs HTTP/1.1\r\nHost: 127"
EVERY = 10  # connections between two questions


def health_ms(address: str) -> float:
    begin_s = time.perf_counter()
    httpx.get(f"{address}/healthz", timeout=60).raise_for_status()
    return 1e3 * (time.perf_counter() - begin_s)


def measure(root: Path, address: str, connections: int, first: bytes) -> dict[str, object]:
    parts = urlsplit(address)
    token = json.loads((root / ".control" / "tokens.json").read_text())["read"]
    health_ms(address)
    answers: list[float] = []
    with contextlib.ExitStack() as held:
        for number in range(connections):
            one = held.enter_context(socket.create_connection((parts.hostname, parts.port), timeout=60))
            with contextlib.suppress(OSError):  # the service may have closed it for a newer one
                one.sendall(first)
            if number % EVERY == EVERY - 1:
                answers.append(health_ms(address))
        answers += [health_ms(address) for _ in range(100)]
    begin_s = time.perf_counter()
    headers = {"Authorization": f"Bearer {token}"}
    while httpx.get(f"{address}/api/v1/runs", headers=headers, timeout=60).status_code != 200:
        time.sleep(0.01)
    return {
        "value": max(answers),
        "median_ms": statistics.median(answers),
        "normal_ms": 1e3 * (time.perf_counter() - begin_s),
        "questions": len(answers),
        "settings": {"connections": connections, "descriptors": DESCRIPTORS},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--slow", action="store_true", help="each sends a part of a request")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, most))  # the service inherits this
    service = subprocess.Popen([sys.executable, "-c", SERVE, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # here are as many connections, and more
    assert service.stdout is not None
    address = service.stdout.readline().rsplit(" ", 1)[1].strip()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    try:
        await_service(address)
        first = PART_OF_A_REQUEST if given.slow else b""
        print(json.dumps(measure(Path(os.environ["STEPPE_RUNS"]), address, given.connections, first)))
    finally:
        service.terminate()
        service.wait(30)


if __name__ == "__main__":
    main()

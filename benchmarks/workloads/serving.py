"""`steppe serve` under load: many WebSocket clients, a stream of metric points, and a run that trains meanwhile. Run by control.py.

Loaded and quiet spells take turns within one training run; in a quiet one the service is frozen, as if it were not there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from listening import Delays, hear

from steppe.control import process_host
from steppe.core.config.run import RunConfig
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import TRAINING
from steppe.records.run_directory import RunDirectory

SERVE = "from steppe.cli.main import entry; entry()"
TRAINING_RUN = {
    "env": "CartPole-v1", "mode": "single", "actors": 1, "envs": 8, "steps": 1_000_000_000, "name": "trained",
    "evaluation": {"episodes": 1, "every_steps": 1_000_000_000}, "checkpoint": {"every_s": 3_600},
}  # fmt: skip
REPORTS_PER_S = 20
SETTLE_S = 1.0  # at the beginning of a spell, which is not counted


def publish(root: str, points_per_s: int, loaded: Event, ended: Event) -> None:
    """A run that reports so many points a second while the spell is a loaded one."""
    directory = RunDirectory.create(RunConfig(env="CartPole-v1", run_dir=Path(root) / "points"), {})
    directory.store.set_status("RUNNING")
    series, step, due = points_per_s // REPORTS_PER_S - 3, 0, time.monotonic()  # three come with every report
    while not ended.is_set():
        if loaded.is_set():
            step += 1
            stats = {f"s{number}": float(step % 97) for number in range(series)}
            report = TrainingReport(run="points", version=step, updates=step, env_steps=step, train_s=step, stats=stats)
            directory.store.post(TRAINING, report.record())
        if step % REPORTS_PER_S == 0:
            directory.store.heartbeat()
        due = max(due + 1 / REPORTS_PER_S, time.monotonic() - 1.0)
        time.sleep(max(0.0, due - time.monotonic()))
    directory.store.set_status("SUCCEEDED")
    directory.release()


def rate(store_path: Path, begin_s: float, end_s: float) -> float:
    """Environment steps a second between two moments, from what the learner reported."""
    reports = [report for _, report in RunDirectory(store_path).store.read(TRAINING, limit=1_000_000)]
    seen = [(found["time_s"], found["env_steps"]) for found in reports if begin_s <= found["time_s"] <= end_s]
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--points", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    root = Path(os.environ["STEPPE_RUNS"])
    command = [sys.executable, "-c", SERVE, "serve", "--port", "0"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    address = service.stdout.readline().rsplit(" ", 1)[1].strip()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    try:
        print(json.dumps(measure(given, root, address, service.pid)))
    finally:
        service.send_signal(signal.SIGCONT)
        service.terminate()
        service.wait(30)
        if (root / "trained").is_dir():
            process_host.kill_run_processes(RunDirectory(root / "trained").store.status())


def measure(given: argparse.Namespace, root: Path, address: str, service: int) -> dict[str, object]:
    """The load, the spells in turn, and what came of them."""
    context = mp.get_context("spawn")
    loaded, ended, (end, other) = context.Event(), context.Event(), context.Pipe()
    tokens = json.loads((root / ".control" / "tokens.json").read_text())
    headers, reading = ({"Authorization": f"Bearer {tokens[scope]}"} for scope in ("admin", "read"))
    publisher = context.Process(target=publish, args=(str(root), given.points, loaded, ended))
    stream = address.replace("http", "ws") + "/api/v1/stream"
    clients = context.Process(target=hear, args=(stream, reading, given.clients, "points", "loss/s0", other))
    await_service(address)
    publisher.start()
    with httpx.Client(base_url=address + "/api/v1", headers=headers, timeout=30) as api:
        await_state(api, "points", "RUNNING")
        clients.start()
        api.post("/runs", json=TRAINING_RUN).raise_for_status()
        await_state(api, "trained", "RUNNING")
        while not api.get("/runs/trained").json()["progress"][
            "updates"
        ]:  # from now on it does what it does all the time
            time.sleep(0.1)
        while f"steppe_stream_clients {given.clients}\n" not in httpx.get(f"{address}/metrics", headers=headers).text:
            assert clients.is_alive(), "the clients could not connect"
            time.sleep(0.2)
        time.sleep(2.0)
        who = {"service": service, "clients": clients.pid or 0}
        spells = [spell(who, loaded, given.seconds, quiet=number % 2 == 0) for number in range(2 * given.pairs + 1)]
        os.kill(service, signal.SIGCONT)
        end.send(None)
        delays = end.recv()
        ended.set()
    for process in (publisher, clients):
        process.join(30)
    return figures(given, root, spells, delays)


def await_service(address: str) -> None:
    while True:
        try:
            httpx.get(f"{address}/healthz", timeout=30).raise_for_status()
            return
        except httpx.ConnectError:
            time.sleep(0.1)


def await_state(api: httpx.Client, run: str, state: str) -> None:
    while (found := api.get(f"/runs/{run}").json()).get("state") != state:
        assert found.get("state") not in ("FAILED", "LOST"), found
        time.sleep(0.1)


class Spell(NamedTuple):
    """One of them: whether it was quiet, from when to when it counts, and the CPU time that each process took in it."""

    quiet: bool
    begin_s: float
    end_s: float
    cpu_s: dict[str, float]


def cpu_s(process: int) -> float:
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def spell(who: dict[str, int], loaded: Event, seconds: float, *, quiet: bool) -> Spell:
    loaded.clear() if quiet else loaded.set()
    if quiet:
        time.sleep(SETTLE_S / 2)  # what was posted last is delivered before everything is frozen
    os.kill(who["service"], signal.SIGSTOP if quiet else signal.SIGCONT)
    time.sleep(SETTLE_S)
    begin, before = time.time(), {name: cpu_s(process) for name, process in who.items()}
    time.sleep(seconds)
    return Spell(quiet, begin, time.time(), {name: cpu_s(process) - before[name] for name, process in who.items()})


def figures(given: argparse.Namespace, root: Path, spells: list[Spell], delays: Delays) -> dict[str, object]:
    rates = [rate(root / "trained", found.begin_s, found.end_s) for found in spells]
    busy = [found for found in spells if not found.quiet]
    busy_s = sum(found.end_s - found.begin_s for found in busy)
    slowed = [
        1 - rates[number] / statistics.mean((rates[number - 1], rates[number + 1]))
        for number in range(1, len(spells), 2)
    ]
    counted = [(found.begin_s, found.end_s - 1.0) for found in busy]  # the last second's may not be there yet
    took = np.array([took for posted, took in delays if any(begin <= posted <= end for begin, end in counted)])
    span_s = sum(end - begin for begin, end in counted)
    per_client = len(took) / given.clients / span_s * given.points / REPORTS_PER_S
    return {
        "value": 1e3 * float(np.percentile(took, 99)),
        "median_ms": 1e3 * float(np.median(took)),
        "slowed_percent": 100 * statistics.median(slowed),
        "points_per_s": per_client,
        "service_cores": sum(found.cpu_s["service"] for found in busy) / busy_s,
        "clients_cores": sum(found.cpu_s["clients"] for found in busy) / busy_s,
        "training_steps_per_s": statistics.median(rates[::2]),
        "settings": {"clients": given.clients, "points_per_s": given.points, "spells": len(spells)},
    }


if __name__ == "__main__":
    main()

"""The real `steppe serve` in a process of its own, and a client that holds its tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from steppe.control import process_host
from steppe.records.run_directory import RunDirectory
from steppe.records.view import ENDED
from tests.support.warm_host import Forked, WarmHost

PATIENCE_S = 180.0  # only bounds how long a failure takes
SERVE = "from steppe.cli.main import entry; entry()"
SHORT = {"env": "CartPole-v1", "mode": "sync", "actors": 1, "envs": 8, "steps": 4_000, "evaluation": {"episodes": 2}}
LONG = {  # sleeps most of the time: what is tested meanwhile needs the cores
    "env": "steppe/Sleep-v0", "environment": {"kwargs": {"delay_s": 0.002}}, "mode": "async", "actors": 2, "envs": 4,
    "steps": 500_000_000, "evaluation": {"episodes": 1, "every_steps": 50_000_000}, "flow": {"max_actors": 4},
    "agent": {"segment_steps": 32, "hidden": [8], "epochs": 1},
}  # fmt: skip
TABLE = {  # as long; it needs no torch, so it starts five times faster
    "env": "steppe/TicTacToe-v0", "algo": "q-learning", "mode": "workers", "runtime": "inline", "steps": 2_000_000_000,
}  # fmt: skip


class Served:
    """One life of the service after the other, over the same runs."""

    def __init__(
        self,
        root: Path,
        kafka: str | None = None,
        descriptors: int | None = None,
        prefix: str | None = None,
        host: WarmHost | None = None,
    ) -> None:
        """With `kafka`, runs go through that broker, by topics of their own unless a `prefix` is given; `descriptors` is a limit
        on open files. A fork of `host` serves, if there is one."""
        self.root, self.host = root, host
        self.before = ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh") if descriptors else ()
        self.options: tuple[str, ...] = ()
        self.environ = {"STEPPE_RUNS": str(root / "runs")}
        if kafka is not None:
            self.options = ("--kafka", kafka)
            prefix = prefix or f"t{uuid.uuid4().hex[:8]}."
            self.environ |= {"STEPPE_KAFKA__PREFIX": prefix, "STEPPE_KAFKA__PARTITIONS": "2"}
        self.process: subprocess.Popen[str] | Forked | None = None
        self.address = self.link = ""

    def start(self, *options: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}
        words = ["serve", "--port", "0", *self.options, *options]
        logs = Path(tempfile.mkdtemp(dir=self.root))
        if self.host is not None:
            self.process = self.host.start(words, environ | self.environ, self.root, logs)
        else:
            with (logs / "stdout").open("w") as out:
                self.process = subprocess.Popen(
                    [*self.before, sys.executable, "-c", SERVE, *words],
                    cwd=self.root,
                    env=environ | self.environ,
                    stdout=out,
                    text=True,
                )
        lines = until(lambda: self._told(logs / "stdout"), "the service says where it is")
        self.address, self.link = (line.rsplit(" ", 1)[1] for line in lines[:2])
        until(lambda: self.answers("/healthz"), "the service answers")

    def _told(self, out: Path) -> list[str] | None:
        """What the service has printed, once its address and a link are there."""
        assert self.process is not None
        lines = out.read_text().splitlines(keepends=True) if out.exists() else []
        found = [line.strip() for line in lines if line.endswith("\n")]
        assert self.process.poll() is None, found
        return found if len(found) >= 2 else None

    def answers(self, path: str) -> bool:
        try:
            return httpx.get(self.address + path, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._gone()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self._gone()

    def _gone(self) -> None:
        assert self.process is not None
        self.process.wait(PATIENCE_S)
        self.process = None

    def token(self, scope: str) -> str:
        return str(json.loads((self.root / "runs" / ".control" / "tokens.json").read_text())[scope])

    def client(self, scope: str | None = "admin") -> httpx.Client:
        headers = {} if scope is None else {"Authorization": f"Bearer {self.token(scope)}"}
        return httpx.Client(base_url=self.address, headers=headers, timeout=120)


def listen(served: Served, resume: str | None = None) -> ClientConnection:
    """The stream, from its snapshot or from where a client left off; it is read while the test does other things."""
    address = served.address.replace("http", "ws") + "/api/v1/stream" + (f"?resume={resume}" if resume else "")
    return connect(address, additional_headers={"Authorization": f"Bearer {served.token('read')}"}, max_queue=None)


def messages(socket: ClientConnection) -> Iterator[dict[str, Any]]:
    """What the stream says from now on."""
    while True:
        for line in str(socket.recv(PATIENCE_S)).splitlines():
            yield json.loads(line)


def bring_down(service: Served) -> None:
    """End the service and whatever it started."""
    if service.process is not None:
        service.stop()
    for record in (service.root / "runs").glob("*/run.json"):
        directory = RunDirectory(record.parent)
        process_host.kill_run_processes(directory.store.status())
        until(lambda store=directory.store: store.status().state in (*ENDED, "PENDING"), "the run is gone")
    clean_up(service.root / "runs")


def clean_up(runs: Path) -> None:
    """Remove what killed runs left in shared memory. Who is dying may hold its room a moment longer than its run."""
    names = [path.parent.name[:40] for path in runs.glob("*/run.json")]

    def gone() -> bool:
        process_host.remove_stale_shared_memory()
        return not [room for name in names for room in Path("/dev/shm").glob(f"steppe-{name}-*")]

    until(gone, "no room is left")


def until(holds: Callable[[], Any], what: str) -> Any:
    """Wait for something that is bound to come; what it is when it has."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.05)
    return found


def make(api: httpx.Client, request: dict[str, Any], **changes: Any) -> str:
    answer = api.post("/api/v1/runs", json={**request, **changes})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def run_of(api: httpx.Client, run: str) -> dict[str, Any]:
    answer = api.get(f"/api/v1/runs/{run}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def in_state(api: httpx.Client, run: str, *states: str) -> dict[str, Any]:
    def looked() -> dict[str, Any] | None:
        found = run_of(api, run)
        wrong = found["state"] in ENDED and found["state"] not in states
        assert not wrong, f"{found['state']}: {found['reason']} {found['message']}"
        return found if found["state"] in states else None

    return until(looked, f"{run} is {states}")


def learning(api: httpx.Client, run: str) -> dict[str, Any]:
    """Wait until a run has learned something."""
    in_state(api, run, "RUNNING")
    return until(lambda: found if (found := run_of(api, run))["progress"]["updates"] > 0 else None, f"{run} learns")


def finished(api: httpx.Client, answer: httpx.Response) -> dict[str, Any]:
    """The operation that an answer began, when it is finished."""
    assert answer.status_code == 202, answer.text
    body = answer.json()
    identity = (body.get("operation") or body)["id"]

    def looked() -> dict[str, Any] | None:
        found = api.get(f"/api/v1/operations/{identity}").json()
        return found if found["state"] != "pending" else None

    return until(looked, f"operation {identity}")

"""Memory of `steppe serve` while a run reports 1,000 points a second for hours, and a client listens. Run by control.py.

Time is simulated: what would be reported in an hour goes into the run's store as fast as it takes it. The service's memory is
looked at when all of an hour has reached the client.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from serving import SERVE, await_service
from websockets.sync.client import connect

from steppe.core.config.run import RunConfig
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import TRAINING
from steppe.records.run_directory import RunDirectory

CURVES = 50
HOUR = 20 * 3_600  # reports of so many points: 1,000 a second


def resident_mib(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Client(threading.Thread):
    """Reads everything; knows the newest step that it was told of."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(daemon=True)
        headers = {"Authorization": f"Bearer {token}"}
        self.socket = connect(address, additional_headers=headers, max_size=None, compression=None)
        self.step = 0

    def run(self) -> None:
        for text in self.socket:
            for message in map(json.loads, str(text).splitlines()):
                if message["type"] == "metrics":
                    self.step = max([self.step, *(point[0] for point in message["series"].get("train/updates", ()))])


def measure(root: Path, address: str, service: int, hours: int) -> dict[str, object]:
    directory = RunDirectory.create(RunConfig(env="CartPole-v1", run_dir=root / "lasting"), {})
    directory.store.set_status("RUNNING")
    token = json.loads((root / ".control" / "tokens.json").read_text())["read"]
    client = Client(address.replace("http", "ws") + "/api/v1/stream", token)
    client.start()
    seen: list[float] = []
    for step in range(1, hours * HOUR + 1):
        stats = {f"s{number}": float(step % 97) for number in range(CURVES - 3)}  # three come by themselves
        report = TrainingReport(run="lasting", version=step, updates=step, env_steps=step, train_s=step, stats=stats)
        directory.store.post(TRAINING, report.record())
        if step % 2_000 == 0:
            directory.store.heartbeat()
        if step % HOUR == 0:
            while client.step < step:  # until it has come through
                directory.store.heartbeat()
                time.sleep(0.2)
            seen.append(resident_mib(service))
    directory.store.set_status("SUCCEEDED")
    directory.release()
    client.socket.close()
    half_mib = seen[hours // 2 - 1]
    return {
        "value": seen[-1],
        "first_mib": seen[0],
        "half_mib": half_mib,
        "most_mib": max(seen),
        "growth_percent": 100 * (seen[-1] / half_mib - 1),
        "settings": {"hours": hours, "points": hours * HOUR * CURVES},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=int, default=24)
    given = parser.parse_args()
    root = Path(os.environ["STEPPE_RUNS"])
    service = subprocess.Popen([sys.executable, "-c", SERVE, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    address = service.stdout.readline().rsplit(" ", 1)[1].strip()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    try:
        await_service(address)
        print(json.dumps(measure(root, address, service.pid, given.hours)))
    finally:
        service.terminate()
        service.wait(30)


if __name__ == "__main__":
    main()

"""Two machines (network namespaces) with a cut between them that heals, and servers killed with -9 at random moments."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from steppe import ParameterClient
from steppe.params.privacy import PrivacyLedger
from steppe.params.rpc.protocol import Tls

pytestmark = pytest.mark.integration

TOKEN = "a token for these tests"
SERVER = """
import sys
from pathlib import Path
import numpy as np
from steppe import ParameterServer
from steppe.params.optimizers import Optimizer
from steppe.params.rpc.protocol import Tls
path, host, port, certificate, key = sys.argv[1:]
server = ParameterServer({"w": np.zeros(2000, np.float32)}, update_frequency=1, save_frequency=1, checkpoint_path=path,
                         optimizer=Optimizer("sgd", 1.0))
if Path(path).exists():
    server.load_checkpoint(path)
tls = Tls(certificate, key) if certificate else None
print(server.start_server(host, int(port), token="a token for these tests", tls=tls), flush=True)
sys.stdin.read()
server.close()
"""
WORKER = """
import sys
import numpy as np
from steppe import ParameterClient
url, ca, name, times = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
client = ParameterClient(url, ca=ca, token="a token for these tests", timeout_s=1.0, retry_s=120.0)
client.register_worker(name)
for number in range(times):
    assert client.push_gradients(name, {"w": np.ones(2000, np.float32)})
    print(number, flush=True)
print(int(client.pull(name).arrays()["w"][0]), flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Network namespaces with a cable between them: 10.99.0.1 in the first, 10.99.0.2 in the second."""
    if os.geteuid() != 0:
        pytest.skip("making network namespaces takes root")
    mark = f"steppe{os.getpid()}"
    names = (f"{mark}a", f"{mark}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            f"{mark}x"[-15:],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            f"{mark}y"[-15:],
            "netns",
            names[1],
        )
        for number, (name, cable) in enumerate(zip(names, (f"{mark}x"[-15:], f"{mark}y"[-15:]), strict=True), 1):
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def inside(namespace: str, script: str, *words: object) -> subprocess.Popen[str]:
    given = ["ip", "netns", "exec", namespace, sys.executable, "-c", script, *map(str, words)]
    return subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_cut_between_two_machines_heals(tmp_path: Path, tls: Tls) -> None:
    with two_machines() as (here, there):
        server = inside(here, SERVER, tmp_path / "server.ckpt", "10.99.0.1", 0, tls.certificate, tls.key)
        port = int(server.stdout.readline())
        worker = inside(there, WORKER, f"grpcs://10.99.0.1:{port}", tls.certificate, "far", 60)
        cable = f"steppe{os.getpid()}x"[-15:]
        for line in worker.stdout:
            if int(line) == 20:
                break
        ip("-n", here, "link", "set", cable, "down")
        time.sleep(1.5)  # longer than a call may take: what was under way fails
        ip("-n", here, "link", "set", cable, "up")
        rest = worker.communicate(timeout=120)[0].split()
        server.communicate("", timeout=60)
    assert worker.returncode == 0
    assert rest[-2:] == ["59", "-60"], "every push counted, and once"


def launch(script: str, *words: object) -> tuple[subprocess.Popen[str], int]:
    given = [sys.executable, "-c", script, *map(str, words)]
    process = subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_server_killed_at_random_moments_applies_every_push_once(tmp_path: Path, seed: int) -> None:
    """Three workers push meanwhile; in the end every parameter is minus the number of pushes."""
    stream, path = random.Random(seed), tmp_path / "server.ckpt"
    process, port = launch(SERVER, path, "localhost", 0, "", "")
    pushed, failures = threading.Semaphore(0), []

    def work(name: str) -> None:
        with ParameterClient(f"grpc://localhost:{port}", token=TOKEN, retry_s=120.0) as client:
            client.register_worker(name)
            for _ in range(40):
                receipt = client.push_gradients(name, {"w": np.ones(2000, np.float32)})
                failures.extend([] if receipt else [receipt])
                pushed.release()

    workers = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(3)]
    for worker in workers:
        worker.start()
    for _ in range(3):
        for _ in range(stream.randrange(5, 25)):
            pushed.acquire(timeout=120.0)
        time.sleep(stream.uniform(0.0, 0.02))  # anywhere within a push, its checkpoint or its answer
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process, _ = launch(SERVER, path, "localhost", port, "", "")
    for worker in workers:
        worker.join()
    with ParameterClient(f"grpc://localhost:{port}", token=TOKEN) as client:
        client.register_worker("reader")
        found = client.get_parameters("reader")["w"]
        accepted = client.get_server_stats()["accepted_pushes"]
    process.communicate("")
    assert not failures
    assert accepted == 120
    np.testing.assert_array_equal(found, np.full(2000, -120.0))


PRIVATE = """
import json, sys
from pathlib import Path
import numpy as np
from steppe import FederatedParameterServer
from steppe.params.privacy import PrivacyPlan
path, ledger, port, tokens = sys.argv[1:]
plan = PrivacyPlan(ledger, epsilon=1e6, expected_clients=2)
server = FederatedParameterServer({"w": np.zeros(50)}, 2, True, 1.0, checkpoint_path=path, privacy=plan, deadline_s=30.0)
if Path(path).exists():
    server.load_checkpoint(path)
print(server.start_server(port=int(port), token=json.loads(tokens)), flush=True)
sys.stdin.read()
server.close()
"""


@pytest.mark.slow
def test_the_ledger_survives_kills_and_never_counts_less_than_was_released(tmp_path: Path) -> None:
    stream, path, ledger = random.Random(3), tmp_path / "server.ckpt", tmp_path / "ledger.json"
    tokens = {name: f"the token of worker {name}" for name in "ab"}
    process, port = launch(PRIVATE, path, ledger, 0, json.dumps(tokens))
    seen, ending, failures = [0], threading.Event(), []

    def work(name: str) -> None:
        with ParameterClient(f"grpc://localhost:{port}", token=tokens[name], retry_s=120.0) as client:
            client.register_worker(name)
            while not ending.is_set():
                receipt = client.push_gradients(name, {"w": np.full(50, 0.1, np.float32)})
                if not receipt and receipt.reason not in ("pushed_twice", "stale_round"):
                    failures.append(receipt)
                seen[0] = max(seen[0], client.pull(name).version)
            client.unregister_worker(name)

    workers = [threading.Thread(target=work, args=(name,)) for name in tokens]
    for worker in workers:
        worker.start()
    charges = 0
    for _ in range(3):
        goal, until = seen[0] + 3, time.monotonic() + 120.0
        while seen[0] < goal and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(stream.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        found = PrivacyLedger(ledger)
        assert found.count >= charges, "what was spent is never forgotten"
        assert found.count >= seen[0], "every version that anyone saw was paid for before"
        charges = found.count
        found.close()
        process, _ = launch(PRIVATE, path, ledger, port, json.dumps(tokens))
    ending.set()
    for worker in workers:
        worker.join()
    process.communicate("")
    assert not failures

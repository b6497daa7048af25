"""The server in shared memory: other processes push and pull, are killed, and find a server that was killed again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from steppe import FederatedParameterServer, ParameterClient, ParameterServer
from steppe.core.contracts.errors import ConfigError, Conflict, Unreachable, UsageError
from steppe.core.system.shared_dir import Wakeup
from steppe.params.optimizers import Optimizer
from steppe.params.privacy import PrivacyPlan
from steppe.params.rounds import Rounds
from steppe.params.rpc import shm_server
from steppe.params.rpc.shm_server import RequestSlot, SharedParameters
from tests.support.commands import wait_until

pytestmark = pytest.mark.integration


def params() -> dict[str, np.ndarray]:
    return {"w": np.zeros(4, np.float32), "b": np.zeros((2, 3), np.float64), "n": np.array([3])}


def step_of(value: float = 1.0) -> dict[str, np.ndarray]:
    return {"w": np.full(4, value, np.float32), "b": np.full((2, 3), value)}


@contextlib.contextmanager
def sharing(directory: Path | None = None, **given) -> Iterator[tuple[ParameterServer, str]]:
    settings = {"update_frequency": 1, "optimizer": Optimizer("sgd", 1.0), **given}
    server = ParameterServer(params(), **settings)
    url = server.share(directory)
    try:
        yield server, url
    finally:
        server.close()


def test_a_client_does_what_the_server_does(tmp_path: Path) -> None:
    with sharing(checkpoint_path=tmp_path / "server.ckpt") as (server, url), ParameterClient(url) as client:
        assert client.is_serving()
        assert client.register_worker("a")
        assert not client.register_worker("a")
        assert client.get_parameters("a")["n"].tolist() == [3]
        receipt = client.push_gradients("a", step_of())
        assert (receipt.accepted, receipt.version) == (True, 1)
        found = client.pull("a")
        assert found.version == 1
        assert found.sha256() == server.weights().sha256()
        assert client.pull_newer("a", 1) is None
        assert client.newer_than("policy", 0).sha256() == found.sha256()
        assert client.wait_newer("a", 1, 0.0) is None
        assert client.push_gradients("a", {"w": np.ones(5, np.float32)}).reason == "wrong_shape"
        assert client.push_gradients("a", step_of(np.nan)).reason == "not_finite"
        assert client.push_row("a", np.full(10, np.inf, np.float32)).reason == "not_finite"
        assert client.push_row("a", np.ones(9, np.float32)).reason == "wrong_shape"
        assert client.push_row("a", np.ones(10, np.float32))
        np.testing.assert_array_equal(client.get_parameters("a")["b"], np.full((2, 3), -2.0))
        assert client.push_gradients("a", {"w": np.ones(4, np.float32)})
        np.testing.assert_array_equal(client.get_parameters("a")["b"], np.full((2, 3), -2.0))
        client.report("a", {"return": 12.5})
        assert client.get_server_stats() == server.get_server_stats()
        assert server.get_server_stats()["refused_pushes"] == {"wrong_shape": 2, "not_finite": 2}
        assert server.get_server_stats()["workers"]["a"]["metrics"] == {"return": 12.5}
        assert client.save_checkpoint() == str(tmp_path / "server.ckpt")
        assert client.unregister_worker("a")
        with pytest.raises(UsageError, match="register_worker first"):
            client.push_gradients("a", step_of())
        with pytest.raises(UsageError, match="shared already"):
            server.share()
    assert not Path(url.removeprefix("shm://")).exists()


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("pushes", [1, 3])
def test_the_numbers_are_those_of_a_server_in_this_process(optimizer: str, pushes: int) -> None:
    stream = np.random.default_rng(0)
    plain = ParameterServer(params(), update_frequency=pushes, optimizer=optimizer)
    plain.register_worker("a")
    with sharing(update_frequency=pushes, optimizer=optimizer) as (_, url), ParameterClient(url) as client:
        client.register_worker("a")
        for _ in range(12):
            update = {"w": stream.standard_normal(4).astype(np.float32), "b": stream.standard_normal((2, 3))}
            assert plain.push_gradients("a", update)
            assert client.push_gradients("a", update)
        assert client.pull("a").version == 12 // pushes
        assert client.pull("a").sha256() == plain.weights().sha256()


def test_staleness_is_counted_by_what_each_client_pulled() -> None:
    with (
        sharing(rounds=Rounds(damping=1.0, max_staleness=2)) as (server, url),
        ParameterClient(url) as one,
        ParameterClient(url) as two,
    ):
        one.register_worker("a")
        two.register_worker("b")
        for _ in range(2):
            assert one.push_gradients("a", step_of())
            one.pull("a")
        assert two.push_gradients("b", step_of())  # made with version 0: counts a third
        np.testing.assert_allclose(one.get_parameters("a")["b"], -2.0 - 1.0 / 3.0, rtol=1e-6)
        assert two.push_gradients("b", step_of()).reason == "too_stale"
        two.pull("b")
        assert two.push_gradients("b", step_of())
        assert server.get_server_stats()["staleness"] == {0: 3, 2: 1}


def test_numbers_are_summed_over_workers() -> None:
    rounds = Rounds(synchronous=True)
    with sharing(rounds=rounds, update_frequency=2) as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        assert client.about("a")["supports_sums"]
        server.register_worker("b")
        assert client.sum_over_workers("a", 0, [3, 0.25]) == (0, None)
        assert (
            server.sum_over_workers("b", 0, [1.0, 0.5])
            == client.sum_over_workers("a", 0, [3, 0.25])
            == (0, [4.0, 0.75])
        )


def test_by_steps_nothing_happens_until_it_is_called() -> None:
    server = ParameterServer(params(), update_frequency=1)
    url = server.share(by_steps=True)
    assert not server.serve_step()
    done = threading.Event()

    def ask() -> None:
        with ParameterClient(url) as client:
            client.register_worker("a")
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    while not done.is_set():
        server.serve_step(0.05)
    asking.join()
    assert server.get_server_stats()["num_workers"] == 1
    server.close()
    with pytest.raises(UsageError, match="nothing to serve"):
        server.serve_step()


def test_what_cannot_be_shared_says_so(tmp_path: Path) -> None:
    plan = PrivacyPlan(tmp_path / "ledger.json", epsilon=100.0, expected_clients=2)
    private = FederatedParameterServer({"w": np.zeros(4)}, differential_privacy=True, privacy=plan)
    with pytest.raises(ConfigError, match="has to know who pushes"):
        private.share()
    private.close()
    with sharing(tmp_path / "shared") as (_, url), pytest.raises(Conflict, match="another parameter server"):
        ParameterServer(params()).share(tmp_path / "shared")
    with pytest.raises(ConfigError, match="token and ca are for"):
        ParameterClient(url, token="x")
    with ParameterClient(url, retry_s=0.0) as client:
        assert not client.is_serving()
        with pytest.raises(Unreachable, match="is it running"):
            client.register_worker("a")
    assert list((tmp_path / "shared").iterdir()) == [tmp_path / "shared" / "owner"]


def test_malformed_slots_and_wakeups_are_ignored(tmp_path: Path) -> None:
    with sharing(tmp_path / "shared") as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        (path,) = (tmp_path / "shared").glob("seat-*")
        number = int(path.name.removeprefix("seat-"), 16)
        wakeup = Wakeup(tmp_path / "shared" / "bell")
        (tmp_path / "shared" / shm_server.slot_name(7)).write_bytes(b"short")
        wakeup.ring((7).to_bytes(8, "little"))
        wakeup.ring((9).to_bytes(8, "little"))
        slot = RequestSlot(path, server.num_parameters)
        for data in (b"", b"\xc1garbage", b"\x92\xa4Push\x01", b"\x91\xa8Shutdown"):
            slot.put(data, shm_server.REQUESTED)
            wakeup.ring(number.to_bytes(8, "little"))
            wait_until(lambda: slot.words[shm_server.STATE] == shm_server.REPLIED)
        wakeup.ring(number.to_bytes(8, "little"))  # without a request
        assert client.push_gradients("a", step_of())
        wakeup.close()


def test_requests_and_replies_are_those_of_the_first_version(tmp_path: Path) -> None:
    """Shared memory kept its names when those in the code changed: requests as Steppe 0.1.0 wrote them."""
    rounds = Rounds(synchronous=True)
    with (
        sharing(tmp_path / "shared", rounds=rounds, update_frequency=2) as (server, url),
        ParameterClient(url) as client,
    ):
        client.register_worker("a")
        (path,) = (tmp_path / "shared").glob("seat-*")
        slot = RequestSlot(path, server.num_parameters)
        wakeup = Wakeup(tmp_path / "shared" / "bell")

        def request(*words: object) -> object:
            slot.put(msgspec.msgpack.encode(words), shm_server.REQUESTED)
            wakeup.ring(int(path.name.removeprefix("seat-"), 16).to_bytes(8, "little"))
            wait_until(lambda: slot.words[shm_server.STATE] == shm_server.REPLIED)
            return msgspec.msgpack.decode(slot.get())

        kind, reply = request("Register", "b", 1.0, None, None, None, {}, [])
        assert kind == "ok"
        assert (reply["tallies"], reply["weighs"], reply["last"]) == (True, False, -1)
        assert request("Tally", "a", 1.0, 0, None, None, {}, [1.5])[1] == {"round_number": 0, "total": None}
        assert request("Tally", "b", 1.0, 0, None, None, {}, [2.0])[1] == {"round_number": 0, "total": [3.5]}
        assert request("Stats")[1]["num_workers"] == 2
        assert request("Unregister", "b")[1] == {"was": True}
        wakeup.close()


def test_a_long_reply_is_written_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing() as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        for number in range(1500):
            server.register_worker(f"a worker with a rather long name, number {number}")
        assert client.get_server_stats() == server.get_server_stats()


def test_a_reader_never_sees_half_a_version() -> None:
    """Every parameter is minus the version; readers copy while the server continues."""
    size = 100_000
    server = ParameterServer({"w": np.zeros(size, np.float32)}, update_frequency=1, optimizer=Optimizer("sgd", 1.0))
    url, torn, ending = server.share(), [], threading.Event()

    def read() -> None:
        with ParameterClient(url) as client:
            version = -1
            while not ending.is_set():
                found = client.newer_than("policy", version)
                if found is not None:
                    version = found.version
                    array = found.arrays()["w"]
                    torn.extend([] if (array == -version).all() else [version])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    with ParameterClient(url) as client:
        client.register_worker("a")
        for _ in range(200):
            assert client.push_row("a", np.ones(size, np.float32))
    ending.set()
    for reader in readers:
        reader.join()
    server.close()
    assert not torn


def test_a_copy_is_made_again_when_two_versions_came_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing(tmp_path / "shared") as (server, _):
        server.register_worker("a")
        memory = SharedParameters(tmp_path / "shared" / "parameters")
        real, pushes = memory.space.weights, iter([2, 1])

        def meanwhile(*given: object) -> object:
            found = real(*given)
            for _ in range(next(pushes)):
                server.push_gradients("a", step_of())
            return found

        monkeypatch.setattr(memory.space, "weights", meanwhile)
        assert memory.newest().version == 2  # the first copy was thrown away, the second one kept


WORKER = """
import sys
import numpy as np
from steppe import ParameterClient
client = ParameterClient(sys.argv[1])
name, times = sys.argv[2], int(sys.argv[3])
client.register_worker(name)
for _ in range(times):
    assert client.push_gradients(name, {"w": np.ones(4, np.float32), "b": np.ones((2, 3))})
print(client.pull(name).version, flush=True)
if times == 1:
    sys.stdin.read()
client.close()
"""


def start(script: str, *words: object) -> subprocess.Popen[str]:
    given = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_push_together() -> None:
    with sharing() as (server, url):
        workers = [start(WORKER, url, f"w{number}", 50) for number in range(3)]
        assert [worker.communicate()[0] != "" for worker in workers] == [True] * 3
        assert server.version == 150
        np.testing.assert_array_equal(server.weights().arrays()["w"], np.full(4, -150.0))


def test_a_worker_that_is_killed_leaves_the_others_working(tmp_path: Path) -> None:
    rounds = Rounds(synchronous=True, quorum=1, deadline_s=0.3)
    with (
        sharing(tmp_path / "shared", rounds=rounds, update_frequency=9) as (server, url),
        ParameterClient(url) as client,
    ):
        client.register_worker("a")
        worker = start(WORKER, url, "mortal", 1)
        assert worker.stdout.readline()
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        version = client.pull("a").version
        while not client.push_gradients("a", step_of()):
            client.pull("a")  # the round may end under it
        assert client.wait_newer("a", version, 60.0).version > version
        with ParameterClient(url) as another:  # whose slot makes the server look for empty ones
            another.register_worker("b")
            assert len(list((tmp_path / "shared").glob("seat-*"))) == 2
        assert server.get_server_stats()["abandoned_rounds"] == 0


SERVER = """
import sys
from pathlib import Path
import numpy as np
from steppe import ParameterServer
from steppe.params.optimizers import Optimizer
path, directory = Path(sys.argv[1]), sys.argv[2]
params = {"w": np.zeros(4, np.float32), "b": np.zeros((2, 3)), "n": np.array([3])}
server = ParameterServer(params, update_frequency=1, save_frequency=1, checkpoint_path=path, optimizer=Optimizer("sgd", 1.0))
if path.exists():
    server.load_checkpoint(path)
print(server.share(directory), flush=True)
sys.stdin.read()
server.close()
"""


def test_a_server_killed_and_restarted_applies_every_push_once(tmp_path: Path) -> None:
    path, directory = tmp_path / "server.ckpt", tmp_path / "shared"
    process = start(SERVER, path, directory)
    url = process.stdout.readline().strip()
    client = ParameterClient(url, retry_s=120.0)
    client.register_worker("a")
    marks, failures = {20: threading.Event(), 40: threading.Event()}, []

    def push() -> None:
        for number in range(60):
            if number in marks:
                marks[number].set()
            receipt = client.push_gradients("a", step_of())
            failures.extend([] if receipt else [receipt])

    pusher = threading.Thread(target=push)
    pusher.start()
    for mark in marks.values():
        mark.wait(120.0)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = start(SERVER, path, directory)
        assert process.stdout.readline().strip() == url
    pusher.join()
    assert not failures
    assert client.get_parameters("a")["w"].tolist() == [-60.0] * 4
    client.close()
    process.communicate("")


def test_a_checkpoint_is_loaded_while_clients_are_connected(tmp_path: Path) -> None:
    with sharing(checkpoint_path=tmp_path / "server.ckpt") as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        client.push_gradients("a", step_of())
        server.save_checkpoint()
        for _ in range(3):
            client.push_gradients("a", step_of())
        assert client.pull("a").version == 4
        server.load_checkpoint(tmp_path / "server.ckpt")
        assert client.pull("a").version == 1
        assert client.push_gradients("a", step_of(), round_number=9)
        assert client.get_parameters("a")["w"].tolist() == [-2.0] * 4

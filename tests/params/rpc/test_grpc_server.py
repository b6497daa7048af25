"""The network service with real clients: TLS, tokens, limits, lost answers, dead workers, a server killed and restarted."""

from __future__ import annotations

import contextlib
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe import FederatedParameterServer, ParameterClient, ParameterServer
from steppe.core.contracts.errors import ConfigError, DamagedFile, Unreachable, UsageError
from steppe.core.io.codec import pack, unpack
from steppe.params.optimizers import Optimizer
from steppe.params.privacy import PrivacyPlan
from steppe.params.rounds import Receipt, Rounds
from steppe.params.rpc import calls, grpc_server, protocol
from steppe.params.rpc.protocol import Tls

pytestmark = pytest.mark.integration

TOKEN = "a token for these tests"


def ones(size: int = 4, value: float = 1.0) -> dict[str, np.ndarray]:
    return {"w": np.full(size, value, np.float32)}


@contextlib.contextmanager
def serving(size: int = 4, *, token=None, tls=None, **given) -> Iterator[tuple[ParameterServer, str]]:
    server = ParameterServer(
        {"w": np.zeros(size, np.float32), "n": np.array([3])},
        **{"update_frequency": 1, "optimizer": Optimizer("sgd", 1.0), **given},
    )
    port = server.start_server(port=0, token=token, tls=tls)
    try:
        yield server, f"grpc{'s' if tls else ''}://localhost:{port}"
    finally:
        server.close()


def test_a_client_does_what_the_server_does(tmp_path: Path) -> None:
    with serving(checkpoint_path=tmp_path / "server.ckpt") as (server, url), ParameterClient(url) as client:
        assert client.is_serving()
        assert client.register_worker("a")
        assert not client.register_worker("a")
        assert client.get_parameters("a")["n"].tolist() == [3]
        receipt = client.push_gradients("a", ones())
        assert (receipt.accepted, receipt.version) == (True, 1)
        found = client.pull("a")
        assert found.version == 1
        assert found.sha256() == server.weights().sha256()
        assert found.arrays()["w"].tolist() == [-1.0] * 4
        assert client.pull_newer("a", 1) is None
        assert client.wait_newer("a", 1, 0.0) is None
        assert client.push_gradients("a", ones(5)).reason == "wrong_shape"
        assert client.push_gradients("a", ones(value=np.nan)).reason == "not_finite"
        assert client.get_server_stats() == server.get_server_stats()
        assert client.save_checkpoint() == str(tmp_path / "server.ckpt")
        assert client.unregister_worker("a")
        with pytest.raises(UsageError, match="register_worker first"):
            client.push_gradients("a", ones())
        with pytest.raises(UsageError, match="is not registered"):
            client.pull("a")
        with pytest.raises(UsageError, match="listens on port"):
            server.start_server(port=0)
    assert not (tmp_path / "home" / "params").exists() or not list((tmp_path / "home" / "params").iterdir())


def test_synchronous_rounds_over_the_network() -> None:
    rounds = Rounds(synchronous=True)
    with (
        serving(rounds=rounds, update_frequency=2) as (server, url),
        ParameterClient(url) as one,
        ParameterClient(url) as two,
    ):
        one.register_worker("a")
        two.register_worker("b")
        for number in range(3):
            assert one.push_gradients("a", ones())
            assert one.push_gradients("a", ones()).reason == "pushed_twice"
            assert two.push_gradients("b", ones())
            assert one.wait_newer("a", number, 60.0).version == number + 1
        two.pull("b")
        assert server.get_server_stats()["accepted_pushes"] == 6


def test_a_pull_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that ends meanwhile is in both, the weights and the round that come with them, or in neither."""
    with serving(rounds=Rounds(synchronous=True)) as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        pushing, pull = threading.Thread(target=lambda: server.push_gradients("a", ones())), server.pull

        def meanwhile(worker: str) -> object:
            pushing.start()
            pushing.join(0.3)  # it cannot end before this pull has
            return pull(worker)

        monkeypatch.setattr(server, "pull", meanwhile)
        assert client.pull("a").version == client.about("a")["round_number"] == 0
        pushing.join()
        assert server.version == server.round_number == 1


def test_workers_count_together_over_the_network() -> None:
    with (
        serving(rounds=Rounds(synchronous=True), update_frequency=2) as (_, url),
        ParameterClient(url) as one,
        ParameterClient(url) as two,
    ):
        one.register_worker("a")
        two.register_worker("b")
        assert one.about("a")["tallies"]
        assert one.tally("a", 0, [3, 0.25]) == (0, None)
        assert two.tally("b", 0, [1, 1e-9]) == (0, [4.0, 0.25 + 1e-9])
        assert one.tally("a", 0, [3, 0.25]) == (0, [4.0, 0.25 + 1e-9])
        with pytest.raises(UsageError, match="finite numbers"):
            one.tally("a", 0, [float("nan")])


def test_the_token_is_left_for_the_same_user_and_no_one_else(tmp_path: Path) -> None:
    with serving() as (_, url):
        path = protocol.token_file(int(url.rpartition(":")[2]))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


def test_a_bad_token_is_refused_and_counted() -> None:
    with serving(token=TOKEN) as (server, url):
        for wrong in ("something else here", None):
            with ParameterClient(url, token=wrong) as client, pytest.raises(UsageError, match="wrong or missing token"):
                client.register_worker("a")
        with ParameterClient(url, token=TOKEN) as client:
            assert client.register_worker("a")
        assert server.get_server_stats()["refused_calls"] == {"bad_token": 2}


def test_a_workers_token_speaks_for_no_other() -> None:
    tokens = {"a": "the token of worker a", "b": "the token of worker b"}
    with serving(token=tokens) as (server, url), ParameterClient(url, token=tokens["a"]) as client:
        assert client.register_worker("a")
        with pytest.raises(UsageError, match="another worker's"):
            client.register_worker("b")
        assert server.get_server_stats()["refused_calls"] == {"not_yours": 1}


def test_a_private_server_serves_only_clients_it_can_tell_apart(tmp_path: Path) -> None:
    plan = PrivacyPlan(tmp_path / "ledger.json", epsilon=100.0, expected_clients=2)
    server = FederatedParameterServer({"w": np.zeros(4)}, differential_privacy=True, privacy=plan)
    tokens = {"a": "the token of worker a", "b": "the token of worker b"}
    with pytest.raises(ConfigError, match="one for each client"):
        server.start_server(port=0, token=TOKEN)
    url = f"grpc://localhost:{server.start_server(port=0, token=tokens)}"
    for name in tokens:
        with ParameterClient(url, token=tokens[name]) as client:
            client.register_worker(name)
    for name in tokens:
        with ParameterClient(url, token=tokens[name]) as client:
            client.register_worker(name)
            assert client.push_gradients(name, ones())
    assert server.version == 1
    server.close()


def test_tls(tls: Tls, stranger: Tls) -> None:
    with serving(tls=tls) as (_, url):
        with ParameterClient(url, ca=tls.certificate) as client:
            assert client.register_worker("a")
            assert client.push_gradients("a", ones())
        with (
            ParameterClient(url, ca=stranger.certificate, retry_s=0.0) as client,
            pytest.raises(Unreachable),
        ):
            client.register_worker("b")
        with ParameterClient(url.replace("grpcs", "grpc"), retry_s=0.0) as client, pytest.raises(Unreachable):
            client.register_worker("b")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "reached by other machines"),
        ({"host": "0.0.0.0", "token": TOKEN}, "reached by other machines"),
        ({"token": "short"}, "at least 16"),
        ({"token": {"a": TOKEN, "b": TOKEN}}, "no two workers"),
        ({"tls": Tls("absent.pem", "absent.key")}, "absent.key cannot be read"),
    ],
)
def test_what_protects_nothing_does_not_start(settings: dict, words: str) -> None:
    server = ParameterServer({"w": np.zeros(2)})
    with pytest.raises(ConfigError, match=words):
        server.start_server(**{"port": 0, **settings})


def test_a_port_in_use_is_one_sentence() -> None:
    with serving() as (_, url):
        other = ParameterServer({"w": np.zeros(2)})
        with pytest.raises(UsageError, match="is the port in use"):
            other.start_server(port=int(url.rpartition(":")[2]))


@pytest.mark.parametrize("url", ["localhost:1", "http://localhost:1", "grpc://localhost", "grpc://localhost:x"])
def test_wrong_addresses(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        ParameterClient(url)


def test_garbage_and_too_much_are_refused_and_the_server_goes_on() -> None:
    with serving(token=TOKEN) as (server, url):
        channel = grpc.insecure_channel(url.removeprefix("grpc://"), [("grpc.max_send_message_length", -1)])
        metadata = [("authorization", f"Bearer {TOKEN}")]
        trees = ([1], {"worker": 3}, {"worker": "a", "path": "/etc/passwd"})
        for data in (b"", b"garbage", *(pack(tree, sealed=False) for tree in trees), pack({"worker": "a"})):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(protocol.method_path("Register"))(data, metadata=metadata, timeout=120)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(protocol.method_path("Push"))(
                bytes(protocol.SLACK + 100), metadata=metadata, timeout=120
            )
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(protocol.method_path("Shutdown"))(b"", metadata=metadata, timeout=120)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        channel.close()
        assert server.get_server_stats()["refused_calls"] == {"garbage": 6}
        with ParameterClient(url, token=TOKEN) as client:
            assert client.register_worker("a")
            assert client.push_gradients("a", ones(400_000)).reason == "wrong_shape"
            assert client.push_gradients("a", ones())
        assert server.get_server_stats()["refused_pushes"] == {"wrong_shape": 1}


BIG = 400_000  # numbers: more than one part


@pytest.mark.parametrize("pushes", [1, 2])
def test_a_long_row_comes_in_parts(pushes: int) -> None:
    stream = np.random.default_rng(0)
    updates = [{"w": stream.standard_normal(BIG).astype(np.float32)} for _ in range(4)]
    with serving(size=BIG, update_frequency=pushes) as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        for update in updates:
            assert client.push_gradients("a", update)
        assert client.push_gradients("a", ones(BIG, np.inf)).reason == "not_finite"
        expected = -sum(update["w"].astype(np.float64) for update in updates) / pushes
        np.testing.assert_allclose(client.get_parameters("a")["w"], expected, rtol=1e-5, atol=1e-5)
        assert server.version == 4 // pushes


def test_parts_that_are_no_row_are_refused_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    header = pack({**push_of(row=None, version=None)}, sealed=False)
    whole = bytes(4 * BIG)
    wrong = [
        [],
        [b"garbage"],
        [header],
        [header, whole, b"more"],
        [header, whole[:-4]],
        [header, b"abc"],
        [header, whole * 2],
    ]
    with serving(size=BIG, token=TOKEN) as (server, url):
        channel = grpc.insecure_channel(url.removeprefix("grpc://"), [("grpc.max_send_message_length", -1)])
        push = channel.stream_unary(protocol.method_path("PushRow"))
        metadata = [("authorization", f"Bearer {TOKEN}")]
        for parts in wrong:
            with pytest.raises(grpc.RpcError) as caught:
                push(iter(parts), metadata=metadata, timeout=120)
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        with pytest.raises(grpc.RpcError) as caught:
            push(iter([header, whole]), timeout=120)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        channel.close()
        assert server.version == 0
        with ParameterClient(url, token=TOKEN) as client:
            client.register_worker("a")
            assert client.push_gradients("a", ones(BIG))


def test_an_answer_that_is_lost_makes_no_second_push(monkeypatch: pytest.MonkeyPatch) -> None:
    real, losses = grpc_server.GrpcServer.answer, iter([True, True, False])

    def losing(self, method, data, context, rest=None) -> bytes:
        answer = real(self, method, data, context, rest)
        if method == "Push" and next(losses):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return answer

    monkeypatch.setattr(grpc_server.GrpcServer, "answer", losing)
    with serving() as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        assert client.push_gradients("a", ones())
        assert server.version == 1
        assert server.get_server_stats()["refused_pushes"] == {"pushed_twice": 2}


def test_too_much_at_once_is_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "THREADS", 1)
    monkeypatch.setattr(grpc_server, "WAITING_BYTES", 1)  # one call at a time
    with serving() as (server, url):
        push_from_many(url, workers=8, pushes=5)
        assert server.version == 40


def test_sixty_four_workers() -> None:
    with serving(size=25_000) as (server, url):
        push_from_many(url, workers=64, pushes=2, size=25_000)
        assert server.version == 128
        np.testing.assert_array_equal(server.weights().arrays()["w"], np.full(25_000, -128.0))


def push_from_many(url: str, workers: int, pushes: int, size: int = 4) -> None:
    failures: list[object] = []

    def work(name: str) -> None:
        try:
            with ParameterClient(url) as client:
                client.register_worker(name)
                failures.extend(r for r in (client.push_gradients(name, ones(size)) for _ in range(pushes)) if not r)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


SERVER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from steppe import ParameterServer
from steppe.params.optimizers import Optimizer
path, port, dies = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

class Mortal(ParameterServer):
    def save_checkpoint(self, given=None):
        if dies == "before" and self.version == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        found = super().save_checkpoint(given)
        if dies == "after" and self.version == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

server = Mortal({"w": np.zeros(4, np.float32)}, update_frequency=1, save_frequency=1, checkpoint_path=path,
                         optimizer=Optimizer("sgd", 1.0))
if path.exists():
    server.load_checkpoint(path)
print(server.start_server(port=port, token="a token for these tests"), flush=True)
sys.stdin.read()
server.close()
"""


def launch(path: Path, port: int, dies: str = "never") -> tuple[subprocess.Popen[str], int]:
    words = [sys.executable, "-c", SERVER, str(path), str(port), dies]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def test_a_server_killed_and_restarted_applies_every_push_once(tmp_path: Path) -> None:
    """Pushes go on while the server is killed with -9; in the end the parameters are minus the number of pushes."""
    path = tmp_path / "server.ckpt"
    process, port = launch(path, 0)
    client = ParameterClient(f"grpc://localhost:{port}", token=TOKEN, retry_s=120.0)
    client.register_worker("a")
    half, failures = threading.Event(), []

    def push() -> None:
        for number in range(60):
            if number == 20:
                half.set()
            receipt = client.push_gradients("a", ones())
            failures.extend([] if receipt else [receipt])

    pusher = threading.Thread(target=push)
    pusher.start()
    half.wait(120.0)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process, _ = launch(path, port)
    pusher.join()
    assert not failures
    assert client.get_parameters("a")["w"].tolist() == [-60.0] * 4
    client.close()
    process.communicate("")


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_push_whose_answer_died_with_the_server_counts_once(tmp_path: Path, dies: str) -> None:
    """Killed when the third push is applied, and before or after it is in the checkpoint: the client sends it again."""
    path = tmp_path / "server.ckpt"
    process, port = launch(path, 0, dies)
    with ParameterClient(f"grpc://localhost:{port}", token=TOKEN, retry_s=120.0) as client:
        client.register_worker("a")
        assert client.push_gradients("a", ones())
        assert client.push_gradients("a", ones())
        receipts: list[Receipt] = []
        pusher = threading.Thread(target=lambda: receipts.append(client.push_gradients("a", ones())))
        pusher.start()
        assert process.wait(120.0) == -signal.SIGKILL
        process.communicate()
        process, _ = launch(path, port)
        pusher.join()
        assert [receipt.accepted for receipt in receipts] == [True]
        assert client.get_parameters("a")["w"].tolist() == [-3.0] * 4
    process.communicate("")


WORKER = """
import sys, time
import numpy as np
from steppe import ParameterClient
client = ParameterClient(sys.argv[1], token="a token for these tests")
client.register_worker("mortal")
print(client.push_gradients("mortal", {"w": np.ones(4, np.float32)}).round_number, flush=True)
sys.stdin.read()
"""


def test_a_worker_that_dies_in_a_round_does_not_hold_it_up() -> None:
    rounds = Rounds(synchronous=True, quorum=1, deadline_s=0.5)
    with (
        serving(rounds=rounds, update_frequency=9, token=TOKEN) as (server, url),
        ParameterClient(url, token=TOKEN) as client,
    ):
        client.register_worker("a")
        words = [sys.executable, "-c", WORKER, url]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        version = client.pull("a").version
        assert client.wait_newer("a", version - 1, 60.0) is not None
        while not client.push_gradients("a", ones()):
            client.pull("a")  # the round may end under it
        assert client.wait_newer("a", version, 60.0).version > version
        assert server.get_server_stats()["abandoned_rounds"] == 0


def test_nobody_there() -> None:
    with serving() as (_, url):
        pass
    with ParameterClient(url, token=TOKEN, retry_s=0.0) as client:
        assert not client.is_serving()
        with pytest.raises(Unreachable, match="is it running"):
            client.register_worker("a")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)
arrays = st.sampled_from(
    [np.zeros(4, np.float32), np.zeros(4), np.full(4, np.inf), np.zeros((2, 2), np.float32), np.zeros(4, np.complex64)]
)


def push_of(**changes: object) -> dict[str, object]:
    return {"worker": "a", "row": ones()["w"], "refusal": None, "weight": 1.0, "number": None, "version": 3, **changes}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_bytes_that_were_changed_are_damaged_and_nothing_else(data: bytes, place: int, value: int) -> None:
    """All but those of the numbers, which are four floats behind everything else."""
    whole = pack(push_of(), sealed=False)
    place %= len(whole) - 16
    changed = bytearray(whole)
    changed[place] ^= value or 1
    padding = place >= len(whole) - 16 - 64 and not any(whole[place : len(whole) - 16])
    for wrong in (data, whole[:place], whole + data + b"!", *([] if padding else [bytes(changed)])):
        with pytest.raises(DamagedFile):
            protocol.read_request(wrong, calls.REQUESTS["Push"])


@pytest.mark.parametrize("method", calls.REQUESTS)
def test_a_request_has_its_fields_and_no_others(method: str) -> None:
    fields = calls.REQUESTS[method]
    plain_values = {str: "a", int: 1, float: 1.0, list: [], dict: {}, np.ndarray: np.zeros(4, np.float32)}
    whole = {name: plain_values.get(kinds[0]) for name, kinds in fields.items()}
    assert set(protocol.read_request(pack(whole, sealed=False), fields)) == set(fields)
    fewer = [{name: value for name, value in whole.items() if name != gone} for gone in whole]
    for wrong in (*fewer, {**whole, "more": 1}, [whole]):
        with pytest.raises(DamagedFile):
            protocol.read_request(pack(wrong, sealed=False), fields)


@settings(max_examples=300, deadline=None)
@given(
    request_=st.fixed_dictionaries(
        {
            "worker": st.sampled_from(["a", "b"]) | plain,
            "row": st.none() | arrays | plain,
            "refusal": st.none() | st.lists(st.sampled_from(["not_finite", "wrong_shape"]) | plain, max_size=3) | plain,
            "weight": st.floats() | plain,
            "number": st.none() | st.integers() | plain,
            "version": st.none() | st.integers() | plain,
        }
    )
)
def test_well_formed_nonsense_is_refused_in_words(request_: dict) -> None:
    server = ParameterServer({"w": np.zeros(4, np.float32)}, update_frequency=1)
    server.register_worker("a")
    try:
        request = protocol.read_request(pack(request_, sealed=False), calls.REQUESTS["Push"])
        answer = calls.HANDLERS["Push"](server, request)
    except (DamagedFile, UsageError):
        return
    assert answer
    assert np.isfinite(server.weights().arrays()["w"]).all()


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [({"version": None}, True), ({"version": None, "row": None, "refusal": ["not_finite", "words"]}, False)],
)
def test_fuzzed_pushes_can_be_good(changes: dict[str, object], accepted: bool) -> None:
    """The two tests above would pass if nothing were ever answered."""
    server = ParameterServer({"w": np.zeros(4, np.float32)}, update_frequency=1)
    server.register_worker("a")
    data = pack(push_of(**changes), sealed=False)
    answer = calls.HANDLERS["Push"](server, protocol.read_request(data, calls.REQUESTS["Push"]))
    assert msgspec.convert(unpack(answer, sealed=False), Receipt).accepted is accepted

"""The network service with real clients: TLS, tokens, limits, lost replies, dead workers, a server killed and restarted."""

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
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steppe import FederatedParameterServer, ParameterClient, ParameterServer
from steppe.core.contracts.errors import ConfigError, DamagedFile, Unreachable, UsageError
from steppe.params.optimizers import Optimizer
from steppe.params.privacy import PrivacyPlan
from steppe.params.rounds import Receipt, Rounds
from steppe.params.rpc import grpc_server, protocol
from steppe.params.rpc import parameter_server_pb2 as pb
from steppe.params.rpc.messages import CHUNK, encode, handle_call, method_path, read_pull
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


def test_numbers_are_summed_over_workers_over_the_network() -> None:
    with (
        serving(rounds=Rounds(synchronous=True), update_frequency=2) as (_, url),
        ParameterClient(url) as one,
        ParameterClient(url) as two,
    ):
        one.register_worker("a")
        two.register_worker("b")
        assert one.about("a")["supports_sums"]
        assert one.sum_over_workers("a", 0, [3, 0.25]) == (0, None)
        assert two.sum_over_workers("b", 0, [1, 1e-9]) == (0, [4.0, 0.25 + 1e-9])
        assert one.sum_over_workers("a", 0, [3, 0.25]) == (0, [4.0, 0.25 + 1e-9])
        with pytest.raises(UsageError, match="finite numbers"):
            one.sum_over_workers("a", 0, [float("nan")])


def test_the_token_file_is_readable_by_the_same_user_only(tmp_path: Path) -> None:
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


def test_a_workers_token_is_refused_for_other_workers() -> None:
    tokens = {"a": "the token of worker a", "b": "the token of worker b"}
    with serving(token=tokens) as (server, url), ParameterClient(url, token=tokens["a"]) as client:
        assert client.register_worker("a")
        with pytest.raises(UsageError, match="another worker's"):
            client.register_worker("b")
        assert server.get_server_stats()["refused_calls"] == {"not_yours": 1}


def test_a_private_server_requires_one_token_per_client(tmp_path: Path) -> None:
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


def test_tls(tls: Tls, other_tls: Tls) -> None:
    with serving(tls=tls) as (_, url):
        with ParameterClient(url, ca=tls.certificate) as client:
            assert client.register_worker("a")
            assert client.push_gradients("a", ones())
        with (
            ParameterClient(url, ca=other_tls.certificate, retry_s=0.0) as client,
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


def test_malformed_and_oversized_messages_are_refused_and_the_server_continues() -> None:
    with serving(token=TOKEN) as (server, url):
        channel = grpc.insecure_channel(url.removeprefix("grpc://"), [("grpc.max_send_message_length", -1)])
        metadata = [("authorization", f"Bearer {TOKEN}")]
        for data in (b"garbage", b"\x0a\x05abc", b"\x0a\x02\xff\xff"):  # cut off, and a name that is not UTF-8
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method_path("Register"))(data, metadata=metadata, timeout=120)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method_path("Push"))(bytes(protocol.SLACK + 100), metadata=metadata, timeout=120)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method_path("Shutdown"))(b"", metadata=metadata, timeout=120)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        channel.close()
        assert server.get_server_stats()["refused_calls"] == {"garbage": 3}
        with ParameterClient(url, token=TOKEN) as client:
            assert client.register_worker("a")
            assert client.push_gradients("a", ones(400_000)).reason == "wrong_shape"
            assert client.push_gradients("a", ones())
        assert server.get_server_stats()["refused_pushes"] == {"wrong_shape": 1}


BIG = 400_000  # numbers: more than one part


@pytest.mark.parametrize("pushes", [1, 2])
def test_a_long_row_is_streamed(pushes: int) -> None:
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


def test_large_parameters_are_streamed() -> None:
    """Also to a reader that is not registered, and only if there is something newer."""
    with serving(size=BIG) as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        for version in range(3):
            assert client.pull("a").sha256() == client.newer_than("policy", -1).sha256() == server.weights().sha256()
            assert client.pull_newer("a", version) is None
            assert client.push_gradients("a", ones(BIG))
        assert client.about("a")["round_number"] == server.round_number == 3


def test_pulled_parts_that_do_not_fit_are_damaged() -> None:
    layout = {"parameters": [{"name": "w", "shape": [4], "dtype": "float32", "offset": 0}]}
    first, part = pb.PullReply(newer=True, layout=layout), encode(pb.PullReply(), bytes(8))
    weights, _ = read_pull(iter([encode(first), part, part]))
    assert weights.arrays()["w"].tolist() == [0.0] * 4
    for parts in ([encode(first), part], [encode(first), part, part, part], [encode(first, bytes(20))], [b"\xff"]):
        with pytest.raises(DamagedFile):
            read_pull(iter(parts))
    for wrong in (
        {"dtype": "object"},
        {"offset": 6},
        {"offset": 0},
        {"shape": [2**40, 2**40]},
        {"shape": []},
        {"name": "v"},
    ):
        entry = {"name": "w", "shape": [4], "dtype": "float32", "offset": 4, **wrong}
        reply = pb.PullReply(newer=True, layout={"parameters": [{"name": "v", "dtype": "float32"}, entry]})
        with pytest.raises(DamagedFile):
            read_pull(iter([encode(reply, bytes(20))]))


def test_malformed_streams_are_refused_and_the_server_continues() -> None:
    header = encode(push_of(version=None))
    whole, part = bytes(4 * BIG), encode(pb.PushRequest(), bytes(4 * BIG))
    wrong = [
        [b"garbage"],
        [header],
        [header, part, b"garbage"],
        [header, part, encode(pb.PushRequest(), bytes(4))],
        [header, encode(pb.PushRequest(), whole[:-4])],
        [header, encode(pb.PushRequest(), b"abc")],
        [header, encode(pb.PushRequest(), whole * 2)],
    ]
    with serving(size=BIG, token=TOKEN) as (server, url):
        channel = grpc.insecure_channel(url.removeprefix("grpc://"), [("grpc.max_send_message_length", -1)])
        push = channel.stream_unary(method_path("PushStream"))
        metadata = [("authorization", f"Bearer {TOKEN}")]
        for parts in wrong:
            with pytest.raises(grpc.RpcError) as caught:
                push(iter(parts), metadata=metadata, timeout=120)
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        with pytest.raises(grpc.RpcError) as caught:
            push(iter([header, part]), timeout=120)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        channel.close()
        assert server.version == 0
        with ParameterClient(url, token=TOKEN) as client:
            client.register_worker("a")
            assert client.push_gradients("a", ones(BIG))


def test_a_push_whose_reply_is_lost_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original, losses = grpc_server.GrpcServer.handle, iter([True, True, False])

    def losing(self, method, data, context) -> bytes:
        reply = original(self, method, data, context)
        if method == "Push" and next(losses):
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return reply

    monkeypatch.setattr(grpc_server.GrpcServer, "handle", losing)
    with serving() as (server, url), ParameterClient(url) as client:
        client.register_worker("a")
        assert client.push_gradients("a", ones())
        assert server.version == 1
        assert server.get_server_stats()["refused_pushes"] == {"pushed_twice": 2}


def test_clients_retry_when_the_server_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_push_whose_reply_is_lost_with_the_server_counts_once(tmp_path: Path, dies: str) -> None:
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


def test_a_round_does_not_wait_for_a_killed_worker() -> None:
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


def test_no_server_is_unreachable() -> None:
    with serving() as (_, url):
        pass
    with ParameterClient(url, token=TOKEN, retry_s=0.0) as client:
        assert not client.is_serving()
        with pytest.raises(Unreachable, match="is it running"):
            client.register_worker("a")


def push_of(**changes: object) -> pb.PushRequest:
    return pb.PushRequest(**{"worker": "a", "weight": 1.0, "version": 3, **changes})


def handle(server: ParameterServer, data: bytes) -> Receipt | None:
    """The receipt of a push, or None for a push that is refused with an error."""
    kind, reply = handle_call(server, "Push", data)
    if kind != "ok":
        assert reply
        return None
    found = pb.PushReply.FromString(reply)
    return Receipt(found.accepted, found.round_number, found.version, found.reason, found.message)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_bytes_that_were_changed_are_another_message_or_none(data: bytes, index: int, value: int) -> None:
    """Whatever comes, the reply is a receipt or an error in words, and the parameters stay finite."""
    server = ParameterServer({"w": np.zeros(4, np.float32)}, update_frequency=1)
    server.register_worker("a")
    whole = encode(push_of(version=0), ones()["w"].tobytes())
    index %= len(whole)
    changed = bytearray(whole)
    changed[index] ^= value or 1
    for wrong in (data, whole[:index], whole + data, bytes(changed)):
        handle(server, wrong)
        assert np.isfinite(server.weights().arrays()["w"]).all()


texts = st.sampled_from(["a", "b", ""]) | st.text(max_size=5)
int64s = st.sampled_from([-1, 0, 1, 2**62, 2**63 - 1, -(2**63)]) | st.integers(-5, 5)


@settings(max_examples=300, deadline=None)
@given(
    fields=st.fixed_dictionaries(
        {"worker": texts},
        optional={
            "weight": st.floats(),
            "number": int64s,
            "version": int64s,
            "refusal": st.fixed_dictionaries({"reason": st.sampled_from(["not_finite", "", "x"]), "message": texts}),
            "values": st.sampled_from([b"", b"abc", bytes(16), bytes(20), np.full(4, np.inf, np.float32).tobytes()]),
        },
    )
)
def test_contradictory_messages_are_refused_with_a_reason(fields: dict) -> None:
    server = ParameterServer({"w": np.zeros(4, np.float32)}, update_frequency=1)
    server.register_worker("a")
    receipt = handle(server, encode(pb.PushRequest(**fields)))
    assert receipt is None or receipt.accepted or receipt.reason
    assert np.isfinite(server.weights().arrays()["w"]).all()
    assert handle_call(server, "GetStats", b"")[0] == "ok", "no counter is too large to be sent"


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"version": 0, "values": bytes(16)}, True),
        ({"version": 0, "refusal": {"reason": "not_finite", "message": "words"}}, False),
    ],
)
def test_fuzzed_pushes_can_be_good(fields: dict, accepted: bool) -> None:
    """The two tests above would pass if nothing were ever answered."""
    server = ParameterServer({"w": np.zeros(4, np.float32)}, update_frequency=1)
    server.register_worker("a")
    receipt = handle(server, encode(push_of(**fields)))
    assert receipt is not None
    assert receipt.accepted is accepted


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "either numbers or"),
        ({"values": bytes(16), "refusal": {"reason": "not_finite"}}, "either numbers or"),
        ({"values": bytes(15)}, "whole float32 numbers"),
        ({"values": bytes(16), "number": -1}, "at least 0"),
        ({"values": bytes(16), "version": 2**62}, "at least 0"),
        ({"refusal": {"reason": "pushed_twice"}}, "is one of wrong_shape"),
    ],
)
def test_a_push_that_contradicts_itself_is_damaged(fields: dict, words: str) -> None:
    server = ParameterServer({"w": np.zeros(4, np.float32)}, update_frequency=1)
    server.register_worker("a")
    kind, message = handle_call(server, "Push", encode(pb.PushRequest(worker="a", **fields)))
    assert kind == "error"
    assert words in message


@pytest.mark.parametrize("size", [0, 1, 127, 128, 1 << 14, CHUNK])
def test_appended_values_are_what_protobuf_reads(size: int) -> None:
    values = bytes(range(256)) * (size // 256) + bytes(size % 256)
    request = push_of(number=7)
    assert pb.PushRequest.FromString(encode(request, values)) == push_of(number=7, values=values)

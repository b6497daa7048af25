"""The .proto: the committed modules are its own, a client that knows nothing else works, other versions are refused."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import steppe
from steppe import ParameterClient, ParameterServer
from steppe.core.contracts.errors import UsageError
from steppe.params.optimizers import Optimizer
from steppe.params.rpc import messages
from steppe.params.rpc import parameter_server_pb2 as pb
from steppe.params.rpc.messages import HANDLERS, SERVICE, encode, handle_call, method_path

pytestmark = pytest.mark.integration

SOURCE = Path(steppe.__file__).parent
PROTO = SOURCE / "params" / "rpc" / "parameter_server.proto"
TOKEN = "a token for these tests"
# The first call of a client of Steppe 0.1, as it sent it: its method, and {"worker": "a"} in its own encoding.
FORMER_METHOD = "/steppe.ParameterServer/Register"
FORMER_REQUEST = bytes.fromhex(
    "5354504f01000000 2a00000000000000 0a00000000000000 e115cb00 00000000 81a6776f726b6572a161".replace(" ", "")
)


@contextlib.contextmanager
def serving(size: int = 4, **given: object) -> Iterator[tuple[ParameterServer, str]]:
    params = {"w": np.zeros(size, np.float32), "n": np.array([3])}
    server = ParameterServer(params, **{"update_frequency": 1, "optimizer": Optimizer("sgd", 1.0), **given})
    port = server.start_server(port=0, token=TOKEN)
    try:
        yield server, f"localhost:{port}"
    finally:
        server.close()


def test_the_committed_modules_are_what_the_proto_generates(tmp_path: Path) -> None:
    script = SOURCE.parents[1] / "scripts" / "generate_protos.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    names = {path.name for path in PROTO.parent.glob("*_pb2*.py*")}
    assert names == {"parameter_server_pb2.py", "parameter_server_pb2.pyi"}
    for name in names:
        assert (tmp_path / "steppe/params/rpc" / name).read_text() == (PROTO.parent / name).read_text(), name


def test_every_method_is_handled() -> None:
    assert set(SERVICE.methods_by_name) == {*HANDLERS, "PullStream", "PushStream"}
    assert method_path("Push") == "/steppe.params.v1.ParameterServer/Push"


CLIENT = """
import struct, sys
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
import parameter_server_pb2 as pb
import parameter_server_pb2_grpc as stubs
address, token = sys.argv[1:]
channel = grpc.insecure_channel(address)
assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
server, metadata = stubs.ParameterServerStub(channel), [("authorization", "Bearer " + token)]
about = server.Register(pb.RegisterRequest(worker="other", protocol=1), metadata=metadata)
assert (about.new, about.protocol, about.last, about.version) == (True, 1, -1, 0)
pulled = server.Pull(pb.PullRequest(worker="other"), metadata=metadata)
weight, count = pulled.layout.parameters
assert (weight.name, list(weight.shape), weight.dtype, weight.offset, weight.trained) == ("w", [4], "float32", 0, True)
assert (count.name, count.dtype, count.offset, count.trained) == ("n", "int64", 16, False)
assert struct.unpack("<4fq", pulled.values) == (0.0, 0.0, 0.0, 0.0, 3)
push = {"worker": "other", "number": about.last + 1, "version": pulled.version}
values = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)
receipt = server.Push(pb.PushRequest(**push, values=values), metadata=metadata)
assert (receipt.accepted, receipt.version) == (True, 1)
again = server.Push(pb.PushRequest(**push, values=values), metadata=metadata)
assert (again.accepted, again.reason) == (False, "pushed_twice")
push |= {"number": 1, "version": 1}
parts = [pb.PushRequest(**push, values=values[:4]), pb.PushRequest(values=values[4:])]
assert server.PushStream(iter(parts), metadata=metadata).version == 2
parts = server.PullStream(pb.PullRequest(worker="other", newer_than=1), metadata=metadata)
assert struct.unpack("<4fq", b"".join(part.values for part in parts)) == (-2.0, -4.0, -6.0, -8.0, 3)
assert not server.Pull(pb.PullRequest(worker="other", newer_than=2), metadata=metadata).newer
stats = server.GetStats(pb.GetStatsRequest(), metadata=metadata)
assert (stats.accepted_pushes, stats.workers[0].name, dict(stats.refused_pushes)) == (2, "other", {"pushed_twice": 1})
assert not any(name.partition(".")[0] in ("steppe", "numpy") for name in sys.modules)
print("done")
"""


def test_a_client_that_has_only_the_proto(tmp_path: Path) -> None:
    shutil.copy(PROTO, tmp_path)
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=.", "--grpc_python_out=.", PROTO.name]
    subprocess.run(protoc, cwd=tmp_path, check=True)
    with serving() as (_, address):
        command = [sys.executable, "-c", CLIENT, address, TOKEN]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_health_is_the_standard_service() -> None:
    serving_status = health_pb2.HealthCheckResponse.SERVING
    with serving() as (_, address), grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "steppe.params.v1.ParameterServer"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=120).status == serving_status
            assert next(iter(stub.Watch(request, timeout=120))).status == serving_status
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="another"), timeout=120)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_client_of_the_former_protocol_is_refused() -> None:
    with serving() as (server, address), grpc.insecure_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(FORMER_METHOD)(FORMER_REQUEST, timeout=120)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == (
            "this server speaks steppe.params.v1.ParameterServer, and this client is of Steppe 0.1.0 or older: "
            "update the client"
        )
        with pytest.raises(grpc.RpcError) as caught:
            channel.stream_unary("/steppe.ParameterServer/PushRow")(iter([FORMER_REQUEST] * 3), timeout=120)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert server.get_server_stats()["refused_calls"] == {"former_protocol": 2}


class FormerServer(grpc.GenericRpcHandler):
    """A server that knows the methods of Steppe 0.1 and no others."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method == FORMER_METHOD:
            return grpc.unary_unary_rpc_method_handler(lambda data, _: data)
        return None


def test_a_server_of_the_former_protocol_is_reported_as_another_version() -> None:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=(FormerServer(),))
        port = server.add_insecure_port("localhost:0")
        server.start()
        with ParameterClient(f"grpc://localhost:{port}", token=TOKEN) as client:
            with pytest.raises(UsageError, match=r"does not speak steppe\.params\.v1.*Update the older of the two"):
                client.register_worker("a")
            assert not client.is_serving()
        server.stop(None).wait()


def test_another_version_of_the_protocol_is_refused_at_both_ends() -> None:
    server = ParameterServer({"w": np.zeros(4, np.float32)})
    for version in (0, 2):
        kind, message = handle_call(server, "Register", encode(pb.RegisterRequest(worker="a", protocol=version)))
        assert kind == "usage"
        assert f"the client speaks version {version}" in message
    assert server.get_server_stats()["num_workers"] == 0
    future = encode(pb.RegisterReply(new=True, protocol=2))
    with pytest.raises(UsageError, match="the server speaks version 2"):
        Replying(future).call("Register", {"worker": "a"})


class Replying(messages.MessageClient):
    """A client that gets one reply to everything."""

    def __init__(self, reply: bytes) -> None:
        super().__init__()
        self.reply = reply

    def _send(self, method: str, data: object, *, worker: str | None = None) -> tuple[bytes, int]:
        return self.reply, 1


@pytest.mark.parametrize("number", [2**63, -(2**64)])
def test_an_integer_of_more_than_64_bits_is_refused(number: int) -> None:
    with serving() as (_, address), ParameterClient(f"grpc://{address}", token=TOKEN) as client:
        client.register_worker("a")
        with pytest.raises(UsageError, match="PushRequest cannot be sent"):
            client.push_gradients("a", {"w": np.ones(4, np.float32)}, round_number=number)


def test_a_new_token_of_a_restarted_server_is_found() -> None:
    first = ParameterServer({"w": np.zeros(4, np.float32)})
    port = first.start_server(port=0)
    with ParameterClient(f"grpc://localhost:{port}") as client:
        assert client.register_worker("a")
        first.close()
        second = ParameterServer({"w": np.zeros(4, np.float32)})
        second.start_server(port=port)
        assert client.register_worker("a")
        second.close()


FILES = {
    "client.py", "kernels.py", "parameter_layout.py", "admission.py", "rounds.py",
    "rpc/messages.py", "rpc/grpc_client.py", "rpc/grpc_server.py",
}  # fmt: skip
CHECKS = {"core/system/typecheck.py", "core/contracts/weights.py"}  # of arguments, and where an array lies in a row


@pytest.mark.parametrize("size", [4, 400_000])
def test_a_push_passes_eight_files_from_the_call_to_its_round(size: int) -> None:
    """On client and server together; in one message and in parts."""
    passed, recording = set(), threading.Event()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if recording.is_set() and event == "call" and path.is_relative_to(SOURCE):
            passed.add(path.relative_to(SOURCE).as_posix())

    update = {"w": np.ones(size, np.float32)}
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with serving(size, update_frequency=9) as (server, address):
            with ParameterClient(f"grpc://{address}", token=TOKEN) as client:
                client.register_worker("a")
                assert client.push_gradients("a", update)  # also compiles what is not compiled yet
                recording.set()
                assert client.push_gradients("a", update)
                recording.clear()
            assert server.get_server_stats()["pending_pushes"] == 2
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert {f"params/{name}" for name in ("client.py", "admission.py", "rpc/grpc_server.py")} <= passed
    assert passed - CHECKS <= {f"params/{name}" for name in FILES}
    assert len(FILES) <= 8

"""The messages of parameter_server.proto: how clients encode and decode them, and how a ParameterServer handles them.

gRPC, MPI and Ray carry the same bytes: grpc_client.py and grpc_server.py, roles/cluster/mpi.py and ray.py. Transports
authenticate callers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from steppe.core.contracts.errors import DamagedFile, SteppeError, UsageError
from steppe.core.contracts.weights import Weights, WeightsEntry, WeightsLayout
from steppe.core.io.codec import Buffer, validate_layout
from steppe.params.client import POLICY
from steppe.params.parameter_layout import INVALID_UPDATE_REASONS, ParameterLayout, Refusal
from steppe.params.rounds import Push, Receipt
from steppe.params.rpc import parameter_server_pb2 as pb

if TYPE_CHECKING:
    from steppe.params.server import ParameterServer

PROTOCOL = 1  # the version that RegisterRequest and RegisterReply name
SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"]
CHUNK = 1 << 20  # bytes; longer arrays are sent in parts of this size, which are read while the next ones are in flight
MAX_NUMBER = 1 << 62  # numbers and versions of pushes are below it, so that counting further does not overflow
MAX_REASON_LENGTH = 1000
_VALUES_TAG = bytes([pb.PushRequest.VALUES_FIELD_NUMBER << 3 | 2])  # the same in PullReply

RpcReply = tuple[str, Any]  # ("ok", bytes) or ("usage" or "error", message)


def encode(message: Any, values: Buffer | None = None) -> bytes:
    """Encode a message; its field `values`, if given, is appended without the extra copies of protobuf's encoder."""
    head: bytes = message.SerializeToString()
    if values is None:
        return head
    length, varint = len(values), bytearray()
    while length >= 128:
        varint.append(length & 127 | 128)
        length >>= 7
    varint.append(length)
    return b"".join([head, _VALUES_TAG, varint, values])


def decode(kind: Any, data: bytes) -> Any:
    """Decode a message of a generated class; raise DamagedFile for other bytes."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise DamagedFile(f"these bytes are not a {kind.DESCRIPTOR.full_name}") from None


def method_path(method: str) -> str:
    """Return a method's full gRPC name."""
    return f"/{SERVICE.full_name}/{method}"


def request_class(method: str) -> Any:
    """Return the generated class of a method's requests."""
    return SERVICE.methods_by_name[method].input_type._concrete_class


def iter_parts(first: Any, array: np.ndarray) -> Iterator[bytes]:
    """Yield a message with an array in parts: all its other fields, then messages that have only `values`."""
    yield encode(first)
    raw, empty = _raw(array), type(first)()
    for start in range(0, len(raw), CHUNK):
        yield encode(empty, raw[start : start + CHUNK])


class MessageClient:
    """Encode requests and decode replies; subclasses implement `_send`."""

    MIN_POLL_S, MAX_POLL_S = 0.002, 0.1
    MAX_INLINE_ROW_BYTES: int | None = None  # longer rows are streamed in parts
    sends_version = False

    def __init__(self) -> None:
        self._space: tuple[ParameterLayout, bool] | None = None  # and whether a push must contain all parameters

    def call(self, method: str, request: Mapping[str, Any]) -> Any:
        given = {**request, "protocol": PROTOCOL} if method == "Register" else request
        message = make_message(request_class(method), **given)
        data, _ = self._send(method, encode(message), worker=request.get("worker"))
        return self._read_reply(method, decode(SERVICE.methods_by_name[method].output_type._concrete_class, data))

    def pull(self, worker: str | None, newer_than: int) -> tuple[Weights | None, int | None]:
        message = make_message(pb.PullRequest, worker=worker, newer_than=newer_than)
        data, _ = self._send("Pull", encode(message), worker=worker)
        return read_pull(iter([data]))

    def push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> tuple[Receipt, int]:
        """Push an update; for an invalid one, send only the reason, so that the server counts it."""
        assert self._space is not None, "only registered workers push"
        row, refusal = _to_row(update, *self._space)
        message = make_message(pb.PushRequest, **push._asdict())
        if refusal is not None:
            message.refusal.reason, message.refusal.message = refusal
            data, tries = self._send("Push", encode(message), worker=push.worker)
        elif self.MAX_INLINE_ROW_BYTES is not None and row.nbytes > self.MAX_INLINE_ROW_BYTES:
            data, tries = self._send("PushStream", lambda: iter_parts(message, row), worker=push.worker)
        else:
            data, tries = self._send("Push", encode(message, _raw(row)), worker=push.worker)
        found = decode(pb.PushReply, data)
        return Receipt(found.accepted, found.round_number, found.version, found.reason, found.message), tries

    def _read_reply(self, method: str, reply: Any) -> Any:
        """Return a reply as plain values."""
        if method == "Register":
            if reply.protocol != PROTOCOL:
                raise UsageError(_protocol_mismatch("server", reply.protocol, "client"))
            fields = [(entry.name, tuple(entry.shape), entry.dtype) for entry in reply.layout.parameters]
            self._space = ParameterLayout.described(fields), reply.whole
            reply.ClearField("layout")
        if method == "SumOverWorkers":
            return {"round_number": reply.round_number, "total": list(reply.total) if reply.complete else None}
        return _plain_stats(reply) if method == "GetStats" else to_plain(reply)

    def _send(
        self, method: str, data: bytes | Callable[[], Iterator[bytes]], *, worker: str | None = None
    ) -> tuple[bytes, int]:
        """Send a request; return the reply and the number of attempts.

        Retries while the server does not reply or is overloaded. `data` is a function if the request is a stream.
        `worker`: the worker that the call is made for, if any.
        """
        raise NotImplementedError


def unwrap_reply(reply: RpcReply) -> bytes:
    """Return a reply's bytes; raise the server's error."""
    kind, found = reply
    if kind != "ok":
        raise (UsageError if kind == "usage" else SteppeError)(found)
    return bytes(found)


def to_plain(message: Any) -> dict[str, Any]:
    """Return a message's fields by name; maps are dicts in the order of their keys, absent messages are left out."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            found[field.name] = value
        elif field.message_type.GetOptions().map_entry:
            found[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            found[field.name] = [to_plain(item) for item in value]
        elif message.HasField(field.name):
            found[field.name] = to_plain(value)
    return found


def _plain_stats(reply: Any) -> dict[str, Any]:
    stats = to_plain(reply)
    workers, staleness = stats.pop("workers"), stats.pop("staleness")
    if "privacy" in stats:
        return stats
    return {**stats, "staleness": staleness, "workers": {worker.pop("name"): worker for worker in workers}}


def _raw(array: np.ndarray) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).view(np.uint8).data


def make_message(kind: Any, **fields: Any) -> Any:
    """Return a message; raise UsageError for values that it cannot hold."""
    try:
        return kind(**fields)
    except ValueError as error:  # an integer of more than 64 bits, or text that is not Unicode
        raise UsageError(f"{kind.DESCRIPTOR.name} cannot be sent: {error}") from None


def _to_row(
    update: Mapping[str, np.ndarray] | np.ndarray, space: ParameterLayout, whole: bool
) -> tuple[np.ndarray, Refusal | None]:
    """Return an update as a flat row, and why it is invalid, or None."""
    if isinstance(update, np.ndarray):
        return update, space.validate_row(update)
    row = None if whole else space.view_as_row(update)
    if row is not None:
        return row, None
    row = np.empty(space.size, np.float32)
    return row, space.fill(row, update, whole=whole)


def read_pull(parts: Iterator[bytes]) -> tuple[Weights | None, int | None]:
    """Decode a pull that comes in one message or several: the weights in a new buffer, or None; and the round."""
    first = decode(pb.PullReply, next(parts, b""))
    number = first.round_number if first.HasField("round_number") else None
    if not first.newer:
        return None, number
    layout = _read_layout(first.layout.SerializeToString())
    try:
        buffer = np.empty(layout.nbytes, np.uint8)
    except (MemoryError, ValueError):
        raise DamagedFile(f"parameters of {layout.nbytes} bytes do not fit into this machine") from None
    values, at = first.values, 0
    while at + len(values) <= len(buffer):
        buffer[at : at + len(values)] = np.frombuffer(values, np.uint8)
        at += len(values)
        part = next(parts, None)
        if part is not None:
            values = decode(pb.PullReply, part).values
        elif at == len(buffer):
            return Weights(layout, buffer, first.version, first.updates), number
        else:
            break
    raise DamagedFile(f"the parameters have {len(buffer)} bytes, and another number of bytes came")


@functools.lru_cache(maxsize=16)
def _read_layout(data: bytes) -> WeightsLayout:
    """Return a layout after checking that its parameters do not overlap."""
    entries = pb.Layout.FromString(data).parameters
    rows = [(entry.name, tuple(entry.shape), entry.dtype, entry.offset) for entry in entries]
    try:
        last = WeightsEntry(*rows[-1])
        return validate_layout(rows, last.offset + last.nbytes)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise DamagedFile(f"the layout of the parameters is damaged: {error}") from None


@functools.lru_cache(maxsize=16)
def _write_layout(layout: WeightsLayout) -> pb.Layout:
    found = pb.Layout()
    for entry in layout.entries:
        found.parameters.add(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            offset=entry.offset,
            trained=np.dtype(entry.dtype).kind == "f",
        )
    return found


def handle_call(server: ParameterServer, method: str, data: bytes) -> RpcReply:
    """Decode and handle a request; return errors as a reply."""
    try:
        if method not in HANDLERS:
            raise DamagedFile(f"there is no call {method!r}")
        return "ok", HANDLERS[method](server, decode(request_class(method), data))
    except UsageError as error:
        return "usage", str(error)
    except SteppeError as error:
        return "error", str(error)


def read_push(request: Any) -> Push:
    """Return the metadata of a push; raise DamagedFile if a number is out of range."""
    number = request.number if request.HasField("number") else None
    version = request.version if request.HasField("version") else None
    if not all(given is None or 0 <= given < MAX_NUMBER for given in (number, version)):
        raise DamagedFile("the number and the version of a push are at least 0 and below 2**62")
    return Push(request.worker, request.weight if request.HasField("weight") else 1.0, number, version)


def encode_receipt(receipt: Receipt) -> bytes:
    """Encode the reply to a push."""
    return encode(pb.PushReply(**msgspec.structs.asdict(receipt)))


def _register(server: ParameterServer, request: Any) -> bytes:
    if request.protocol != PROTOCOL:
        raise UsageError(_protocol_mismatch("client", request.protocol, "server"))
    new, about = server.register_worker(request.worker), server.description()
    del about["fields"], about["carried"]
    about.update(server.standing(request.worker))
    return encode(pb.RegisterReply(new=new, protocol=PROTOCOL, layout=_write_layout(server.layout), **about))


def _protocol_mismatch(other: str, version: int, this: str) -> str:
    return (
        f"the {other} speaks version {version} of the parameter server's protocol and this {this} version {PROTOCOL}: "
        "update the older of the two"
    )


def _unregister(server: ParameterServer, request: Any) -> bytes:
    return encode(pb.UnregisterReply(was_registered=server.unregister_worker(request.worker)))


def pull_newest(server: ParameterServer, request: Any) -> tuple[pb.PullReply, np.ndarray]:
    """Handle a pull by a worker, or by a reader that is not registered; return the reply and its `values`."""
    after = request.newer_than if request.HasField("newer_than") else -1
    if request.HasField("worker"):
        found, number = server.pull_newer(request.worker, after)
        reply = pb.PullReply(round_number=number)
    else:
        found, reply = server.newer_than(POLICY, after), pb.PullReply()
    if found is None:
        return reply, np.empty(0, np.uint8)
    reply.newer, reply.version, reply.updates = True, found.version, found.updates
    reply.layout.CopyFrom(_write_layout(found.layout))
    return reply, found.buffer


def _pull(server: ParameterServer, request: Any) -> bytes:
    reply, values = pull_newest(server, request)
    return encode(reply, values.data)


def _push(server: ParameterServer, request: Any) -> bytes:
    """Handle a push: a row of numbers, or the reason why the client found them invalid."""
    push, values = read_push(request), request.values
    if bool(values) == request.HasField("refusal"):
        raise DamagedFile("a push has either numbers or what is wrong with them")
    if len(values) % 4:
        raise DamagedFile(f"a push has whole float32 numbers, and this one {len(values)} bytes")
    if values:
        return encode_receipt(server.take_row(push, np.frombuffer(values, np.float32)))
    refusal = Refusal(request.refusal.reason, request.refusal.message[:MAX_REASON_LENGTH])
    if refusal.reason not in INVALID_UPDATE_REASONS:
        raise DamagedFile(f"the reason of a push's refusal is one of {', '.join(INVALID_UPDATE_REASONS)}")
    return encode_receipt(server.refuse_push(push, refusal))


def _sum_over_workers(server: ParameterServer, request: Any) -> bytes:
    number, total = server.sum_over_workers(request.worker, request.round_number, list(request.values))
    return encode(pb.SumOverWorkersReply(round_number=number, complete=total is not None, total=total))


def _report(server: ParameterServer, request: Any) -> bytes:
    server.report(request.worker, dict(request.metrics))
    return encode(pb.ReportReply())


def _get_stats(server: ParameterServer, _: Any) -> bytes:
    stats = server.get_server_stats()
    workers = [{"name": name, **found} for name, found in stats.pop("workers", {}).items()]
    return encode(pb.ServerStats(**stats, workers=workers))


def _save_checkpoint(server: ParameterServer, _: Any) -> bytes:
    """Write a checkpoint to the server's configured path: clients cannot choose one."""
    return encode(pb.SaveCheckpointReply(path=str(server.save_checkpoint())))


HANDLERS: dict[str, Callable[[ParameterServer, Any], bytes]] = {
    "Register": _register,
    "Unregister": _unregister,
    "Pull": _pull,
    "Push": _push,
    "SumOverWorkers": _sum_over_workers,
    "Report": _report,
    "GetStats": _get_stats,
    "SaveCheckpoint": _save_checkpoint,
}

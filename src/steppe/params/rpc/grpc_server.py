"""gRPC server of a parameter server: authentication of every call, limits, health, backpressure.

Calls are authenticated here, before anything is decoded; messages.py and the ParameterServer handle them. Every refused
call is counted by reason.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from steppe.core.contracts.errors import ConfigError, DamagedFile, MissingExtra, SteppeError, UsageError
from steppe.params.kernels import copy_finite
from steppe.params.rpc import parameter_server_pb2 as pb
from steppe.params.rpc import protocol
from steppe.params.rpc.messages import (
    HANDLERS,
    SERVICE,
    decode,
    encode_receipt,
    iter_parts,
    method_path,
    pull_newest,
    read_push,
    request_class,
)
from steppe.params.rpc.protocol import Tls

try:
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
except ImportError as error:  # pragma: no cover
    raise MissingExtra("the parameter server's network service", "grpc") from error

if TYPE_CHECKING:
    from steppe.params.server import ParameterServer

THREADS, RESERVED = 24, 8  # reserved threads never handle streams, which may be slow
FORMER_SERVICE = "/steppe.ParameterServer/"  # of Steppe 0.1, which had no .proto
WAITING_BYTES = 1 << 30  # bytes of requests that are being read or wait for a thread; further ones must be retried


class GrpcServer:
    """One gRPC server around a ParameterServer. `token`: one for all, or one per worker, valid only for that worker."""

    def __init__(
        self, server: ParameterServer, host: str, port: int, token: str | Mapping[str, str] | None, tls: Tls | None
    ) -> None:
        self.server = server
        self.refused: dict[str, int] = {}
        self._refused_lock = threading.Lock()
        self._streams = threading.BoundedSemaphore(max(1, THREADS - RESERVED))
        self._rows: list[np.ndarray] = []  # reusable memory for streamed rows
        self._token_file: Path | None = None
        self.token = _accepted_tokens(token, host, tls, private=server.is_private)
        largest = 4 * server.num_parameters + protocol.SLACK
        options = [
            *protocol.BULK_CHANNEL_OPTIONS,
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
            ("grpc.max_metadata_size", 16 << 10),
        ]
        at_once = max(THREADS, min(256, WAITING_BYTES // largest))
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="params")
        self._grpc = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=at_once)
        self._grpc.add_generic_rpc_handlers((_RpcHandlers(self),))
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        for service in ("", SERVICE.full_name):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        try:
            self.port = self._bind(host, port, tls)
        except BaseException:
            self.stop(0.0)
            raise
        if token is None:
            self._token_file = protocol.write_token(self.port, str(self.token))
        self._grpc.start()

    def stop(self, grace_s: float = 2.0) -> None:
        """Stop accepting calls and let those in progress finish within `grace_s`."""
        self._health.enter_graceful_shutdown()
        self._grpc.stop(grace_s).wait()
        self._pool.shutdown()
        if self._token_file is not None:
            with contextlib.suppress(OSError):
                self._token_file.unlink()

    def handle(self, method: str, data: bytes, context: Any) -> bytes:
        """Authenticate, decode and handle a call of one message."""
        name = self._identity(context)
        with self._aborting(context):
            request = decode(request_class(method), data)
            self._require_own(context, name, request)
            return HANDLERS[method](self.server, request)

    def stream_pull(self, data: bytes, context: Any) -> Iterator[bytes]:
        """Handle a pull that is replied to in several messages."""
        name = self._identity(context)
        with self._streaming(context), self._aborting(context):
            request = decode(pb.PullRequest, data)
            self._require_own(context, name, request)
            yield from iter_parts(*pull_newest(self.server, request))

    def stream_push(self, parts: Iterator[bytes], context: Any) -> bytes:
        """Handle a push in several messages, few of which are in memory at a time."""
        name = self._identity(context)
        with self._streaming(context), self._aborting(context):
            first = decode(pb.PushRequest, next(parts, b""))
            self._require_own(context, name, first)
            return self._push_stream(first, parts)

    def refuse_former_client(self, _: bytes, context: Any) -> bytes:
        """Refuse a call of the protocol that Steppe had before its .proto."""
        words = (
            f"this server speaks {SERVICE.full_name}, and this client is of Steppe 0.1.0 or older: update the client"
        )
        self._refuse(context, "former_protocol", grpc.StatusCode.UNIMPLEMENTED, words)

    def _push_stream(self, first: Any, parts: Iterator[bytes]) -> bytes:
        """Assemble a streamed row in reused memory, checking that it is finite, and push it."""
        push, values = read_push(first), first.values
        row = self._rows.pop() if self._rows else np.empty(self.server.num_parameters, np.float32)
        at, finite = 0, True
        while True:
            numbers = np.frombuffer(values, np.float32) if len(values) % 4 == 0 else None
            if numbers is None or at + len(numbers) > len(row):
                raise DamagedFile(f"a row has {len(row)} float32 numbers, in parts of whole ones")
            finite &= copy_finite(numbers, row[at : at + len(numbers)])
            at += len(numbers)
            part = next(parts, None)
            if part is None:
                break
            values = decode(pb.PushRequest, part).values
        if at != len(row):
            raise DamagedFile(f"a row has {len(row)} numbers, and this one ends after {at}")
        # The server checks a row again that is not finite, and refuses it.
        receipt = self.server.take_row(push, row, finite=bool(finite))
        self._rows.append(row)
        return encode_receipt(receipt)

    @contextlib.contextmanager
    def _streaming(self, context: Any) -> Iterator[None]:
        """Allow a limited number of streams at a time: each occupies a thread."""
        if not self._streams.acquire(blocking=False):
            self._refuse(context, "too_many", grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams at once: try again")
        try:
            yield
        finally:
            self._streams.release()

    @contextlib.contextmanager
    def _aborting(self, context: Any) -> Iterator[None]:
        """Refuse a call of which the caller no longer awaits the reply; map errors to statuses."""
        if context.time_remaining() is not None and context.time_remaining() <= 0:
            self._refuse(context, "too_late", grpc.StatusCode.DEADLINE_EXCEEDED, "the caller no longer waits")
        try:
            yield
        except DamagedFile as error:
            self._refuse(context, "garbage", grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except SteppeError as error:
            status = grpc.StatusCode.FAILED_PRECONDITION if isinstance(error, UsageError) else grpc.StatusCode.ABORTED
            context.abort(status, str(error))

    def _require_own(self, context: Any, name: str | None, request: Any) -> None:
        """Refuse a call for another worker than the one whose token came with it."""
        worker = getattr(request, "worker", "")
        if name is not None and worker and worker != name:
            self._refuse(context, "not_yours", grpc.StatusCode.PERMISSION_DENIED, "this token is another worker's")

    def _bind(self, host: str, port: int, tls: Tls | None) -> int:
        address = f"{host}:{port}"
        try:
            if tls is None:
                bound = self._grpc.add_insecure_port(address)
            else:
                pair = (Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes())
                bound = self._grpc.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError:
            bound = 0
        except OSError as error:
            raise ConfigError(f"the TLS file {error.filename} cannot be read: {error.strerror}") from None
        if not bound:
            raise UsageError(
                f"the parameter server cannot listen on {address}: is the port in use, or TLS's key wrong?"
            )
        return int(bound)

    def _identity(self, context: Any) -> str | None:
        """Return the worker whose token came with the call, or None for a common token; refuse the call otherwise."""
        given = dict(context.invocation_metadata()).get("authorization", "")
        presented = given.encode() if isinstance(given, str) else given
        known = {None: self.token} if isinstance(self.token, str) else self.token
        found = [name for name, token in known.items() if hmac.compare_digest(presented, f"Bearer {token}".encode())]
        if not found:
            words = f"a wrong or missing token: give the client the server's, or set {protocol.TOKEN_VARIABLE}"
            self._refuse(context, "bad_token", grpc.StatusCode.UNAUTHENTICATED, words)
        return found[0]

    def _refuse(self, context: Any, reason: str, status: Any, words: str) -> NoReturn:
        with self._refused_lock:
            self.refused[reason] = self.refused.get(reason, 0) + 1
        context.abort(status, words)
        raise AssertionError("abort raises")


class _RpcHandlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Map method names to handlers of raw bytes: nothing is decoded before authentication."""

    def __init__(self, service: GrpcServer) -> None:
        self._former = grpc.unary_unary_rpc_method_handler(service.refuse_former_client)
        self._handlers = {
            method_path(method): grpc.unary_unary_rpc_method_handler(functools.partial(service.handle, method))
            for method in HANDLERS
        }
        self._handlers[method_path("PullStream")] = grpc.unary_stream_rpc_method_handler(service.stream_pull)
        self._handlers[method_path("PushStream")] = grpc.stream_unary_rpc_method_handler(service.stream_push)

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        return self._former if method.startswith(FORMER_SERVICE) else self._handlers.get(method)


def _accepted_tokens(
    token: str | Mapping[str, str] | None, host: str, tls: Tls | None, *, private: bool
) -> str | dict[str, str]:
    """Return the accepted tokens; raise ConfigError if they are insecure."""
    local = protocol.is_loopback(host)
    if not local and (token is None or tls is None):
        raise ConfigError(f"{host!r} can be reached by other machines: give token=… and tls=Tls(certificate, key)")
    if private and not isinstance(token, Mapping):
        raise ConfigError(
            "a private server needs to know who pushes: give token={worker: token} with one for each client"
        )
    if token is None:
        return protocol.new_token()
    found = token if isinstance(token, str) else dict(token)
    values = [found] if isinstance(found, str) else list(found.values())
    if (
        not values
        or len(set(values)) < len(values)
        or min(map(len, values)) < 16
        or not all(v.isascii() for v in values)
    ):
        raise ConfigError("a token has at least 16 ASCII characters, and no two workers have the same")
    return found

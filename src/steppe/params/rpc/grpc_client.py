"""gRPC client of a parameter server: sends the messages of parameter_server.proto, and retries."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from steppe.core.contracts.errors import ConfigError, MissingExtra, SteppeError, Unreachable, UsageError
from steppe.core.contracts.weights import Weights
from steppe.params.rpc import parameter_server_pb2 as pb
from steppe.params.rpc import protocol
from steppe.params.rpc.messages import CHUNK, SERVICE, MessageClient, encode, make_message, method_path, read_pull

try:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
except ImportError as error:  # pragma: no cover
    raise MissingExtra("a client of the parameter server", "grpc") from error

T = TypeVar("T")
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.02, 2.0


class GrpcClient(MessageClient):
    """One channel to one address."""

    MAX_INLINE_ROW_BYTES = CHUNK

    def __init__(
        self,
        url: str,
        token: str | Mapping[str, str] | None,
        ca: str | Path | None,
        timeout_s: float,
        retry_s: float,
    ) -> None:
        super().__init__()
        secure, self._host, self._port = protocol.parse_address(url)
        if ca is not None and not secure:
            raise ConfigError(f"ca is for grpcs:// addresses, and {url!r} is not one")
        self._url, self._token, self._timeout_s, self._retry_s = url, token, timeout_s, retry_s
        self._local_token: str | None = None
        self._pull_nbytes = 0  # of the parameters that were pulled last
        options = [
            *protocol.BULK_CHANNEL_OPTIONS,
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.min_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        target = f"{self._host}:{self._port}"
        self._channel = (
            grpc.secure_channel(target, _credentials(ca), options) if secure else grpc.insecure_channel(target, options)
        )

    def close(self) -> None:
        self._channel.close()

    def is_serving(self) -> bool:
        health = health_pb2_grpc.HealthStub(self._channel)
        try:
            reply = health.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def pull(self, worker: str | None, newer_than: int) -> tuple[Weights | None, int | None]:
        if self._pull_nbytes <= CHUNK:
            found = super().pull(worker, newer_than)
        else:
            message = encode(make_message(pb.PullRequest, worker=worker, newer_than=newer_than))
            call = self._channel.unary_stream(method_path("PullStream"))
            found, _ = self._retry(worker, lambda options: read_pull(call(message, **options)))
        if found[0] is not None:
            self._pull_nbytes = found[0].layout.nbytes
        return found

    def _send(
        self, method: str, data: bytes | Callable[[], Iterator[bytes]], *, worker: str | None = None
    ) -> tuple[bytes, int]:
        kind = self._channel.stream_unary if callable(data) else self._channel.unary_unary
        call = kind(method_path(method))
        return self._retry(worker, lambda options: call(data() if callable(data) else data, **options))

    def _retry(self, worker: str | None, call: Callable[[Any], T]) -> tuple[T, int]:
        """Make a call until the server replies; return the result and the number of attempts."""
        until, pause, tries = time.monotonic() + self._retry_s, INITIAL_BACKOFF_S, 0
        while True:
            tries += 1
            token = self._token_of(worker)
            metadata = [("authorization", f"Bearer {token}")] if token else []
            try:
                return call({"timeout": self._timeout_s, "metadata": metadata}), tries
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAUTHENTICATED and self._has_new_token(token):
                    continue
                left = until - time.monotonic()
                if not _is_retryable(error) or left <= 0:
                    raise self._to_steppe_error(error) from None
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # jitter, so that clients do not retry together
            pause = min(2 * pause, MAX_BACKOFF_S)

    def _token_of(self, worker: str | None) -> str | None:
        """Return the token of a worker, or any token for a call that is not made for a worker."""
        if self._token is None:
            self._local_token = self._local_token or protocol.find_token(self._host, self._port)
            return self._local_token
        if not isinstance(self._token, Mapping):
            return self._token
        if worker is None:
            return next(iter(self._token.values()))
        if worker not in self._token:
            raise UsageError(f"there is no token for worker {worker!r}, only for {', '.join(self._token)}")
        return self._token[worker]

    def _has_new_token(self, refused: str | None) -> bool:
        """Read the token again after one was refused: a restarted server has a new one."""
        if self._token is not None:
            return False
        self._local_token = protocol.find_token(self._host, self._port)
        return self._local_token not in (None, refused)

    def _to_steppe_error(self, error: Any) -> SteppeError:
        code, words = error.code(), error.details()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return Unreachable(f"no parameter server answers at {self._url} ({words}): is it running?")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return UsageError(f"the parameter server at {self._url} did not take the message: {words}")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return UsageError(
                f"the server at {self._url} does not speak {SERVICE.full_name}: it is from another version of Steppe. "
                "Update the older of the two"
            )
        if code == grpc.StatusCode.ABORTED:
            return SteppeError(str(words))
        return UsageError(str(words))


def _is_retryable(error: Any) -> bool:
    """Return whether a retry may succeed."""
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "larger than max" not in (error.details() or "")
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _credentials(ca: str | Path | None) -> Any:
    try:
        return grpc.ssl_channel_credentials(None if ca is None else Path(ca).read_bytes())
    except OSError as error:
        raise ConfigError(f"ca={ca} cannot be read: {error.strerror}") from None

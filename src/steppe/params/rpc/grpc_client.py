"""gRPC client of a parameter server, with packed bytes as messages (see grpc_server.py)."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.errors import ConfigError, MissingExtra, SteppeError, Unreachable, UsageError
from steppe.params.rpc import protocol
from steppe.params.rpc.packed_client import PackedClient

try:
    import grpc
except ImportError as error:  # pragma: no cover
    raise MissingExtra("a client of the parameter server", "grpc") from error

INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.02, 2.0


class GrpcClient(PackedClient):
    """One channel to one address."""

    MAX_INLINE_ROW_BYTES = protocol.CHUNK

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
        try:
            return bool(self._channel.unary_unary(protocol.HEALTH)(b"", timeout=self._timeout_s) == protocol.SERVING)
        except grpc.RpcError:
            return False

    def _send(
        self, method: str, data: bytes, row: np.ndarray | None = None, *, worker: str | None = None
    ) -> tuple[bytes, int | None, int]:
        kind = self._channel.unary_unary if row is None else self._channel.stream_unary
        call = kind(protocol.method_path(method))
        until, pause, tries = time.monotonic() + self._retry_s, INITIAL_BACKOFF_S, 0
        while True:
            tries += 1
            try:
                sent = data if row is None else protocol.iter_push_parts(data, row)
                answer, details = call.with_call(sent, timeout=self._timeout_s, metadata=self._metadata(worker))
                return answer, _round_of(details), tries
            except grpc.RpcError as error:
                left = until - time.monotonic()
                if not _is_retryable(error) or left <= 0:
                    raise self._to_steppe_error(error) from None
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # jitter, so that clients do not retry together
            pause = min(2 * pause, MAX_BACKOFF_S)

    def _metadata(self, worker: str | None) -> list[tuple[str, str]]:
        # Read the token again for each call: a restarted server has a new one.
        token = self._token_of(worker) or protocol.find_token(self._host, self._port)
        return [("authorization", f"Bearer {token}")] if token else []

    def _token_of(self, worker: str | None) -> str | None:
        """Return the token of a worker, or any token for a call that is not made for a worker."""
        if not isinstance(self._token, Mapping):
            return self._token
        if worker is None:
            return next(iter(self._token.values()))
        if worker not in self._token:
            raise UsageError(f"there is no token for worker {worker!r}, only for {', '.join(self._token)}")
        return self._token[worker]

    def _to_steppe_error(self, error: Any) -> SteppeError:
        code, words = error.code(), error.details()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return Unreachable(f"no parameter server answers at {self._url} ({words}): is it running?")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return UsageError(f"the parameter server at {self._url} did not take the message: {words}")
        if code == grpc.StatusCode.ABORTED:
            return SteppeError(str(words))
        return UsageError(str(words))


def _is_retryable(error: Any) -> bool:
    """Return whether a retry may succeed."""
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "larger than max" not in (error.details() or "")
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _round_of(details: Any) -> int | None:
    found = dict(details.trailing_metadata() or ()).get(protocol.ROUND_METADATA_KEY)
    return None if found is None else int(found)


def _credentials(ca: str | Path | None) -> Any:
    try:
        return grpc.ssl_channel_credentials(None if ca is None else Path(ca).read_bytes())
    except OSError as error:
        raise ConfigError(f"ca={ca} cannot be read: {error.strerror}") from None

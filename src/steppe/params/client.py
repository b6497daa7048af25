"""ParameterClient: a parameter server on another machine, used as if it were here. Calls are repeated with growing pauses
until the server answers, and a push that is repeated counts once."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from steppe.core.checked import checked
from steppe.core.codec import decode_weights, pack, unpack
from steppe.core.errors import ConfigError, MissingExtra, SteppeError, Unreachable, UsageError
from steppe.core.weights import Weights
from steppe.params import wire
from steppe.params.rounds import Receipt

try:
    import grpc
except ImportError as error:  # pragma: no cover
    raise MissingExtra("a client of the parameter server", "grpc") from error

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0


class ParameterClient:
    """Speaks to `grpc://host:port` (`grpcs://` for TLS, with `ca` the PEM file of who signed the server's certificate).

    One call may take `timeout_s`; while nobody answers it is repeated for `retry_s`, then Unreachable is raised. `token`: by
    default STEPPE_PARAMS_TOKEN, or what a server of the same user on this machine left. A client may be used by threads.
    """

    @checked
    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: str | Path | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
    ) -> None:
        secure, self._host, self._port = wire.address_of(url)
        if ca is not None and not secure:
            raise ConfigError(f"ca is for grpcs:// addresses, and {url!r} is not one")
        if not timeout_s > 0 or not retry_s >= 0:
            raise ConfigError("timeout_s is above 0, retry_s at least 0")
        self.url = url
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self._token = token
        self._standing: dict[str, dict[str, Any]] = {}
        options = [
            *wire.BULK,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        self._channel.close()

    @checked
    def register_worker(self, worker_id: str) -> bool:
        """As ParameterServer.register_worker."""
        answer = unpack(self._call("Register", {"worker": worker_id})[0])
        new = bool(answer.pop("new"))
        self._standing[worker_id] = answer
        return new

    @checked
    def unregister_worker(self, worker_id: str) -> bool:
        """As ParameterServer.unregister_worker."""
        self._standing.pop(worker_id, None)
        return bool(unpack(self._call("Unregister", {"worker": worker_id})[0])["was"])

    @checked
    def get_parameters(self, worker_id: str) -> dict[str, np.ndarray]:
        """As ParameterServer.get_parameters."""
        return self.pull(worker_id).arrays()

    @checked
    def pull(self, worker_id: str) -> Weights:
        """As ParameterServer.pull."""
        found = self.pull_newer(worker_id, -1)
        assert found is not None, "every version is newer than −1"
        return found

    @checked
    def pull_newer(self, worker_id: str, version: int) -> Weights | None:
        """The newest weights if they are newer than `version`; little travels when they are not."""
        data, current = self._call("Pull", {"worker": worker_id, "newer_than": version})
        if current is not None and worker_id in self._standing:
            self._standing[worker_id]["round_number"] = current
        return decode_weights(data) if data else None

    @checked
    def wait_newer(self, worker_id: str, version: int, timeout_s: float) -> Weights | None:
        """The newest weights once they are newer than `version`; None when time is up. Asks in growing pauses."""
        until, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S / 10
        while True:
            found = self.pull_newer(worker_id, version)
            left = until - time.monotonic()
            if found is not None or left <= 0:
                return found
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.1)

    @checked
    def push_gradients(
        self,
        worker_id: str,
        gradients: Mapping[str, np.ndarray],
        weight: float = 1.0,
        *,
        round_number: int | None = None,
        version: int | None = None,
    ) -> Receipt:
        """As ParameterServer.push_gradients. Without a `round_number` the client counts, so that repeating is harmless."""
        standing = self._standing.get(worker_id)
        if standing is None:
            raise UsageError(f"worker {worker_id!r} is not registered: call register_worker first")
        number = _number(standing) if round_number is None else round_number
        request = {"worker": worker_id, "update": dict(gradients), "weight": weight, "round_number": number}
        receipt, tries = self._push({**request, "version": version})
        if receipt.reason == "unknown_worker":  # a server that began anew
            self.register_worker(worker_id)
            standing = self._standing[worker_id]
            renewed = number if round_number is not None else _number(standing)
            receipt, tries = self._push({**request, "round_number": renewed, "version": None})
            number = renewed
        if receipt.reason == "pushed_twice" and tries > 1:  # the first try had arrived, and its answer was lost
            receipt = Receipt(True, receipt.round_number, receipt.version)
        if receipt:
            standing["last"] = max(standing["last"], number)
        standing["round_number"] = receipt.round_number
        return receipt

    def get_server_stats(self) -> dict[str, Any]:
        """As ParameterServer.get_server_stats."""
        found = unpack(self._call("Stats", {})[0])
        assert isinstance(found, dict)
        return found

    def save_checkpoint(self) -> str:
        """Let the server write a checkpoint where it was told to keep them; the path, on its machine."""
        return str(unpack(self._call("Checkpoint", {})[0])["path"])

    def is_serving(self) -> bool:
        """Whether somebody answers the health check now; needs no token and is not repeated."""
        try:
            return bool(self._channel.unary_unary(wire.HEALTH)(b"", timeout=self.timeout_s) == wire.SERVING)
        except grpc.RpcError:
            return False

    def _push(self, request: dict[str, Any]) -> tuple[Receipt, int]:
        tries = [0]
        data = self._call("Push", request, tries)[0]
        return msgspec.convert(unpack(data), Receipt), tries[0]

    def _call(self, method: str, request: dict[str, Any], tries: list[int] | None = None) -> tuple[bytes, int | None]:
        """The answer and the round that came with it; repeats while nobody answers or the server has too much to do."""
        data, call = pack(request), self._channel.unary_unary(wire.path_of(method))
        until, pause = time.monotonic() + self.retry_s, FIRST_PAUSE_S
        while True:
            if tries is not None:
                tries[0] += 1
            try:
                answer, details = call.with_call(data, timeout=self.timeout_s, metadata=self._metadata())
                return answer, _round_of(details)
            except grpc.RpcError as error:
                left = until - time.monotonic()
                if not _passing(error) or left <= 0:
                    raise self._meaning(error) from None
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # apart, so that not all come again at once
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _metadata(self) -> list[tuple[str, str]]:
        token = self._token or wire.find_token(self._host, self._port)  # a server that began anew has a new one
        return [("authorization", f"Bearer {token}")] if token else []

    def _meaning(self, error: Any) -> SteppeError:
        code, words = error.code(), error.details()
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return Unreachable(f"no parameter server answers at {self.url} ({words}): is it running?")
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return UsageError(f"the parameter server at {self.url} did not take the message: {words}")
        if code == grpc.StatusCode.ABORTED:
            return SteppeError(str(words))
        return UsageError(str(words))


def _number(standing: dict[str, Any]) -> int:
    """The round to push for: the server's, or one more than this worker's last."""
    return int(standing["round_number"] if standing["synchronous"] else standing["last"] + 1)


def _passing(error: Any) -> bool:
    """Whether trying again may help."""
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return "larger than max" not in (error.details() or "")
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _round_of(details: Any) -> int | None:
    found = dict(details.trailing_metadata() or ()).get(wire.ROUND)
    return None if found is None else int(found)


def _credentials(ca: str | Path | None) -> Any:
    try:
        return grpc.ssl_channel_credentials(None if ca is None else Path(ca).read_bytes())
    except OSError as error:
        raise ConfigError(f"ca={ca} cannot be read: {error.strerror}") from None

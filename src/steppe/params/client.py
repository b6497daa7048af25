"""ParameterClient: use a parameter server in another process or on another machine like a local one.

Calls are retried with exponential backoff until the server replies. Pushes are idempotent: a retried push counts once.
A ParameterRpcClient implements the transport.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.system.typecheck import to_python_number, typechecked
from steppe.params.parameter_layout import as_update
from steppe.params.round_sum import validate_numbers
from steppe.params.rounds import Push, Receipt

POLICY = "policy"
MAX_METRICS = 64


class ParameterRpcClient(Protocol):
    """Transport of calls to a server. Each call is retried up to the configured time, then raises Unreachable."""

    MIN_POLL_S: float  # shortest and longest pause between polls for a newer version
    MAX_POLL_S: float
    sends_version: bool  # whether a push must name the version it was computed with: the server sees no pulls

    def call(self, method: str, request: Mapping[str, Any]) -> Any:
        """Return the reply to a small request."""

    def pull(self, worker: str | None, newer_than: int) -> tuple[Weights | None, int | None]:
        """Return the newest weights if they are newer, else None, and the server's round if known."""

    def push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> tuple[Receipt, int]:
        """Push an update; return the receipt and the number of attempts."""

    def is_serving(self) -> bool: ...

    def close(self) -> None: ...


def as_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to floats; raise UsageError unless they are at most MAX_METRICS numbers with short names."""
    found = {name: to_python_number(value) for name, value in metrics.items()}
    plain = all(isinstance(name, str) and isinstance(value, float | int) for name, value in found.items())
    if not plain or len(found) > MAX_METRICS or any(len(name) > MAX_METRICS for name in found):
        raise UsageError(f"metrics are at most {MAX_METRICS} numbers, with names of at most {MAX_METRICS} letters")
    try:
        return {name: float(value) for name, value in found.items()}
    except OverflowError as error:
        raise UsageError(f"a metric is beyond the range of a float: {error}") from None


class ParameterServerApi:
    """Calls with the same meaning on a local server and on a remote client."""

    def pull(self, worker_id: str) -> Weights:
        """Return the newest parameters as one flat buffer with its version.

        The worker's next push is assumed to be computed with them.
        """
        raise NotImplementedError

    def _push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> Receipt:
        """Push an update given by name or as a flat row."""
        raise NotImplementedError

    def _newer_than(self, version: int) -> Weights | None:
        raise NotImplementedError

    @typechecked
    def get_parameters(self, worker_id: str) -> dict[str, np.ndarray]:
        """Return copies of the newest parameters by name; see `pull`."""
        return self.pull(worker_id).arrays()

    @typechecked
    def push_gradients(
        self,
        worker_id: str,
        gradients: Mapping[str, Any],
        weight: float = 1.0,
        *,
        round_number: int | None = None,
        version: int | None = None,
    ) -> Receipt:
        """Push one update; the receipt is false, with the reason, if it is refused.

        `round_number` makes pushes idempotent: the round if synchronous, the worker's own count of pushes otherwise; a
        client sets it automatically. `version`: the weights that the update was computed with; default: those last
        pulled.
        """
        return self._push(Push(worker_id, weight, round_number, version), as_update(gradients))

    @typechecked
    def push_row(
        self,
        worker_id: str,
        row: np.ndarray,
        weight: float = 1.0,
        *,
        round_number: int | None = None,
        version: int | None = None,
    ) -> Receipt:
        """Push an update given as one flat float32 vector of all trained parameters, in order; see `push_gradients`."""
        return self._push(Push(worker_id, weight, round_number, version), row)

    def sum_over_workers(
        self, worker_id: str, round_number: int, values: Sequence[float]
    ) -> tuple[int, list[float] | None]:
        """Add numbers to a sum over all workers, once per round, before pushing.

        Returns the server's round (−1 if the worker is not registered) and the sum for `round_number`. The sum is None
        until all workers have contributed, and if the server is in another round. Repeat the call until it is complete.
        """
        raise NotImplementedError

    def tally(self, worker_id: str, round_number: int, counted: Sequence[float]) -> tuple[int, list[float] | None]:
        """Call `sum_over_workers`, by its former name."""
        warnings.warn("tally is now called sum_over_workers", DeprecationWarning, stacklevel=2)
        return self.sum_over_workers(worker_id, round_number, counted)

    @typechecked
    def newer_than(self, policy: str, version: int) -> Weights | None:
        """Return the newest parameters if newer than `version`, else None, as a WeightStore with one policy does."""
        if policy != POLICY:
            raise UsageError(f"a parameter server has one policy, {POLICY!r}, not {policy!r}")
        return self._newer_than(version)


class ParameterClient(ParameterServerApi):
    """Client of a parameter server at `grpc://host:port`, `grpcs://host:port` (TLS) or `shm://…`.

    The `shm://…` address is what `ParameterServer.share` returned in another process of this machine. `ca` is the PEM
    file of the authority that signed the server's TLS certificate. A call may take `timeout_s`; without a reply it is
    retried for `retry_s`, then Unreachable is raised. `token`: one for all workers of this client, or one per worker
    name, which a private server requires; default: STEPPE_PARAMS_TOKEN, or the token file of the same user's server on
    this machine. Thread-safe.
    """

    @typechecked
    def __init__(
        self,
        url: str,
        *,
        token: str | Mapping[str, str] | None = None,
        ca: str | Path | None = None,
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
    ) -> None:
        if not timeout_s > 0 or not retry_s >= 0:
            raise ConfigError("timeout_s is above 0, retry_s at least 0")
        if token is not None and not token:
            raise ConfigError("token is empty: give the server's, or one for each worker by name")
        self.url = url
        self._worker_status: dict[str, dict[str, Any]] = {}
        self._rpc = _make_rpc_client(url, token, ca, timeout_s, retry_s)

    @classmethod
    def over(cls, rpc: ParameterRpcClient, url: str) -> Self:
        """Return a client that uses the caller's transport; `url` is its display name."""
        client = cls.__new__(cls)
        client.url, client._worker_status, client._rpc = url, {}, rpc
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._rpc.close()

    @typechecked
    def register_worker(self, worker_id: str) -> bool:
        """Register a worker; see ParameterServer.register_worker."""
        reply = self._rpc.call("Register", {"worker": worker_id})
        new = bool(reply.pop("new"))
        self._worker_status[worker_id] = reply
        return new

    @typechecked
    def unregister_worker(self, worker_id: str) -> bool:
        """Unregister a worker; see ParameterServer.unregister_worker."""
        self._worker_status.pop(worker_id, None)
        return bool(self._rpc.call("Unregister", {"worker": worker_id})["was_registered"])

    @typechecked
    def about(self, worker_id: str) -> dict[str, Any]:
        """Return the last known status of a registered worker.

        It includes the server's run and round_number, whether it takes deltas, and whether its rounds are synchronous.
        """
        return dict(self._require_registered(worker_id))

    @typechecked
    def pull(self, worker_id: str) -> Weights:
        """Return the newest weights; see ParameterServer.pull."""
        found = self.pull_newer(worker_id, -1)
        assert found is not None, "every version is newer than −1"
        return found

    @typechecked
    def pull_newer(self, worker_id: str, version: int) -> Weights | None:
        """Return the newest weights if they are newer than `version`, else None; then no weights are transferred."""
        status = self._require_registered(worker_id)
        found, current = self._rpc.pull(worker_id, version)
        if current is not None:
            status["round_number"] = current
        if found is not None:
            status["version"] = found.version
        return found

    @typechecked
    def wait_newer(self, worker_id: str, version: int, timeout_s: float) -> Weights | None:
        """Poll until there are weights newer than `version`; return them, or None after `timeout_s`."""
        until, pause = time.monotonic() + timeout_s, self._rpc.MIN_POLL_S
        while True:
            found = self.pull_newer(worker_id, version)
            left = until - time.monotonic()
            if found is not None or left <= 0:
                return found
            time.sleep(min(pause, left))
            pause = min(2 * pause, self._rpc.MAX_POLL_S)

    @typechecked
    def sum_over_workers(
        self, worker_id: str, round_number: int, values: Sequence[float]
    ) -> tuple[int, list[float] | None]:
        """Add numbers to the round's sum; see ParameterServerApi."""
        request = {"worker": worker_id, "round_number": round_number, "values": validate_numbers(values).tolist()}
        reply = self._rpc.call("SumOverWorkers", request)
        return int(reply["round_number"]), reply["total"]

    @typechecked
    def report(self, worker_id: str, metrics: Mapping[str, float]) -> None:
        """Report a worker's metrics; see ParameterServer.report."""
        self._rpc.call("Report", {"worker": worker_id, "metrics": as_metrics(metrics)})

    def get_server_stats(self) -> dict[str, Any]:
        """Return the server's statistics; see ParameterServer.get_server_stats."""
        found = self._rpc.call("GetStats", {})
        assert isinstance(found, dict)
        return found

    def save_checkpoint(self) -> str:
        """Let the server write a checkpoint to its configured path; return that path, which is on its machine."""
        return str(self._rpc.call("SaveCheckpoint", {})["path"])

    def is_serving(self) -> bool:
        """Return whether a server is running now; needs no token and is not retried."""
        return self._rpc.is_serving()

    def _require_registered(self, worker: str) -> dict[str, Any]:
        status = self._worker_status.get(worker)
        if status is None:
            raise UsageError(f"worker {worker!r} is not registered: call register_worker first")
        return status

    def _newer_than(self, version: int) -> Weights | None:
        """Read weights without a registered worker."""
        return self._rpc.pull(None, version)[0]

    def _push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> Receipt:
        status = self._require_registered(push.worker)
        number = _next_push_number(status) if push.number is None else push.number
        version = status["version"] if push.version is None and self._rpc.sends_version else push.version
        receipt, tries = self._rpc.push(push._replace(number=number, version=version), update)
        if receipt.reason == "unknown_worker":  # the server restarted without a checkpoint
            self.register_worker(push.worker)
            status = self._worker_status[push.worker]
            number = _next_push_number(status) if push.number is None else push.number
            receipt, tries = self._rpc.push(push._replace(number=number, version=None), update)
        elif receipt.reason == "future_version" and push.version is None:  # the server restored an older checkpoint
            receipt, tries = self._rpc.push(push._replace(number=number, version=None), update)
        if receipt.reason == "pushed_twice" and tries > 1:  # an earlier attempt arrived, but its reply was lost
            receipt = Receipt(True, receipt.round_number, receipt.version)
        if receipt:
            status["last"] = max(status["last"], number)
        status["round_number"] = receipt.round_number
        return receipt


def _make_rpc_client(
    url: str, token: str | Mapping[str, str] | None, ca: str | Path | None, timeout_s: float, retry_s: float
) -> ParameterRpcClient:
    if url.startswith("shm://"):
        if token is not None or ca is not None:
            raise ConfigError(f"{url!r} is memory of this machine: token and ca are for addresses on the network")
        from steppe.params.rpc.shm_client import ShmClient

        return ShmClient(Path(url.removeprefix("shm://")), timeout_s, retry_s)
    from steppe.params.rpc.grpc_client import GrpcClient

    return GrpcClient(url, token, ca, timeout_s, retry_s)


def _next_push_number(status: dict[str, Any]) -> int:
    """Return the number of the next push: the server's round or, if asynchronous, one more than the worker's last."""
    return int(status["round_number"] if status["synchronous"] else status["last"] + 1)

"""Base class of the clients that send packed bytes to a remote parameter server (calls.py defines the requests)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import SteppeError, UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.io.codec import decode_weights, pack, unpack
from steppe.params.parameter_layout import ParameterLayout
from steppe.params.push_api import Push
from steppe.params.rounds import Receipt
from steppe.params.rpc.calls import RpcReply


class PackedClient:
    """Encode requests and decode replies; subclasses implement `_send`."""

    MIN_POLL_S, MAX_POLL_S = 0.002, 0.1
    MAX_INLINE_ROW_BYTES: int | None = None  # longer rows are streamed in parts after the request
    sends_version = False

    def __init__(self) -> None:
        self._space: tuple[ParameterLayout, bool] | None = (
            None  # the server's parameter layout, and whether a push must contain all parameters
        )

    def call(self, method: str, request: Mapping[str, Any]) -> Any:
        sent = self._send(method, pack(dict(request), sealed=False), worker=request.get("worker"))
        answer = unpack(sent[0], sealed=False)
        if method == "Register":
            self._space = ParameterLayout.described(answer.pop("fields")), bool(answer.pop("whole"))
        return answer

    def pull(self, worker: str | None, newer_than: int) -> tuple[Weights | None, int | None]:
        asked = pack({"worker": worker, "newer_than": newer_than}, sealed=False)
        data, number, _ = self._send("Pull", asked, worker=worker)
        return (decode_weights(data, sealed=False) if data else None), number

    def push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> tuple[Receipt, int]:
        """Push an update; for an invalid one, send only the reason, so that the server counts it."""
        assert self._space is not None, "whoever pushes is registered"
        space, whole = self._space
        row: np.ndarray | None
        if isinstance(update, np.ndarray):
            row, refusal = update, space.validate_row(update)
        else:
            row, refusal = None if whole else space.view_as_row(update), None
            if row is None:
                row = np.empty(space.size, np.float32)
                refusal = space.fill(row, update, whole=whole)
        long = refusal is None and self.MAX_INLINE_ROW_BYTES is not None and row.nbytes > self.MAX_INLINE_ROW_BYTES
        words = {**push._asdict(), "refusal": list(refusal) if refusal else None}
        header = pack({**words, "row": None if refusal or long else row}, sealed=False)
        method, rest = ("PushRow", row) if long else ("Push", None)
        data, _, tries = self._send(method, header, rest, worker=push.worker)
        return msgspec.convert(unpack(data, sealed=False), Receipt), tries

    def _send(
        self, method: str, data: bytes, row: np.ndarray | None = None, *, worker: str | None = None
    ) -> tuple[bytes, int | None, int]:
        """Send a request; return the reply, the server's round if it is included, and the number of attempts.

        Retries while the server does not reply or is overloaded. A `row` is streamed in parts after the request.
        `worker`: the worker that the call is made for, if any.
        """
        raise NotImplementedError


def unwrap_reply(answer: RpcReply) -> tuple[bytes, int | None]:
    """Return a reply's bytes and round; raise the server's error."""
    kind, found, number = answer
    if kind != "ok":
        raise (UsageError if kind == "usage" else SteppeError)(found)
    return bytes(found), number

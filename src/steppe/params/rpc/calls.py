"""The calls of a parameter server: requests and replies as packed bytes (core/io/codec.py), the same on all transports.

The transports authenticate callers: grpc_server.py (gRPC), and roles/cluster/ray.py and mpi.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import DamagedFile, SteppeError, UsageError
from steppe.core.contracts.weights import Weights
from steppe.core.io.codec import Buffer, encode_weights, pack
from steppe.params.parameter_layout import INVALID_UPDATE_REASONS, Refusal
from steppe.params.push_api import POLICY, Push
from steppe.params.round_sum import validate_counts
from steppe.params.rpc import protocol

if TYPE_CHECKING:
    from steppe.params.server import ParameterServer

_NONE = type(None)
_WORKER_FIELD: dict[str, tuple[type, ...]] = {"worker": (str,)}
REQUESTS: dict[str, dict[str, tuple[type, ...]]] = {
    "Register": _WORKER_FIELD,
    "Unregister": _WORKER_FIELD,
    "Pull": {"worker": (str, _NONE), "newer_than": (int,)},
    "Push": {
        **_WORKER_FIELD,
        "row": (np.ndarray, _NONE),
        "refusal": (list, _NONE),
        "weight": (float, int),
        "number": (int, _NONE),
        "version": (int, _NONE),
    },
    "PushRow": {
        **_WORKER_FIELD,
        "row": (_NONE,),
        "refusal": (_NONE,),
        "weight": (float, int),
        "number": (int, _NONE),
        "version": (int, _NONE),
    },
    "Tally": {**_WORKER_FIELD, "round_number": (int,), "counted": (list,)},
    "Report": {**_WORKER_FIELD, "metrics": (dict,)},
    "Stats": {},
    "Checkpoint": {},
}

RpcReply = tuple[str, Any, int | None]  # ("ok", bytes, round after a pull) or ("usage" or "error", message, None)


def dispatch(server: ParameterServer, method: str, request: dict[str, Any]) -> tuple[bytes, int | None]:
    """Handle a request; return the reply's bytes and, for a worker's pull, the server's round."""
    if method == "Pull" and request["worker"] is not None:
        found, number = server.pull_newer(request["worker"], request["newer_than"])
        return _weights(found), number
    return HANDLERS[method](server, request), None


def handle_call(server: ParameterServer, method: str, data: Buffer) -> RpcReply:
    """Decode and handle a request; return errors as a reply."""
    try:
        if method not in HANDLERS:
            raise DamagedFile(f"there is no call {method!r}")
        return ("ok", *dispatch(server, method, protocol.read_request(data, REQUESTS[method])))
    except UsageError as error:
        return "usage", str(error), None
    except SteppeError as error:
        return "error", str(error), None


def _register(server: ParameterServer, request: dict[str, Any]) -> bytes:
    new, about = server.register_worker(request["worker"]), server.description()
    del about["carried"]
    return encode_reply({"new": new, **server.standing(request["worker"]), **about})


def _unregister(server: ParameterServer, request: dict[str, Any]) -> bytes:
    return encode_reply({"was": server.unregister_worker(request["worker"])})


def _pull(server: ParameterServer, request: dict[str, Any]) -> bytes:
    """Handle a pull by a reader that is not a registered worker."""
    return _weights(server.newer_than(POLICY, request["newer_than"]))


def _weights(found: Weights | None) -> bytes:
    """Encode weights; no bytes if the caller has the newest ones already."""
    return b"" if found is None else encode_weights(found, sealed=False)


def _push(server: ParameterServer, request: dict[str, Any]) -> bytes:
    """Handle a push: a row of numbers, or the reason why the client found them invalid."""
    push = Push(request["worker"], float(request["weight"]), request["number"], request["version"])
    row, words = request["row"], request["refusal"]
    if (row is None) == (words is None):
        raise DamagedFile("a push has either numbers or what is wrong with them")
    if row is not None:
        return encode_reply(msgspec.to_builtins(server.take_row(push, row)))
    if len(words) != 2 or not all(isinstance(word, str) for word in words) or words[0] not in INVALID_UPDATE_REASONS:
        raise DamagedFile("a push's refusal is a known word and a sentence")
    return encode_reply(msgspec.to_builtins(server.refuse_push(push, Refusal(words[0], words[1][:1000]))))


def _tally(server: ParameterServer, request: dict[str, Any]) -> bytes:
    number, total = server.tally(
        request["worker"], request["round_number"], validate_counts(request["counted"]).tolist()
    )
    return encode_reply({"round_number": number, "total": total})


def _report(server: ParameterServer, request: dict[str, Any]) -> bytes:
    server.report(request["worker"], request["metrics"])
    return encode_reply({})


def _stats(server: ParameterServer, _: dict[str, Any]) -> bytes:
    return encode_reply(server.get_server_stats())


def _checkpoint(server: ParameterServer, _: dict[str, Any]) -> bytes:
    """Write a checkpoint to the server's configured path: clients cannot choose one."""
    return encode_reply({"path": str(server.save_checkpoint())})


def encode_reply(tree: Any) -> bytes:
    """Encode a reply."""
    return pack(tree, sealed=False)


HANDLERS: dict[str, Callable[[ParameterServer, dict[str, Any]], bytes]] = {
    "Register": _register,
    "Unregister": _unregister,
    "Pull": _pull,
    "Push": _push,
    "Tally": _tally,
    "Report": _report,
    "Stats": _stats,
    "Checkpoint": _checkpoint,
}

"""A cluster over Ray: the parameter server is a named Ray actor, which the first node starts and which ends with that
node; and the client with which every node calls it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from steppe.core.config.cluster import ClusterConfig, read_cluster
from steppe.core.contracts.errors import Conflict, Unreachable
from steppe.core.io.codec import pack, unpack
from steppe.params.from_cluster import AdamSettings, build_parameter_server
from steppe.params.rpc.messages import MessageClient, RpcReply, handle_call, unwrap_reply
from steppe.transport.ray.links import import_ray

NAMESPACE = "steppe"
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0


class ParameterServerActor:
    """Ray actor that hosts the parameter server. Calls take and return byte arrays, which Ray stores as they are."""

    def __init__(self, description: np.ndarray) -> None:
        tree = unpack(description.tobytes(), sealed=False)
        step = msgspec.convert(tree["step"], AdamSettings)
        self._server = build_parameter_server(read_cluster(tree["cluster"]), tree["parameters"], step)

    def handle(self, method: str, data: np.ndarray) -> RpcReply:
        """Handle a call and return its reply (params/rpc/messages.py)."""
        kind, found = handle_call(self._server, method, data.tobytes())
        return kind, np.frombuffer(found, np.uint8) if kind == "ok" else found

    def save_checkpoint(self) -> None:
        """Save a last checkpoint, if checkpoints are configured."""
        if self._server.checkpoint_path is not None:
            self._server.save_checkpoint()


class RayClusterServer:
    """Start the server actor under the cluster's name, by which other programs of the Ray cluster find it."""

    def __init__(self, cluster: ClusterConfig, params: Mapping[str, np.ndarray], step: AdamSettings) -> None:
        ray = join_ray_cluster(cluster)
        config = cluster.model_dump(mode="json", exclude_none=True)
        description = {"cluster": config, "parameters": dict(params), "step": msgspec.to_builtins(step)}
        options = {"name": cluster.name, "namespace": NAMESPACE, "num_cpus": 0}
        try:
            self._actor = (
                ray.remote(ParameterServerActor)
                .options(**options)
                .remote(np.frombuffer(pack(description, sealed=False), np.uint8))
            )
            ray.get(self._actor.handle.remote("GetStats", np.empty(0, np.uint8)))
        except ValueError:
            message = f"another cluster {cluster.name!r} is on this Ray cluster: end it, or give this one another cluster.name"
            raise Conflict(message) from None

    def close(self) -> None:
        ray = import_ray()
        with contextlib.suppress(ray.exceptions.RayError):  # the actor is already gone
            ray.get(self._actor.save_checkpoint.remote())
        ray.kill(self._actor)


class RayClusterClient(MessageClient):
    """Call the server actor, and look it up again if it is gone."""

    def __init__(self, cluster: ClusterConfig) -> None:
        super().__init__()
        self._ray, self._cluster, self._actor = join_ray_cluster(cluster), cluster, None

    def is_serving(self) -> bool:
        return self._find_actor() is not None

    def close(self) -> None:
        self._actor = None

    def _send(
        self, method: str, data: bytes | Callable[[], Iterator[bytes]], *, worker: str | None = None
    ) -> tuple[bytes, int]:
        assert isinstance(data, bytes), "nothing is streamed over Ray"
        deadline_s, backoff_s, attempts = time.monotonic() + self._cluster.retry_s, INITIAL_BACKOFF_S, 0
        while True:
            attempts += 1
            actor = self._find_actor()
            if actor is not None:
                try:
                    reply = actor.handle.remote(method, np.frombuffer(data, np.uint8))
                    return unwrap_reply(self._ray.get(reply, timeout=self._cluster.timeout_s)), attempts
                except self._ray.exceptions.RayError:  # the actor or its node ended, or the call timed out
                    self._actor = None
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise Unreachable(
                    f"no parameter server is at {self._cluster.url}: is the cluster's first node running?"
                )
            time.sleep(min(remaining_s, backoff_s))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _find_actor(self) -> Any:
        if self._actor is None:
            with contextlib.suppress(ValueError):  # no actor has that name
                self._actor = self._ray.get_actor(self._cluster.name, namespace=NAMESPACE)
        return self._actor


def join_ray_cluster(cluster: ClusterConfig) -> Any:
    """Return the module ray, connected to the Ray cluster that the program has joined, or to the configured one."""
    ray = import_ray()
    if not ray.is_initialized():
        quiet_options = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        try:
            ray.init(address=cluster.parameter_server, namespace=NAMESPACE, **quiet_options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            message = (
                f"there is no Ray cluster at {cluster.parameter_server}: start one with `ray start --head` ({error})"
            )
            raise Unreachable(message) from None
    return ray

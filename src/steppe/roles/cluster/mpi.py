"""A cluster over MPI: every rank is a node, and rank 0 hosts the parameter server.

    REQUEST_TAG   any rank → rank 0      (number, method, request)
    REPLY_TAG     rank 0 → that rank     (number, kind, reply or error message)

A thread of rank 0 serves requests while the rank itself trains, so MPI must be initialized with THREAD_MULTIPLE. No
call blocks for long: client and server poll for messages with exponential backoff.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from steppe.core.config.cluster import ClusterConfig
from steppe.core.contracts.errors import ConfigError, Unreachable, UsageError
from steppe.params.from_cluster import AdamSettings, build_parameter_server
from steppe.params.rpc.messages import MessageClient, handle_call, unwrap_reply
from steppe.transport.mpi.links import import_mpi

REQUEST_TAG, REPLY_TAG = 7101, 7102
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.00005, 0.002


class MpiClusterServer:
    """Serve requests from a thread of rank 0."""

    def __init__(self, cluster: ClusterConfig, params: Mapping[str, np.ndarray], step: AdamSettings) -> None:
        self._mpi = join_mpi_cluster(cluster)
        self.server = build_parameter_server(cluster, params, step)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="params-mpi", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        if self.server.checkpoint_path is not None:
            self.server.save_checkpoint()
        self.server.close()

    def _serve(self) -> None:
        backoff_s = INITIAL_BACKOFF_S
        while not self._ending.is_set():
            message = receive_message(self._mpi, self._mpi.ANY_SOURCE, REQUEST_TAG)
            backoff_s = INITIAL_BACKOFF_S if message is not None else min(2 * backoff_s, MAX_BACKOFF_S)
            if message is None:
                self.server.tick()
                time.sleep(backoff_s)
                continue
            data, rank = message
            number, method, request = msgspec.msgpack.decode(data)
            reply = msgspec.msgpack.encode((number, *handle_call(self.server, method, request)))
            self._mpi.COMM_WORLD.Send([reply, self._mpi.BYTE], rank, REPLY_TAG)


class MpiClusterClient(MessageClient):
    """Send requests to rank 0, one at a time. Requests are queued there until served, so they are never retried."""

    def __init__(self, cluster: ClusterConfig) -> None:
        super().__init__()
        self._mpi, self._cluster = join_mpi_cluster(cluster), cluster
        self._lock, self._request_number = threading.Lock(), time.monotonic_ns()  # unlike an earlier client's numbers

    def is_serving(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: the client holds no resources."""

    def _send(
        self, method: str, data: bytes | Callable[[], Iterator[bytes]], *, worker: str | None = None
    ) -> tuple[bytes, int]:
        with self._lock:
            self._request_number += 1
            request = msgspec.msgpack.encode((self._request_number, method, data))
            sent = self._mpi.COMM_WORLD.Isend([request, self._mpi.BYTE], 0, REQUEST_TAG)
            return unwrap_reply(self._wait_for_reply(sent)), 1

    def _wait_for_reply(self, sent: Any) -> Any:
        deadline_s, backoff_s = time.monotonic() + self._cluster.timeout_s + self._cluster.retry_s, INITIAL_BACKOFF_S
        while True:
            sent.Test()
            message = receive_message(self._mpi, 0, REPLY_TAG)
            if message is not None:
                number, *reply = msgspec.msgpack.decode(message[0])
                if number == self._request_number:
                    return reply
                continue  # the reply to an abandoned request
            if time.monotonic() >= deadline_s:
                raise Unreachable(
                    "the first rank, which has the parameter server, does not respond: is it still training?"
                )
            time.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


def receive_message(mpi: Any, source: int, tag: int) -> tuple[bytearray, int] | None:
    """Return an arrived message and its source rank, or None without blocking."""
    status = mpi.Status()
    message = mpi.COMM_WORLD.Improbe(source, tag, status)
    if message is None:
        return None
    data = bytearray(status.Get_count(mpi.BYTE))
    message.Recv([data, mpi.BYTE])
    return data, status.Get_source()


def join_mpi_cluster(cluster: ClusterConfig) -> Any:
    """Initialize MPI and return its module. Raises unless the ranks match the nodes and threads are allowed."""
    mpi = import_mpi("multiple")
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UsageError(
            "the MPI world of a cluster has to allow threads, and this one was joined without: see docs/cluster.md"
        )
    size, rank = mpi.COMM_WORLD.size, mpi.COMM_WORLD.rank
    if size != len(cluster.nodes):
        raise ConfigError(
            f"the MPI world has {size} ranks, and the cluster {len(cluster.nodes)} nodes: use mpiexec -n {len(cluster.nodes)}"
        )
    if cluster.node_id is not None and cluster.rank != rank:
        raise ConfigError(f"rank {rank} of the MPI world is node {cluster.nodes[rank]!r}, not {cluster.node_id!r}")
    return mpi

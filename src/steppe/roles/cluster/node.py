"""A cluster node: a learner that exchanges deltas or gradients with other nodes through a parameter server.

With deltas, each node learns on its own, and its parameter changes are combined with those of the others at intervals.
With gradients, every optimizer step is one of all nodes together: the server has the optimizer, and a step is a push
and a pull.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from steppe.core.config.cluster import ClusterConfig
from steppe.core.config.validation import read_toml
from steppe.core.contracts.algorithm import Agent, JointTrainable, Learned, trainable_entries
from steppe.core.contracts.errors import ConfigError, RunFailed, Unreachable
from steppe.core.contracts.weights import Weights
from steppe.params.client import ParameterClient
from steppe.roles.learner import Learner

if TYPE_CHECKING:
    from steppe.params.from_cluster import AdamSettings

CLUSTER_END = "cluster_end"  # the event with the cluster's final version and nodes
DEADLINE_GRACE_S = 2.0  # how long to wait beyond a round's deadline
POLL_INTERVAL_S = 0.2  # between checks whether the run must end
INITIAL_BACKOFF_S = 0.001  # first pause between polls for the other nodes' sums
MAX_MISSED_ROUNDS = 3  # rounds without a result until a node that exchanges gradients fails


class ClusterNode:
    """One agent's membership in the cluster. `ending` is polled while waiting for other nodes, to stop waiting. `external_client`:
    the caller owns the client and closes it."""

    def __init__(
        self,
        config: ClusterConfig,
        agent: Agent,
        client: ParameterClient,
        ending: Callable[[], bool] = lambda: False,
        *,
        external_client: bool = False,
    ) -> None:
        assert config.node_id is not None, "a run's configuration was checked"
        self.config, self.agent, self.client, self.name = config, agent, client, config.node_id
        self.version = -1
        self.counts = {"exchanges": 0, "missed": 0}  # rounds with and without a result
        self._ending, self._external_client = ending, external_client
        self._entries = trainable_entries(agent)
        self._rounds, self._weighted, self._private = True, False, False
        self._base = np.empty(0, np.float32)  # the parameters last adopted from the cluster
        self._steps = self._updates = 0  # since the last exchange

    def join(self) -> None:
        """Register, and adopt the cluster's newest parameters. A node may join at any time."""
        self.client.register_worker(self.name)
        info, deltas = self.client.about(self.name), self.config.exchange == "deltas"
        if info["deltas"] != deltas or not (deltas or info["synchronous"]):
            accepted = (
                "deltas" if info["deltas"] else "gradients" if info["synchronous"] else "gradients, but no rounds"
            )
            raise ConfigError(
                f"the server at {self.client.url} takes {accepted}, and this node has exchange={self.config.exchange!r}"
            )
        self._rounds, self._weighted = bool(info["synchronous"]), bool(info["uses_weights"])
        self._private = bool(info.get("private"))
        newest = self.client.pull(self.name)
        missing = [entry.name for entry in self._entries if entry.name not in newest.arrays()]
        if missing:
            raise ConfigError(
                f"the server at {self.client.url} has no parameter {missing[0]!r}: it serves another agent"
            )
        self._adopt(newest)
        if not deltas:
            if not isinstance(self.agent, JointTrainable):
                raise ConfigError(f"{type(self.agent).__name__} cannot exchange gradients: use exchange='deltas'")
            self.agent.train_jointly(self.synchronized_step, self.all_reduce_sum if info["supports_sums"] else None)

    def leave(self) -> None:
        """Unregister, so that the other nodes do not wait for this one."""
        if isinstance(self.agent, JointTrainable):
            self.agent.train_alone()
        try:
            self.client.unregister_worker(self.name)
        except Unreachable:  # the others wait until a round's deadline
            self.counts["missed"] += 1

    def close(self) -> None:
        """Leave the cluster, and close the client unless the caller owns it."""
        self.leave()
        if not self._external_client:
            self.client.close()

    def count_update(self, learned: Learned) -> bool:
        """Count a learning step, exchange deltas if due, and return whether an exchange took place."""
        self._steps += 1
        self._updates += learned.updates
        due = self.config.exchange == "deltas" and self._steps >= (self.config.sync_every or 1)
        return due and self.synchronize()

    def synchronize(self) -> bool:
        """Push the delta since the last exchange, and adopt the combined parameters.

        Returns False if the exchange failed: the node keeps its parameters, and tries again at the next exchange.
        """
        if self.config.exchange == "gradients":
            return False
        self._steps = 0
        try:
            newest = self._exchange(self._flatten(self.agent.weights()) - self._base, self._weight())
        except Unreachable:
            newest = None
        self.counts["missed" if newest is None else "exchanges"] += 1
        if newest is None:
            return False
        self._adopt(newest)
        return True

    def synchronized_step(self, gradient: np.ndarray, rows: int) -> np.ndarray:
        """Take one optimizer step with all nodes, along the mean gradient over all rows; return the new parameters."""
        weight = float(max(1, rows)) if self._weighted else 1.0
        for _ in range(MAX_MISSED_ROUNDS):
            newest = self._exchange(gradient, weight)
            if newest is not None:
                self.counts["exchanges"] += 1
                self.version = newest.version
                return self._flatten(newest)
            if self._ending():
                return self._flatten(self.agent.weights())
            self.counts["missed"] += 1
        raise self._too_few_nodes()

    def all_reduce_sum(self, local_sums: np.ndarray) -> np.ndarray:
        """Sum `counted` over all nodes, at most once per step.

        A node that missed the round gets its own numbers back. Its push is then late as well, and puts it back in step.
        """
        number, backoff_s = int(self.client.about(self.name)["round_number"]), INITIAL_BACKOFF_S
        until = time.monotonic() + MAX_MISSED_ROUNDS * (self.config.deadline_s + DEADLINE_GRACE_S)
        while time.monotonic() < until:
            current, total = self.client.sum_over_workers(self.name, number, local_sums.tolist())
            if total is not None:
                return np.array(total)
            if current != number or self._ending():
                return local_sums
            time.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, POLL_INTERVAL_S)
        raise self._too_few_nodes()

    def _too_few_nodes(self) -> RunFailed:
        return RunFailed(
            f"{MAX_MISSED_ROUNDS} rounds in a row had too few nodes: is cluster.quorum={self.config.quorum} right?"
        )

    def report(self, metrics: dict[str, float]) -> None:
        """Report this node's progress, unless the server is private: that publishes nothing about single nodes."""
        if not self._private:
            try:
                self.client.report(self.name, {**metrics, **self.counts})
            except Unreachable:
                return  # the next report includes these counts

    def _exchange(self, row: np.ndarray, weight: float) -> Weights | None:
        """Push a row and return the weights after its round; None without a new version, or if the node must end.

        A push that comes after its round is not counted; the node then gets the result of the others.
        """
        ends = np.cumsum([entry.nbytes // 4 for entry in self._entries])[:-1]
        parts = zip(self._entries, np.split(row, ends), strict=True)
        before = self.client.about(self.name)["round_number"]
        receipt = self.client.push_gradients(
            self.name, {entry.name: part.reshape(entry.shape) for entry, part in parts}, weight
        )
        if not receipt or not self._rounds:
            return self.client.pull_newer(self.name, self.version)
        known_version = receipt.version - 1 if receipt.round_number > before else receipt.version
        until = time.monotonic() + self.config.deadline_s + DEADLINE_GRACE_S
        while not self._ending() and time.monotonic() < until:
            found = self.client.wait_newer(self.name, max(known_version, self.version), POLL_INTERVAL_S)
            if found is not None or self.client.about(self.name)["round_number"] > before:
                return found
        return None

    def _adopt(self, newest: Weights) -> None:
        found, weights = newest.arrays(), self.agent.weights()
        views = weights.arrays()
        for entry in self._entries:
            views[entry.name][...] = found[entry.name]
        self.agent.load(weights)
        self._base, self.version, self._updates = self._flatten(newest), newest.version, 0

    def _flatten(self, weights: Weights) -> np.ndarray:
        arrays = weights.arrays()
        return np.concatenate([arrays[entry.name].reshape(-1) for entry in self._entries])

    def _weight(self) -> float:
        """Return the weight of this node's delta: its number of updates if the server weighs pushes, else 1."""
        return float(max(1, self._updates)) if self._weighted else 1.0


class NodeLearner(Learner):
    """A learner that is a cluster node and otherwise behaves like Learner."""

    node: ClusterNode

    def publish_initial(self) -> None:
        self.node.join()
        rank, nodes = self.node.config.rank, list(self.node.config.nodes)
        info = {"node": self.node.name, "rank": rank, "nodes": nodes, "version": self.node.version}
        self.context.event("cluster", run=self.node.client.about(self.node.name)["run"], **info)
        super().publish_initial()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.node.close()

    def _after_update(self, learned: Learned) -> None:
        if self.node.count_update(learned):
            learned.stats["cluster_version"] = float(self.node.version)

    def _end(self) -> None:
        """Exchange once more, so that the run's result is the cluster's newest version."""
        if not self.context.ending and self.node.synchronize():
            if self.limits.ahead:
                self._publish_pending = True
            else:
                self.publish()
        super()._end()

    def _report(self, *, final: bool) -> None:
        counts = {"env_steps": self.env_steps, "episodes": self.episodes, "updates": self.updates}
        means = {name: sum(values) / len(values) for name, values in self._stats.items()}
        self.node.report({**counts, **means, "cluster_version": self.node.version, "done": float(final)})
        if final:
            self._post_final_state()
        super()._report(final=final)

    def _post_final_state(self) -> None:
        """Post the cluster's final state to the event log: after this node has left, the server may be gone."""
        with contextlib.suppress(Unreachable):
            stats = self.node.client.get_server_stats()
            info = {"version": stats["version"], "nodes": stats.get("workers", {})}
            self.context.event(CLUSTER_END, run=stats["run"], **info)


def connect(config: ClusterConfig) -> ParameterClient:
    """Return a client of the cluster's server, with this node's token if the token file can be read here."""
    if config.backend == "ray":
        from steppe.roles.cluster.ray import RayClusterClient

        return ParameterClient.over(RayClusterClient(config), config.url)
    if config.backend == "mpi":
        from steppe.roles.cluster.mpi import MpiClusterClient

        return ParameterClient.over(MpiClusterClient(config), config.url)
    ca = config.tls.ca if config.tls is not None else None
    path = config.server.tokens
    token = read_tokens(path).get(config.node_id or "") if path is not None and os.access(path, os.R_OK) else None
    return ParameterClient(config.url, token=token, ca=ca, timeout_s=config.timeout_s, retry_s=config.retry_s)


def read_tokens(path: Path) -> dict[str, str]:
    """Return node → token from the cluster's token file."""
    found = read_toml(path)
    if not found or not all(isinstance(token, str) for token in found.values()):
        raise ConfigError(f'server.tokens: {path} has one line `node = "token"` for each node, and nothing else')
    return found


class ClusterServer(Protocol):
    """A parameter server that this node hosts, in its process or in a Ray actor."""

    def close(self) -> None: ...


def start_cluster_server(config: ClusterConfig, params: Mapping[str, np.ndarray], step: AdamSettings) -> ClusterServer:
    """Start the parameter server of a cluster over Ray or MPI."""
    if config.backend == "ray":
        from steppe.roles.cluster.ray import RayClusterServer

        return RayClusterServer(config, params, step)
    from steppe.roles.cluster.mpi import MpiClusterServer

    return MpiClusterServer(config, params, step)


def wait_for_other_nodes(client: ParameterClient, idle_timeout_s: float) -> None:
    """Block until no node is registered, or there was no activity for `idle_timeout_s`."""
    last_activity, until = None, 0.0
    while True:
        stats = client.get_server_stats()
        if not stats["num_workers"]:
            return
        now = (stats["num_workers"], stats["accepted_pushes"], stats["round"])
        if now != last_activity:
            last_activity, until = now, time.monotonic() + idle_timeout_s
        elif time.monotonic() >= until:
            return
        time.sleep(POLL_INTERVAL_S)

"""A node of a cluster: a learner that exchanges what it learned with others through a parameter server.

With deltas it learns on its own, and every so often what it changed is combined with what the others did. With gradients
every optimizer step is one of all nodes together: the server has the optimizer, and a step is a push and a pull.
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
from steppe.core.contracts.algorithm import Agent, Learned, trainable_entries
from steppe.core.contracts.errors import ConfigError, RunFailed, Unreachable
from steppe.core.contracts.segment import Batch
from steppe.core.contracts.weights import Weights
from steppe.params.client import ParameterClient
from steppe.roles.learner import Learner

if TYPE_CHECKING:
    from steppe.params.from_cluster import AdamSettings

CLUSTER_END = "cluster_end"  # the event with what the cluster has come to
DEADLINE_GRACE_S = 2.0  # what a round's deadline is waited for beyond
POLL_INTERVAL_S = 0.2  # between looks at whether the run is to end
INITIAL_BACKOFF_S = 0.001  # between looks at whether the others have counted, at first
MAX_MISSED_ROUNDS = 3  # rounds without result until nodes that step together give up


class ClusterNode:
    """One agent's ties to the cluster. `ending`: asked while it waits for others, to wait no longer. `lent`: whether the client
    is somebody else's, who closes it."""

    def __init__(
        self,
        config: ClusterConfig,
        agent: Agent,
        client: ParameterClient,
        ending: Callable[[], bool] = lambda: False,
        *,
        lent: bool = False,
    ) -> None:
        assert config.node_id is not None, "a run's configuration was checked"
        self.config, self.agent, self.client, self.name = config, agent, client, config.node_id
        self.version = -1
        self.counts = {"exchanges": 0, "missed": 0}  # rounds with a part in the result, and without
        self._ending, self._lent = ending, lent
        self._entries = trainable_entries(agent)
        self._rounds, self._weighted, self._private = True, False, False
        self._base = np.empty(0, np.float32)  # the parameters as the cluster had them when last heard of
        self._steps = self._updates = 0  # since the last exchange

    def join(self) -> None:
        """Begin with what the cluster has learned so far; late joiners are welcome."""
        self.client.register_worker(self.name)
        about, deltas = self.client.about(self.name), self.config.exchange == "deltas"
        if about["deltas"] != deltas or not (deltas or about["synchronous"]):
            takes = "deltas" if about["deltas"] else "gradients" if about["synchronous"] else "gradients, but no rounds"
            raise ConfigError(
                f"the server at {self.client.url} takes {takes}, and this node has exchange={self.config.exchange!r}"
            )
        self._rounds, self._weighted = bool(about["synchronous"]), bool(about["weighs"])
        self._private = bool(about.get("private"))
        newest = self.client.pull(self.name)
        missing = [entry.name for entry in self._entries if entry.name not in newest.arrays()]
        if missing:
            raise ConfigError(
                f"the server at {self.client.url} has no parameter {missing[0]!r}: it serves another agent"
            )
        self._adopt(newest)
        if not deltas:
            if not hasattr(self.agent, "joint_step"):
                raise ConfigError(f"{type(self.agent).__name__} cannot exchange gradients: use exchange='deltas'")
            self.agent.joint_step = self.synchronized_step
            if about["tallies"] and hasattr(self.agent, "joint_sum"):
                self.agent.joint_sum = self.all_reduce_sum

    def leave(self) -> None:
        """Let the others go on without this node."""
        for tie in ("joint_step", "joint_sum"):
            if hasattr(self.agent, tie):
                setattr(self.agent, tie, None)
        try:
            self.client.unregister_worker(self.name)
        except Unreachable:  # they wait until the deadline of a round
            self.counts["missed"] += 1

    def close(self) -> None:
        """Leave, and close the connection if it is the node's own."""
        self.leave()
        if not self._lent:
            self.client.close()

    def learned(self, learned: Learned) -> bool:
        """Count a learning step; whether there was an exchange after it."""
        self._steps += 1
        self._updates += learned.updates
        due = self.config.exchange == "deltas" and self._steps >= (self.config.sync_every or 1)
        return due and self.synchronize()

    def synchronize(self) -> bool:
        """Hand in what was learned since the last exchange, and take over what all made of it.

        False when there was nobody to exchange with: then the node goes on from where it is, and tries the next time.
        """
        if self.config.exchange == "gradients":
            return False
        self._steps = 0
        try:
            newest = self._exchange(self._flat(self.agent.weights()) - self._base, self._weight())
        except Unreachable:
            newest = None
        self.counts["missed" if newest is None else "exchanges"] += 1
        if newest is None:
            return False
        self._adopt(newest)
        return True

    def synchronized_step(self, gradient: np.ndarray, rows: int) -> np.ndarray:
        """One optimizer step of all nodes: the parameters after it. The mean over everyone's rows is what is stepped along."""
        weight = float(max(1, rows)) if self._weighted else 1.0
        for _ in range(MAX_MISSED_ROUNDS):
            newest = self._exchange(gradient, weight)
            if newest is not None:
                self.counts["exchanges"] += 1
                self.version = newest.version
                return self._flat(newest)
            if self._ending():
                return self._flat(self.agent.weights())
            self.counts["missed"] += 1
        raise self._alone()

    def all_reduce_sum(self, counted: np.ndarray) -> np.ndarray:
        """What all nodes counted for the step that they take next, added up; at most once a step.

        A node whose round went on without it has its own numbers only: its push comes too late too, and then it is with the others.
        """
        number, pause = int(self.client.about(self.name)["round_number"]), INITIAL_BACKOFF_S
        until = time.monotonic() + MAX_MISSED_ROUNDS * (self.config.deadline_s + DEADLINE_GRACE_S)
        while time.monotonic() < until:
            current, total = self.client.tally(self.name, number, counted.tolist())
            if total is not None:
                return np.array(total)
            if current != number or self._ending():
                return counted
            time.sleep(pause)
            pause = min(2 * pause, POLL_INTERVAL_S)
        raise self._alone()

    def _alone(self) -> RunFailed:
        return RunFailed(
            f"{MAX_MISSED_ROUNDS} rounds in a row had too few nodes: is cluster.quorum={self.config.quorum} right?"
        )

    def report(self, metrics: dict[str, float]) -> None:
        """Let everyone see how far this node is, unless the server is private: it publishes nothing about one node."""
        if not self._private:
            try:
                self.client.report(self.name, {**metrics, **self.counts})
            except Unreachable:
                return  # the next report says more

    def _exchange(self, row: np.ndarray, weight: float) -> Weights | None:
        """Push, and what came of the round; None if nothing did, or the node has to end.

        A push that does not count, as its round is over already, leaves what the others made of it.
        """
        ends = np.cumsum([entry.nbytes // 4 for entry in self._entries])[:-1]
        parts = zip(self._entries, np.split(row, ends), strict=True)
        before = self.client.about(self.name)["round_number"]
        receipt = self.client.push_gradients(
            self.name, {entry.name: part.reshape(entry.shape) for entry, part in parts}, weight
        )
        if not receipt or not self._rounds:
            return self.client.pull_newer(self.name, self.version)
        known = receipt.version - 1 if receipt.round_number > before else receipt.version
        until = time.monotonic() + self.config.deadline_s + DEADLINE_GRACE_S
        while not self._ending() and time.monotonic() < until:
            found = self.client.wait_newer(self.name, max(known, self.version), POLL_INTERVAL_S)
            if found is not None or self.client.about(self.name)["round_number"] > before:
                return found
        return None

    def _adopt(self, newest: Weights) -> None:
        found, weights = newest.arrays(), self.agent.weights()
        views = weights.arrays()
        for entry in self._entries:
            views[entry.name][...] = found[entry.name]
        self.agent.load(weights)
        self._base, self.version, self._updates = self._flat(newest), newest.version, 0

    def _flat(self, weights: Weights) -> np.ndarray:
        arrays = weights.arrays()
        return np.concatenate([arrays[entry.name].reshape(-1) for entry in self._entries])

    def _weight(self) -> float:
        """How much this node's delta counts where that is asked for: by its updates."""
        return float(max(1, self._updates)) if self._weighted else 1.0


class NodeLearner(Learner):
    """A learner that is a node: everything else is as without a cluster."""

    node: ClusterNode

    def publish_initial(self) -> None:
        self.node.join()
        rank, nodes = self.node.config.rank, list(self.node.config.nodes)
        about = {"node": self.node.name, "rank": rank, "nodes": nodes, "version": self.node.version}
        self.context.event("cluster", run=self.node.client.about(self.node.name)["run"], **about)
        super().publish_initial()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.node.close()

    def _learn_batch(self, batch: Batch) -> Learned:
        learned = super()._learn_batch(batch)
        if self.node.learned(learned):
            learned.stats["cluster_version"] = float(self.node.version)
        return learned

    def _end(self) -> None:
        """The run is judged by what the cluster has come to."""
        if not self.context.ending and self.node.synchronize():
            if self.limits.ahead:
                self._owed = True
            else:
                self.publish()
        super()._end()

    def _report(self, *, final: bool) -> None:
        counts = {"env_steps": self.env_steps, "episodes": self.episodes, "updates": self.updates}
        means = {name: sum(values) / len(values) for name, values in self._stats.items()}
        self.node.report({**counts, **means, "cluster_version": self.node.version, "done": float(final)})
        if final:
            self._tell()
        super()._report(final=final)

    def _tell(self) -> None:
        """What the cluster has come to goes into the event log: when this node has left, there may be nobody to ask."""
        with contextlib.suppress(Unreachable):
            stats = self.node.client.get_server_stats()
            about = {"version": stats["version"], "nodes": stats.get("workers", {})}
            self.context.event(CLUSTER_END, run=stats["run"], **about)


def connect(config: ClusterConfig) -> ParameterClient:
    """A client of the cluster's server, with this node's token where the file of the tokens is on this machine."""
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
    """Every node's token, from the file that a cluster names."""
    found = read_toml(path)
    if not found or not all(isinstance(token, str) for token in found.values()):
        raise ConfigError(f'server.tokens: {path} has one line `node = "token"` for each node, and nothing else')
    return found


class ClusterServer(Protocol):
    """A server that this node's process, or an actor of its, has for the others."""

    def close(self) -> None: ...


def start_cluster_server(config: ClusterConfig, params: Mapping[str, np.ndarray], step: AdamSettings) -> ClusterServer:
    """The server of a cluster that meets in Ray or in an MPI world."""
    if config.backend == "ray":
        from steppe.roles.cluster.ray import RayClusterServer

        return RayClusterServer(config, params, step)
    from steppe.roles.cluster.mpi import MpiClusterServer

    return MpiClusterServer(config, params, step)


def wait_for_other_nodes(client: ParameterClient, idle_timeout_s: float) -> None:
    """Return when nobody is registered any more, or nothing more has come for `patience_s`."""
    seen, until = None, 0.0
    while True:
        stats = client.get_server_stats()
        if not stats["num_workers"]:
            return
        now = (stats["num_workers"], stats["accepted_pushes"], stats["round"])
        if now != seen:
            seen, until = now, time.monotonic() + idle_timeout_s
        elif time.monotonic() >= until:
            return
        time.sleep(POLL_INTERVAL_S)

"""Gradient memory for a parameter server that the caller owns.

Pushes are forwarded to that server, which combines and applies them by its own rules. The agent loads what the server
publishes. The server is a local object, or is reached by a ParameterClient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from steppe.core.contracts.algorithm import Agent, Learned, Tree, trainable_entries
from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import PushSpec
from steppe.core.contracts.weights import Weights
from steppe.params.client import ParameterClient
from steppe.params.rounds import Receipt
from steppe.params.server import ParameterServer
from steppe.roles.context import POLICY
from steppe.roles.gradients.learner import GradientMemory

ParameterServerLike = ParameterServer | ParameterClient
POLL_INTERVAL_S = 0.1  # between checks whether the run must end, while a round waits for remote workers


class ServerGradientMemory(GradientMemory):
    """A GradientMemory in front of the caller's server. `in_rounds`: whether the server's rounds are synchronous;
    `ending` is polled while such a round waits for workers of other programs."""

    def __init__(
        self,
        agent: Agent,
        server: ParameterServerLike,
        num_workers: int,
        *,
        in_rounds: bool,
        ending: Callable[[], bool],
    ) -> None:
        self.agent, self.external_server = agent, server
        self.refused: Counter[str] = Counter()
        self._entries = trainable_entries(agent)
        self._in_rounds, self._ending = in_rounds, ending
        self._names = [f"worker-{number}" for number in range(num_workers)]
        for name in self._names:
            server.register_worker(name)
        newest = newest_weights(server)
        missing = [entry.name for entry in self._entries if entry.name not in newest.arrays()]
        if missing:
            raise ConfigError(
                f"the parameter server lacks {missing[0]!r}: initialize it with the agent's get_policy_parameters()"
            )
        about = server.description() if isinstance(server, ParameterServer) else server.about(self._names[0])
        self._weighted, self._expects_parameters = (
            bool(about["uses_weights"]),
            server.get_server_stats()["takes"] == "parameters",
        )
        self._newest, self._loaded_version, self._base_version = newest, newest.version, newest.version

    def add(self, segments: Sequence[Segment]) -> None:
        """Push in the given order. With rounds, block until the round is over, including workers of other programs."""
        before, number = self._newest.version, self._open_round()
        idle = [self._worker_name(push) for push in segments if not push["counts"][0, 0, PushSpec.ROWS]]
        for name in idle if self._in_rounds else ():
            self.external_server.unregister_worker(name)  # so that the round does not wait for an idle worker
        counted = sum(self._push_segment(push, number) for push in segments if push["counts"][0, 0, PushSpec.ROWS])
        if self._in_rounds:
            if counted and not idle:
                self._wait_for_round(before, number)
            for name in idle:
                self.external_server.register_worker(name)
        self._fetch_newest()

    def ready(self) -> bool:
        return self._newest.version > self._loaded_version

    def learn(self, batch: Batch) -> Learned:
        """Load the newest parameters into the agent."""
        stats = (
            {"learning_rate": self.external_server.optimizer.rates[0]}
            if isinstance(self.external_server, ParameterServer)
            else {}
        )
        return Learned(self._load(self._newest), stats)

    def stats(self) -> dict[str, float]:
        """Return the server's counts over its whole lifetime."""
        return self._report_stats(self.external_server.get_server_stats())

    def state(self) -> Tree:
        """Return the run's state, including that of a local server, so that `steppe resume` can continue without it."""
        server = (
            self.external_server.state()
            if isinstance(self.external_server, ParameterServer) and not self.external_server.is_private
            else None
        )
        waiting = self.external_server.get_server_stats()["pending_pushes"] if server is not None else 0
        counts = {
            "refused": dict(self.refused),
            "base": self._base_version,
            "shown": self._loaded_version,
            "waiting": waiting,
        }
        return {"server": server, **counts}

    def restore(self, state: Tree) -> None:
        """Restore the counts and keep the server's present parameters, which include pushes after the checkpoint."""
        self.refused = Counter(state["refused"])
        self._base_version, self._loaded_version = int(state["base"]), int(state["shown"])
        self._newest = newest_weights(self.external_server)

    def _push_segment(self, push: Segment, number: int | None) -> bool:
        """Push one worker's update; return whether the round no longer waits for that worker."""
        rows, _, _, updates = push["counts"][0, 0].tolist()
        row = push["gradient"][0, 0]
        if self._expects_parameters:
            row = row + self._loaded_row(len(row))
        receipt: Receipt = self.external_server.push_gradients(
            self._worker_name(push),
            self._by_parameter(row),
            float(rows) if self._weighted else 1.0,
            round_number=None if isinstance(self.external_server, ParameterServer) else number,
            version=self._base_version + updates,
        )
        if not receipt:
            self.refused[receipt.reason] += 1
        return bool(receipt) or receipt.reason == "not_drawn"

    def _open_round(self) -> int | None:
        """Return the number of the open synchronous round, or None without rounds."""
        if not self._in_rounds:
            return None
        if isinstance(self.external_server, ParameterServer):
            return self.external_server.round_number
        self.external_server.pull_newer(self._names[0], self._newest.version)
        return int(self.external_server.about(self._names[0])["round_number"])

    def _wait_for_round(self, version: int, number: int | None) -> None:
        """Block until the round is over, with or without a new version, or the run must end."""
        server, name = self.external_server, self._names[0]
        while self._open_round() == number and not self._ending():
            if isinstance(server, ParameterServer):
                server.wait_newer(version, POLL_INTERVAL_S)
            else:
                server.wait_newer(name, version, POLL_INTERVAL_S)

    def _fetch_newest(self) -> None:
        """Fetch the server's parameters if they are newer."""
        self._newest = self.external_server.newer_than(POLICY, self._newest.version) or self._newest

    def _loaded_row(self, size: int) -> np.ndarray:
        """Return the newest parameters, from which the workers' deltas start, as a flat row of `size` numbers."""
        arrays = self._newest.arrays()
        row = np.zeros(size, np.float32)
        for entry in self._entries:
            first = entry.offset // 4
            row[first : first + entry.nbytes // 4] = arrays[entry.name].reshape(-1)
        return row

    def _worker_name(self, push: Segment) -> str:
        assert push.header is not None
        return self._names[push.header.actor]


def newest_weights(server: Any) -> Weights:
    """Return the newest parameters of a ParameterServer or of a ParameterClient's server."""
    found = server.newer_than(POLICY, -1)
    if found is None:
        raise UsageError("the parameter server has no parameters yet: wait until it has been started")
    return found  # type: ignore[no-any-return]

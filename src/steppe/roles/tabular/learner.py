"""The learner of a run whose workers share a table: creates, publishes and checkpoints the table, and ends the run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from steppe.algorithms.tabular.agent import TabularAgent
from steppe.core.contracts.algorithm import Progress, Tree
from steppe.core.contracts.errors import DiskFull
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.transport import SET, TRAINING, SharedTable, TableTotals, ValidatingTable
from steppe.core.contracts.weights import Weights
from steppe.core.system.process import rss_bytes
from steppe.core.system.timing import PhaseTimer
from steppe.roles.context import POLICY, Context
from steppe.roles.learner import POLL_COMMANDS_EVERY_S, REPORT_EVERY_S, RunLimits, SaveCheckpoint
from steppe.roles.tuning import LiveHyperparameters

PUBLISH_EVERY_S = 0.1
PUBLISH_SHARE = 0.05  # largest share of the time for copying large tables


class TabularLearner:
    """Publish copies of the shared table as weights, each with a new version. The workers learn and count the steps."""

    def __init__(
        self, agent: TabularAgent, num_workers: int, limits: RunLimits, save: SaveCheckpoint, context: Context
    ) -> None:
        self.name = context.name
        self.done = False
        self.agent, self.num_workers, self.limits = agent, num_workers, limits
        self.save, self.context = save, context
        self.version = -1
        self.totals = TableTotals(0, 0, 0.0, 0.0)
        self.phases = PhaseTimer("wait", "publish", "other")
        self._train_base_s = 0.0
        self._created = False
        self.live_hyperparameters = LiveHyperparameters(agent, ())
        self._last_command, self._commands_polled_s = 0, -math.inf
        self._publish_s = 0.0  # earliest time of the next publication
        self._reported_s = self._saved_s = context.clock()
        self._saved_episodes = 0

    def step(self) -> bool:
        """Read the workers' progress; publish, report and write a checkpoint if due. Returns whether it published."""
        if not self._created:
            self.publish_initial()
            return True
        totals = self._table.totals()
        if self.context.ending or self._is_finished(totals):
            self._read_table()
            if not self.context.ending:
                self.publish()
            self.done = True
            return False
        now = self.context.clock()
        self._poll_commands_if_due(now)
        due = totals.steps > self.totals.steps and now >= self._publish_s
        if due:
            self._read_table()
            self.publish()
            self._save_if_due(now)
        self.phases.switch("wait")
        return due

    def _poll_commands_if_due(self, now: float) -> None:
        """Answer commands that set hyperparameters: workers with a shared table only read them at a restart."""
        if now - self._commands_polled_s < POLL_COMMANDS_EVERY_S:
            return
        self._commands_polled_s = now
        for number, command in self.context.commands(self._last_command):
            self._last_command = number
            if command.get("command") == SET and self.live_hyperparameters.is_new(command):
                steps = self.totals.steps
                counts = {"version": self.version, "updates": steps, "env_steps": steps}
                self.live_hyperparameters.post_result(self.context, command, {}, counts)

    def publish_initial(self) -> None:
        """Create the shared table, so that workers can begin, and publish it."""
        steps, episodes = self.totals.steps, self.totals.episodes
        limits = self.limits
        self._table.create(
            self.agent.table, self.num_workers, limits.steps, steps, episodes, episode_limit=limits.episodes
        )
        self._created = True
        self.publish()

    def publish(self) -> None:
        """Publish the newest copy of the table under the next version."""
        self.phases.switch("publish")
        started, started_s = time.perf_counter(), self.context.clock()
        self.version += 1
        self.context.weights.publish(POLICY, self.stamped())
        spent_s = time.perf_counter() - started
        self._publish_s = self.context.clock() + max(PUBLISH_EVERY_S, spent_s / PUBLISH_SHARE)
        self.context.span("publish", started_s, version=self.version)
        self.phases.switch("other")

    def stamped(self) -> Weights:
        """Return the copy of the table with the workers' counters."""
        steps, episodes = self.totals.steps, self.totals.episodes
        return self.agent.weights().stamped(
            version=self.version, updates=steps, env_steps=steps, episodes=episodes, train_s=self.train_s
        )

    @property
    def train_s(self) -> float:
        """Seconds from the first claimed step to the newest merge."""
        return self._train_base_s + max(0.0, self.totals.merged_s - self.totals.started_s)

    def close(self) -> None:
        """Write the last checkpoint and the final report."""
        try:
            if self._created:
                self._read_table()
                self._save()
        finally:
            self._report(final=True)

    def restore(self, weights: Weights, state: Tree, counters: Mapping[str, Any]) -> None:
        """Restore a checkpoint; the workers begin new episodes."""
        self.agent.load(weights)
        self.agent.restore(state["agent"])
        self.live_hyperparameters.restore(state.get("tuning"))
        self.version = int(counters["version"]) - 1  # publish_initial publishes the table under the version it had
        self.totals = TableTotals(int(counters["env_steps"]), int(counters["episodes"]), 0.0, 0.0)
        self._train_base_s, self._saved_episodes = float(counters["train_s"]), self.totals.episodes

    @property
    def _table(self) -> SharedTable:
        assert self.context.table is not None, "the learner of a tabular run has a table"
        return self.context.table

    def _is_finished(self, totals: TableTotals) -> bool:
        steps, episodes = self.limits.steps, self.limits.episodes
        return (steps is not None and totals.steps >= steps) or (episodes is not None and totals.episodes >= episodes)

    def _read_table(self) -> None:
        """Copy the table and the counts that belong to it."""
        self.totals = self._table.read(self.agent.table)
        self.agent.follow(Progress(self.totals.steps, self.limits.steps))

    def _save_if_due(self, now: float) -> None:
        every = self.limits.checkpoint_every_episodes
        due = every is not None and self.totals.episodes - self._saved_episodes >= every
        if due or now - self._saved_s >= self.limits.checkpoint_every_s:
            self.phases.switch("other")
            try:
                self._save()
            except DiskFull as error:
                if self.limits.stop_on_full_disk:
                    raise
                self.context.event(
                    "warning", message=f"{error}; the previous checkpoint is kept, and the run continues"
                )
            self._saved_s, self._saved_episodes = self.context.clock(), self.totals.episodes
        if now - self._reported_s >= REPORT_EVERY_S:
            self._report(final=False)

    def _save(self) -> None:
        steps, episodes = self.totals.steps, self.totals.episodes
        counters: dict[str, int | float] = {
            "version": self.version, "updates": steps, "env_steps": steps, "episodes": episodes, "train_s": self.train_s,
        }  # fmt: skip
        state: Tree = {"agent": self.agent.state(), "ledger": {"actors": [], "dropped": {}}}
        state["tuning"] = self.live_hyperparameters.state()
        self.save(self.stamped(), state, counters)

    def _report(self, *, final: bool) -> None:
        self.phases.switch("other")
        algorithm = self.agent.algorithm
        stats = {"epsilon": float(algorithm.epsilon), "learning_rate": float(algorithm.learning_rate)}
        if self.totals.lost_steps:
            stats["lost_steps"] = float(self.totals.lost_steps)
        report = TrainingReport(
            run=self.context.run,
            version=self.version,
            updates=self.totals.steps,
            env_steps=self.totals.steps,
            episodes=self.totals.episodes,
            train_s=self.train_s,
            stats=stats,
            phases=dict(self.phases.seconds),
            dropped=dict(self.context.table.dropped) if isinstance(self.context.table, ValidatingTable) else {},
            rss_bytes=rss_bytes(),
            cpu_s=time.process_time(),
            weights_sha256=self.agent.weights().sha256() if final else None,
            final=final,
        )
        self.context.board.post(TRAINING, report.record())
        self.context.flush_spans()
        self._reported_s = self.context.clock()

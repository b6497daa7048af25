"""The tabular worker: acts and learns in a copy of the shared table, and merges its changes at intervals."""

from __future__ import annotations

import time

from steppe.core.contracts.reports import ActorReport
from steppe.core.contracts.transport import ACTORS, SharedTable, TableDelta
from steppe.core.system.process import rss_bytes
from steppe.core.system.timing import PhaseTimer
from steppe.roles.context import PAUSE, Context
from steppe.roles.tabular.rollouts import TabularRollout

REPORT_EVERY_S = 0.5
MAX_LISTED_EPISODES = 1_000  # newest episodes that one report lists


class TabularWorker:
    """Take steps and, if the run has an episode limit, play episodes that were claimed from the shared table, so that
    the totals of all workers match the run's limits."""

    def __init__(
        self, index: int, rollout: TabularRollout, chunk_steps: int, limit: int | None, context: Context
    ) -> None:
        """`chunk_steps` is the number of steps between two merges; `limit` is the run's length, for schedules."""
        self.name = context.name
        self.done = False
        self.index, self.rollout, self.chunk_steps, self.limit = index, rollout, chunk_steps, limit
        self.context = context
        self.claim_chunks = 1
        self.claims_episodes = False  # whether the run has an episode limit
        self.env_steps = self.merges = 0
        self.phases = PhaseTimer("work", "merge", "blocked", "other")
        self._begun = False
        self._steps_left = 0  # claimed steps that were not taken yet
        self._episodes_left = 0  # claimed episodes, those in progress included
        self._finished: list[tuple[float, int]] = []
        self._episodes = 0
        self._reported_s = context.clock()

    def step(self) -> bool:
        """Take the steps of one chunk and merge; return False if nothing could be claimed."""
        if self.context.ending:
            self.done = True
            return False
        if (
            self.context.requested() == PAUSE
            or not (self._begun or self._begin())
            or not self._claim_steps()
            or not self._claim_episodes()
        ):
            self.phases.switch("blocked")
            return False
        table = self._table
        self.phases.switch("work")
        started_s = self.context.clock()
        self.rollout.update_schedules(table.totals(), self.limit)
        max_episodes = self._episodes_left if self.claims_episodes else None
        result = self.rollout.run(min(self._steps_left, self.chunk_steps), self._heartbeat, max_episodes)
        self.phases.switch("merge")
        change = TableDelta(self.rollout.candidates, self.rollout.kept, result.steps, result.episodes)
        table.merge(self.index, change, self.context.clock())
        self.phases.switch("other")
        self._steps_left -= result.steps
        self._episodes_left -= result.episodes
        self.env_steps += result.steps
        self.merges += 1
        self._episodes += result.episodes
        self._finished = (self._finished + result.finished)[-MAX_LISTED_EPISODES:]
        self.context.span("work", started_s, merge=self.merges)
        if self.context.clock() - self._reported_s >= REPORT_EVERY_S:
            self._report("running")
        self.phases.switch("blocked")  # time until the next step is not this role's work
        return True

    def close(self) -> None:
        """Report the final state and close the environments."""
        try:
            self._report("stopped")
        finally:
            self.rollout.close()

    def _heartbeat(self) -> bool:
        self.context.heartbeat()
        return self.context.ending

    @property
    def _table(self) -> SharedTable:
        assert self.context.table is not None, "workers have a table"
        return self.context.table

    def _begin(self) -> bool:
        lost = self._table.begin(self.index, self.rollout.agent.table)
        if lost is None:
            return False
        if lost:
            message = f"{self.name} was started again; the {lost:,} steps that it had not merged are taken again"
            self.context.event("warning", message=message, lost_steps=lost)
        self._begun = True
        return True

    def _claim_steps(self) -> bool:
        if self._steps_left <= 0:
            requested = self.chunk_steps * self.claim_chunks
            self._steps_left = self._table.claim(self.index, requested, self.context.clock()) or 0
        return self._steps_left > 0

    def _claim_episodes(self) -> bool:
        """Claim more episodes if there are fewer than environments; return whether there is one to play."""
        if not self.claims_episodes:
            return True
        if self._episodes_left < self.rollout.num_envs:
            granted = self._table.claim_episodes(self.index, self.chunk_steps * self.claim_chunks)
            if granted is None:
                return False
            self._episodes_left += granted
        return self._episodes_left > 0

    def _report(self, state: str) -> None:
        self.phases.switch("other")
        report = ActorReport(
            run=self.context.run,
            actor=self.index,
            epoch=self.context.epoch,
            version=self.merges,
            sequence=self.merges,
            env_steps=self.env_steps,
            episodes=self._finished,
            num_episodes=self._episodes,
            phases=dict(self.phases.seconds),
            rss_bytes=rss_bytes(),
            cpu_s=time.process_time(),
            state=state,
        )
        self._finished, self._episodes = [], 0
        self.context.board.post(ACTORS, report.record())
        self.context.flush_spans()
        self._reported_s = self.context.clock()

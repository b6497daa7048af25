"""The actor: collects segments with an environment and a policy, and adopts newer weights between segments."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from steppe.core.contracts.algorithm import Policy, Tree
from steppe.core.contracts.env import (
    ResumeKind,
    SegmentEnv,
    get_agent_returns,
    num_rows,
)
from steppe.core.contracts.errors import CannotResume, EnvironmentFault
from steppe.core.contracts.reports import ActorReport
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.transport import ACTORS
from steppe.core.contracts.weights import Weights
from steppe.core.io import codec
from steppe.core.system import seeding
from steppe.core.system.process import rss_bytes
from steppe.core.system.timing import PhaseTimer
from steppe.envs.vector.finite import require_finite
from steppe.roles.action_log import ActionLog, SaveFault
from steppe.roles.bound_policy import BoundPolicy
from steppe.roles.context import PAUSE, POLICY, RESTART, Context, run_role
from steppe.roles.evaluation import mean_returns_by_agent
from steppe.roles.quota import EpisodeQuota
from steppe.roles.scheduling import CollectPolicy

REPORT_EVERY_S = 0.5


class Actor:
    """Collect segments until asked to stop. `sequence` numbers the segments from 0; `epoch` counts restarts."""

    def __init__(
        self,
        index: int,
        env: SegmentEnv,
        policy: Policy,
        collect_policy: CollectPolicy,
        context: Context,
        *,
        epoch: int = 0,
        save_fault: SaveFault | None = None,
    ) -> None:
        self.name = context.name
        self.done = False
        self.index, self.epoch, self.sequence = index, epoch, 0
        self.version = -1
        self.env_steps = self.episodes = 0  # of complete segments, restarts included
        self.pending: Segment | None = None
        self.env, self.policy, self.collect_policy, self.context = env, policy, collect_policy, context
        self._bound_policy = BoundPolicy(policy, env)
        self.phases = PhaseTimer("env", "policy", "blocked", "other")
        self._obs = np.zeros((num_rows(env), *env.spec.obs.shape), env.spec.obs.dtype)
        self._started = False
        self._reported_episodes = 0  # how many of `episodes` were reported
        self.quota: EpisodeQuota | None = None  # set if the run has an episode limit
        self._action_log = ActionLog(index, env, save_fault)
        self._reported_s = context.clock()

    def step(self) -> bool:
        """Adopt newer weights, collect a segment if the collect policy allows it, and offer it to the channel.

        Returns whether there was progress.
        """
        if self.context.requested() == PAUSE:
            self.phases.switch("blocked")
            return False
        newer = self.update_weights()
        if self.pending is None and self.collect_policy.allows(self.sequence, self.version):
            self.pending = self.collect()
        if self.pending is None or not self.context.channel.offer(self.pending):
            self.phases.switch("blocked")
            self.done = self.context.ending
            return newer
        self.pending, self.sequence = None, self.sequence + 1
        self.done = self.context.ending
        self._report_if_due()
        self.phases.switch("blocked")  # time until the next step is not this role's work
        return True

    def run(self) -> None:
        """Collect in the caller's thread until the actor is asked to stop."""
        run_role(self)

    def update_weights(self) -> bool:
        """Adopt newer weights; return False if there are none."""
        newer = self.context.weights.newer_than(POLICY, self.version)
        if newer is not None:
            self.adopt(newer)
        return newer is not None

    def adopt(self, weights: Weights) -> None:
        """Act with these weights from now on."""
        self.policy.load(weights)
        self.version = weights.version

    def collect(self) -> Segment | None:
        """Collect T steps of every environment; return None without a free segment, or if the actor must stop."""
        segment = self.context.channel.blank(self.index)
        return segment if segment is not None and self.fill(segment) else None

    def fill(self, segment: Segment) -> bool:
        """Fill a segment with T steps of every environment, header and state; return False if asked to stop."""
        self._bound_policy.assign_curriculum_stages()
        self._reset_if_needed()
        started_s = self.context.clock()
        obs = segment["obs"]
        obs[0] = self._obs
        for t in range(segment.spec.num_steps):
            self._step(segment, t)
            self.context.heartbeat()
            if self.context.ending:
                return False
        if "mask" in segment.columns:
            masks = self._bound_policy.action_masks
            segment["mask"][-1] = True if masks is None else masks
        if "comm_mask" in segment.columns:
            segment["comm_mask"][-1] = self._bound_policy.comm_mask
        self.phases.switch("other")
        require_finite(segment, segment.spec.num_steps, self._location)
        self._obs[...] = obs[-1]
        self.env_steps += segment.env_steps
        self.episodes += int(np.count_nonzero(segment.ended))
        segment.header = SegmentHeader(
            self.context.run, self.index, self.epoch, self.sequence, self.version, started_s=started_s
        )
        state = self.state()
        segment.state = codec.pack(state)
        self._action_log.record_segment(segment, resumable=state["world"] is not None)
        self.context.span("collect", started_s, sequence=self.sequence, version=self.version)
        return True

    def state(self) -> Tree:
        """Return the state after the newest segment; "world" is None if the environment cannot be snapshotted."""
        quota = {} if self.quota is None else {"quota": self.quota.state()}
        return {
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "listed": self._reported_episodes,
            "obs": self._obs,
            "world": self.env.snapshot(),  # key of the stored format
            "policy": self.policy.acting_state(),
            **quota,
        }

    def resume(self, sequence: int, state: bytes | None, seeds: np.random.SeedSequence) -> ResumeKind:
        """Continue after segment `sequence`: from its snapshot if possible, else with new episodes from `seeds`."""
        self.sequence = sequence + 1
        saved = codec.unpack(state) if state is not None else {}
        self.env_steps, self.episodes = saved.get("env_steps", 0), saved.get("episodes", 0)
        self._started = True
        if saved:
            self.policy.restore_acting(saved["policy"])
        if saved and saved["world"] is not None:
            with contextlib.suppress(CannotResume):
                self.env.restore(saved["world"])
                self._obs[...] = saved["obs"]
                self._action_log.resume(state)
                self._resume_quota(saved, exact=True)
                self._reported_episodes = saved.get("listed", 0)
                return "exact"
        self._action_log.begin(after=sequence)
        self._reported_episodes = self.episodes
        self._resume_quota(saved, exact=False)
        self._reset(seeds)
        return "episode-boundary"

    def _resume_quota(self, saved: Tree, *, exact: bool) -> None:
        if self.quota is not None and "quota" in saved:
            self.quota.restore(saved["quota"], exact=exact)

    def close(self) -> None:
        """Report the final state and close the environments."""
        try:
            self._report("stopped")
        finally:
            self.env.close()

    def _reset_if_needed(self) -> None:
        if not self._started or self.context.requested() == RESTART:
            if self._started:
                self._action_log.forget_origin()
            self._reset()
            self._started = True

    def _reset(self, seeds: np.random.SeedSequence | None = None) -> None:
        try:
            self.env.reset(self._obs, seeds)
        except EnvironmentFault as fault:
            raise self._action_log.attach_to(fault, None) from fault.__cause__

    def _step(self, segment: Segment, t: int) -> None:
        """Step every environment once. On an exception, report a non-finite value first: it is the likelier cause."""
        if self.quota is not None and self.quota.exhausted:
            self.quota.write_invalid(segment, t)
            return
        try:
            self.phases.switch("policy")
            if "comm_mask" in segment.columns:
                segment["comm_mask"][t] = self._bound_policy.comm_mask
            segment.write(t, self._bound_policy.act(segment["obs"][t]))
            self.phases.switch("env")
            self.env.step(segment["action"][t], segment, t)
            if self.quota is not None:
                self.quota.count(segment, t)
        except Exception as error:
            require_finite(segment, t, self._location)
            if isinstance(error, EnvironmentFault):
                raise self._action_log.attach_to(error, segment["action"][: t + 1]) from error.__cause__
            raise

    @property
    def _location(self) -> str:
        return f"{self.name}, segment {self.sequence}"

    def report_if_silent(self, limit_s: float) -> None:
        """Post a report if none was posted for `limit_s` seconds."""
        if self.context.clock() - self._reported_s >= limit_s:
            self._report("paused" if self.context.requested() == PAUSE else "running")

    def _report_if_due(self) -> None:
        if self.context.clock() - self._reported_s >= REPORT_EVERY_S:
            self._report("running")

    def _report(self, state: str) -> None:
        self.phases.switch("other")
        returns_by_agent = get_agent_returns(self.env)
        finished = self.env.take_finished()
        if self.quota is not None:
            finished = self.quota.counted_only(finished)
        num_new, self._reported_episodes = self.episodes - self._reported_episodes, self.episodes
        report = ActorReport(
            run=self.context.run,
            actor=self.index,
            epoch=self.epoch,
            version=self.version,
            sequence=self.sequence,
            env_steps=self.env_steps,
            episodes=finished[:num_new],  # none of an abandoned segment
            total_episodes=self.episodes,
            agent_returns={}
            if returns_by_agent is None
            else mean_returns_by_agent(self.env.spec.agents, returns_by_agent),
            phases=dict(self.phases.seconds),
            rss_bytes=rss_bytes(),
            cpu_s=time.process_time(),
            state=state,
        )
        self.context.board.post(ACTORS, report.record())
        self.context.flush_spans()
        self._reported_s = self.context.clock()


def env_seeds(seed: int, actor: int, *, after: int | None = None) -> np.random.SeedSequence:
    """Return the seeds of an actor's environments: the initial ones, or those for new episodes `after` a segment."""
    suffix = () if after is None else ("again", after)
    return seeding.seed_sequence(seed, "actor", actor, "env", *suffix)

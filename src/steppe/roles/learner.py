"""The learner: takes segments from the batch policy, stores them in the memory, learns, and publishes weights."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from steppe.core.array_checks import clear_segment, require_segment
from steppe.core.contracts.algorithm import Agent, Learned, Memory, Progress, Tree
from steppe.core.contracts.errors import DiskFull, NotFinite, RunFailed, SteppeError
from steppe.core.contracts.reports import TrainingReport
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.transport import SET, TRAINING, Checkpointable, ValidatingChannel
from steppe.core.contracts.weights import Weights
from steppe.core.io import codec
from steppe.core.system.process import rss_bytes
from steppe.core.system.timing import PhaseTimer
from steppe.roles.context import PAUSE, POLICY, Context, run_role
from steppe.roles.quota import invalidate_after_episodes
from steppe.roles.scheduling import BatchPolicy
from steppe.roles.tuning import LiveHyperparameters

REPORT_EVERY_S = 0.5
POLL_COMMANDS_EVERY_S = 0.2
WARN_EVERY_S = 1.0  # least interval between warnings of refused segments
MAX_REFUSED_BATCHES = 10  # the run fails after this many consecutive batches of which every segment was refused

SaveCheckpoint = Callable[[Weights, Tree, dict[str, int | float]], None]


class StopCondition(Protocol):
    """Whether the run ends at these counts; `has_batch`: the memory has a batch to learn from."""

    def __call__(self, env_steps: int, updates: int, *, has_batch: bool) -> bool: ...


class UpdateSource(Protocol):
    """What updates the agent's weights with a batch: the agent itself, or a memory that applies pushed gradients."""

    def learn(self, batch: Batch) -> Learned: ...


@dataclass(frozen=True)
class RunLimits:
    """When a run ends, and how often weights are published and checkpoints written."""

    steps: int | None = None
    episodes: int | None = None
    publish_every: int | None = None  # updates; None: only when the memory has no batch left
    ahead: int = 0  # rounds that actors collect ahead; 1: weights are published when the next round has arrived
    checkpoint_every_s: float = math.inf
    checkpoint_every_episodes: int | None = None
    stop_on_full_disk: bool = False  # otherwise the run continues and the previous checkpoint stays
    ended: StopCondition | None = None  # replaces the other limits in a repeated run


class Learner:
    """Learn until the counts of environment steps or episodes reach the run's limits."""

    def __init__(
        self,
        agent: Agent,
        memory: Memory,
        batch_policy: BatchPolicy,
        limits: RunLimits,
        save: SaveCheckpoint,
        context: Context,
    ) -> None:
        self.name = context.name
        self.done = False
        self.agent, self.memory, self.batch_policy = agent, memory, batch_policy
        self._update_source: UpdateSource = agent
        self.limits, self.save, self.context = limits, save, context
        self.version, self.updates, self.env_steps, self.episodes = -1, 0, 0, 0
        self.agent_steps: int | None = None  # counted if an environment has several agents
        self.phases = PhaseTimer("wait", "sample", "remember", "learn", "publish", "other")
        self.lags: Counter[int] = Counter()
        self._published_initial = False
        self._unpublished = 0
        self._quota_used = False  # whether every actor has used up its episode quota
        self._publish_pending = False  # whether weights are ready to be published when the next round arrives
        self._newest_published: Weights | None = None  # newest published weights, kept with `ahead` for the checkpoint
        self._train_base_s = 0.0
        self._first_step_s = math.inf
        self._last_update_s = 0.0
        self._stats: defaultdict[str, list[float]] = defaultdict(list)
        self._reported_s = self._saved_s = context.clock()
        self._saved_episodes = 0
        self.live_hyperparameters = LiveHyperparameters(agent)
        self._last_command, self._commands_polled_s = 0, -math.inf  # the newest command that was read, and when
        self._refused_batches, self._warned_s = 0, -math.inf

    def step(self) -> bool:
        """Receive segments, learn from a batch and publish: at most once each. Returns whether there was progress."""
        if not self._published_initial:
            self.publish_initial()
        if self._is_finished():
            self._end()
            return False
        self._poll_commands_if_due()
        if self.context.requested() == PAUSE:
            self.phases.switch("wait")
            return False
        received = self._wants_data() and self.receive()
        learned = self.memory.ready()
        if learned:
            self.learn()
        if received or learned:
            self._publish_if_due()
            self._report_if_due()
        self.phases.switch("wait")  # time until the next step is not this role's work
        return received or learned

    def train(self) -> None:
        """Learn in the caller's thread until the run ends."""
        run_role(self)

    def receive(self) -> bool:
        """Take segments from the batch policy and store them in the memory; return False if there are none.

        Pending weights are published first, without the new segments: the new round only shows that every actor waits
        for them. So which segments are collected with which weights does not depend on the speed of any role.
        """
        segments = self.batch_policy.take(self.version)
        if segments and self._publish_pending:
            self.publish()
        self.phases.switch("remember")
        if segments:
            self._validate_segments(segments)
        for segment in segments:
            assert segment.header is not None
            self._first_step_s = min(self._first_step_s, segment.header.started_s)
            self.lags[self.version - segment.header.version] += 1
            self._observe(segment)
        if segments and self._has_experience(segments):
            self.memory.add(segments)
        elif segments:
            self._quota_used = True
        for segment in segments:
            self.context.channel.release(segment)
        return bool(segments)

    def _validate_segments(self, segments: list[Segment]) -> None:
        """Clear and count the segments with invalid values; their rounds continue.

        Segments enter from other processes here, so their values are checked here, once. Raises NotFinite or RunFailed
        if all segments of MAX_REFUSED_BATCHES consecutive batches were refused.
        """
        faults = [fault for segment in segments if (fault := self._validate(segment)) is not None]
        self._refused_batches = self._refused_batches + 1 if len(faults) == len(segments) else 0
        if self._refused_batches >= MAX_REFUSED_BATCHES:
            kind = NotFinite if isinstance(faults[0], NotFinite) else RunFailed
            raise kind(f"every segment of the last {MAX_REFUSED_BATCHES} batches was refused: {faults[0]}")

    def _validate(self, segment: Segment) -> SteppeError | None:
        """Clear an invalid segment and return the reason; return None for a valid one."""
        try:
            self._require_valid(segment)
        except SteppeError as fault:
            clear_segment(segment)
            dropped = self.batch_policy.tracker.dropped
            dropped["refused"] += 1
            if self.context.clock() - self._warned_s >= WARN_EVERY_S:
                self._warned_s = self.context.clock()
                actor = segment.header.actor if segment.header is not None else None
                message = f"refused a segment of actor {actor} ({dropped['refused']} refused so far): {fault}"
                self.context.event("warning", message=message, actor=actor, refused=dropped["refused"])
            return fault
        return None

    def _require_valid(self, segment: Segment) -> None:
        """Raise SteppeError if a value of a segment is invalid."""
        require_segment(segment)

    def learn(self) -> Learned:
        """Sample a batch from the memory and update the agent with it."""
        self.phases.switch("sample")
        batch = self.memory.sample()
        self.phases.switch("learn")
        started_s = self.context.clock()
        learned = self._update_source.learn(batch)
        self._after_update(learned)
        self.phases.switch("remember")
        self.memory.update(batch, learned)
        self.updates += learned.updates
        self._unpublished += learned.updates
        self._last_update_s = self.context.clock()
        for name, value in learned.stats.items():
            self._stats[name].append(value)
        self.context.span("learn", started_s, version=self.version)
        return learned

    def _observe(self, segment: Segment) -> None:
        """Count a segment and pass it to the agent; rows after the run's last episode are invalidated."""
        if self.limits.episodes is not None:
            invalidate_after_episodes(segment, max(0, self.limits.episodes - self.episodes))
        self.env_steps += segment.env_steps
        self.episodes += int(np.count_nonzero(segment.ended))
        if segment.spec.num_agents > 1:
            self.agent_steps = (self.agent_steps or 0) + segment.num_valid
        self.agent.observe(segment, Progress(self.env_steps, self.limits.steps))

    def _has_experience(self, segments: Sequence[Segment]) -> bool:
        """Whether any row is valid; none is once every actor has used up its episode quota."""
        return self.limits.episodes is None or any(segment["valid"].any() for segment in segments)

    def _after_update(self, learned: Learned) -> None:
        """Do what follows each update and counts as part of it; subclasses may add statistics."""

    def publish_initial(self) -> None:
        """Publish the initial weights: version 0, or those that the actors of a resumed run had."""
        self.version = max(self.version, 0)
        self._publish(self._newest_published or self.stamped())
        self._published_initial = True

    def publish(self) -> None:
        """Publish the current weights under the next version."""
        self.phases.switch("publish")
        started_s = self.context.clock()
        self.version += 1
        self._unpublished, self._publish_pending = 0, False
        self._publish(self.stamped())
        self.context.span("publish", started_s, version=self.version)
        self.phases.switch("other")

    def store_weights(self) -> None:
        """Alias of `publish`."""
        self.publish()

    def _publish(self, weights: Weights) -> None:
        self.context.weights.publish(POLICY, weights)
        if self.limits.ahead:
            self._newest_published = weights.copy()

    def _wants_data(self) -> bool:
        """Whether to receive segments now.

        With `ahead`, segments may arrive at any time. They are taken only when the memory has no batch left, so that
        the result does not depend on their timing.
        """
        return self.memory.wants_data() and not (self.limits.ahead and self.memory.ready())

    def _publish_if_due(self) -> None:
        """Publish if the memory has no batch left, or after `publish_every` updates.

        With `ahead`, the first case only marks the weights as pending until the next round arrives.
        """
        if not self.memory.ready():
            if self.limits.ahead:
                self._publish_pending = True
            else:
                self.publish()
        elif self.limits.publish_every and self._unpublished >= self.limits.publish_every:
            self.publish()

    def _end(self) -> None:
        """End the run. Pending weights are published as its result, and stay pending for a resumed run."""
        if self._publish_pending and not self.context.ending:
            newest_published = self._newest_published
            self.publish()
            self._publish_pending, self._newest_published = True, newest_published
        self.done = True

    def stamped(self) -> Weights:
        """Return the agent's weights with the learner's counters."""
        return self.agent.weights().stamped(
            version=self.version,
            updates=self.updates,
            env_steps=self.env_steps,
            episodes=self.episodes,
            train_s=self.train_s,
        )

    @property
    def train_s(self) -> float:
        """Seconds from the first environment step to the last update."""
        return self._train_base_s + max(0.0, self._last_update_s - self._first_step_s)

    def close(self) -> None:
        """Write the last checkpoint and the final report. Batches left in the memory are learned by a resumed run."""
        try:
            self._save()
        finally:
            self._report(final=True)

    def checkpoint(self) -> None:
        """Write a checkpoint of everything that the next update depends on.

        On a full disk, raise DiskFull if `stop_on_full_disk`, else post a warning and keep the previous checkpoint.
        """
        self.phases.switch("other")
        try:
            self._save()
        except DiskFull as error:
            if self.limits.stop_on_full_disk:
                raise
            self.context.event("warning", message=f"{error}; the previous checkpoint is kept, and the run continues")
        self._saved_s, self._saved_episodes = self.context.clock(), self.episodes

    def _save(self) -> None:
        counters: dict[str, int | float] = {
            "version": self.version,
            "updates": self.updates,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "train_s": self.train_s,
        }
        started_s = self.context.clock()
        self.save(self.stamped(), self.state(), counters)
        self.context.span("checkpoint", started_s, version=self.version)

    def state(self) -> Tree:
        """Return all but weights and counters: agent, memory, positions, states and newest weights of the actors.

        The tree shares the memory's large columns, so save it before the next update.
        """
        state: Tree = {
            "agent": self.agent.state(),
            "memory": self.memory.live_state(),
            "ledger": self.batch_policy.tracker.state(),  # key of the stored format
            "lags": [[lag, count] for lag, count in self.lags.items()],
            "agent_steps": self.agent_steps,
            "tuning": self.live_hyperparameters.state(),
        }
        if self._newest_published is not None:
            # "owed" is the stored format's key of `_publish_pending`
            state["acting"] = {"weights": codec.encode_weights(self._newest_published), "owed": self._publish_pending}
        return state

    def restore(self, weights: Weights, state: Tree, counters: Mapping[str, Any]) -> None:
        """Restore a checkpoint exactly."""
        self.agent.load(weights)
        self.agent.restore(state["agent"])
        self.live_hyperparameters.restore(state.get("tuning"))
        self.memory.restore(state["memory"])
        self.batch_policy.tracker.restore(state["ledger"])
        self.lags, self.agent_steps = Counter(dict(state["lags"])), state.get("agent_steps")
        self.version, self.updates = int(counters["version"]), int(counters["updates"])
        self.env_steps, self.episodes = int(counters["env_steps"]), int(counters["episodes"])
        self._train_base_s, self._saved_episodes = float(counters["train_s"]), self.episodes
        if "acting" in state:
            self._newest_published = codec.decode_weights(state["acting"]["weights"])
            self.version, self._publish_pending = self._newest_published.version, bool(state["acting"]["owed"])

    def _is_finished(self) -> bool:
        if self.context.ending:
            return True
        if self.limits.ended is not None:
            return self.limits.ended(self.env_steps, self.updates, has_batch=self.memory.ready())
        if self.memory.ready():
            return False  # learn from all received segments first
        steps, episodes = self.limits.steps, self.limits.episodes
        return (
            self._quota_used
            or (steps is not None and self.env_steps >= steps)
            or (episodes is not None and self.episodes >= episodes)
        )

    def _poll_commands_if_due(self) -> None:
        """Apply hyperparameters that were set since the last poll, or since the checkpoint of a resumed run."""
        if self.context.clock() - self._commands_polled_s < POLL_COMMANDS_EVERY_S:
            return
        self._commands_polled_s = self.context.clock()
        for number, command in self.context.commands(self._last_command):
            self._last_command = number
            if command.get("command") == SET and self.live_hyperparameters.is_new(command):
                self._apply_command(command)

    def _apply_command(self, command: Mapping[str, Any]) -> None:
        """Apply a command's values from the next update on, and report the outcome."""
        live = self.live_hyperparameters.live_values(command)
        self.live_hyperparameters.post_result(
            self.context, command, live, self._counts(), refusal=self.live_hyperparameters.apply(live)
        )

    def _counts(self) -> dict[str, int]:
        return {"version": self.version, "updates": self.updates, "env_steps": self.env_steps}

    def _report_if_due(self) -> None:
        now = self.context.clock()
        every_episodes = self.limits.checkpoint_every_episodes or math.inf
        if (
            now - self._saved_s >= self.limits.checkpoint_every_s
            or self.episodes - self._saved_episodes >= every_episodes
        ):
            self.checkpoint()
        if now - self._reported_s >= REPORT_EVERY_S:
            self._report(final=False)

    def _report(self, *, final: bool) -> None:
        self.phases.switch("other")
        report = TrainingReport(
            run=self.context.run,
            version=self.version,
            updates=self.updates,
            env_steps=self.env_steps,
            episodes=self.episodes,
            agent_steps=self.agent_steps,
            train_s=self.train_s,
            stats={name: sum(values) / len(values) for name, values in self._stats.items()} | self._channel_stats(),
            memory=self.memory.stats(),
            phases=dict(self.phases.seconds),
            lags=dict(self.lags),
            dropped=self._dropped(final=final),
            rss_bytes=rss_bytes(),
            cpu_s=time.process_time(),
            weights_sha256=self.agent.weights().sha256() if final else None,
            final=final,
        )
        self._stats.clear()
        self.context.board.post(TRAINING, report.record())
        self.context.flush_spans()
        self._reported_s = self.context.clock()

    def report_if_silent(self, limit_s: float) -> None:
        """Post a report if none was posted for `limit_s` seconds."""
        if self.context.clock() - self._reported_s >= limit_s:
            self._report(final=False)

    def _channel_stats(self) -> dict[str, float]:
        channel = self.context.channel
        return channel.stats() if isinstance(channel, Checkpointable) else {}

    def _dropped(self, *, final: bool) -> dict[str, int]:
        """Count segments that were not learned from, by cause.

        Segments collected ahead of the run's end are counted too; a resumed run collects them again.
        """
        dropped = dict(self.batch_policy.tracker.dropped)
        if isinstance(self.context.channel, ValidatingChannel):
            dropped |= self.context.channel.dropped
        if final and self.limits.ahead and (num_waiting := self.batch_policy.num_waiting()):
            dropped["ahead"] = num_waiting
        return dropped

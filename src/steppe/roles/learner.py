"""The learner: segments become weights. Takes what the intake gives, remembers, learns, publishes."""

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
WARN_EVERY_S = 1.0  # of refused segments
MAX_REFUSED_BATCHES = 10  # intakes one after the other of which every segment was refused: then the run is over

SaveCheckpoint = Callable[[Weights, Tree, dict[str, int | float]], None]


class StopCondition(Protocol):
    """Whether a run is over that has taken in and learned so much; `digesting`: there is more to learn from."""

    def __call__(self, env_steps: int, updates: int, *, digesting: bool) -> bool: ...


@dataclass(frozen=True)
class RunLimits:
    """When a run is over, how often weights go out at the latest, and how often they are written down."""

    steps: int | None = None
    episodes: int | None = None
    publish_every: int | None = None  # updates; None: only when what was taken in is digested
    ahead: int = 0  # rounds that actors collect meanwhile; 1: weights go out only when the next round is in
    checkpoint_every_s: float = math.inf
    checkpoint_every_episodes: int | None = None
    stop_on_full_disk: bool = False  # otherwise the run goes on with the checkpoint before
    ended: StopCondition | None = None  # where a run that is repeated ended, in place of the rest


class Learner:
    """Counts what it learned from; the run is over when its counts say so."""

    def __init__(
        self,
        agent: Agent,
        memory: Memory,
        intake: BatchPolicy,
        limits: RunLimits,
        save: SaveCheckpoint,
        context: Context,
    ) -> None:
        self.name = context.name
        self.done = False
        self.agent, self.memory, self.batch_policy = agent, memory, intake
        self.limits, self.save, self.context = limits, save, context
        self.version, self.updates, self.env_steps, self.episodes = -1, 0, 0, 0
        self.agent_steps: int | None = None  # counted where there are several agents in an environment
        self.phases = PhaseTimer("wait", "sample", "remember", "learn", "publish", "other")
        self.lags: Counter[int] = Counter()
        self._announced = False
        self._unpublished = 0
        self._spent = False  # whether every actor has played its episodes
        self._owed = False  # what was taken in is digested, and goes out with the next intake
        self._acting: Weights | None = None  # what the next segments are collected with, a round ahead
        self._train_base_s = 0.0
        self._first_step_s = math.inf
        self._last_update_s = 0.0
        self._stats: defaultdict[str, list[float]] = defaultdict(list)
        self._reported_s = self._saved_s = context.clock()
        self._saved_episodes = 0
        self.live_hyperparameters = LiveHyperparameters(agent)
        self._heard, self._commands_polled_s = 0, -math.inf  # the newest command that was looked at, and when
        self._refused_batches, self._warned_s = 0, -math.inf

    def step(self) -> bool:
        """Take in, learn from one batch, publish what has been digested: at most one of each."""
        if not self._announced:
            self.publish_initial()
        if self._over():
            self._end()
            return False
        self._poll_commands_if_due()
        if self.context.asked() == PAUSE:
            self.phases.switch("wait")
            return False
        took = self._wants_data() and self.receive()
        learned = self.memory.ready()
        if learned:
            self.learn()
        if took or learned:
            self._publish_if_due()
            self._report_if_due()
        self.phases.switch("wait")  # whatever happens until the next step is not this role's work
        return took or learned

    def train(self) -> None:
        """Learn until the run is over, in the caller's thread."""
        run_role(self)

    def receive(self) -> bool:
        """Take what the intake gives and remember it; False when that is nothing.

        Weights that are owed go out first, as the last intake made them: this one only says that every actor waits for
        them. Which segments are collected with them does not depend on anyone's speed.
        """
        segments = self.batch_policy.take(self.version)
        if segments and self._owed:
            self.publish()
        self.phases.switch("remember")
        if segments:
            self._check(segments)
        for segment in segments:
            assert segment.header is not None
            self._first_step_s = min(self._first_step_s, segment.header.started_s)
            self.lags[self.version - segment.header.version] += 1
            self._observe(segment)
        if segments and self._has_experience(segments):
            self.memory.add(segments)
        elif segments:
            self._spent = True
        for segment in segments:
            self.context.channel.release(segment)
        return bool(segments)

    def _check(self, segments: list[Segment]) -> None:
        """Empty the segments whose values cannot be learned from, and count them; their rounds go on.

        This is where segments come in from other processes, so it is where their values are checked: once, for all that
        is computed from them. A run in which nothing else comes in is over.
        """
        faults = [fault for segment in segments if (fault := self._fault(segment)) is not None]
        self._refused_batches = self._refused_batches + 1 if len(faults) == len(segments) else 0
        if self._refused_batches >= MAX_REFUSED_BATCHES:
            kind = NotFinite if isinstance(faults[0], NotFinite) else RunFailed
            raise kind(f"everything that came in the last {MAX_REFUSED_BATCHES} times was refused: {faults[0]}")

    def _fault(self, segment: Segment) -> SteppeError | None:
        """Why a segment was refused and emptied; None for a sound one."""
        try:
            self._require(segment)
        except SteppeError as fault:
            clear_segment(segment)
            dropped = self.batch_policy.ledger.dropped
            dropped["refused"] += 1
            if self.context.clock() - self._warned_s >= WARN_EVERY_S:
                self._warned_s = self.context.clock()
                actor = segment.header.actor if segment.header is not None else None
                words = f"a segment of actor {actor} was refused, {dropped['refused']} in all: {fault}"
                self.context.event("warning", message=words, actor=actor, refused=dropped["refused"])
            return fault
        return None

    def _require(self, segment: Segment) -> None:
        """Raise SteppeError unless every value of a segment can be learned from."""
        require_segment(segment)

    def learn(self) -> Learned:
        """One batch from the memory into the agent."""
        self.phases.switch("sample")
        batch = self.memory.sample()
        self.phases.switch("learn")
        started_s = self.context.clock()
        learned = self._learn_batch(batch)
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
        """Count what a segment holds and let the agent see it; nothing of it after the run's last episode."""
        if self.limits.episodes is not None:
            invalidate_after_episodes(segment, max(0, self.limits.episodes - self.episodes))
        self.env_steps += segment.env_steps
        self.episodes += int(np.count_nonzero(segment.ended))
        if segment.spec.num_agents > 1:
            self.agent_steps = (self.agent_steps or 0) + segment.num_valid
        self.agent.observe(segment, Progress(self.env_steps, self.limits.steps))

    def _has_experience(self, segments: Sequence[Segment]) -> bool:
        """Whether there is anything in these segments; not where every actor has played its episodes."""
        return self.limits.episodes is None or any(segment["valid"].any() for segment in segments)

    def _learn_batch(self, batch: Batch) -> Learned:
        return self.agent.learn(batch)

    def publish_initial(self) -> None:
        """Publish what the run begins with: version 0, or what the actors of a resumed run had."""
        self.version = max(self.version, 0)
        self._publish(self._acting or self.stamped())
        self._announced = True

    def publish(self) -> None:
        """Give the weights as they are now to everyone, under the next version."""
        self.phases.switch("publish")
        started_s = self.context.clock()
        self.version += 1
        self._unpublished, self._owed = 0, False
        self._publish(self.stamped())
        self.context.span("publish", started_s, version=self.version)
        self.phases.switch("other")

    def store_weights(self) -> None:
        """The same, for a reader who knows it by this name."""
        self.publish()

    def _publish(self, weights: Weights) -> None:
        self.context.weights.publish(POLICY, weights)
        if self.limits.ahead:
            self._acting = weights.copy()

    def _wants_data(self) -> bool:
        """A round ahead, segments may be there at any time: when they are taken must not depend on that."""
        return self.memory.wants_data() and not (self.limits.ahead and self.memory.ready())

    def _publish_if_due(self) -> None:
        """Publish if it is time to."""
        if not self.memory.ready():
            if self.limits.ahead:
                self._owed = True
            else:
                self.publish()
        elif self.limits.publish_every and self._unpublished >= self.limits.publish_every:
            self.publish()

    def _end(self) -> None:
        """No more steps. Weights that are owed are what the run is judged by; one that goes on from here owes them again."""
        if self._owed and not self.context.ending:
            acting = self._acting
            self.publish()
            self._owed, self._acting = True, acting
        self.done = True

    def stamped(self) -> Weights:
        """The agent's weights with the learner's counters."""
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
        """Write everything down one last time. What was not digested is not published: a resumed run digests it."""
        try:
            self._save()
        finally:
            self._report(final=True)

    def checkpoint(self) -> None:
        """Write down everything that the run's next update depends on, if there is room for it."""
        self.phases.switch("other")
        try:
            self._save()
        except DiskFull as error:
            if self.limits.stop_on_full_disk:
                raise
            self.context.event("warning", message=f"{error}; the checkpoint before stays, and the run goes on")
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
        """All but the weights and the counters: agent, memory, where each actor stands and what it has to act with.

        Shares the memory's big columns, so it is to be saved at once.
        """
        state: Tree = {
            "agent": self.agent.state(),
            "memory": self.memory.live_state(),
            "ledger": self.batch_policy.ledger.state(),
            "lags": [[lag, count] for lag, count in self.lags.items()],
            "agent_steps": self.agent_steps,
            "tuning": self.live_hyperparameters.state(),
        }
        if self._acting is not None:
            state["acting"] = {"weights": codec.encode_weights(self._acting), "owed": self._owed}
        return state

    def restore(self, weights: Weights, state: Tree, counters: Mapping[str, Any]) -> None:
        """Go on exactly from a checkpoint."""
        self.agent.load(weights)
        self.agent.restore(state["agent"])
        self.live_hyperparameters.restore(state.get("tuning"))
        self.memory.restore(state["memory"])
        self.batch_policy.ledger.restore(state["ledger"])
        self.lags, self.agent_steps = Counter(dict(state["lags"])), state.get("agent_steps")
        self.version, self.updates = int(counters["version"]), int(counters["updates"])
        self.env_steps, self.episodes = int(counters["env_steps"]), int(counters["episodes"])
        self._train_base_s, self._saved_episodes = float(counters["train_s"]), self.episodes
        if "acting" in state:
            self._acting = codec.decode_weights(state["acting"]["weights"])
            self.version, self._owed = self._acting.version, bool(state["acting"]["owed"])

    def _over(self) -> bool:
        if self.context.ending:
            return True
        if self.limits.ended is not None:
            return self.limits.ended(self.env_steps, self.updates, digesting=self.memory.ready())
        if self.memory.ready():
            return False  # what was taken in is learned from first
        steps, episodes = self.limits.steps, self.limits.episodes
        return (
            self._spent
            or (steps is not None and self.env_steps >= steps)
            or (episodes is not None and self.episodes >= episodes)
        )

    def _poll_commands_if_due(self) -> None:
        """Take over hyperparameters that were set since the last look, or since the checkpoint that the run goes on from."""
        if self.context.clock() - self._commands_polled_s < POLL_COMMANDS_EVERY_S:
            return
        self._commands_polled_s = self.context.clock()
        for number, command in self.context.commands(self._heard):
            self._heard = number
            if command.get("command") == SET and self.live_hyperparameters.is_new(command):
                self._set(command)

    def _set(self, command: Mapping[str, Any]) -> None:
        """Learn with a command's values from the next update on."""
        live = self.live_hyperparameters.wanted(command)
        self.live_hyperparameters.answer(
            self.context, command, live, self._counts(), refusal=self.live_hyperparameters.take(live)
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
            stats={name: sum(values) / len(values) for name, values in self._stats.items()} | self._carried(),
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
        """Show life where there was nothing to report for so long."""
        if self.context.clock() - self._reported_s >= limit_s:
            self._report(final=False)

    def _carried(self) -> dict[str, float]:
        channel = self.context.channel
        return channel.stats() if isinstance(channel, Checkpointable) else {}

    def _dropped(self, *, final: bool) -> dict[str, int]:
        """Segments that nobody learned from, by cause. What was collected ahead of an end is collected again after it."""
        dropped = dict(self.batch_policy.ledger.dropped)
        if isinstance(self.context.channel, ValidatingChannel):
            dropped |= self.context.channel.dropped
        if final and self.limits.ahead and (left := self.batch_policy.left()):
            dropped["ahead"] = left
        return dropped

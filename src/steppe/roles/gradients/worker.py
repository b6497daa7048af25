"""The worker that pushes gradients: it acts like an actor, and sends only the gradients of its own experience.

It receives new weights in return. The learner in learner.py applies the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from steppe.core.contracts.algorithm import Agent, Learned, Memory, Progress, trainable_entries
from steppe.core.contracts.env import ResumeKind, SegmentEnv
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.core.system.timing import PhaseTimer
from steppe.roles.action_log import SaveFault
from steppe.roles.actor import Actor
from steppe.roles.context import Context
from steppe.roles.scheduling import CollectPolicy, LockstepCollectPolicy
from steppe.roles.tuning import SETTINGS, apply_live_hyperparameters


@dataclass(frozen=True)
class GradientSource:
    """What a worker computes gradients with: agent, memory, segment layout, and the run's length for schedules."""

    agent: Agent
    memory: Memory
    segment: SegmentSpec
    total_steps: int | None
    on_policy: bool  # whether a segment is learned from once and discarded
    deltas: bool = False  # whether the worker learns locally and pushes parameter deltas

    def update(self, batch: Batch) -> tuple[np.ndarray, Learned]:
        """Return the gradient or delta of a batch, flat float32 in the order of the agent's layout."""
        if not self.deltas:
            return self.agent.gradients(batch), Learned(1)
        before = self._flat()
        learned = self.agent.learn(batch)
        return self._flat() - before, learned

    def _flat(self) -> np.ndarray:
        """Return a flat copy of all trained parameters."""
        arrays = self.agent.weights().arrays()
        return np.concatenate([arrays[entry.name].reshape(-1) for entry in trainable_entries(self.agent)])


@dataclass(frozen=True)
class _PendingGradient:
    """A gradient that waits to be sent; empty if the memory had too little data."""

    gradient: np.ndarray
    rows: int
    updates: int
    header: SegmentHeader


class GradientWorker(Actor):
    """Collect segments and push gradients. `sequence` numbers the pushes: one per segment, or as many as the memory's
    rate limiter allows."""

    def __init__(
        self,
        index: int,
        env: SegmentEnv,
        gradient_source: GradientSource,
        collect_policy: CollectPolicy,
        context: Context,
        *,
        save_fault: SaveFault | None = None,
    ) -> None:
        super().__init__(
            index, env, gradient_source.agent, collect_policy, context, epoch=context.epoch, save_fault=save_fault
        )
        self.gradient_source = gradient_source
        self.phases = PhaseTimer("env", "policy", "learn", "blocked", "other")
        self._segment = Segment.blank(gradient_source.segment)
        self._pending: _PendingGradient | None = None
        self._num_segments = self._new_steps = self._new_episodes = 0
        self._total_steps = self._updates = 0  # of the whole run, as of the adopted weights
        self._settings_version = -1  # version of the newest adopted live hyperparameters

    def adopt(self, weights: Weights) -> None:
        super().adopt(weights)
        self._total_steps, self._updates = weights.env_steps, weights.updates
        settings = self.context.weights.newer_than(SETTINGS, self._settings_version)  # published before their weights
        if settings is not None:
            apply_live_hyperparameters(self.gradient_source.agent, settings)
            self._settings_version = settings.version

    def collect(self) -> Segment | None:
        """Return the next push; None if the channel has no free segment or the worker must stop.

        The gradient is computed before a segment is requested: a worker computes while its last push is in flight.
        """
        if self._pending is None:
            self._pending = self._compute()
        push, pending = self.context.channel.blank(self.index), self._pending
        if push is None or pending is None:
            return None
        push["gradient"][0, 0, : len(pending.gradient)] = pending.gradient
        push["counts"][0, 0] = (pending.rows, self._new_steps, self._new_episodes, pending.updates)
        push.header, push.state = pending.header, self._segment.state
        self._new_steps = self._new_episodes = 0
        self._pending = None
        return push

    def resume(self, sequence: int, state: bytes | None, seeds: np.random.SeedSequence) -> ResumeKind:
        """Resume like an actor. A worker's replay is lost with its process, so with replay the resume is not exact."""
        kind = super().resume(sequence, state, seeds)
        if self.gradient_source.on_policy:
            return kind
        self.context.event(
            "warning", message=f"{self.name} begins with an empty replay, and fills it before it continues"
        )
        return "episode-boundary"

    def _compute(self) -> _PendingGradient | None:
        """Collect a segment if the memory has no batch, and compute a gradient if it has one."""
        memory, started_s = self.gradient_source.memory, self.context.clock()
        if not memory.ready() and not self._collect_segment():
            return None
        self.phases.switch("learn")
        gradient, rows = np.empty(0, np.float32), 0
        if memory.ready():
            batch = memory.sample()
            rows = _count_rows(batch)
            learned = Learned(1)
            if rows:
                gradient, learned = self.gradient_source.update(batch)
            memory.update(batch, learned)
        self.phases.switch("other")
        header = SegmentHeader(self.context.run, self.index, self.epoch, self.sequence, self.version, started_s)
        return _PendingGradient(gradient, rows, self._updates, header)

    @property
    def _finished(self) -> bool:
        """Whether the episode quota is exhausted and no round waits for this worker."""
        return (
            self.quota is not None
            and self.quota.exhausted
            and not isinstance(self.collect_policy, LockstepCollectPolicy)
        )

    def _collect_segment(self) -> bool:
        """Collect one segment into the memory; return False if the worker is finished or must stop."""
        segment = self._segment
        if self._finished or not self.fill(segment):
            return False
        assert segment.header is not None
        segment.header = msgspec.structs.replace(segment.header, sequence=self._num_segments)
        self._num_segments += 1
        self._new_steps += segment.env_steps
        self._new_episodes += int(np.count_nonzero(segment.ended))
        self.phases.switch("learn")
        self.gradient_source.agent.observe(segment, Progress(self._total_steps, self.gradient_source.total_steps))
        self.gradient_source.memory.add([segment])
        return True


def _count_rows(batch: Batch) -> int:
    """Return the number of rows of a batch that count for learning."""
    counted = next((name for name in ("learn", "valid") if name in batch.columns), None)
    return len(batch["reward"]) if counted is None else int(np.count_nonzero(batch[counted]))

"""The worker that pushes gradients: it acts like any actor, computes the gradient of what it saw itself, and sends only that.

What it acts with comes back as weights. Where gradients become weights is learner.py.
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
    """What a worker makes gradients with: agent, memory, room for a segment, and the length that schedules go by."""

    agent: Agent
    memory: Memory
    segment: SegmentSpec
    total_steps: int | None
    on_policy: bool  # whether a segment is learned from once and forgotten
    deltas: bool = False  # whether it learns by itself and pushes what changed

    def update(self, batch: Batch) -> tuple[np.ndarray, Learned]:
        """What to push for a batch, flat in float32, in the order of the agent's layout."""
        if not self.deltas:
            return self.agent.gradients(batch), Learned(1)
        before = self._flat()
        learned = self.agent.learn(batch)
        return self._flat() - before, learned

    def _flat(self) -> np.ndarray:
        """A copy of all trained parameters."""
        arrays = self.agent.weights().arrays()
        return np.concatenate([arrays[entry.name].reshape(-1) for entry in trainable_entries(self.agent)])


@dataclass(frozen=True)
class _PendingGradient:
    """A gradient that waits to be sent; an empty one where the memory had too little to learn from."""

    gradient: np.ndarray
    rows: int
    updates: int
    header: SegmentHeader


class GradientWorker(Actor):
    """One worker's life. `sequence` numbers its pushes: one per segment, or as many as its replay pays for."""

    def __init__(
        self,
        index: int,
        world: SegmentEnv,
        gradient_source: GradientSource,
        gate: CollectPolicy,
        context: Context,
        *,
        keep_fault: SaveFault | None = None,
    ) -> None:
        super().__init__(index, world, gradient_source.agent, gate, context, epoch=context.epoch, keep_fault=keep_fault)
        self.gradient_source = gradient_source
        self.phases = PhaseTimer("env", "policy", "learn", "blocked", "other")
        self._segment = Segment.blank(gradient_source.segment)
        self._made: _PendingGradient | None = None
        self._segments = self._new_steps = self._new_episodes = 0
        self._seen_steps = self._updates = 0  # everyone's, behind the weights
        self._settings = -1  # the version of the newest hyperparameters that were published

    def adopt(self, weights: Weights) -> None:
        super().adopt(weights)
        self._seen_steps, self._updates = weights.env_steps, weights.updates
        settings = self.context.weights.newer_than(
            SETTINGS, self._settings
        )  # published before the weights they are for
        if settings is not None:
            apply_live_hyperparameters(self.gradient_source.agent, settings)
            self._settings = settings.version

    def collect(self) -> Segment | None:
        """The next push; None while there is no memory for it, or when asked to stop on the way.

        The gradient is made before memory is asked for: a worker computes while its last push is under way.
        """
        if self._made is None:
            self._made = self._make()
        push, made = self.context.channel.blank(self.index), self._made
        if push is None or made is None:
            return None
        push["gradient"][0, 0, : len(made.gradient)] = made.gradient
        push["counts"][0, 0] = (made.rows, self._new_steps, self._new_episodes, made.updates)
        push.header, push.state = made.header, self._segment.state
        self._new_steps = self._new_episodes = 0
        self._made = None
        return push

    def resume(self, sequence: int, state: bytes | None, seeds: np.random.SeedSequence) -> ResumeKind:
        """As an actor does; what a replay held is lost with its worker, so that is not exact."""
        kind = super().resume(sequence, state, seeds)
        if self.gradient_source.on_policy:
            return kind
        self.context.event(
            "warning", message=f"{self.name} begins with an empty replay, and fills it before it goes on"
        )
        return "episode-boundary"

    def _make(self) -> _PendingGradient | None:
        """Collect if the memory is hungry, and compute a gradient if it has something to learn from."""
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
    def _spent(self) -> bool:
        """Whether there is nothing more to play and no round that waits for this worker."""
        return self.quota is not None and self.quota.exhausted and not isinstance(self.gate, LockstepCollectPolicy)

    def _collect_segment(self) -> bool:
        """One segment into the memory; False when asked to stop on the way."""
        segment = self._segment
        if self._spent or not self.fill(segment):
            return False
        assert segment.header is not None
        segment.header = msgspec.structs.replace(segment.header, sequence=self._segments)
        self._segments += 1
        self._new_steps += segment.env_steps
        self._new_episodes += int(np.count_nonzero(segment.ended))
        self.phases.switch("learn")
        self.gradient_source.agent.observe(segment, Progress(self._seen_steps, self.gradient_source.total_steps))
        self.gradient_source.memory.add([segment])
        return True


def _count_rows(batch: Batch) -> int:
    """How many steps a batch is learned from."""
    counted = next((name for name in ("learn", "valid") if name in batch.columns), None)
    return len(batch["reward"]) if counted is None else int(np.count_nonzero(batch[counted]))

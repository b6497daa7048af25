"""Contracts of policies, agents and memories. Axes are [T, B, …] throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.weights import Weights, WeightsEntry

Tree = dict[str, Any]  # nested dicts and lists of plain numbers, strings, bytes and NumPy arrays: see codec.pack
# Takes a gradient and the number of rows that it averages over; returns the parameters after the step of all learners.
JointStep = Callable[[np.ndarray, int], np.ndarray]
# Sums a few numbers over all learners; called at most once before each step.
JointSum = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as counted by the learner."""

    env_steps: int
    total_steps: int | None = None

    @property
    def fraction(self) -> float:
        """Completed fraction in [0, 1]; 0 when the run has no fixed length."""
        return min(1.0, self.env_steps / self.total_steps) if self.total_steps else 0.0


@dataclass
class Learned:
    """Result of one call of `learn`: optimizer steps, statistics for the records, new priorities for the memory."""

    updates: int
    stats: dict[str, float] = field(default_factory=dict)
    priorities: np.ndarray | None = None


@runtime_checkable
class Policy(Protocol):
    """Contract of actors and evaluations."""

    version: int

    def begin(self, num_envs: int, stream: np.random.Generator, *, actor: int = 0, num_actors: int = 1) -> None:
        """Prepare to act for `num_envs` rows (environments or their agents); all randomness comes from `stream`."""

    def act(self, obs: np.ndarray, starts: np.ndarray, *, explore: bool = True) -> Mapping[str, np.ndarray]:
        """Return actions `[B, …]` for observations `[B, …]` under "action", and the columns that the config declares.

        `starts[b]` is True on the first step of an episode (recurrent state is cleared there). The next call may reuse
        the arrays. A policy for enumerated states also receives `masks` [B, actions], the allowed actions, or None.
        """

    def acting_state(self) -> Tree:
        """Return everything besides the weights that the next `act` depends on: random generators, recurrent state."""

    def restore_acting(self, state: Tree) -> None:
        """Restore what `acting_state` returned, after `begin`."""

    def load(self, weights: Weights) -> None:
        """Copy weights into the policy; their layout must match."""


@runtime_checkable
class CommunicatingPolicy(Protocol):
    """A policy whose agents exchange messages.

    If `communicates` is true, `act` also receives `comm_mask` [B, num_agents], the agents that each agent receives
    messages from.
    """

    communicates: bool


@runtime_checkable
class CurriculumPolicy(Protocol):
    """A policy that chooses the difficulty of the episodes."""

    def curriculum_stages(self, num_envs: int) -> np.ndarray | None:
        """Return the stage of each environment's next episode, int64 [N, 2]; None: no curriculum.

        Called before each segment. CurriculumEnv in core/contracts/env.py takes the stages.
        """


@runtime_checkable
class ConfiguredAgent(Protocol):
    """An agent that shows its configuration."""

    config: Any


@runtime_checkable
class ScheduledAgent(Protocol):
    """An agent that has a learning rate, perhaps with a schedule."""

    learning_rate: float


@runtime_checkable
class AdamAgent(Protocol):
    """An agent that Adam trains."""

    adam_eps: float


@runtime_checkable
class Agent(Policy, Protocol):
    """Contract of learners: one class acts and learns. An actor never builds the optimizer."""

    def observe(self, segment: Segment, progress: Progress) -> None:
        """Update running statistics and schedules; called once per segment, in order, before `Memory.add`."""

    def learn(self, batch: Batch) -> Learned:
        """Update from one batch: a rollout (all epochs) or one sample from replay."""

    def gradients(self, batch: Batch) -> np.ndarray:
        """Return the flat float32 gradient of the loss on `batch`, in layout order of the trainable entries."""

    def apply(self, gradient: np.ndarray) -> None:
        """Take one optimizer step with a flat gradient."""

    def weights(self) -> Weights:
        """Return the current weights, sharing the agent's memory: copy before the next `learn`."""

    def state(self) -> Tree:
        """Return everything besides the weights that the next update depends on: optimizer, RNG, schedules."""

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned."""


@runtime_checkable
class Tunable(Protocol):
    """An agent whose hyperparameters can be changed between updates: those that its configuration lists as `live`."""

    def retune(self, values: Mapping[str, Any]) -> None:
        """Use these values from the next update on."""


@runtime_checkable
class PartlyTrainable(Protocol):
    """An agent whose gradients cover the first `num_trainable` numbers of its weights, not all of them."""

    @property
    def num_trainable(self) -> int: ...


@runtime_checkable
class JointTrainable(Protocol):
    """An agent that can take its optimizer steps together with the agents of other learners."""

    def train_jointly(self, joint_step: JointStep, joint_sum: JointSum | None = None) -> None:
        """Take every optimizer step with `joint_step` from now on, and sum over all learners with `joint_sum`."""

    def train_alone(self) -> None:
        """Take optimizer steps without other learners from now on."""


class Memory(Protocol):
    """Stores segments until the learner learns from them: a rollout or a replay pool."""

    def add(self, segments: Sequence[Segment]) -> None:
        """Store copies of the segments of one intake; the caller releases them afterwards."""

    def wants_data(self) -> bool:
        """Return whether to take in more segments now (the insert side of the samples-per-insert limit)."""

    def ready(self) -> bool:
        """Return whether `sample` can return a batch now."""

    def sample(self) -> Batch:
        """Return the next batch; the next call may reuse its arrays."""

    def update(self, batch: Batch, learned: Learned) -> None:
        """Update priorities and the rate limiter after a batch was learned from."""

    def stats(self) -> dict[str, float]:
        """Return fill level, samples per insert and similar statistics, for the records."""

    def state(self) -> Tree:
        """Return everything needed to continue exactly from here."""

    def live_state(self) -> Tree:
        """Return `state` for a checkpoint: columns too large to copy are rings.Ring, valid until the next `add`."""

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned, or `live_state` after it went through a checkpoint."""


def trainable_entries(agent: Agent) -> tuple[WeightsEntry, ...]:
    """Return the float32 entries that the agent's gradients cover: its first `num_trainable` numbers, by default all.

    Raises ConfigError when one of them is not float32.
    """
    layout = agent.weights().layout
    entries = layout.first(agent.num_trainable) if isinstance(agent, PartlyTrainable) else layout.entries
    odd = [entry.name for entry in entries if entry.dtype != "float32"]
    if odd:
        raise ConfigError(
            f"{type(agent).__name__} has {odd[0]!r}, which is not float32, among its weights: declare with a property "
            "num_trainable how many of its first numbers a gradient has"
        )
    return entries

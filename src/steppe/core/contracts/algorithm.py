"""The contracts of what acts, what learns and what remembers. Axes are [T, B, …] throughout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.weights import Weights, WeightsEntry

Tree = dict[str, Any]  # nested dicts and lists of plain numbers, strings, bytes and NumPy arrays: what codec.pack takes


@dataclass(frozen=True)
class Progress:
    """How far a run is, as the learner counts it."""

    env_steps: int
    total_steps: int | None = None

    @property
    def fraction(self) -> float:
        """In [0, 1]; 0 when the run has no fixed length."""
        return min(1.0, self.env_steps / self.total_steps) if self.total_steps else 0.0


@dataclass
class Learned:
    """What one call of `learn` did: optimizer steps, statistics for the records, new priorities for the memory."""

    updates: int
    stats: dict[str, float] = field(default_factory=dict)
    priorities: np.ndarray | None = None


@runtime_checkable
class Policy(Protocol):
    """What an actor or an evaluation needs."""

    version: int

    def begin(self, num_envs: int, stream: np.random.Generator, *, actor: int = 0, num_actors: int = 1) -> None:
        """Prepare to act for `num_envs` rows, environments or their agents; all randomness comes from `stream`."""

    def act(self, obs: np.ndarray, starts: np.ndarray, *, explore: bool = True) -> Mapping[str, np.ndarray]:
        """Actions `[B, …]` for observations `[B, …]` under "action", and the columns that the config declares.

        `starts[b]` is True on the first step of an episode (recurrent state is cleared there). The arrays may be
        reused by the next call. A policy that asks for numbered states is also given `masks` [B, actions], or None: what is
        allowed. One with an attribute `hears` that is True is also given `comm_mask` [B, num_agents]: whom each agent hears.
        One that has `lessons(num_envs)` is asked before each segment what the next episodes are to be (core/contracts/env.py).
        """

    def acting_state(self) -> Tree:
        """What the next `act` depends on besides the weights: random numbers, recurrent state."""

    def restore_acting(self, state: Tree) -> None:
        """Take over what `acting_state` returned, after `begin`."""

    def load(self, weights: Weights) -> None:
        """Adopt weights; their layout must fit. Copies, so the buffer may be reused."""


@runtime_checkable
class Agent(Policy, Protocol):
    """What a learner needs besides: one class acts and learns, and an actor never builds the optimizer."""

    def observe(self, segment: Segment, progress: Progress) -> None:
        """Called once per segment, in order, before it is remembered: running statistics, schedules."""

    def learn(self, batch: Batch) -> Learned:
        """Improve from one batch: a rollout (all epochs) or one draw from replay."""

    def gradients(self, batch: Batch) -> np.ndarray:
        """The flat float32 gradient of the loss on `batch`, in layout order of the trainable entries."""

    def apply(self, gradient: np.ndarray) -> None:
        """One optimizer step with a flat gradient."""

    def weights(self) -> Weights:
        """The weights as they are now, sharing the agent's memory: copy before the next `learn`."""

    def state(self) -> Tree:
        """Everything besides the weights that the next update depends on: optimizer, RNG, schedules."""

    def restore(self, state: Tree) -> None:
        """Take over what `state` returned."""


@runtime_checkable
class Tunable(Protocol):
    """An agent whose hyperparameters can be changed between two updates: those that its configuration lists as `live`."""

    def retune(self, values: Mapping[str, Any]) -> None:
        """Learn with these values from now on."""


class Memory(Protocol):
    """Where a learner keeps segments until it learns from them: a rollout or a replay pool."""

    def add(self, segments: Sequence[Segment]) -> None:
        """Remember the segments of one intake. Copies: the caller releases them afterwards."""

    def wants_data(self) -> bool:
        """Whether more experience should be taken in now (the other half of a samples-per-insert limit)."""

    def ready(self) -> bool:
        """Whether `sample` would give a batch now."""

    def sample(self) -> Batch:
        """The next batch; its arrays may be reused by the next call."""

    def update(self, batch: Batch, learned: Learned) -> None:
        """Account for a batch that was learned from: priorities, limiter."""

    def stats(self) -> dict[str, float]:
        """Fill, samples per insert and the like, for the records."""

    def state(self) -> Tree:
        """Everything needed to go on exactly from here."""

    def live_state(self) -> Tree:
        """The same for a checkpoint: with rings.Ring where columns are too big to copy, good until the next `add`."""

    def restore(self, state: Tree) -> None:
        """Take over what `state` returned, or `live_state` by way of a checkpoint."""


def trainable_entries(agent: Agent) -> tuple[WeightsEntry, ...]:
    """The parameters that the agent's gradients are about: those that it says it trains, or else all it has, in float32."""
    layout = agent.weights().layout
    count = getattr(agent, "num_trainable", None)
    entries = layout.entries if count is None else layout.first(count)
    odd = [entry.name for entry in entries if entry.dtype != "float32"]
    if odd:
        raise ConfigError(
            f"{type(agent).__name__} has {odd[0]!r}, which is not float32, among its weights: say with a property "
            "num_trainable how many of its first numbers a gradient has"
        )
    return entries

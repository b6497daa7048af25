"""Base class of all torch agents: weights, counters and the optimizer.

The losses are in the algorithms' own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.nn.optimizers import FlatAdam, FlatOptimizer, JointOptimizer
from steppe.algorithms.shared.td_learning import RecurrentState
from steppe.core.config.agent import AgentConfig
from steppe.core.config.tunables import validate_changes
from steppe.core.config.validation import validate_config
from steppe.core.contracts.algorithm import JointStep, JointSum, Tree
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding


class TorchAgent:
    """Owns the flat module, its optimizer, the random stream for acting and the counters."""

    config: Any  # the algorithm's configuration, with defaults resolved

    def __init__(self, flat: FlatModule, config: AgentConfig, seed: int, *, adam_eps: float) -> None:
        self.version = 0
        self.updates = 0
        self.env_steps = 0
        self.seed = seed
        self.flat = flat
        self.learning_rate = config.learning_rate or 0.0  # never None once defaults are resolved
        self._stream = seeding.generator(seed, "act")
        self._recurrent_state: RecurrentState | None = None  # None unless the agent is recurrent
        self.adam_eps = adam_eps
        self._adam = FlatAdam(flat, eps=adam_eps, max_grad_norm=config.max_grad_norm)
        self.optimizer: FlatOptimizer = self._adam
        self.joint_sum: JointSum | None = None  # set while several learners train together

    def begin(self, num_envs: int, stream: np.random.Generator, *, actor: int = 0, num_actors: int = 1) -> None:
        """Take all exploration from `stream` from now on, and clear the recurrent state."""
        self._stream = stream
        if self._recurrent_state is not None:
            self._recurrent_state.begin(num_envs)

    @property
    def num_trainable(self) -> int:
        """Number of elements of a gradient."""
        return int(self.flat.gradient.numel())

    def acting_state(self) -> Tree:
        """Return the state of the exploration stream and, for a recurrent agent, its hidden state."""
        state: Tree = {"stream": self._stream.bit_generator.state}
        return state if self._recurrent_state is None else state | {"hidden": self._recurrent_state.state.copy()}

    def restore_acting(self, state: Tree) -> None:
        """Continue from what `acting_state` returned."""
        self._stream.bit_generator.state = state["stream"]
        if self._recurrent_state is not None:
            self._recurrent_state.keep(np.array(state["hidden"]))

    def load(self, weights: Weights) -> None:
        """Adopt weights with their counters; the layout must be this agent's."""
        self.flat.load(weights, f"this {type(self).__name__}")
        self.version, self.updates, self.env_steps = weights.version, weights.updates, weights.env_steps

    def weights(self) -> Weights:
        """Return the current weights, sharing memory with this agent."""
        return self.flat.weights(self.version, self.updates, self.env_steps)

    def retune(self, values: Mapping[str, Any]) -> None:
        """Change hyperparameters from the next update on; ConfigError, and no change, if a value is invalid."""
        changes = validate_changes(self.config, values)
        self.config = validate_config(type(self.config), self.config.model_dump() | changes, "agent.")
        if "learning_rate" in changes:
            self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        """Set the learning rate from the configuration."""
        self.learning_rate = float(self.config.learning_rate or 0.0)

    def apply(self, gradient: np.ndarray) -> None:
        """Take one optimizer step with a flat gradient, clipped like the agent's own."""
        if gradient.shape != tuple(self.flat.gradient.shape):
            raise ConfigError(f"the gradient has shape {gradient.shape}, not {tuple(self.flat.gradient.shape)}")
        self.flat.gradient.copy_(torch.from_numpy(np.array(gradient, np.float32)))
        self.optimizer.step(self.learning_rate, self.updates)
        self.updates += 1

    def train_jointly(self, joint_step: JointStep, joint_sum: JointSum | None = None) -> None:
        """Take every optimizer step together with other learners from now on."""
        self.optimizer, self.joint_sum = JointOptimizer(self.flat, joint_step), joint_sum

    def train_alone(self) -> None:
        """Take optimizer steps without other learners from now on."""
        self.optimizer, self.joint_sum = self._adam, None

    def _counters(self) -> Tree:
        """Return the part of `state` that all torch agents share."""
        return {
            "seed": self.seed,
            "version": self.version,
            "updates": self.updates,
            "env_steps": self.env_steps,
            "learning_rate": self.learning_rate,
            "adam": self._adam.state(),
        }

    def _restore_counters(self, state: Tree) -> None:
        self.seed, self.version = int(state["seed"]), int(state["version"])
        self.updates, self.env_steps = int(state["updates"]), int(state["env_steps"])
        self.learning_rate = float(state["learning_rate"])
        self._adam.restore(state["adam"])

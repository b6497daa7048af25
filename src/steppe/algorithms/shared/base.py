"""What every torch agent does the same way: hand weights out and take them in, and step the optimizer. Mathematics is in
the algorithms' own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from steppe.algorithms.nn.flat_module import FlatAdam, FlatModule
from steppe.algorithms.shared.td_learning import RecurrentState
from steppe.core.algorithms import AgentConfig
from steppe.core.config.tunables import validate_changes
from steppe.core.config.validation import validate_config
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding


class TorchAgent:
    """Owns the flat module, the acting stream, the counters and (once it learns) the optimizer."""

    config: Any  # of the algorithm, fitted

    def __init__(self, flat: FlatModule, config: AgentConfig, seed: int, *, adam_eps: float) -> None:
        self.version = 0
        self.updates = 0
        self.env_steps = 0
        self.seed = seed
        self.flat = flat
        self.learning_rate = config.learning_rate or 0.0  # a fitted configuration has one
        self._stream = seeding.generator(seed, "act")
        self._recurrent_state: RecurrentState | None = None  # of a recurrent agent
        self._max_grad_norm = config.max_grad_norm
        self.adam_eps = adam_eps
        self._adam: FlatAdam | None = None
        # Of learners together: a gradient, and over how many rows it is a mean, become everyone's parameters.
        self.joint_step: Callable[[np.ndarray, int], np.ndarray] | None = None
        # Likewise, at most once before each step: a few numbers become everyone's, added up.
        self.joint_sum: Callable[[np.ndarray], np.ndarray] | None = None

    def begin(self, num_envs: int, stream: np.random.Generator, *, actor: int = 0, num_actors: int = 1) -> None:
        """All later exploration draws from `stream`, and nothing is remembered."""
        self._stream = stream
        if self._recurrent_state is not None:
            self._recurrent_state.begin(num_envs)

    @property
    def num_trainable(self) -> int:
        """How many numbers a gradient has."""
        return int(self.flat.gradient.numel())

    def acting_state(self) -> Tree:
        """Where the exploration's random numbers stand, and what a recurrent agent remembers."""
        state: Tree = {"stream": self._stream.bit_generator.state}
        return state if self._recurrent_state is None else state | {"hidden": self._recurrent_state.state.copy()}

    def restore_acting(self, state: Tree) -> None:
        """Go on from there."""
        self._stream.bit_generator.state = state["stream"]
        if self._recurrent_state is not None:
            self._recurrent_state.keep(np.array(state["hidden"]))

    def load(self, weights: Weights) -> None:
        """Adopt weights with their counters; the layout must be this agent's."""
        self.flat.load(weights, f"this {type(self).__name__}")
        self.version, self.updates, self.env_steps = weights.version, weights.updates, weights.env_steps

    def weights(self) -> Weights:
        """The weights as they are now, sharing memory."""
        return self.flat.weights(self.version, self.updates, self.env_steps)

    def retune(self, values: Mapping[str, Any]) -> None:
        """Learn with other hyperparameters from the next update on; ConfigError, and no change, if one does not fit."""
        changes = validate_changes(self.config, values)
        self.config = validate_config(type(self.config), self.config.model_dump() | changes, "agent.")
        if "learning_rate" in changes:
            self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        """Step as far as the configuration says."""
        self.learning_rate = float(self.config.learning_rate or 0.0)

    def apply(self, gradient: np.ndarray) -> None:
        """One optimizer step with a flat gradient, clipped like the agent's own."""
        if gradient.shape != tuple(self.flat.gradient.shape):
            raise ConfigError(f"the gradient has shape {gradient.shape}, not {tuple(self.flat.gradient.shape)}")
        self.flat.gradient.copy_(torch.from_numpy(np.array(gradient, np.float32)))
        self._step()

    def _step(self, rows: int = 1) -> float:
        """Clip and step along the flat gradient, a mean over `rows`; returns its length before clipping."""
        if self.joint_step is None:
            norm = self._optimizer().step(self.learning_rate, self.updates)
        else:
            gradient = self.flat.gradient.cpu().numpy()
            norm = float(np.linalg.norm(gradient))
            self.flat.parameters.copy_(torch.from_numpy(self.joint_step(gradient, rows)))
        self.updates += 1
        return norm

    def _optimizer(self) -> FlatAdam:
        if self._adam is None:
            self._adam = FlatAdam(self.flat, eps=self.adam_eps, max_grad_norm=self._max_grad_norm)
        return self._adam

    def _counters(self) -> Tree:
        """The part of `state` that every torch agent has."""
        return {
            "seed": self.seed,
            "version": self.version,
            "updates": self.updates,
            "env_steps": self.env_steps,
            "learning_rate": self.learning_rate,
            "adam": self._adam.state() if self._adam else {},
        }

    def _restore_counters(self, state: Tree) -> None:
        self.seed, self.version = int(state["seed"]), int(state["version"])
        self.updates, self.env_steps = int(state["updates"]), int(state["env_steps"])
        self.learning_rate = float(state["learning_rate"])
        self._adam = None
        if state["adam"]:
            self._optimizer().restore(state["adam"])

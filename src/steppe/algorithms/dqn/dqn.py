"""Deep Q-learning (Mnih et al. 2015) on flat batches from replay: double, dueling, n-step, importance weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numba
import numpy as np

from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.nn.q_network import QFunction, build_q_network
from steppe.algorithms.nn.torsos import build_seeded
from steppe.algorithms.shared.base import TorchAgent
from steppe.algorithms.shared.target_network import TargetNetwork
from steppe.algorithms.shared.td_learning import epsilon_greedy
from steppe.core.contracts.algorithm import Learned, Progress, Tree
from steppe.core.contracts.errors import NotFinite
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import EnvSpec

_MIN_PRIORITY = 1e-6  # so that no transition becomes unreachable


class DQN(TorchAgent):
    """Q-learning with a target network and epsilon-greedy exploration, for discrete actions."""

    def __init__(self, config: DQNConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        config.require(spec, "dqn")
        self.config = config = config.resolve_defaults(spec, 1, None)[0]
        self.num_actions = spec.action.sizes[0]
        self._spec = spec
        self.network = build_seeded(seed, lambda: build_q_network(config, spec))
        super().__init__(FlatModule(self.network, device), config, seed, adam_eps=1e-8)
        self._online = QFunction(self.flat)
        self._target = TargetNetwork(self.flat, config.target_every)

    @property
    def epsilon(self) -> float:
        """Probability of a random action."""
        return float(self.network.epsilon)

    def act(self, obs: np.ndarray, starts: np.ndarray, *, explore: bool = True) -> Mapping[str, np.ndarray]:
        """Return the greedy action or, with probability epsilon, a random one; the same number of draws either way."""
        action: np.ndarray = self._online(obs).argmax(axis=1)
        if explore:
            action = epsilon_greedy(action, self.num_actions, self.epsilon, self._stream)
        return {"action": action}

    def retune(self, values: Mapping[str, Any]) -> None:
        super().retune(values)
        self._target.every_steps = self.config.target_every

    def observe(self, segment: Segment, progress: Progress) -> None:
        """Update running statistics and epsilon, and the target network every `target_every` environment steps."""
        config, network = self.config, self.network
        self.env_steps = progress.env_steps
        if network.normalizer is not None:
            network.normalizer.update_from_rows(segment["obs"][:-1][segment["valid"]])
        if network.reward_normalizer is not None:
            network.reward_normalizer.observe(segment)
        share = min(1.0, progress.env_steps / config.exploration_steps(self._spec, progress.total_steps))
        network.epsilon.fill_(config.epsilon_start + share * (config.epsilon_end - config.epsilon_start))
        self._target.follow(progress.env_steps)

    def learn(self, batch: Batch) -> Learned:
        """Take one update with one sampled batch."""
        loss, mean_value, mean_error, errors = self._backward(batch)
        norm = self.optimizer.step(self.learning_rate, self.updates, len(batch["reward"]))
        self.updates += 1
        stats = {
            "loss": loss,
            "q_mean": mean_value,
            "td_error": mean_error,
            "grad_norm": norm,
            "epsilon": self.epsilon,
            "learning_rate": self.learning_rate,
        }
        return Learned(1, stats, priorities=errors + np.float32(_MIN_PRIORITY))

    def gradients(self, batch: Batch) -> np.ndarray:
        """Return the unclipped gradient of the loss on one sampled batch."""
        self._backward(batch)
        gradient: np.ndarray = self.flat.gradient.cpu().numpy().copy()
        return gradient

    def state(self) -> Tree:
        normalizer = self.network.reward_normalizer
        return self._counters() | {
            **self._target.state(),
            "running_returns": normalizer.running_state() if normalizer is not None else {},
        }

    def restore(self, state: Tree) -> None:
        self._restore_counters(state)
        self._target.restore(state, "this DQN")
        if self.network.reward_normalizer is not None:
            self.network.reward_normalizer.restore_running(state["running_returns"])

    def _backward(self, batch: Batch) -> tuple[float, float, float, np.ndarray]:
        """Fill the flat gradient; return (loss, mean Q of the taken actions, mean |TD error|, all |TD errors| [N])."""
        reward = batch["reward"]
        if self.network.reward_normalizer is not None:
            reward = self.network.reward_normalizer.normalize(reward)
        judged = self._judge(batch["next_obs"])
        chooser = self._online(batch["next_obs"]).copy() if self.config.double else judged
        loss, mean_value, mean_error, gradient, errors = _huber_loss(
            self._online.trace(batch["obs"]),
            chooser,
            judged,
            batch["action"],
            reward,
            batch["discount"],
            batch["terminated"],
            np.ones(len(reward), np.float32) if batch.weights is None else batch.weights,
        )
        if not math.isfinite(loss):
            raise NotFinite(f"loss is {loss} at update {self.updates}: lower learning_rate or check the rewards")
        self._online.backward(gradient)
        return loss, mean_value, mean_error, errors

    @cached_property
    def _judge(self) -> QFunction:
        return QFunction(self._target.flat)


@numba.njit(cache=True, nogil=True)
def _huber_loss(
    values: np.ndarray,
    selection_values: np.ndarray,
    target_values: np.ndarray,
    action: np.ndarray,
    reward: np.ndarray,
    discount: np.ndarray,
    terminated: np.ndarray,
    weights: np.ndarray,
) -> tuple[float, float, float, np.ndarray, np.ndarray]:
    """Compute the mean weighted Huber loss (threshold 1) of Q(s, a) − [r + γⁿ Q'(s', argmax Q)].

    Returns (loss, mean Q of the taken actions, mean |TD error|, d(loss)/d(values), |TD errors| [N]).
    """
    count, num_actions = values.shape
    gradient = np.zeros((count, num_actions), np.float32)
    errors = np.empty(count, np.float32)
    loss, mean_value, mean_error = 0.0, 0.0, 0.0
    for i in range(count):
        target = np.float64(reward[i])
        if not terminated[i]:
            best = 0
            for j in range(1, num_actions):
                if selection_values[i, j] > selection_values[i, best]:
                    best = j
            target += np.float64(discount[i]) * np.float64(target_values[i, best])
        value = np.float64(values[i, action[i]])
        error = value - target
        size = abs(error)
        weight = np.float64(weights[i]) / count
        loss += weight * (0.5 * error * error if size <= 1.0 else size - 0.5)
        gradient[i, action[i]] = weight * min(max(error, -1.0), 1.0)
        errors[i] = size
        mean_value += value / count
        mean_error += size / count
    return loss, mean_value, mean_error, gradient, errors

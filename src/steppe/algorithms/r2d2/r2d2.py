"""Recurrent Q-learning (R2D2, Kapturowski et al. 2019) on sequences with axes [T, N, …].

Stored recurrent state, burn-in, n-step double Q targets with value rescaling, a priority per sequence, and Ape-X
epsilons over the environments of all actors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.nn.mlp_kernels import HeadSpec
from steppe.algorithms.nn.rnn.cell import UnrollResult
from steppe.algorithms.nn.rnn.network import RecurrentNetwork
from steppe.algorithms.nn.torsos import build_seeded
from steppe.algorithms.r2d2.config import R2D2Config
from steppe.algorithms.shared.base import TorchAgent
from steppe.algorithms.shared.target_network import TargetNetwork
from steppe.algorithms.shared.td_learning import (
    RecurrentState,
    TDLoss,
    apex_epsilons,
    epsilon_greedy,
    first_learned_step,
    td_loss,
)
from steppe.core.contracts.algorithm import Learned, Progress, Tree
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import EnvSpec
from steppe.core.priorities import sequence_priority


class R2D2(TorchAgent):
    """Recurrent Q-learning for discrete actions."""

    def __init__(self, config: R2D2Config, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        config.require(spec, "r2d2")
        self.config = config = config.resolve_defaults(spec, 1, None)[0]
        self.num_actions = spec.action.sizes[0]
        self.network = build_seeded(seed, lambda: RecurrentQNetwork(config, spec))
        super().__init__(FlatModule(self.network, device), config, seed, adam_eps=1e-5)
        self._recurrent_state = self._hidden_state = RecurrentState((self.network.body.num_state,))
        self._target = TargetNetwork(self.flat, config.target_every)
        # Epsilons [B], one for each environment that this agent acts in.
        self.epsilon = apex_epsilons(config.epsilon_base, config.epsilon_power, 1, 0, 1)

    def begin(self, num_envs: int, stream: np.random.Generator, *, actor: int = 0, num_actors: int = 1) -> None:
        """Take this actor's share of the Ape-X epsilons."""
        super().begin(num_envs, stream, actor=actor, num_actors=num_actors)
        self.epsilon = apex_epsilons(self.config.epsilon_base, self.config.epsilon_power, num_envs, actor, num_actors)

    def act(self, obs: np.ndarray, starts: np.ndarray, *, explore: bool = True) -> Mapping[str, np.ndarray]:
        """Return epsilon-greedy actions, the hidden state before each step, and the action values."""
        hidden = self._hidden_state.reset_where(starts)
        values, unrolled = self.network.values(obs[None], hidden)
        self._hidden_state.keep(unrolled.states(-1))
        action: np.ndarray = values[0].argmax(axis=1)
        if explore:
            action = epsilon_greedy(action, self.num_actions, self._shares(len(obs)), self._stream)
        return {"action": action, "hidden": hidden, "q_val": values[0]}

    def retune(self, values: Mapping[str, Any]) -> None:
        super().retune(values)
        self._target.every_steps = self.config.target_every

    def observe(self, segment: Segment, progress: Progress) -> None:
        """Update running statistics, and the target network every `target_every` environment steps."""
        self.env_steps = progress.env_steps
        normalizer = self.network.body.normalizer
        if normalizer is not None:
            normalizer.update_from_rows(segment["obs"][:-1][segment["valid"]])
        self._target.follow(progress.env_steps)

    def learn(self, batch: Batch) -> Learned:
        """Take one update with one sampled batch."""
        found = self._backward(batch)
        rows = int(np.count_nonzero(batch["learn"]))
        norm = self.optimizer.step(self.learning_rate, self.updates, rows)
        self.updates += 1
        stats = {
            "loss": found.loss,
            "q_mean": found.mean_value,
            "td_error": found.mean_error,
            "grad_norm": norm,
            "learning_rate": self.learning_rate,
        }
        return Learned(1, stats, priorities=sequence_priority(found.errors, batch["learn"]))

    def gradients(self, batch: Batch) -> np.ndarray:
        """Return the unclipped gradient of the loss on one sampled batch."""
        self._backward(batch)
        gradient: np.ndarray = self.flat.gradient.cpu().numpy().copy()
        return gradient

    def state(self) -> Tree:
        return self._counters() | self._target.state()

    def restore(self, state: Tree) -> None:
        self._restore_counters(state)
        self._target.restore(state, "this R2D2")

    def _backward(self, batch: Batch) -> TDLoss:
        """Fill the flat gradient. Both networks unroll the stored state over the burn-in, which gets no gradient."""
        config, older = self.config, self._target.flat.module
        assert isinstance(older, RecurrentQNetwork)
        obs, hidden = batch["obs"], batch["hidden"]
        judged, _ = older.values(obs, hidden)
        values = self.network.trace(obs, hidden, first_learned_step(batch["learn"]))
        found = td_loss(values, judged, batch, double=config.double, value_rescaling=config.value_rescaling)
        found.require_finite(self.updates)
        self.flat.gradient.zero_()
        self.network.backward(found.gradient)
        return found

    def _shares(self, width: int) -> np.ndarray:
        """Return the epsilons; another batch width than that of `begin` gets the first environment's epsilon."""
        return self.epsilon if len(self.epsilon) == width else self.epsilon[:1]


class RecurrentQNetwork(nn.Module):
    """Action values [T, N, A] of a recurrent network; dueling: Q = V + A − mean A (Wang et al. 2016)."""

    def __init__(self, config: R2D2Config, spec: EnvSpec) -> None:
        super().__init__()
        self.dueling, self.num_actions = config.dueling, spec.action.sizes[0]
        self.body = RecurrentNetwork(
            config, spec, [HeadSpec(self.num_actions), *[HeadSpec(1)] * config.dueling], "relu"
        )

    def values(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, UnrollResult]:
        """Return action values without gradients, and the recurrent state after each row."""
        unrolled = self.body.unroll(obs, state)
        return self._joined(unrolled.outputs), unrolled

    def trace(self, obs: np.ndarray, state: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return action values for a later `backward`; gradients stop at rows where `stop` [T, N] is set."""
        return self._joined(self.body.trace(obs, state, None, stop).outputs)

    def backward(self, gradient: np.ndarray) -> None:
        """Fill the gradients, which must be zero, from d(loss)/d(values)."""
        if self.dueling:
            total = gradient.sum(axis=2, keepdims=True)
            gradient = np.concatenate([gradient - total / self.num_actions, total], axis=2)
        self.body.backward(gradient)

    def _joined(self, outputs: np.ndarray) -> np.ndarray:
        if not self.dueling:
            return outputs
        advantage, value = outputs[..., :-1], outputs[..., -1:]
        joined: np.ndarray = value + advantage - advantage.mean(axis=2, keepdims=True)
        return joined

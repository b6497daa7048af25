"""Base class of agents that learn from fresh rollouts [T, B, …]: acting, running statistics, advantages.

The losses are in the algorithms' own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from steppe.algorithms.nn.distributions import make_distribution
from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.nn.forward_backward import RolloutTargets, build_network, make_pass
from steppe.algorithms.nn.normalizers import RunningMeanStd
from steppe.algorithms.nn.torsos import build_seeded
from steppe.algorithms.shared.actor_critic_config import ActorCriticConfig
from steppe.algorithms.shared.base import TorchAgent
from steppe.algorithms.shared.returns import gae
from steppe.core.contracts.algorithm import Progress, Tree
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch, Segment
from steppe.core.contracts.specs import EnvSpec


class OnPolicyAgent(TorchAgent):
    """An actor-critic for discrete, multi-discrete and box actions; optionally recurrent."""

    config: ActorCriticConfig

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, seed: int, device: str) -> None:
        """`config` has its defaults resolved for the environment."""
        self.config, self._spec = config, spec
        self.choices = make_distribution(spec.action)
        self.network = build_seeded(seed, lambda: build_network(config, spec, self.choices.width))
        super().__init__(FlatModule(self.network, device), config, seed, adam_eps=1e-5)
        self._pass = make_pass(self.network)
        self._recurrent_state = self._pass.recurrent_state
        self._seen = RunningMeanStd(spec.obs.shape)  # observation statistics since the last update

    def act(self, obs: np.ndarray, starts: np.ndarray, *, explore: bool = True) -> Mapping[str, np.ndarray]:
        """Return actions with their logp and the values of the observations; `explore=False` takes the mode."""
        (outputs, value), noted = self._pass.act(obs, starts)
        action, logp = self.choices.sample(outputs, self._stream if explore else None)
        return {"action": action, "logp": logp, "value": value, **noted}

    def observe(self, segment: Segment, progress: Progress) -> None:
        """Update running statistics and the learning rate.

        Observation statistics are only collected here. They are merged into the weights after the next update, so that
        the update normalizes each observation as the actor did, and its first probability ratio is 1.
        """
        self.env_steps = progress.env_steps
        if self.network.normalizer is not None:
            self._seen.update_from_rows(segment["obs"][:-1][segment["valid"]])
        if self.network.reward_normalizer is not None:
            self.network.reward_normalizer.observe(segment)
        if self.config.anneal:
            if progress.total_steps is None:
                raise ConfigError("anneal=true needs a run with a number of steps: give --steps, or set anneal=false")
            self.learning_rate = (self.config.learning_rate or 0.0) * (1.0 - progress.fraction)

    def retune(self, values: Mapping[str, Any]) -> None:
        if values.get("bounds_coef"):
            self.config.model_copy(update={"bounds_coef": values["bounds_coef"]}).require(self._spec, "this algorithm")
        super().retune(values)
        if self.network.reward_normalizer is not None:
            self.network.reward_normalizer.gamma = self.config.gamma

    def _set_learning_rate(self) -> None:
        if not self.config.anneal:  # when annealing, the next `observe` sets it from the run's progress
            super()._set_learning_rate()

    def apply(self, gradient: np.ndarray) -> None:
        super().apply(gradient)
        self._apply_obs_statistics()

    def state(self) -> Tree:
        normalizer = self.network.reward_normalizer
        return self._counters() | {
            "seen": self._seen.statistics(),
            "running_returns": normalizer.running_state() if normalizer is not None else {},
        }

    def restore(self, state: Tree) -> None:
        self._restore_counters(state)
        self._seen.restore_statistics(state["seen"])
        if self.network.reward_normalizer is not None:
            self.network.reward_normalizer.restore_running(state["running_returns"])

    def _prepare(self, batch: Batch) -> RolloutTargets:
        """Compute advantages and returns; the values after the last rows come from the current network."""
        value, rows = batch["value"].ravel(), np.flatnonzero(batch["valid"])
        reward = batch["reward"]
        if self.network.reward_normalizer is not None:
            reward = self.network.reward_normalizer.normalize(reward)
        last_value, final_value = self._pass.bootstrap(batch)
        ends = (batch["terminated"], batch["truncated"], batch["valid"], final_value, last_value)
        advantage = gae(reward, batch["value"], *ends, self.config.gamma, self.config.gae_lambda).ravel()
        returns = advantage + value
        spread = max(float(returns[rows].var()), 1e-8) if len(rows) else 1.0
        return RolloutTargets(
            batch=batch,
            rows=rows,
            action=batch["action"].reshape(len(value), *batch["action"].shape[2:]),
            logp=batch["logp"].ravel(),
            advantage=advantage,
            returns=returns,
            explained_variance=1.0 - float(advantage[rows].var()) / spread if len(rows) else 0.0,
        )

    def _apply_obs_statistics(self) -> None:
        if self.network.normalizer is not None:
            self.network.normalizer.take(self._seen)

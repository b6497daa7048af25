"""Q-networks of DQN: action values [N, actions], NumPy in and out.

Vectors on the CPU go through compiled kernels; everything else, and every other device, goes through torch and its
autograd.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.nn.flat_module import FlatModule, as_tensor
from steppe.algorithms.nn.mlp_kernels import HeadSpec, ParallelMLPs
from steppe.algorithms.nn.normalizers import ObsNormalizer, RewardNormalizer
from steppe.algorithms.nn.torsos import DuelingHead, build_torso
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec


def build_q_network(config: DQNConfig, spec: EnvSpec) -> QNetwork:
    """Build a compiled MLP for vector observations without dueling; otherwise a torso with a linear or dueling head."""
    if config.normalize_obs and spec.is_image:
        raise ConfigError("normalize_obs is for vector observations; images are scaled to [0, 1] already")
    plain = config.network in ("auto", "mlp") and not spec.is_image and bool(config.hidden) and not config.dueling
    return MLPQNetwork(config, spec) if plain else TorsoQNetwork(config, spec)


class QNetwork(nn.Module):
    """Base of both kinds; `epsilon` is a buffer, so that actors receive it with the weights."""

    epsilon: torch.Tensor

    def __init__(self, config: DQNConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.normalizer = ObsNormalizer(spec.obs.shape) if config.normalize_obs else None
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_reward else None
        self.register_buffer("epsilon", torch.tensor(config.epsilon_start, dtype=torch.float64))


class QFunction:
    """A flat Q-network in use. The next call reuses the arrays that it returned."""

    def __init__(self, flat: FlatModule) -> None:
        assert isinstance(flat.module, QNetwork)
        self.flat, self.network = flat, flat.module
        self._normalizer = flat.module.normalizer
        tower = flat.module.tower if isinstance(flat.module, MLPQNetwork) else None
        self._tower = tower if tower is not None and tower.bound else None  # bound on the CPU only
        self._traced: torch.Tensor | None = None

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Return action values [N, actions], without support for `backward`."""
        if self._tower is not None:
            return self._tower.run(self._rows(obs))
        with torch.no_grad():
            values: np.ndarray = self.network(as_tensor(obs, self.flat.device)).cpu().numpy()
        return values

    def trace(self, obs: np.ndarray) -> np.ndarray:
        """Return action values for a later `backward`; `obs` must not change until then."""
        if self._tower is not None:
            return self._tower.trace(self._rows(obs))
        self._traced = self.network(as_tensor(obs, self.flat.device))
        values: np.ndarray = self._traced.detach().cpu().numpy()
        return values

    def backward(self, gradient: np.ndarray) -> None:
        """Write the flat gradient from d(loss)/d(values) of the last call, which must have been `trace`."""
        if self._tower is not None:
            self._tower.backward(gradient)
            return
        traced, self._traced = self._traced, None
        assert traced is not None, "trace comes before backward"
        self.flat.gradient.zero_()
        torch.autograd.backward(traced, as_tensor(gradient, self.flat.device))

    def _rows(self, obs: np.ndarray) -> np.ndarray:
        """Return observations as the layers need them: contiguous, normalized if configured."""
        return np.ascontiguousarray(obs) if self._normalizer is None else self._normalizer.normalize(obs)


class MLPQNetwork(QNetwork):
    """An MLP with ReLU from a vector to a value per action."""

    def __init__(self, config: DQNConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        heads = {"values": HeadSpec(spec.action.sizes[0])}
        self.tower = ParallelMLPs(spec.obs.shape[0], config.hidden or (), heads, "relu")

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Action values [N, actions]."""
        values: torch.Tensor = self.tower(obs if self.normalizer is None else self.normalizer(obs))
        return values


class TorsoQNetwork(QNetwork):
    """Any torso with a linear or a dueling head."""

    def __init__(self, config: DQNConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.torso, features = build_torso(config.network, spec, config.hidden or (), "relu")
        num_actions = spec.action.sizes[0]
        self.head = DuelingHead(features, num_actions) if config.dueling else nn.Linear(features, num_actions)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Action values [N, actions]."""
        values: torch.Tensor = self.head(self.torso(obs if self.normalizer is None else self.normalizer(obs)))
        return values

"""Action values [N, actions], arrays in and arrays out: what DQN's network is. Vectors on the CPU go compiled ways;
everything else, and every other device, is torch's, with its autograd for the way back."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from steppe.algorithms.nn.flat_module import FlatModule, as_tensor
from steppe.algorithms.nn.mlp_kernels import HeadSpec, ParallelMLPs
from steppe.algorithms.nn.normalizers import ObsNormalizer, RewardNormalizer
from steppe.algorithms.nn.torsos import DuelingHead, build_torso
from steppe.core.algorithms import DQNConfig
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec


def build_q_network(config: DQNConfig, spec: EnvSpec) -> QNetwork:
    """Plain layers where observations are vectors; any torso, or separate value and advantage streams, elsewhere."""
    if config.normalize_obs and spec.is_image:
        raise ConfigError("normalize_obs is for vector observations; images are scaled to [0, 1] already")
    plain = config.network in ("auto", "mlp") and not spec.is_image and bool(config.hidden) and not config.dueling
    return MLPQNetwork(config, spec) if plain else TorsoQNetwork(config, spec)


class QNetwork(nn.Module):
    """What both kinds have; `epsilon` is a buffer, so that actors adopt it with the weights."""

    epsilon: torch.Tensor

    def __init__(self, config: DQNConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.normalizer = ObsNormalizer(spec.obs.shape) if config.normalize_obs else None
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_reward else None
        self.register_buffer("epsilon", torch.tensor(config.epsilon_start, dtype=torch.float64))


class QFunction:
    """A flat Q network in use. The arrays that it returns are reused by its next call."""

    def __init__(self, flat: FlatModule) -> None:
        assert isinstance(flat.module, QNetwork)
        self.flat, self.network = flat, flat.module
        self._normalizer = flat.module.normalizer
        tower = flat.module.tower if isinstance(flat.module, MLPQNetwork) else None
        self._tower = tower if tower is not None and tower.bound else None  # bound on the CPU only
        self._traced: torch.Tensor | None = None

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        """Action values [N, actions], for reading only."""
        if self._tower is not None:
            return self._tower.run(self._rows(obs))
        with torch.no_grad():
            values: np.ndarray = self.network(as_tensor(obs, self.flat.device)).cpu().numpy()
        return values

    def trace(self, obs: np.ndarray) -> np.ndarray:
        """Action values that `backward` may follow, with `obs` left as they are until then."""
        if self._tower is not None:
            return self._tower.trace(self._rows(obs))
        self._traced = self.network(as_tensor(obs, self.flat.device))
        values: np.ndarray = self._traced.detach().cpu().numpy()
        return values

    def backward(self, gradient: np.ndarray) -> None:
        """Write the flat gradient from d(loss)/d(values) of the last call, which was `trace`."""
        if self._tower is not None:
            self._tower.backward(gradient)
            return
        traced, self._traced = self._traced, None
        assert traced is not None, "trace comes before backward"
        self.flat.gradient.zero_()
        torch.autograd.backward(traced, as_tensor(gradient, self.flat.device))

    def _rows(self, obs: np.ndarray) -> np.ndarray:
        """Observations as the layers read them."""
        return np.ascontiguousarray(obs) if self._normalizer is None else self._normalizer.normalize(obs)


class MLPQNetwork(QNetwork):
    """Rectified layers from a vector to a value per action."""

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

"""Action values [N, actions]: what DQN's network is, for vectors in closed form, for anything else by autograd."""

from __future__ import annotations

import torch
from torch import nn

from steppe.agents.networks import DuelingHead, build_torso
from steppe.agents.normalizers import ObsNormalizer, RewardNormalizer
from steppe.agents.towers import Towers
from steppe.core.algorithms import DQNConfig
from steppe.core.errors import ConfigError
from steppe.core.specs import EnvSpec


def build_q_network(config: DQNConfig, spec: EnvSpec) -> TowerQ | TorsoQ:
    """A tower where observations are vectors; any torso, or separate value and advantage streams, by autograd."""
    if config.normalize_obs and spec.is_image:
        raise ConfigError("normalize_obs is for vector observations; images are scaled to [0, 1] already")
    plain = config.network in ("auto", "mlp") and not spec.is_image and bool(config.hidden) and not config.dueling
    return TowerQ(config, spec) if plain else TorsoQ(config, spec)


class _QNetwork(nn.Module):
    """The parts that both kinds have; `epsilon` is a buffer, so that actors adopt it with the weights."""

    epsilon: torch.Tensor

    def __init__(self, config: DQNConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.normalizer = ObsNormalizer(spec.obs.shape) if config.normalize_obs else None
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_reward else None
        self.register_buffer("epsilon", torch.tensor(config.epsilon_start, dtype=torch.float64))


class TowerQ(_QNetwork):
    """One tower and a linear head. No graph: `backward` belongs to the last call."""

    def __init__(self, config: DQNConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        hidden = config.hidden or ()
        self.tower = Towers(1, spec.obs.shape[0], hidden, "relu")
        self.head = nn.Linear(hidden[-1], spec.action.sizes[0])

    @torch.no_grad()
    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Action values [N, actions]."""
        features = self.tower(obs if self.normalizer is None else self.normalizer(obs))
        return torch.addmm(self.head.bias, features[0], self.head.weight.t())

    @torch.no_grad()
    def backward(self, gradient: torch.Tensor) -> None:
        """Fill the gradients from d(loss)/d(values) of the last call."""
        torch.mm(gradient.t(), self.tower.features[0], out=self.head.weight.grad)
        torch.sum(gradient, 0, out=self.head.bias.grad)
        self.tower.backward(torch.mm(gradient, self.head.weight).unsqueeze(0))


class TorsoQ(_QNetwork):
    """Any torso with a linear or a dueling head; torch records the way back."""

    def __init__(self, config: DQNConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.torso, features = build_torso(config.network, spec, config.hidden or (), "relu")
        num_actions = spec.action.sizes[0]
        self.head = DuelingHead(features, num_actions) if config.dueling else nn.Linear(features, num_actions)
        self._values: torch.Tensor | None = None

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Action values [N, actions]."""
        values: torch.Tensor = self.head(self.torso(obs if self.normalizer is None else self.normalizer(obs)))
        self._values = values
        return values

    def backward(self, gradient: torch.Tensor) -> None:
        """Fill the gradients, which are zero, from d(loss)/d(values) of the last call."""
        values, self._values = self._values, None
        assert values is not None, "forward comes before backward"
        torch.autograd.backward(values, gradient)

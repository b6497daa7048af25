"""Policies with a value beside them: what PPO's network is, for vectors in closed form, for anything else by autograd."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import nn

from steppe.agents.networks import build_torso, linear
from steppe.agents.normalizers import ObsNormalizer, RewardNormalizer
from steppe.agents.towers import Towers
from steppe.core.algorithms import PPOConfig
from steppe.core.errors import ConfigError
from steppe.core.specs import EnvSpec


class Network(Protocol):
    """(distribution's outputs [N, width], values [N]) and the way back."""

    normalizer: ObsNormalizer | None
    reward_normalizer: RewardNormalizer | None

    def __call__(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(self, d_outputs: torch.Tensor, d_value: torch.Tensor) -> None:
        """Fill the gradients, which are zero, from those by the results of the last call."""


def build_actor_critic(config: PPOConfig, spec: EnvSpec, width: int) -> TwinTowers | CommonTorso:
    """A tower each for policy and value where observations are vectors, a common torso for images and users' networks."""
    if config.normalize_obs and spec.is_image:
        raise ConfigError("normalize_obs is for vector observations; images are scaled to [0, 1] already")
    plain = config.network in ("auto", "mlp") and not spec.is_image and bool(config.hidden)
    return TwinTowers(config, spec, width) if plain else CommonTorso(config, spec, width)


class Head(NamedTuple):
    """A linear layer's parameters."""

    weight: torch.Tensor
    bias: torch.Tensor


class _ActorCritic(nn.Module):
    """The parts that both kinds have."""

    def __init__(self, config: PPOConfig, spec: EnvSpec, width: int, features: int) -> None:
        super().__init__()
        is_box = spec.action.kind == "box"
        self.num_outputs = width // 2 if is_box else width
        self.normalizer = ObsNormalizer(spec.obs.shape) if config.normalize_obs else None
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_reward else None
        self.policy = linear(features, self.num_outputs, gain=0.01)
        self.value = linear(features, 1, gain=1.0)
        self.log_std = nn.Parameter(torch.zeros(self.num_outputs)) if is_box else None

    def _with_deviation(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand_as(outputs)], dim=1)


class TwinTowers(_ActorCritic):
    """Policy and value on towers of their own. No graph: `backward` belongs to the last call."""

    def __init__(self, config: PPOConfig, spec: EnvSpec, width: int) -> None:
        hidden = config.hidden or ()
        super().__init__(config, spec, width, hidden[-1])
        self.towers = Towers(2, spec.obs.shape[0], hidden, "tanh")

    @functools.cached_property
    def _heads(self) -> tuple[Head, Head]:
        """The two heads' parameters, found once: a module's attributes are slow to look up."""
        return Head(self.policy.weight, self.policy.bias), Head(self.value.weight, self.value.bias)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(distribution's outputs [N, width], values [N])."""
        with torch.no_grad():
            features = self.towers(obs if self.normalizer is None else self.normalizer(obs))
            policy, value = self._heads
            outputs = torch.addmm(policy.bias, features[0], policy.weight.t())
            values = torch.addmv(value.bias, features[1], value.weight[0])
            return self._with_deviation(outputs), values

    def backward(self, d_outputs: torch.Tensor, d_value: torch.Tensor) -> None:
        policy, value = self._heads
        features = self.towers.features
        with torch.no_grad():
            if self.log_std is not None:
                torch.sum(d_outputs[:, self.num_outputs :], 0, out=self.log_std.grad)
                d_outputs = d_outputs[:, : self.num_outputs]
            torch.mm(d_outputs.t(), features[0], out=policy.weight.grad)
            torch.sum(d_outputs, 0, out=policy.bias.grad)
            torch.mv(features[1].t(), d_value, out=_of(value.weight)[0])
            torch.sum(d_value, 0, keepdim=True, out=value.bias.grad)
            gradient = self.towers.gradient
            torch.mm(d_outputs, policy.weight, out=gradient[0])
            torch.outer(d_value, value.weight[0], out=gradient[1])
            self.towers.backward(gradient)


class CommonTorso(_ActorCritic):
    """Policy and value as two heads of one torso, which may be anything; torch records the way back."""

    def __init__(self, config: PPOConfig, spec: EnvSpec, width: int) -> None:
        torso, features = build_torso(config.network, spec, config.hidden or (), "tanh")
        super().__init__(config, spec, width, features)
        self.torso = torso
        self._results: list[torch.Tensor] = []

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(distribution's outputs [N, width], values [N])."""
        features = self.torso(obs if self.normalizer is None else self.normalizer(obs))
        outputs, value = self._with_deviation(self.policy(features)), self.value(features).squeeze(1)
        self._results = [outputs, value]
        return outputs, value

    def backward(self, d_outputs: torch.Tensor, d_value: torch.Tensor) -> None:
        results, self._results = self._results, []
        torch.autograd.backward(results, [d_outputs, d_value])


def _of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "a flat module's parameters have gradients"
    return parameter.grad

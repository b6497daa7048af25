"""Actor-critic networks of PPO and A2C, NumPy in and out.

Vectors go through compiled MLPs on the CPU; anything else (images, users' networks, a GPU) goes through torch's graph.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import nn

from steppe.algorithms.nn.flat_module import as_tensor
from steppe.algorithms.nn.mlp_kernels import HeadSpec, ParallelMLPs
from steppe.algorithms.nn.normalizers import ObsNormalizer, RewardNormalizer
from steppe.algorithms.nn.torsos import build_torso, linear
from steppe.algorithms.shared.actor_critic_config import ActorCriticConfig
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec

PolicyAndValue = tuple[np.ndarray, np.ndarray]  # the distribution's outputs [N, width], values [N]


class ActorCriticNetwork(Protocol):
    """What PPO and A2C need of a network; results may be in memory that the next call reuses."""

    normalizer: ObsNormalizer | None
    reward_normalizer: RewardNormalizer | None

    def run(self, obs: np.ndarray) -> PolicyAndValue:
        """Return results for acting, without support for `backward`."""

    def trace(self, obs: np.ndarray) -> PolicyAndValue:
        """Return the same results, keeping what `backward` needs; `obs` must not change until then."""

    def backward(self, d_outputs: np.ndarray, d_value: np.ndarray) -> None:
        """Fill the gradients, which must be zero, from d(loss)/d(results) of the last `trace`."""


def build_actor_critic(
    config: ActorCriticConfig, spec: EnvSpec, width: int
) -> SeparateActorCritic | SharedTorsoActorCritic:
    """Build separate policy and value MLPs for vector observations, a shared torso for images and users' networks."""
    if config.normalize_obs and spec.is_image:
        raise ConfigError("normalize_obs is for vector observations; images are scaled to [0, 1] already")
    plain = config.network in ("auto", "mlp") and not spec.is_image and bool(config.hidden)
    return SeparateActorCritic(config, spec, width) if plain else SharedTorsoActorCritic(config, spec, width)


class _ActorCritic(nn.Module):
    """The parts that both kinds share, and the forward and backward pass through torch's graph."""

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, width: int) -> None:
        super().__init__()
        is_box = spec.action.kind == "box"
        self.num_outputs = width // 2 if is_box else width
        self.normalizer = ObsNormalizer(spec.obs.shape) if config.normalize_obs else None
        self.reward_normalizer = RewardNormalizer(config.gamma) if config.normalize_reward else None
        self.log_std = nn.Parameter(torch.zeros(self.num_outputs)) if is_box else None
        self._results: list[torch.Tensor] = []

    def run(self, obs: np.ndarray) -> PolicyAndValue:
        with torch.inference_mode():
            outputs, value = self._forward_torch(obs)
        return outputs.cpu().numpy(), value.cpu().numpy()

    def trace(self, obs: np.ndarray) -> PolicyAndValue:
        outputs, value = self._results = self._forward_torch(obs)
        return outputs.detach().cpu().numpy(), value.detach().cpu().numpy()

    def backward(self, d_outputs: np.ndarray, d_value: np.ndarray) -> None:
        results, self._results = self._results, []
        torch.autograd.backward(results, [as_tensor(d, results[0].device) for d in (d_outputs, d_value)])

    def _forward_torch(self, obs: np.ndarray) -> list[torch.Tensor]:
        rows = as_tensor(obs, next(self.parameters()).device)
        outputs, value = self(rows if self.normalizer is None else self.normalizer(rows))
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], dim=1)
        return [outputs, value]


class SeparateActorCritic(_ActorCritic):
    """Policy and value as separate MLPs."""

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, width: int) -> None:
        super().__init__(config, spec, width)
        heads = {"policy": HeadSpec(self.num_outputs, gain=0.01), "value": HeadSpec(1, gain=1.0)}
        self.towers = ParallelMLPs(spec.obs.shape[0], config.hidden or (), heads, "tanh")

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        results: torch.Tensor = self.towers(rows)
        return results[:, :-1], results[:, -1]

    def run(self, obs: np.ndarray) -> PolicyAndValue:
        return (
            split_policy_value(self.towers.run(self._scaled(obs)), self.log_std)
            if self.towers.bound
            else super().run(obs)
        )

    def trace(self, obs: np.ndarray) -> PolicyAndValue:
        return (
            split_policy_value(self.towers.trace(self._scaled(obs)), self.log_std)
            if self.towers.bound
            else super().trace(obs)
        )

    def backward(self, d_outputs: np.ndarray, d_value: np.ndarray) -> None:
        if not self.towers.bound:
            super().backward(d_outputs, d_value)
            return
        self.towers.backward(join_output_gradients(d_outputs, d_value, self.log_std))

    def _scaled(self, obs: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(obs) if self.normalizer is None else self.normalizer.normalize(obs)


class SharedTorsoActorCritic(_ActorCritic):
    """Policy and value as two heads of one torso of any kind."""

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, width: int) -> None:
        super().__init__(config, spec, width)
        self.torso, features = build_torso(config.network, spec, config.hidden or (), "tanh")
        self.policy = linear(features, self.num_outputs, gain=0.01)
        self.value = linear(features, 1, gain=1.0)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.torso(rows)
        return self.policy(features), self.value(features).squeeze(1)


def split_policy_value(results: np.ndarray, log_std: nn.Parameter | None) -> PolicyAndValue:
    """Split concatenated head outputs [N, outputs + 1] into new arrays; every row gets the same `log_std`."""
    size = results.shape[1] - 1
    if log_std is None:
        return results[:, :size].copy(), results[:, size].copy()
    outputs = np.empty((len(results), 2 * size), np.float32)
    outputs[:, :size], outputs[:, size:] = results[:, :size], log_std.detach().cpu().numpy()
    return outputs, results[:, size].copy()


def join_output_gradients(d_outputs: np.ndarray, d_value: np.ndarray, log_std: nn.Parameter | None) -> np.ndarray:
    """Invert `split_policy_value` for gradients: return d(loss)/d(heads) [N, outputs + 1].

    The gradient of `log_std` is written in place.
    """
    if log_std is not None:
        assert log_std.grad is not None, "a flat module's parameters have gradients"
        size = len(log_std)
        log_std.grad.copy_(torch.from_numpy(np.sum(d_outputs[:, size:], axis=0)))
        d_outputs = d_outputs[:, :size]
    return np.concatenate([d_outputs, d_value[:, None]], axis=1)

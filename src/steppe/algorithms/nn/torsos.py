"""Torsos: map observations `[N, …]` of an EnvSpec to features `[N, k]`; algorithms add heads.

A user's network is a function `(spec: EnvSpec) -> torch.nn.Module`, named as `module:function` in the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeVar

import numba
import numpy as np
import torch
from torch import nn

from steppe.core.config import references
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.specs import EnvSpec
from steppe.core.system import seeding

Activation = Literal["tanh", "relu"]
ModuleT = TypeVar("ModuleT", bound=nn.Module)
_MIN_NATURE_CNN_SIDE = 36  # the smallest image that leaves output after strides 4, 2, 1


def build_seeded(seed: int, build: Callable[[], ModuleT]) -> ModuleT:
    """Call a function that draws initial weights from torch's generator; restore that generator afterwards.

    Runs on one thread: orthogonal matrices differ bitwise with the number of threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.integer_seed(seed, "init"))
            return build()
    finally:
        torch.set_num_threads(threads)


def build_torso(network: str, spec: EnvSpec, hidden: tuple[int, ...], activation: Activation) -> tuple[nn.Module, int]:
    """Return the torso that the configuration names, and its number of features."""
    if network == "auto":
        network = "cnn" if spec.is_image else "mlp"
    if network == "mlp":
        torso: nn.Module = MLP(spec, hidden, activation)
    elif network == "cnn":
        torso = CNN(spec, hidden)
    elif references.is_reference(network):
        torso = references.resolve_reference(network)(spec)
    else:
        raise ConfigError(f"network={network!r}: must be auto, mlp, cnn or module:function")
    return torso, _num_features(torso, spec, network)


def linear(num_in: int, num_out: int, *, gain: float | None = None) -> nn.Linear:
    """Return a linear layer with torch's initial weights or, given a gain, orthogonal ones and zero bias."""
    layer = nn.Linear(num_in, num_out)
    if gain is not None:
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Sequential):
    """Fully connected layers. tanh comes with orthogonal initial weights (PPO), relu with torch's own (DQN)."""

    def __init__(self, spec: EnvSpec, hidden: tuple[int, ...], activation: Activation) -> None:
        layers: list[nn.Module] = [ScalePixels(spec.obs.most), nn.Flatten()] if spec.is_image else []
        width = math.prod(spec.obs.shape)
        for size in hidden:
            tanh = activation == "tanh"
            layers += [linear(width, size, gain=math.sqrt(2) if tanh else None), nn.Tanh() if tanh else nn.ReLU()]
            width = size
        super().__init__(*layers)


class CNN(nn.Sequential):
    """The convolutions of Mnih et al. 2015 (two small ones for images under 36 pixels), then fully connected layers."""

    def __init__(self, spec: EnvSpec, hidden: tuple[int, ...]) -> None:
        if not spec.is_image:
            raise ConfigError(f"network='cnn' needs image observations, and {spec.id} has vectors: use network=mlp")
        channels, height, width = spec.obs.shape
        plan = (
            [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
            if min(height, width) >= _MIN_NATURE_CNN_SIDE
            else [(16, 3, 1), (32, 3, 1)]
        )
        layers: list[nn.Module] = [ScalePixels(spec.obs.most)]
        for size, kernel, stride in plan:
            layers += [nn.Conv2d(channels, size, kernel, stride), nn.ReLU(inplace=True)]
            channels, height, width = size, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if min(height, width) < 1:
            raise ConfigError(f"images of {spec.obs.shape} are too small for network='cnn': use network=mlp")
        layers.append(FlattenChannelsLast())
        features = channels * height * width
        for size in hidden:
            layers += [nn.Linear(features, size), nn.ReLU(inplace=True)]
            features = size
        super().__init__(*layers)


class ScalePixels(nn.Module):
    """Scales uint8 pixels to [0, 1]. On the CPU the result is channels-last: convolutions learn 1.7 times as fast."""

    def __init__(self, most: int = 255) -> None:
        super().__init__()
        self.scale = 1.0 / most

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        if obs.device.type != "cpu" or obs.dtype != torch.uint8:
            return obs.to(torch.float32) * self.scale
        count, channels, height, width = obs.shape
        beside = torch.empty((count, height, width, channels))
        rows = beside.numpy().reshape(count, -1, channels)
        _scale_to_channels_last(obs.numpy().reshape(count, channels, -1), rows, np.float32(self.scale))
        return beside.permute(0, 3, 1, 2)


class FlattenChannelsLast(nn.Module):
    """Flattens features pixel by pixel, the memory order of channels-last tensors."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.permute(0, 2, 3, 1).flatten(1)


class DuelingHead(nn.Module):
    """Q = V + A − mean A (Wang et al. 2016)."""

    def __init__(self, features: int, num_actions: int) -> None:
        super().__init__()
        self.value = nn.Linear(features, 1)
        self.advantage = nn.Linear(features, num_actions)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        advantage: torch.Tensor = self.advantage(features)
        value: torch.Tensor = self.value(features)
        return value + advantage - advantage.mean(dim=1, keepdim=True)


@numba.njit(cache=True, nogil=True)
def _scale_to_channels_last(planes: np.ndarray, beside: np.ndarray, scale: np.float32) -> None:
    """`torch.Tensor.contiguous` takes eight times as long for the same."""
    for i in range(len(planes)):
        target = beside[i]
        for channel in range(planes.shape[1]):
            plane = planes[i, channel]
            for pixel in range(len(plane)):
                target[pixel, channel] = np.float32(plane[pixel]) * scale


def _num_features(torso: nn.Module, spec: EnvSpec, network: str) -> int:
    """Find the number of features by a trial with two blank observations, so that users need not declare it."""
    blank = torch.zeros((2, *spec.obs.shape), dtype=getattr(torch, spec.obs.dtype))
    with torch.no_grad():
        features = torso(blank)
    if features.ndim != 2 or len(features) != 2:
        raise ConfigError(
            f"network={network!r} maps {tuple(blank.shape)} to {tuple(features.shape)}, not to [2, features]"
        )
    return int(features.shape[1])

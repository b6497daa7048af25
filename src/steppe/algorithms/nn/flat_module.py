"""A torch module as one vector: parameters are views into one flat tensor, gradients into another.

    bytes   | trainable float32 … (no gap) | non-trainable: normalizer statistics, epsilon, … |
    storage |<------- parameters --------->|                                                  |<- layout.nbytes

So the optimizer step, clipping, publishing and loading are one operation each. Roles call
`torch.set_flush_denormal(True)` first: dead units drive Adam's moments into denormals, which makes its step ten times
slower.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from steppe.algorithms.nn.mlp_kernels import ParallelMLPs
from steppe.algorithms.nn.rnn.cell import RecurrentCell
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.weights import Weights, WeightsLayout


def as_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array on `device`; on the CPU it shares memory if the array is writable and contiguous."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class FlatModule:
    """Moves a module's parameters and buffers into one byte buffer, and keeps them there."""

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.module = module.to(self.device)
        trainable, rest = _split_trainable(module)
        self.layout = WeightsLayout.of(
            (name, tuple(tensor.shape), _dtype(tensor)) for name, tensor in [*trainable.items(), *rest.items()]
        )
        self.storage = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self.device)
        num_trainable = sum(tensor.numel() for tensor in trainable.values())
        self.parameters = self.storage[: 4 * num_trainable].view(torch.float32)
        self.gradient = torch.zeros_like(self.parameters)
        for entry in self.layout.entries:
            tensor = trainable[entry.name] if entry.name in trainable else rest[entry.name]
            view = self.storage[entry.offset : entry.offset + entry.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor.data)
            tensor.data = view
            if entry.name in trainable:
                first = entry.offset // 4
                tensor.grad = self.gradient[first : first + tensor.numel()].view(tensor.shape)
        on_cpu = self.device.type == "cpu"
        host = self.storage if on_cpu else torch.zeros(self.layout.nbytes, dtype=torch.uint8, pin_memory=True)
        self._host: np.ndarray = host.numpy()
        for part in module.modules() if on_cpu else ():
            if isinstance(part, ParallelMLPs | RecurrentCell):
                part.bind(self.parameters.numpy(), self.gradient.numpy())

    def clone(self) -> FlatModule:
        """Return an independent copy with the current values, for a target network."""
        return FlatModule(copy.deepcopy(self.module), str(self.device))

    def copy_from(self, other: FlatModule) -> None:
        self.storage.copy_(other.storage)

    def weights(self, version: int = 0, updates: int = 0, env_steps: int = 0) -> Weights:
        """Return the current weights; on the CPU they share this module's memory, on a GPU the host copy's."""
        if self.device.type != "cpu":
            torch.from_numpy(self._host).copy_(self.storage)
        return Weights(self.layout, self._host, version, updates, env_steps)

    def load(self, weights: Weights, whose: str) -> None:
        """Copy weights in; ConfigError names the differences if their layout is not this module's."""
        weights.require(self.layout, whose)
        self._host[:] = weights.buffer[: self.layout.nbytes]
        if self.device.type != "cpu":
            self.storage.copy_(torch.from_numpy(self._host))


def _split_trainable(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return trainable and other tensors by name; trainable ones must be float32 to share one vector."""
    trainable: dict[str, torch.Tensor] = {}
    rest: dict[str, torch.Tensor] = {}
    for name, tensor in module.named_parameters():
        if tensor.requires_grad and tensor.dtype != torch.float32:
            raise ConfigError(f"the network's parameter {name!r} is {tensor.dtype}: make it float32")
        (trainable if tensor.requires_grad else rest)[name] = tensor
    rest.update(module.named_buffers())
    return trainable, rest


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

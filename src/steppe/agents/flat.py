"""A torch module as one vector: parameters are views into one flat tensor, gradients into another.

    bytes   | trainable float32 … (no gap) | non-trainable: normalizer statistics, epsilon, … |
    storage |<------- parameters --------->|                                                  |<- layout.nbytes

So optimizer, clipping, publishing and loading are each one operation. Roles call `torch.set_flush_denormal(True)` first:
dead units drive Adam's moments into denormals, and its step then takes ten times as long.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from steppe.core.agent import Tree
from steppe.core.errors import ConfigError, NotFinite
from steppe.core.weights import Layout, Weights


def as_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on `device`, sharing memory on the CPU where the array may be written."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class FlatModule:
    """Moves a module's parameters and buffers into one byte buffer, and keeps them there."""

    def __init__(self, module: nn.Module, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.module = module.to(self.device)
        trainable, rest = _tensors(module)
        self.layout = Layout.of(
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

    def twin(self) -> FlatModule:
        """A module of its own with the same values now: a target network."""
        return FlatModule(copy.deepcopy(self.module), str(self.device))

    def copy_from(self, other: FlatModule) -> None:
        self.storage.copy_(other.storage)

    def weights(self, version: int = 0, updates: int = 0, env_steps: int = 0) -> Weights:
        """The weights as they are now; on the CPU they share this module's memory, on a GPU the host copy's."""
        if self.device.type != "cpu":
            torch.from_numpy(self._host).copy_(self.storage)
        return Weights(self.layout, self._host, version, updates, env_steps)

    def load(self, weights: Weights, whose: str) -> None:
        """Copy weights in; ConfigError names the differences when their layout is another."""
        weights.require(self.layout, whose)
        self._host[:] = weights.buffer[: self.layout.nbytes]
        if self.device.type != "cpu":
            self.storage.copy_(torch.from_numpy(self._host))


class FlatAdam:
    """Adam over a flat module: clip, check and step are one vector operation each. Built at the first step.

    `torch.optim.Adam(fused=True)` does the same to the bit (a test compares them), but takes 100 µs more for a step and
    longer to import than torch itself; this is the kernel it calls.
    """

    def __init__(self, flat: FlatModule, *, eps: float, max_grad_norm: float) -> None:
        self.flat = flat
        self.eps = eps
        self.max_grad_norm = max_grad_norm
        zeros = torch.zeros_like(flat.parameters)
        self._moments = {"step": zeros.new_zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def step(self, learning_rate: float, update: int) -> float:
        """One step along the flat gradient; returns its length before clipping. NotFinite names the update."""
        norm = float(torch.linalg.vector_norm(self.flat.gradient))
        if not np.isfinite(norm):
            raise NotFinite(
                f"the gradient's length is {norm} at update {update}: lower learning_rate or check the environment's numbers"
            )
        if norm > self.max_grad_norm:
            self.flat.gradient.mul_(self.max_grad_norm / norm)
        moments = self._moments
        moments["step"].add_(1.0)
        torch._fused_adam_(
            [self.flat.parameters], [self.flat.gradient], [moments["exp_avg"]], [moments["exp_avg_sq"]], [],
            [moments["step"]], lr=learning_rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=self.eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        return norm

    def state(self) -> Tree:
        return {name: tensor.cpu().numpy().copy() for name, tensor in self._moments.items()}

    def restore(self, state: Tree) -> None:
        self._moments = {name: torch.from_numpy(np.array(state[name])).to(self.flat.device) for name in self._moments}


def _tensors(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trainable and other tensors by name; trainable ones must be float32 to lie in one vector."""
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

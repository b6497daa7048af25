"""A torch module as one vector: parameters are views into one flat tensor, gradients into another.

    bytes   | trainable float32 … (no gap) | non-trainable: normalizer statistics, epsilon, … |
    storage |<------- parameters --------->|                                                  |<- layout.nbytes

So the optimizer step, clipping, publishing and loading are one operation each. Roles call
`torch.set_flush_denormal(True)` first: dead units drive Adam's moments into denormals, which makes its step ten times
slower.
"""

from __future__ import annotations

import copy
import math

import numba
import numpy as np
import torch
from torch import nn

from steppe.algorithms.nn.mlp_kernels import ParallelMLPs
from steppe.algorithms.nn.rnn.cell import RecurrentCell
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError, NotFinite
from steppe.core.contracts.weights import Weights, WeightsLayout

_BETA1, _BETA2 = 0.9, 0.999


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


class FlatAdam:
    """Adam over a flat module: checks, clips and steps on one vector. Agents build it at their first step.

    On the CPU it is compiled here; on a GPU it is the kernel behind `torch.optim.Adam(fused=True)`, which takes 100 µs
    more per step itself. A test compares both with `torch.optim.Adam`.
    """

    def __init__(self, flat: FlatModule, *, eps: float, max_grad_norm: float) -> None:
        self.flat = flat
        self.eps = eps
        self.max_grad_norm = max_grad_norm
        self._steps = 0
        self._mean, self._square = torch.zeros_like(flat.parameters), torch.zeros_like(flat.parameters)

    def step(self, learning_rate: float, update: int) -> float:
        """Take one step along the flat gradient; return its norm before clipping. NotFinite names the update."""
        parameters, gradient = self.flat.parameters, self.flat.gradient
        on_cpu = self.flat.device.type == "cpu"
        norm = _l2_norm(gradient.numpy()) if on_cpu else float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            raise NotFinite(
                f"the gradient's length is {norm} at update {update}: lower learning_rate or check the environment's numbers"
            )
        self._steps += 1
        scale = min(1.0, self.max_grad_norm / norm) if norm else 1.0
        if on_cpu:
            vectors = (parameters.numpy(), gradient.numpy(), self._mean.numpy(), self._square.numpy())
            _adam(*vectors, scale, learning_rate, *_bias_corrections(self._steps), self.eps)
        else:
            torch._fused_adam_(
                [parameters], [gradient.mul_(scale)], [self._mean], [self._square], [],
                [gradient.new_tensor(float(self._steps))], lr=learning_rate, beta1=_BETA1, beta2=_BETA2,
                weight_decay=0.0, eps=self.eps, amsgrad=False, maximize=False,
            )  # fmt: skip
        return norm

    def state(self) -> Tree:
        vectors = {"exp_avg": self._mean, "exp_avg_sq": self._square}
        return {"step": self._steps} | {name: vector.cpu().numpy().copy() for name, vector in vectors.items()}

    def restore(self, state: Tree) -> None:
        self._steps = int(state["step"])
        self._mean.copy_(torch.from_numpy(np.array(state["exp_avg"])))
        self._square.copy_(torch.from_numpy(np.array(state["exp_avg_sq"])))


def _bias_corrections(steps: int) -> tuple[float, float]:
    """Return Adam's bias corrections of the mean and of the root of the squares after this many steps."""
    return 1.0 - _BETA1**steps, math.sqrt(1.0 - _BETA2**steps)


@numba.njit(cache=True, nogil=True)
def _l2_norm(vector: np.ndarray) -> float:
    return math.sqrt(np.dot(vector, vector))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _adam(
    parameters: np.ndarray,
    gradient: np.ndarray,
    mean: np.ndarray,
    square: np.ndarray,
    scale: float,
    learning_rate: float,
    correction1: float,
    correction2: float,
    eps: float,
) -> None:
    """Adam (Kingma and Ba 2015, algorithm 1) along `scale · gradient`."""
    keep1, keep2 = np.float32(_BETA1), np.float32(_BETA2)
    take1, take2 = np.float32(1.0 - _BETA1), np.float32(1.0 - _BETA2)
    factor, rate = np.float32(scale), np.float32(learning_rate / correction1)
    widen, least = np.float32(1.0 / correction2), np.float32(eps)
    for i in range(len(parameters)):
        slope = gradient[i] * factor
        mean[i] = keep1 * mean[i] + take1 * slope
        square[i] = keep2 * square[i] + take2 * slope * slope
        parameters[i] -= rate * mean[i] / (np.sqrt(square[i]) * widen + least)


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

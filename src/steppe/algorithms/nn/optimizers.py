"""Optimizers of a flat module: Adam on one vector, and the shared step of several learners that train together."""

from __future__ import annotations

import math
from typing import Protocol

import numba
import numpy as np
import torch

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.core.contracts.algorithm import JointStep, Tree
from steppe.core.contracts.errors import NotFinite

_BETA1, _BETA2 = 0.9, 0.999


class FlatOptimizer(Protocol):
    """Updates a flat module's parameters from its flat gradient."""

    def step(self, learning_rate: float, update: int, rows: int = 1) -> float:
        """Take one step along the gradient, a mean over `rows`; return its norm before clipping.

        NotFinite names the number `update` if the gradient is not finite.
        """


class FlatAdam:
    """Adam over a flat module: checks, clips and steps on one vector. The moments are allocated by the first step.

    On the CPU it is compiled here; on a GPU it is the kernel behind `torch.optim.Adam(fused=True)`, which takes 100 µs
    more per step itself. A test compares both with `torch.optim.Adam`.
    """

    def __init__(self, flat: FlatModule, *, eps: float, max_grad_norm: float) -> None:
        self.flat = flat
        self.eps = eps
        self.max_grad_norm = max_grad_norm
        self._steps = 0
        self._mean = self._square = torch.empty(0)  # agents that only act never allocate them

    def step(self, learning_rate: float, update: int, rows: int = 1) -> float:
        """Take one step along the flat gradient; return its norm before clipping. NotFinite names the update."""
        parameters, gradient = self.flat.parameters, self.flat.gradient
        on_cpu = self.flat.device.type == "cpu"
        norm = _l2_norm(gradient.numpy()) if on_cpu else float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            raise NotFinite(
                f"the gradient's length is {norm} at update {update}: lower learning_rate or check the environment's numbers"
            )
        if not self._steps:
            self._mean, self._square = torch.zeros_like(parameters), torch.zeros_like(parameters)
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
        """Return the number of steps and the moments; empty before the first step."""
        if not self._steps:
            return {}
        vectors = {"exp_avg": self._mean, "exp_avg_sq": self._square}
        return {"step": self._steps} | {name: vector.cpu().numpy().copy() for name, vector in vectors.items()}

    def restore(self, state: Tree) -> None:
        """Restore what `state` returned."""
        self._steps = int(state.get("step", 0))
        if self._steps:
            device = self.flat.device
            self._mean = torch.from_numpy(np.array(state["exp_avg"])).to(device)
            self._square = torch.from_numpy(np.array(state["exp_avg_sq"])).to(device)


class JointOptimizer:
    """Takes every step together with other learners: `joint_step` combines their gradients and clips the result."""

    def __init__(self, flat: FlatModule, joint_step: JointStep) -> None:
        self.flat, self._joint_step = flat, joint_step

    def step(self, learning_rate: float, update: int, rows: int = 1) -> float:
        """Adopt the parameters after the joint step; return the norm of this learner's gradient."""
        gradient = self.flat.gradient.cpu().numpy()
        norm = float(np.linalg.norm(gradient))
        self.flat.parameters.copy_(torch.from_numpy(self._joint_step(gradient, rows)))
        return norm


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

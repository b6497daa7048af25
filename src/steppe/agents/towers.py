"""Fully connected towers side by side, `[K, N, width]`, with their gradient in closed form.

K towers of equal widths (policy and value) read the same observations. No graph is recorded, nothing is allocated once
the number of rows is known, and gradients are written where the optimizer reads them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Activation = Literal["tanh", "relu"]
_KEPT_BENCHES = 64  # numbers of rows whose views are kept


class Towers(nn.Module):
    """K multilayer perceptrons. tanh comes with orthogonal initial weights (PPO), relu with torch's own (DQN)."""

    def __init__(self, num_towers: int, num_in: int, hidden: tuple[int, ...], activation: Activation) -> None:
        super().__init__()
        self.num_towers, self.tanh = num_towers, activation == "tanh"
        widths = (num_in, *hidden)
        shapes = list(itertools.pairwise(widths))
        layers = [[_initial(*shape, tanh=self.tanh) for _ in range(num_towers)] for shape in shapes]
        self.weight = nn.ParameterList(torch.stack([weight for weight, _ in layer]) for layer in layers)
        self.bias = nn.ParameterList(torch.stack([bias for _, bias in layer]) for layer in layers)
        self._plain = list(
            zip(self.weight, self.bias, strict=True)
        )  # looking them up in a ParameterList costs more than a layer
        self._capacity = [0]
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._workbenches: dict[tuple[int, int], _Workbench] = {}
        self._last: list[_Workbench] = []  # a list, because setting a module's attribute is slow

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Features [K, N, width], in memory that the next call with as many rows reuses."""
        bench = self._workbench(len(obs))
        self._last[:] = [bench]
        bench.obs = obs
        belows = [obs] * self.num_towers
        for layer in bench.layers:
            for below, weight, bias, out in zip(belows, layer.weight, layer.bias, layer.out, strict=True):
                torch.addmm(bias, below, weight, out=out)
            layer.whole.tanh_() if self.tanh else layer.whole.relu_()
            belows = layer.out
        return bench.layers[-1].whole

    @property
    def features(self) -> torch.Tensor:
        """What the last `forward` returned."""
        return self._last[0].layers[-1].whole

    @property
    def gradient(self) -> torch.Tensor:
        """Memory for d(loss)/d(features) of the last `forward`."""
        return self._last[0].layers[-1].d_whole

    def backward(self, gradient: torch.Tensor) -> None:
        """Write every parameter's gradient, given d(loss)/d(features) [K, N, width] of the last `forward`; clobbers it."""
        bench = self._last[0]
        layers = bench.layers
        for index in range(len(layers) - 1, -1, -1):
            layer = layers[index]
            if self.tanh:
                torch.ops.aten.tanh_backward.grad_input(gradient, layer.whole, grad_input=gradient)
            else:
                torch.ops.aten.threshold_backward.grad_input(gradient, layer.whole, 0.0, grad_input=gradient)
            torch.sum(gradient, 1, out=layer.d_bias)
            below = layers[index - 1].out if index else [bench.obs] * self.num_towers
            for k, inner in enumerate(gradient.unbind()):
                torch.mm(below[k].t(), inner, out=layer.d_weight[k])
                if index:
                    torch.mm(inner, layer.weight[k].t(), out=layers[index - 1].d_out[k])
            gradient = layers[index - 1].d_whole

    def _workbench(self, num_rows: int) -> _Workbench:
        """Views for so many rows into memory that all numbers of rows share: fresh pages would cost more than the sums.

        Parameters move when a module becomes flat or is copied: hence their address.
        """
        key = (num_rows, self._plain[0][0].data_ptr())
        bench = self._workbenches.get(key)
        if bench is None:
            if num_rows > self._capacity[0] or len(self._workbenches) >= _KEPT_BENCHES:
                self._workbenches.clear()
            if num_rows > self._capacity[0]:
                self._capacity[0] = num_rows
                self._memory[:] = [_room(weight, num_rows) for weight, _ in self._plain]
            layers = [_Layer.of(*pair, num_rows, *room) for pair, room in zip(self._plain, self._memory, strict=True)]
            bench = self._workbenches[key] = _Workbench(layers, self._plain[0][0].data)
        return bench

    def __deepcopy__(self, memo: dict[int, object]) -> Towers:
        """A copy with memory of its own."""
        shapes = [weight.shape for weight in self.weight]
        activation: Activation = "tanh" if self.tanh else "relu"
        twin = Towers(self.num_towers, shapes[0][1], tuple(shape[2] for shape in shapes), activation)
        twin.load_state_dict(self.state_dict())
        return twin.to(self.weight[0].device)


@dataclass
class _Layer:
    """One layer of every tower: views into the parameters and their gradients, and memory for results."""

    weight: list[torch.Tensor]
    bias: list[torch.Tensor]
    d_weight: list[torch.Tensor]
    d_bias: torch.Tensor
    whole: torch.Tensor  # [K, N, width]
    out: list[torch.Tensor]
    d_whole: torch.Tensor
    d_out: list[torch.Tensor]

    @classmethod
    def of(
        cls, weight: nn.Parameter, bias: nn.Parameter, num_rows: int, results: torch.Tensor, gradients: torch.Tensor
    ) -> _Layer:
        shape = (weight.shape[0], num_rows, weight.shape[2])
        size = math.prod(shape)
        whole, d_whole = results[:size].view(shape), gradients[:size].view(shape)
        d_weight = weight.grad if weight.grad is not None else torch.zeros_like(weight.data)
        d_bias = bias.grad if bias.grad is not None else torch.zeros_like(bias.data)
        views = [list(tensor.unbind()) for tensor in (weight.data, bias.data, d_weight, whole, d_whole)]
        return cls(views[0], views[1], views[2], d_bias, whole, views[3], d_whole, views[4])


@dataclass
class _Workbench:
    layers: list[_Layer]
    obs: torch.Tensor


@torch.inference_mode(False)  # memory made while acting must also serve while learning
def _room(weight: nn.Parameter, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat memory for one layer's results and their gradients."""
    size = weight.shape[0] * num_rows * weight.shape[2]
    return weight.data.new_empty(size), weight.data.new_empty(size)


def _initial(num_in: int, num_out: int, *, tanh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight [in, out], bias [out]) of one layer of one tower."""
    layer = nn.Linear(num_in, num_out)
    if tanh:
        nn.init.orthogonal_(layer.weight, math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return layer.weight.data.t().contiguous(), layer.bias.data

"""Parallel multilayer perceptrons with compiled forward and backward passes on the CPU; elsewhere torch does both.

Several networks of equal hidden widths, such as policy and value, read the same rows. Rows pass through in tiles that
stay in the nearest cache, products are computed by BLAS, and gradients are written where the optimizer reads them:

    obs [N, in] → tile [128, in] → (product, bias, activation) per layer → outputs [N, sum of outs]

There is no autograd graph, and no allocation once the number of rows is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import torch
from torch import nn

Activation = Literal["tanh", "relu"]
TILE = 128  # rows per tile: their products stay in the nearest caches


class DenseLayer(nn.Module):
    """`x @ weight + bias`; the weight is [in, out], the order in which the kernels read it."""

    def __init__(self, num_in: int, num_out: int, gain: float | None) -> None:
        super().__init__()
        plain = nn.Linear(num_in, num_out)
        if gain is not None:
            nn.init.orthogonal_(plain.weight, gain)
            nn.init.zeros_(plain.bias)
        self.weight = nn.Parameter(plain.weight.data.t().contiguous())
        self.bias = nn.Parameter(plain.bias.data)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, rows, self.weight)

    @property
    def offsets(self) -> tuple[int, int]:
        """Offsets of weight and bias in the flat vector."""
        return int(self.weight.storage_offset()), int(self.bias.storage_offset())


class HeadSpec(NamedTuple):
    """Output size of one network, and the gain of its initial weights; None: torch's own initialization."""

    size: int
    gain: float | None = None


class ParallelMLPs(nn.Module):
    """One network per head. tanh comes with orthogonal initial weights (PPO), relu with torch's own (DQN)."""

    def __init__(
        self, num_in: int, hidden: tuple[int, ...], heads: Mapping[str, HeadSpec], activation: Activation
    ) -> None:
        super().__init__()
        self.tanh = activation == "tanh"
        self.num_out = sum(head.size for head in heads.values())
        self.num_hidden = sum(hidden) * len(heads)
        self.max_width = max(num_in, *hidden, *(head.size for head in heads.values()))
        gain = math.sqrt(2) if self.tanh else None
        self._networks: list[list[DenseLayer]] = []  # the registered modules again, with a type
        for name, head in heads.items():
            layers = [DenseLayer(*pair, gain) for pair in itertools.pairwise((num_in, *hidden))]
            self._networks.append([*layers, DenseLayer(hidden[-1], head.size, head.gain)])
            self.add_module(name, nn.ModuleList(self._networks[-1]))
        self._memory: _MLPWorkspace | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return outputs [N, sum of outs] with an autograd graph, on any device."""
        outputs = []
        for *hidden, head in self._networks:
            features = rows
            for layer in hidden:
                features = torch.tanh(layer(features)) if self.tanh else torch.relu(layer(features))
            outputs.append(head(features))
        return torch.cat(outputs, dim=1)

    def bind(self, parameters: np.ndarray, gradient: np.ndarray) -> None:
        """Use these flat vectors of all parameters and, at the same offsets, gradients; FlatModule calls it."""
        plan, num_hidden, num_out = [], 0, 0
        for *hidden, head in self._networks:
            for layer in hidden:
                plan.append((*layer.weight.shape, *layer.offsets, num_hidden))
                num_hidden += layer.weight.shape[1]
            plan.append((*head.weight.shape, *head.offsets, num_out))
            num_out += head.weight.shape[1]
        table = np.array(plan, np.int64).reshape(len(self._networks), -1, 5)
        self._memory = _MLPWorkspace(self, parameters, gradient, table)

    @property
    def bound(self) -> bool:
        """Whether `bind` was called, so that the compiled passes can be used."""
        return self._memory is not None

    def run(self, rows: np.ndarray) -> np.ndarray:
        """Return outputs [N, sum of outs] of float32 rows, in memory that the next call reuses."""
        assert self._memory is not None, "bind comes before run"
        return self._memory.forward(rows, keep=False)

    def trace(self, rows: np.ndarray) -> np.ndarray:
        """Like `run`, keeping what `backward` needs; `rows` must not change until then."""
        assert self._memory is not None, "bind comes before trace"
        return self._memory.forward(rows, keep=True)

    def backward(self, d_outputs: np.ndarray) -> None:
        """Write every parameter's gradient from d(loss)/d(outputs) of the last `trace`."""
        assert self._memory is not None, "bind comes before backward"
        self._memory.backward(d_outputs)


class _MLPWorkspace:
    """The flat vectors and the scratch memory of the compiled passes."""

    def __init__(self, net: ParallelMLPs, parameters: np.ndarray, gradient: np.ndarray, plan: np.ndarray) -> None:
        self.parameters, self.gradient, self.plan = parameters, gradient, plan
        self.tanh, self.num_hidden, self.num_out = net.tanh, net.num_hidden, net.num_out
        largest = int((plan[:, :, 0] * plan[:, :, 1]).max())
        self.tiles = np.empty((2, TILE * net.max_width), np.float32)
        self.product = np.empty(largest, np.float32)
        self.turned = np.empty(len(parameters), np.float32)
        self.passing = np.empty(TILE * net.num_hidden, np.float32)
        self.kept = np.empty(0, np.float32)
        self.outputs = np.empty((0, net.num_out), np.float32)
        self.rows = np.empty((0, 0), np.float32)

    def forward(self, rows: np.ndarray, *, keep: bool) -> np.ndarray:
        count = len(rows)
        if count > len(self.outputs):
            self.outputs = np.empty((count, self.num_out), np.float32)
        hidden = self.passing
        if keep:
            if count * self.num_hidden > len(self.kept):
                self.kept = np.empty(count * self.num_hidden, np.float32)
            hidden, self.rows = self.kept, rows
        outputs = self.outputs[:count]
        _forward(self.parameters, self.plan, rows, hidden, self.tiles, outputs, keep, self.tanh)
        return outputs

    def backward(self, d_outputs: np.ndarray) -> None:
        _backward(
            self.parameters, self.gradient, self.plan, self.rows, self.kept, d_outputs,
            self.tiles, self.product, self.turned, self.tanh,
        )  # fmt: skip


# tanh(x) = x P(x²) / Q(x²), fitted for the least relative error on [0, 8.1]; beyond that a float32 tanh is 1.
# Error below 3e-7.
_P = tuple(map(np.float32, (0.99999999, 0.13438342, 0.0035641745, 2.1766192e-05, 1.5034872e-08)))
_Q = tuple(map(np.float32, (1.0, 0.46771669, 0.026136508, 0.00033989078, 8.4464927e-07)))
_P0, _P1, _P2, _P3, _P4 = _P
_Q0, _Q1, _Q2, _Q3, _Q4 = _Q
_TANH_LIMIT = np.float32(8.1)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def fast_tanh(x: Any) -> Any:
    """Return tanh of a float32. NaN stays NaN, because every comparison with it is false."""
    x = _TANH_LIMIT if x > _TANH_LIMIT else x
    x = -_TANH_LIMIT if x < -_TANH_LIMIT else x
    u = x * x
    above = x * (_P0 + u * (_P1 + u * (_P2 + u * (_P3 + u * _P4))))
    return above / (_Q0 + u * (_Q1 + u * (_Q2 + u * (_Q3 + u * _Q4))))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _activate(y: np.ndarray, bias: np.ndarray, tanh: bool) -> None:
    """y ← activation(y + bias)."""
    num_rows, size = y.shape
    for i in range(num_rows):
        if tanh:
            for j in range(size):
                y[i, j] = fast_tanh(y[i, j] + bias[j])
        else:
            for j in range(size):
                x = y[i, j] + bias[j]
                y[i, j] = _ZERO if x < _ZERO else x


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _activation_backward(d: np.ndarray, y: np.ndarray, tanh: bool) -> None:
    """d ← d · activation′, computed from the activation's result y."""
    num_rows, size = y.shape
    for i in range(num_rows):
        if tanh:
            for j in range(size):
                d[i, j] *= _ONE - y[i, j] * y[i, j]
        else:
            for j in range(size):
                d[i, j] = _ZERO if y[i, j] == _ZERO else d[i, j]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _forward(
    parameters: np.ndarray,
    plan: np.ndarray,
    rows: np.ndarray,
    hidden: np.ndarray,
    tiles: np.ndarray,
    outputs: np.ndarray,
    keep: bool,
    tanh: bool,
) -> None:
    """Compute the outputs. Hidden layers are stored consecutively, each `[N, size]` if `keep`, else `[TILE, size]`."""
    count, last = len(rows), plan.shape[1] - 1
    for first in range(0, count, TILE):
        end = min(first + TILE, count)
        stride, offset = (count, first) if keep else (TILE, 0)
        for k in range(len(plan)):
            x = rows[first:end]
            for layer in range(last + 1):
                num_in, size, w, b, at = plan[k, layer]
                weight = parameters[w : w + num_in * size].reshape(num_in, size)
                bias = parameters[b : b + size]
                if layer < last:
                    start = at * stride + offset * size
                    y = hidden[start : start + (end - first) * size].reshape(end - first, size)
                    np.dot(x, weight, y)
                    _activate(y, bias, tanh)
                    x = y
                else:
                    y = tiles[0, : (end - first) * size].reshape(end - first, size)
                    np.dot(x, weight, y)
                    outputs[first:end, at : at + size] = y + bias


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _backward(
    parameters: np.ndarray,
    gradient: np.ndarray,
    plan: np.ndarray,
    rows: np.ndarray,
    kept: np.ndarray,
    d_outputs: np.ndarray,
    tiles: np.ndarray,
    product: np.ndarray,
    transposed: np.ndarray,
    tanh: bool,
) -> None:
    count, last = len(rows), plan.shape[1] - 1
    worth_turning = count >= 4 * TILE  # BLAS is slower with a transposed operand
    if worth_turning:
        _transpose_weights(parameters, plan, transposed)
    for first in range(0, count, TILE):
        end = min(first + TILE, count)
        num_rows = end - first
        for k in range(len(plan)):
            size, at = plan[k, last, 1], plan[k, last, 4]
            d = tiles[0, : num_rows * size].reshape(num_rows, size)
            d[:, :] = d_outputs[first:end, at : at + size]
            for layer in range(last, -1, -1):
                num_in, size, w, b, _ = plan[k, layer]
                x = rows[first:end]
                if layer:
                    start = plan[k, layer - 1, 4] * count + first * num_in
                    x = kept[start : start + num_rows * num_in].reshape(num_rows, num_in)
                d_weight, d_bias = gradient[w : w + num_in * size], gradient[b : b + size]
                if first == 0:
                    np.dot(x.T, d, d_weight.reshape(num_in, size))
                    d_bias[:] = _ZERO
                else:
                    np.dot(x.T, d, product[: num_in * size].reshape(num_in, size))
                    _add(product, d_weight)
                _add_rows(d, d_bias)
                if layer:
                    below = tiles[(last - layer + 1) % 2, : num_rows * num_in].reshape(num_rows, num_in)
                    if worth_turning:
                        np.dot(d, transposed[w : w + num_in * size].reshape(size, num_in), below)
                    else:
                        np.dot(d, parameters[w : w + num_in * size].reshape(num_in, size).T, below)
                    _activation_backward(below, x, tanh)
                    d = below


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _transpose_weights(parameters: np.ndarray, plan: np.ndarray, transposed: np.ndarray) -> None:
    """Transpose every weight but the first layers' once for all tiles."""
    for k in range(len(plan)):
        for layer in range(1, plan.shape[1]):
            num_in, size, w, _, _ = plan[k, layer]
            for i in range(num_in):
                for j in range(size):
                    transposed[w + j * num_in + i] = parameters[w + i * size + j]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _add(product: np.ndarray, d_weight: np.ndarray) -> None:
    for i in range(len(d_weight)):
        d_weight[i] += product[i]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _add_rows(d: np.ndarray, d_bias: np.ndarray) -> None:
    for i in range(len(d)):
        for j in range(len(d_bias)):
            d_bias[j] += d[i, j]

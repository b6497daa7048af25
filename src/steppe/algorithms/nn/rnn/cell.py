"""A recurrent cell with linear heads, NumPy in and out. The layers before the cell are in network.py.

On the CPU, compiled kernels do the forward pass and backpropagation through time; elsewhere torch's graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from steppe.algorithms.nn.mlp_kernels import DenseLayer, HeadSpec
from steppe.algorithms.nn.rnn import kernels

Cell = Literal["lstm", "gru"]
MAX_CACHED_SHAPES = 8  # sequence shapes whose buffers are kept


class _CellKind(NamedTuple):
    num_gates: int
    num_parts: int  # arrays of the cell's size that make up a state: (h, c) or (h,)
    forward: Callable[..., None]
    backward: Callable[..., None]

    def __deepcopy__(self, memo: dict[int, object]) -> _CellKind:
        """Return itself when a module is copied: kernels are not copied."""
        return self


_KINDS: Mapping[Cell, _CellKind] = {
    "lstm": _CellKind(4, 2, kernels.lstm_forward, kernels.lstm_backward),
    "gru": _CellKind(3, 1, kernels.gru_forward, kernels.gru_backward),
}


@dataclass
class UnrollResult:
    """Outputs [T, N, out], and the state after every row in parts, [parts, T, N, size]; the next call reuses both."""

    outputs: np.ndarray
    after: np.ndarray

    def states(self, rows: int | tuple[np.ndarray, ...]) -> np.ndarray:
        """Return the states [N, …] after one row, or [M, …] after those at indices (t, n), in a new array."""
        return np.concatenate([part[rows] for part in self.after], axis=-1)


class RecurrentCell(nn.Module):
    """LSTM or GRU. Takes the gates' inputs (`num_in` numbers per row) and a state of `num_state` numbers."""

    def __init__(self, cell: Cell, size: int, heads: Sequence[HeadSpec]) -> None:
        super().__init__()
        self.cell, self.size = cell, size
        self.kind = _KINDS[cell]
        self.num_in, self.num_state = self.kind.num_gates * size, self.kind.num_parts * size
        weight = torch.cat([_orthogonal(size) for _ in range(self.kind.num_gates)], dim=1)
        self.weight = nn.Parameter(weight)
        layers = [DenseLayer(size, head.size, head.gain) for head in heads]
        self.head_weight = nn.Parameter(torch.cat([layer.weight.data for layer in layers], dim=1))
        self.head_bias = nn.Parameter(torch.cat([layer.bias.data for layer in layers]))
        self._memory: _RNNWorkspace | None = None

    @property
    def num_out(self) -> int:
        return len(self.head_bias)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor, clear: torch.Tensor, stop: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [T, N, out] and states [parts, T, N, size] with an autograd graph, on any device."""
        parts, kept = list(torch.split(state, self.size, dim=1)), []
        for t in range(len(x)):
            for index, part in enumerate(parts):
                reset_part = torch.where(clear[t, :, None], torch.zeros_like(part), part)
                parts[index] = torch.where(stop[t, :, None], reset_part.detach(), reset_part)
            parts = self._step(x[t], parts)
            kept.append(torch.stack(parts))
        after = torch.stack(kept, dim=1)
        return after[0] @ self.head_weight + self.head_bias, after

    def _step(self, x: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        own = torch.split(parts[0] @ self.weight, self.size, dim=1)
        add = torch.split(x, self.size, dim=1)
        if self.cell == "lstm":
            i, f, g, o = (a + b for a, b in zip(add, own, strict=True))
            c = torch.sigmoid(f) * parts[1] + torch.sigmoid(i) * torch.tanh(g)
            return [torch.sigmoid(o) * torch.tanh(c), c]
        reset, update = torch.sigmoid(add[0] + own[0]), torch.sigmoid(add[1] + own[1])
        fresh = torch.tanh(add[2] + reset * own[2])
        return [fresh + update * (parts[0] - fresh)]

    def bind(self, parameters: np.ndarray, gradient: np.ndarray) -> None:
        """Use these flat vectors of all parameters and, at the same offsets, gradients; FlatModule calls it."""
        tensors = (self.weight, self.head_weight, self.head_bias)
        self._memory = _RNNWorkspace(
            self, *([_view(flat, tensor) for tensor in tensors] for flat in (parameters, gradient))
        )

    @property
    def bound(self) -> bool:
        """Whether `bind` was called, so that the compiled kernels can be used."""
        return self._memory is not None

    def unroll(self, x: np.ndarray, state: np.ndarray, clear: np.ndarray) -> UnrollResult:
        """Return outputs for x [T · N, num_in] from `state` [N, num_state]; `clear` [T, N] zeroes it before a row."""
        assert self._memory is not None, "bind comes before unroll"
        return self._memory.forward(x, state, clear)

    def backward(self, d_outputs: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Write the gradients from d(loss)/d(outputs) [T, N, out] of the last `unroll`; return d(loss)/d(x)."""
        assert self._memory is not None, "bind comes before backward"
        return self._memory.backward(d_outputs, stop)


class _RNNWorkspace:
    """Views of parameters and gradients, and buffers for the latest sequence shapes."""

    def __init__(self, net: RecurrentCell, parameters: list[np.ndarray], gradients: list[np.ndarray]) -> None:
        self.kind, self.size, self.num_out = net.kind, net.size, net.num_out
        self.weight, self.head_weight, self.head_bias = parameters
        self.d_weight, self.d_head_weight, self.d_head_bias = gradients
        self.buffers: dict[tuple[int, int], _SequenceBuffers] = {}
        self.last: tuple[_SequenceBuffers, np.ndarray] | None = None

    def forward(self, x: np.ndarray, state: np.ndarray, clear: np.ndarray) -> UnrollResult:
        buffers = self.buffers.get(clear.shape) or self._allocate_buffers(*clear.shape)
        steps, rows = clear.shape
        gated = x.reshape(steps, rows, self.kind.num_gates, self.size)
        self.kind.forward(
            gated, self.weight, state, clear, buffers.ins, buffers.outs, buffers.gates, buffers.kept, buffers.product
        )
        kernels.head_forward(buffers.hidden, self.head_weight, self.head_bias, buffers.outputs)
        self.last = buffers, clear
        return UnrollResult(buffers.outputs.reshape(steps, rows, self.num_out), buffers.outs)

    def backward(self, d_outputs: np.ndarray, stop: np.ndarray) -> np.ndarray:
        assert self.last is not None, "unroll comes before backward"
        buffers, clear = self.last
        steps, rows = clear.shape
        d_buffers = buffers.back or buffers.allocate_backward()
        flat = np.ascontiguousarray(d_outputs, np.float32).reshape(steps * rows, self.num_out)
        kernels.head_backward(
            buffers.hidden,
            self.head_weight,
            flat,
            self.d_head_weight,
            self.d_head_bias,
            d_buffers.d_out.reshape(-1, self.size),
        )
        transposed = np.ascontiguousarray(self.weight.T)
        self.kind.backward(
            d_buffers.d_out,
            transposed,
            clear | stop,
            buffers.ins,
            buffers.gates,
            buffers.kept,
            d_buffers.d_x,
            d_buffers.d_product,
            d_buffers.carried,
        )
        width = self.kind.num_gates * self.size
        h_in = buffers.ins[0].reshape(steps * rows, self.size)
        kernels.state_weight_gradient(h_in, d_buffers.d_product.reshape(-1, width), self.d_weight)
        return d_buffers.d_x.reshape(-1, width)

    def _allocate_buffers(self, steps: int, rows: int) -> _SequenceBuffers:
        if len(self.buffers) >= MAX_CACHED_SHAPES:
            del self.buffers[next(iter(self.buffers))]
        self.buffers[steps, rows] = buffers = _SequenceBuffers(self.kind, self.size, self.num_out, steps, rows)
        return buffers


class _SequenceBuffers:
    """Buffers for one sequence shape."""

    def __init__(self, kind: _CellKind, size: int, num_out: int, steps: int, rows: int) -> None:
        self.kind = kind
        self.ins, self.outs = (np.empty((kind.num_parts, steps, rows, size), np.float32) for _ in range(2))
        self.gates = np.empty((steps, rows, kind.num_gates, size), np.float32)
        self.kept = np.empty((steps, rows, size), np.float32)
        self.product = np.empty((rows, kind.num_gates * size), np.float32)
        self.hidden = self.outs[0].reshape(steps * rows, size)
        self.outputs = np.empty((steps * rows, num_out), np.float32)
        self.back: _BackwardBuffers | None = None

    def allocate_backward(self) -> _BackwardBuffers:
        """Allocate buffers for the backward pass, which actors never need."""
        d_x = np.empty_like(self.gates)
        d_product = d_x if self.kind.num_parts == 2 else np.empty_like(d_x)  # the same array for an LSTM
        self.back = _BackwardBuffers(
            np.empty_like(self.kept), d_x, d_product, np.empty((2, *self.kept.shape[1:]), np.float32)
        )
        return self.back


class _BackwardBuffers(NamedTuple):
    d_out: np.ndarray
    d_x: np.ndarray
    d_product: np.ndarray
    carried: np.ndarray


def _orthogonal(size: int) -> torch.Tensor:
    weight = torch.empty(size, size)
    nn.init.orthogonal_(weight)
    return weight


def _view(flat: np.ndarray, tensor: torch.Tensor) -> np.ndarray:
    start = int(tensor.storage_offset())
    view: np.ndarray = flat[start : start + tensor.numel()].reshape(tensor.shape)
    return view

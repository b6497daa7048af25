"""A multilayer perceptron of rectified units, [N, in] → [N, out], with its gradient in closed form on the CPU.

Products are torch's, so their threads are the role's; what lies between two products is one compiled pass over memory that
is still in the cache. Weights are [in, out]: two networks run forward (online and target) for one that runs back, and that
is the faster way round. Nothing is recorded, and nothing allocated once the number of rows is known.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numba
import numpy as np
import torch
from torch import nn

_KEPT_BENCHES = 16  # numbers of rows whose memory is kept
_ZERO = np.float32(0.0)


class Rectified(nn.Module):
    """Layers with torch's own initial weights. The last one is linear."""

    def __init__(self, num_in: int, hidden: tuple[int, ...], num_out: int) -> None:
        super().__init__()
        plain = [nn.Linear(*pair) for pair in itertools.pairwise((num_in, *hidden, num_out))]
        self.weight = nn.ParameterList(layer.weight.data.t().contiguous() for layer in plain)
        self.bias = nn.ParameterList(layer.bias.data for layer in plain)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The outputs on any device, by operations that torch can record."""
        layers = list(zip(self.weight, self.bias, strict=True))
        for weight, bias in layers[:-1]:
            rows = torch.relu(torch.addmm(bias, rows, weight))
        weight, bias = layers[-1]
        return torch.addmm(bias, rows, weight)


class Ways:
    """The ways through a Rectified on the CPU, over its parameters and gradients where they lie now."""

    def __init__(self, network: Rectified) -> None:
        self._layers = [_Layer(*pair) for pair in zip(network.weight, network.bias, strict=True)]
        self._benches: dict[int, _Bench] = {}
        self._last: _Bench | None = None

    def forth(self, rows: np.ndarray) -> np.ndarray:
        """Outputs [N, out] of float32 rows, which must stay as they are until `back`; the next call reuses the memory."""
        bench = self._benches.get(len(rows)) or self._bench(len(rows))
        self._last = bench
        below = bench.rows = torch.from_numpy(rows)
        for layer, place in zip(self._layers, bench.places, strict=False):  # there is no place for the outputs
            torch.mm(below, layer.weight, out=place.out)
            _rectify(place.out_array, layer.bias_array)
            below = place.out
        last = self._layers[-1]
        torch.addmm(last.bias, below, last.weight, out=bench.outputs)
        return bench.outputs_array

    def back(self, d_outputs: np.ndarray) -> None:
        """Write every parameter's gradient from d(loss)/d(outputs) of the last `forth`."""
        bench = self._last
        assert bench is not None, "forth comes before back"
        gradient = torch.from_numpy(d_outputs)
        _add_up(d_outputs, self._layers[-1].d_bias_array)
        for index in range(len(self._layers) - 1, 0, -1):
            layer, place = self._layers[index], bench.places[index - 1]
            torch.mm(place.out_turned, gradient, out=layer.d_weight)
            torch.mm(gradient, layer.weight_turned, out=place.d_out)
            _unrectify(place.d_out_array, place.out_array, self._layers[index - 1].d_bias_array)
            gradient = place.d_out
        torch.mm(bench.rows.t(), gradient, out=self._layers[0].d_weight)

    def _bench(self, num_rows: int) -> _Bench:
        if len(self._benches) >= _KEPT_BENCHES:
            self._benches.clear()
        *hidden, last = [layer.weight.shape[1] for layer in self._layers]
        with torch.inference_mode(False):  # memory made while acting must also serve while learning
            outputs = torch.empty(num_rows, last)
            places = [_Place(num_rows, size) for size in hidden]
        bench = self._benches[num_rows] = _Bench(outputs, outputs.numpy(), places, outputs)
        return bench


class _Layer:
    """One layer's parameters and gradients, as tensors for products and as arrays for kernels."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        assert weight.grad is not None
        assert bias.grad is not None
        self.weight, self.weight_turned, self.d_weight = weight.data, weight.data.t(), weight.grad
        self.bias, self.bias_array, self.d_bias_array = bias.data, bias.data.numpy(), bias.grad.numpy()


class _Place:
    """Memory for one hidden layer's results and their gradients."""

    def __init__(self, num_rows: int, size: int) -> None:
        self.out, self.d_out = torch.empty(num_rows, size), torch.empty(num_rows, size)
        self.out_turned = self.out.t()
        self.out_array, self.d_out_array = self.out.numpy(), self.d_out.numpy()


@dataclass
class _Bench:
    outputs: torch.Tensor
    outputs_array: np.ndarray
    places: list[_Place]
    rows: torch.Tensor


@numba.njit(cache=True, nogil=True)
def _rectify(sums: np.ndarray, bias: np.ndarray) -> None:
    """sums ← max(sums + bias, 0); what is not a number stays that."""
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            total = sums[i, j] + bias[j]
            sums[i, j] = _ZERO if total < _ZERO else total


@numba.njit(cache=True, nogil=True)
def _unrectify(gradient: np.ndarray, results: np.ndarray, d_bias: np.ndarray) -> None:
    """gradient ← 0 where the unit was off; d_bias ← its sum over rows."""
    d_bias[:] = _ZERO
    for i in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            kept = gradient[i, j] if results[i, j] > _ZERO else _ZERO
            gradient[i, j] = kept
            d_bias[j] += kept


@numba.njit(cache=True, nogil=True)
def _add_up(gradient: np.ndarray, d_bias: np.ndarray) -> None:
    """d_bias ← the sum over rows."""
    d_bias[:] = _ZERO
    for i in range(gradient.shape[0]):
        for j in range(gradient.shape[1]):
            d_bias[j] += gradient[i, j]

"""Compiled forward and backward passes of LSTM and GRU through time, on float32 arrays with axes [T, N, …].

x [T, N, gates, size]           the inputs' contribution to each gate (with the bias)
ins, outs [parts, T, N, size]   the state before and after each row: parts are (h, c) of an LSTM, (h,) of a GRU
gates, kept                     for the backward pass: activated gates, and tanh(c) or the state's part of the candidate
clear, stop [T, N]              clear: the state is zeroed before this row; stop: it is kept, but gradients stop here
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from steppe.algorithms.nn.mlp_kernels import fast_tanh

_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _sigmoid(x: Any) -> Any:
    return _HALF + _HALF * fast_tanh(_HALF * x)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _load_state(t: int, state: np.ndarray, clear: np.ndarray, ins: np.ndarray, outs: np.ndarray) -> None:
    """Write the state before row t."""
    num_parts, _, num_rows, size = ins.shape
    for part in range(num_parts):
        for n in range(num_rows):
            if clear[t, n]:
                ins[part, t, n] = _ZERO
            elif t == 0:
                ins[part, t, n] = state[n, part * size : (part + 1) * size]
            else:
                ins[part, t, n] = outs[part, t - 1, n]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def lstm_forward(
    x: np.ndarray,
    weight: np.ndarray,
    state: np.ndarray,
    clear: np.ndarray,
    ins: np.ndarray,
    outs: np.ndarray,
    gates: np.ndarray,
    kept: np.ndarray,
    product: np.ndarray,
) -> None:
    """i, f, o = σ, g = tanh; c′ = f c + i g; h′ = o tanh(c′) (Hochreiter and Schmidhuber 1997, Gers et al. 2000)."""
    num_steps, num_rows, _, size = x.shape
    for t in range(num_steps):
        _load_state(t, state, clear, ins, outs)
        np.dot(ins[0, t], weight, product)
        for n in range(num_rows):
            add, own, c_in, row = x[t, n], product[n], ins[1, t, n], gates[t, n]
            h, c, y = outs[0, t, n], outs[1, t, n], kept[t, n]
            for j in range(size):
                row[0, j] = _sigmoid(add[0, j] + own[j])
            for j in range(size):
                row[1, j] = _sigmoid(add[1, j] + own[size + j])
            for j in range(size):
                row[2, j] = fast_tanh(add[2, j] + own[2 * size + j])
            for j in range(size):
                row[3, j] = _sigmoid(add[3, j] + own[3 * size + j])
            for j in range(size):
                c[j] = row[1, j] * c_in[j] + row[0, j] * row[2, j]
            for j in range(size):
                y[j] = fast_tanh(c[j])
            for j in range(size):
                h[j] = row[3, j] * y[j]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def lstm_backward(
    d_out: np.ndarray,
    transposed: np.ndarray,
    stop: np.ndarray,
    ins: np.ndarray,
    gates: np.ndarray,
    kept: np.ndarray,
    d_x: np.ndarray,
    d_product: np.ndarray,
    carried: np.ndarray,
) -> None:
    """Compute d(loss)/d(x), here equal to d(loss)/d(h W); `carried` is the state's gradient from later rows."""
    num_steps, num_rows, size = d_out.shape
    carried[:] = _ZERO
    for t in range(num_steps - 1, -1, -1):
        for n in range(num_rows):
            row, c_in, d, d_h, d_c = gates[t, n], ins[1, t, n], d_x[t, n], carried[0, n], carried[1, n]
            for j in range(size):
                i, f, g, o, y = row[0, j], row[1, j], row[2, j], row[3, j], kept[t, n, j]
                total = d_out[t, n, j] + d_h[j]
                inner = d_c[j] + total * o * (_ONE - y * y)
                d[0, j] = inner * g * i * (_ONE - i)
                d[1, j] = inner * c_in[j] * f * (_ONE - f)
                d[2, j] = inner * i * (_ONE - g * g)
                d[3, j] = total * y * o * (_ONE - o)
                d_c[j] = inner * f
        if t:
            np.dot(d_x[t].reshape(num_rows, 4 * size), transposed, carried[0])
            for n in range(num_rows):
                if stop[t, n]:
                    carried[:, n] = _ZERO


@numba.njit(cache=True, nogil=True, error_model="numpy")
def gru_forward(
    x: np.ndarray,
    weight: np.ndarray,
    state: np.ndarray,
    clear: np.ndarray,
    ins: np.ndarray,
    outs: np.ndarray,
    gates: np.ndarray,
    kept: np.ndarray,
    product: np.ndarray,
) -> None:
    """r, z = σ; n = tanh(x + r (h W)); h′ = (1 − z) n + z h (Cho et al. 2014, with the reset after the product)."""
    num_steps, num_rows, _, size = x.shape
    for t in range(num_steps):
        _load_state(t, state, clear, ins, outs)
        np.dot(ins[0, t], weight, product)
        for n in range(num_rows):
            add, own, h_in, row = x[t, n], product[n], ins[0, t, n], gates[t, n]
            h, share = outs[0, t, n], kept[t, n]
            for j in range(size):
                row[0, j] = _sigmoid(add[0, j] + own[j])
            for j in range(size):
                row[1, j] = _sigmoid(add[1, j] + own[size + j])
            share[:] = own[2 * size :]
            for j in range(size):
                row[2, j] = fast_tanh(add[2, j] + row[0, j] * share[j])
            for j in range(size):
                h[j] = row[2, j] + row[1, j] * (h_in[j] - row[2, j])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def gru_backward(
    d_out: np.ndarray,
    transposed: np.ndarray,
    stop: np.ndarray,
    ins: np.ndarray,
    gates: np.ndarray,
    kept: np.ndarray,
    d_x: np.ndarray,
    d_product: np.ndarray,
    carried: np.ndarray,
) -> None:
    """Compute d(loss)/d(x) and d(loss)/d(h W), which differ by r in the candidate.

    `carried` is the state's gradient from later rows.
    """
    num_steps, num_rows, size = d_out.shape
    carried[:] = _ZERO
    direct, through = carried[1], carried[0]
    for t in range(num_steps - 1, -1, -1):
        for n in range(num_rows):
            row, h_in, d, own, d_h = gates[t, n], ins[0, t, n], d_x[t, n], d_product[t, n], through[n]
            for j in range(size):
                r, z, fresh = row[0, j], row[1, j], row[2, j]
                total = d_out[t, n, j] + d_h[j] + direct[n, j]
                d_fresh = total * (_ONE - z) * (_ONE - fresh * fresh)
                d[0, j] = own[0, j] = d_fresh * kept[t, n, j] * r * (_ONE - r)
                d[1, j] = own[1, j] = total * (h_in[j] - fresh) * z * (_ONE - z)
                d[2, j] = d_fresh
                own[2, j] = d_fresh * r
                direct[n, j] = total * z
        if t:
            np.dot(d_product[t].reshape(num_rows, 3 * size), transposed, through)
            for n in range(num_rows):
                if stop[t, n]:
                    carried[:, n] = _ZERO


@numba.njit(cache=True, nogil=True, error_model="numpy")
def head_forward(hidden: np.ndarray, weight: np.ndarray, bias: np.ndarray, outputs: np.ndarray) -> None:
    """Apply a linear layer to rows [M, size]."""
    np.dot(hidden, weight, outputs)
    for i in range(len(outputs)):
        for j in range(len(bias)):
            outputs[i, j] += bias[j]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def head_backward(
    hidden: np.ndarray,
    weight: np.ndarray,
    d_outputs: np.ndarray,
    d_weight: np.ndarray,
    d_bias: np.ndarray,
    d_hidden: np.ndarray,
) -> None:
    np.dot(hidden.T, d_outputs, d_weight)
    np.dot(d_outputs, weight.T, d_hidden)
    d_bias[:] = _ZERO
    for i in range(len(d_outputs)):
        for j in range(len(d_bias)):
            d_bias[j] += d_outputs[i, j]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def state_weight_gradient(h_in: np.ndarray, d_product: np.ndarray, d_weight: np.ndarray) -> None:
    """Compute hᵀ d over all rows [M, …] at once."""
    np.dot(h_in.T, d_product, d_weight)

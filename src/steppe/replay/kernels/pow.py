"""x ** y for arrays of x, accurate to about 1e-12: faster than the C library, and the same on every machine.

x = m · 2 ** e with m in [√½, √2), so x ** y = 2 ** (y · (e + log2 m)). Both series stop where the next term is below
1e-13.
"""

from __future__ import annotations

import math

import numpy as np

from steppe.replay.kernels.copy import compiled

_MANTISSA = (1 << 52) - 1
_BIAS = 1023
_ROOT_HALF = math.sqrt(0.5)
_LOG2_E = 1.0 / math.log(2.0)
_LN2 = math.log(2.0)


@compiled
def power(base: np.ndarray, exponent: float) -> None:
    """Raise float64 numbers to a power in place; numbers and results must be normal (above 2e-308) and finite."""
    bits = base.view(np.int64)
    exponents = np.empty(len(base), np.float64)
    for i in range(len(base)):  # separate simple loops, so that the compiler vectorizes them
        exponents[i] = np.float64((bits[i] >> 52) - _BIAS)
        bits[i] = (bits[i] & _MANTISSA) | (_BIAS << 52)
    for i in range(len(base)):
        large = base[i] > 2.0 * _ROOT_HALF
        m = base[i] * 0.5 if large else base[i]
        z = (m - 1.0) / (m + 1.0)
        w = z * z
        series = w * (1.0 / 11.0 + w * (1.0 / 13.0 + w / 15.0))
        series = 1.0 + w * (1.0 / 3.0 + w * (1.0 / 5.0 + w * (1.0 / 7.0 + w * (1.0 / 9.0 + series))))
        e = exponents[i] + 1.0 if large else exponents[i]
        t = exponent * (e + 2.0 * _LOG2_E * z * series)
        whole = np.floor(t + 0.5)
        f = (t - whole) * _LN2
        tail = 1.0 / 5040.0 + f * (1.0 / 40320.0 + f * (1.0 / 362880.0 + f * (1.0 / 3628800.0 + f / 39916800.0)))
        tail = 1.0 / 24.0 + f * (1.0 / 120.0 + f * (1.0 / 720.0 + f * tail))
        exponents[i] = 1.0 + f * (1.0 + f * (0.5 + f * (1.0 / 6.0 + f * tail)))
        base[i] = whole
    for i in range(len(base)):
        bits[i] = (np.int64(base[i]) + _BIAS) << 52
    for i in range(len(base)):
        base[i] *= exponents[i]

"""Action distributions over a policy's outputs `[N, width]`: categorical or Gaussian, in compiled kernels.

Randomness comes from a NumPy stream, so an action depends on the weights, the observation and the stream, never on
torch's generator or the runtime. Gradients are in closed form: `backward` turns d/d(logp) and d/d(entropy) into
d/d(outputs).
"""

from __future__ import annotations

import math
from typing import Protocol

import numba
import numpy as np

from steppe.core.contracts.specs import ActionSpec

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Distribution(Protocol):
    """A family of distributions over actions; rows are independent."""

    width: int

    def sample(self, outputs: np.ndarray, stream: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Return actions and their log probability (density); the most likely actions if `stream` is None."""

    def evaluate(self, outputs: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (logp [N], entropy [N]) of the given actions as float64, and intermediate results for `backward`."""

    def backward(
        self, inner: np.ndarray, action: np.ndarray, d_logp: np.ndarray, d_entropy: float, d_beyond: float = 0.0
    ) -> np.ndarray:
        """Return d(loss)/d(outputs) from d(loss)/d(logp) [N], d(loss)/d(entropy) and d(loss)/d(beyond).

        The last two are the same for every row. `beyond` is the sum of the squared distances of the means outside the
        action bounds, in half extents; 0 where there are no bounds.
        """


def make_distribution(action: ActionSpec) -> Distribution:
    return Gaussian(action) if action.kind == "box" else Categorical(action)


class Categorical:
    """One or several independent choices; outputs are their concatenated logits."""

    def __init__(self, action: ActionSpec) -> None:
        self.width = sum(action.sizes)
        self._single = action.kind == "discrete"
        self._bounds = np.concatenate([[0], np.cumsum(action.sizes)]).astype(np.int64)

    def sample(self, outputs: np.ndarray, stream: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(outputs), len(self._bounds) - 1)
        uniform = np.full(shape, -1.0) if stream is None else stream.random(shape)
        action, logp = _categorical_sample(outputs, self._bounds, uniform)
        return (action[:, 0] if self._single else action), logp

    def evaluate(self, outputs: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logp, entropy, masses = _categorical_evaluate(outputs, self._bounds, action.reshape(len(outputs), -1))
        return logp, entropy, masses

    def backward(
        self, inner: np.ndarray, action: np.ndarray, d_logp: np.ndarray, d_entropy: float, d_beyond: float = 0.0
    ) -> np.ndarray:
        action = action.reshape(len(inner), -1)
        gradient: np.ndarray = _categorical_backward(inner, self._bounds, action, d_logp, d_entropy)
        return gradient


class Gaussian:
    """Independent normal components; outputs are means, then log standard deviations, in units of the box.

    Where both bounds are finite, 0 ± 1 is the box's middle ± half its extent: one network fits torques of ±2 and forces
    of ±1000. Samples are not clipped, and `logp` is theirs; clipping is left to the environment.
    """

    def __init__(self, action: ActionSpec) -> None:
        self._shape = action.sizes
        size = math.prod(action.sizes)
        self.width = 2 * size
        low = np.array(action.low or [-math.inf] * size, np.float64)
        high = np.array(action.high or [math.inf] * size, np.float64)
        bounded = np.isfinite(low) & np.isfinite(high) & (high > low)
        low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
        self._middle, self._extent = 0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low
        self._bound = np.where(bounded, np.float32(1.0), np.float32(math.inf))

    def sample(self, outputs: np.ndarray, stream: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(outputs), self.width // 2)
        noise = np.zeros(shape) if stream is None else stream.standard_normal(shape)
        action, logp = _gaussian_sample(outputs, self._middle, self._extent, noise)
        return action.reshape(len(outputs), *self._shape), logp

    def evaluate(self, outputs: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        action = action.reshape(len(outputs), -1)
        logp, entropy = _gaussian_evaluate(outputs, self._middle, self._extent, action)
        return logp, entropy, outputs

    def backward(
        self, inner: np.ndarray, action: np.ndarray, d_logp: np.ndarray, d_entropy: float, d_beyond: float = 0.0
    ) -> np.ndarray:
        action = action.reshape(len(inner), -1)
        gradient: np.ndarray = _gaussian_backward(inner, self._middle, self._extent, action, d_logp, d_entropy)
        if d_beyond:
            means = inner[:, : self.width // 2]
            gradient[:, : self.width // 2] += 2.0 * d_beyond * (means - np.clip(means, -self._bound, self._bound))
        return gradient


@numba.njit(cache=True, nogil=True)
def _log_normalizer(logits: np.ndarray, first: int, end: int) -> float:
    top = np.float64(logits[first])
    for j in range(first + 1, end):
        top = max(top, np.float64(logits[j]))
    total = 0.0
    for j in range(first, end):
        total += math.exp(np.float64(logits[j]) - top)
    return top + math.log(total)


@numba.njit(cache=True, nogil=True)
def _categorical_sample(logits: np.ndarray, bounds: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sample by inverting the cumulative distribution; a negative uniform number selects the most likely choice."""
    num_rows, num_choices = uniform.shape
    action = np.empty((num_rows, num_choices), np.int64)
    logp = np.empty(num_rows, np.float32)
    for i in range(num_rows):
        total = 0.0
        for k in range(num_choices):
            first, end = bounds[k], bounds[k + 1]
            normalizer = _log_normalizer(logits[i], first, end)
            chosen, cumulated = first, 0.0
            for j in range(first, end):
                if uniform[i, k] < 0.0:
                    if logits[i, j] > logits[i, chosen]:
                        chosen = j
                    continue
                mass = math.exp(np.float64(logits[i, j]) - normalizer)
                if mass > 0.0:  # so that rounding at the end never selects an impossible choice
                    chosen = j
                cumulated += mass
                if cumulated > uniform[i, k]:
                    break
            action[i, k] = chosen - first
            total += np.float64(logits[i, chosen]) - normalizer
        logp[i] = total
    return action, logp


@numba.njit(cache=True, nogil=True)
def _categorical_evaluate(
    logits: np.ndarray, bounds: np.ndarray, action: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (logp [N], entropy [N], masses [N, width]); H = log Σ e^l − Σ p l, with one logarithm per choice."""
    num_rows = len(logits)
    logp = np.zeros(num_rows, np.float64)
    entropy = np.zeros(num_rows, np.float64)
    masses = np.empty(logits.shape, np.float64)
    for i in range(num_rows):
        for k in range(len(bounds) - 1):
            first, end = bounds[k], bounds[k + 1]
            top = np.float64(logits[i, first])
            for j in range(first + 1, end):
                top = max(top, np.float64(logits[i, j]))
            total, weighted = 0.0, 0.0
            for j in range(first, end):
                offset = np.float64(logits[i, j]) - top
                masses[i, j] = math.exp(offset)
                total += masses[i, j]
                if masses[i, j] > 0.0:  # 0 · −∞ counts as 0
                    weighted += masses[i, j] * offset
            normalizer = math.log(total)
            for j in range(first, end):
                masses[i, j] /= total
            logp[i] += np.float64(logits[i, first + action[i, k]]) - top - normalizer
            entropy[i] += normalizer - weighted / total
    return logp, entropy, masses


@numba.njit(cache=True, nogil=True)
def _categorical_backward(
    masses: np.ndarray, bounds: np.ndarray, action: np.ndarray, d_logp: np.ndarray, d_entropy: float
) -> np.ndarray:
    """d logp / d l_j = [j = a] − p_j;  d H / d l_j = −p_j (log p_j + H)."""
    gradient = np.empty(masses.shape, np.float32)
    for i in range(len(masses)):
        for k in range(len(bounds) - 1):
            first, end = bounds[k], bounds[k + 1]
            entropy = 0.0
            if d_entropy != 0.0:
                for j in range(first, end):
                    entropy -= _times_log(masses[i, j])
            for j in range(first, end):
                mass = masses[i, j]
                chosen = 1.0 if j == first + action[i, k] else 0.0
                slope = d_logp[i] * (chosen - mass)
                if d_entropy != 0.0:
                    slope -= d_entropy * (_times_log(mass) + mass * entropy)
                gradient[i, j] = slope
    return gradient


@numba.njit(cache=True, nogil=True)
def _times_log(mass: float) -> float:
    """Return p log p, which is 0 at 0."""
    return mass * math.log(mass) if mass > 0.0 else 0.0


@numba.njit(cache=True, nogil=True)
def _gaussian_sample(
    outputs: np.ndarray, middle: np.ndarray, extent: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    num_rows, size = noise.shape
    action = np.empty((num_rows, size), np.float32)
    logp = np.empty(num_rows, np.float32)
    for i in range(num_rows):
        total = 0.0
        for d in range(size):
            log_std = np.float64(outputs[i, size + d])
            action[i, d] = middle[d] + extent[d] * (outputs[i, d] + math.exp(log_std) * noise[i, d])
            total -= 0.5 * noise[i, d] ** 2 + log_std + math.log(extent[d]) + _HALF_LOG_2PI
        logp[i] = total
    return action, logp


@numba.njit(cache=True, nogil=True)
def _gaussian_evaluate(
    outputs: np.ndarray, middle: np.ndarray, extent: np.ndarray, action: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    num_rows, size = action.shape
    logp = np.zeros(num_rows, np.float64)
    entropy = np.zeros(num_rows, np.float64)
    for i in range(num_rows):
        for d in range(size):
            log_std = np.float64(outputs[i, size + d])
            offset = (action[i, d] - middle[d]) / extent[d] - outputs[i, d]
            z = offset * math.exp(-log_std)
            scale = log_std + math.log(extent[d]) + _HALF_LOG_2PI
            logp[i] -= 0.5 * z * z + scale
            entropy[i] += 0.5 + scale
    return logp, entropy


@numba.njit(cache=True, nogil=True)
def _gaussian_backward(
    outputs: np.ndarray,
    middle: np.ndarray,
    extent: np.ndarray,
    action: np.ndarray,
    d_logp: np.ndarray,
    d_entropy: float,
) -> np.ndarray:
    """d logp / d mean = z / std;  d logp / d log std = z² − 1;  d H / d log std = 1."""
    num_rows, size = action.shape
    gradient = np.empty(outputs.shape, np.float32)
    for i in range(num_rows):
        for d in range(size):
            inverse = math.exp(-np.float64(outputs[i, size + d]))
            z = ((action[i, d] - middle[d]) / extent[d] - outputs[i, d]) * inverse
            gradient[i, d] = d_logp[i] * z * inverse
            gradient[i, size + d] = d_logp[i] * (z * z - 1.0) + d_entropy
    return gradient

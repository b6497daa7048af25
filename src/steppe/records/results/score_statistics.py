"""Statistics of few runs, after Agarwal et al. (2021), "Deep reinforcement learning at the edge of the statistical precipice".

Scores are given as one array of runs per environment. Intervals are percentile bootstraps, stratified by environment: runs are drawn
with replacement within each environment. The seed is fixed, so that the same scores give the same intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Scores = Sequence[Array]  # an array of runs per environment
Statistic = Callable[[Array], Array]  # over the last axis
RESAMPLES, CONFIDENCE, SEED = 2_000, 0.95, 0


@dataclass(frozen=True)
class Estimate:
    """A statistic with its bootstrap interval."""

    value: float
    low: float
    high: float


def interquartile_mean(values: Array) -> Array:
    """Return the mean of the middle half of the last axis: a quarter of the values, rounded down, is cut at each end."""
    ordered = np.sort(values, axis=-1)
    cut = ordered.shape[-1] // 4
    middle: Array = ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)
    return middle


def median(values: Array) -> Array:
    """Return the median of the last axis."""
    found: Array = np.median(values, axis=-1)
    return found


def mean(values: Array) -> Array:
    """Return the mean of the last axis."""
    found: Array = values.mean(axis=-1)
    return found


def estimate(scores: Scores, statistic: Statistic, *, confidence: float = CONFIDENCE) -> Estimate:
    """Return a statistic of all runs of all environments together, with its stratified bootstrap interval."""
    value = float(statistic(np.concatenate(scores)))
    drawn = statistic(np.concatenate(_resample(scores, np.random.default_rng(SEED)), axis=-1))
    return Estimate(value, *_interval(drawn, confidence))


def performance_profile(
    scores: Scores, thresholds: Array, *, confidence: float = CONFIDENCE
) -> tuple[Array, Array, Array]:
    """Return, for each threshold, the share of runs that score above it, averaged over environments, with its interval."""

    def share(stratum: Array) -> Array:
        return np.stack([(stratum > threshold).mean(axis=-1) for threshold in thresholds], axis=-1)

    values = np.mean([share(stratum) for stratum in scores], axis=0)
    drawn = np.mean([share(stratum) for stratum in _resample(scores, np.random.default_rng(SEED))], axis=0)
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return values, low, high


def probability_of_improvement(one: Scores, other: Scores, *, confidence: float = CONFIDENCE) -> Estimate:
    """Return how probably a run of `one` scores higher than a run of `other`, averaged over environments; ties count half."""
    generator = np.random.default_rng(SEED)
    drawn = zip(_resample(one, generator), _resample(other, generator), strict=True)
    resampled = np.mean([_probability(x, y) for x, y in drawn], axis=0)
    value = float(np.mean([_probability(x, y) for x, y in zip(one, other, strict=True)]))
    return Estimate(value, *_interval(resampled, confidence))


def curve_at(curve: Sequence[tuple[int, float]], steps: Sequence[float]) -> Array:
    """Return the newest value of a curve at each number of steps; NaN before its first point."""
    points = sorted(curve)
    at = np.searchsorted([step for step, _ in points], steps, side="right")
    values = np.array([np.nan, *(value for _, value in points)])
    found: Array = values[at]
    return found


def sample_efficiency(
    curves: Sequence[Sequence[Sequence[tuple[int, float]]]], steps: Sequence[float], *, confidence: float = CONFIDENCE
) -> list[Estimate]:
    """Return the interquartile mean of all runs' newest evaluations at each number of steps; `curves[environment][run]`.

    Steps before the first evaluation of some run give NaN.
    """
    strata = [np.stack([curve_at(curve, steps) for curve in runs]) for runs in curves]
    return [
        estimate([stratum[:, at] for stratum in strata], interquartile_mean, confidence=confidence)
        if all(np.isfinite(stratum[:, at]).all() for stratum in strata)
        else Estimate(np.nan, np.nan, np.nan)
        for at in range(len(steps))
    ]


def steps_to_reach(curve: Sequence[tuple[int, float]], score: float) -> int | None:
    """Return the steps of a curve's first value of at least `score`; None if it has none."""
    return next((step for step, value in sorted(curve) if value >= score), None)


def normalize(values: Array, low: float, high: float) -> Array:
    """Map `low` to 0 and `high` to 1."""
    scaled: Array = (np.asarray(values, float) - low) / (high - low)
    return scaled


def _resample(scores: Scores, generator: np.random.Generator) -> list[Array]:
    """Return RESAMPLES draws of each environment's runs, with replacement: arrays [RESAMPLES, runs]."""
    return [stratum[generator.integers(len(stratum), size=(RESAMPLES, len(stratum)))] for stratum in scores]


def _interval(drawn: Array, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)


def _probability(one: Array, other: Array) -> Array:
    """Return the share of pairs, over the last axis of each, in which the first is higher; ties count half."""
    pairs = np.sign(one[..., :, None] - other[..., None, :])
    found: Array = (0.5 * (pairs + 1)).mean(axis=(-2, -1))
    return found

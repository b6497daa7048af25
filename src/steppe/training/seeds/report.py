"""The report on groups of seeds: what `steppe report` computes. records/results/report_pages.py renders it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.records.results.score_statistics import (
    CONFIDENCE,
    RESAMPLES,
    interquartile_mean,
    mean,
    median,
    normalize,
    performance_profile,
    probability_of_improvement,
    sample_efficiency,
    steps_to_reach,
)
from steppe.records.results.score_statistics import estimate as estimate_with_interval
from steppe.records.view import RunView
from steppe.training.seeds.group import SeedGroup

FORMAT = 1
PROFILE_POINTS, CURVE_POINTS = 61, 40
EFFICIENT_SHARE = 0.9  # of the way from the first to the final interquartile mean: "learned"
Bounds = Mapping[str, tuple[float, float]]
STATISTICS = {"iqm": interquartile_mean, "median": median, "mean": mean}


@dataclass(frozen=True)
class SeedSeries:
    """The runs of a group that have a final evaluation."""

    label: str
    group: str
    env: str
    seeds: list[int]
    scores: np.ndarray
    curves: list[list[tuple[int, float]]]
    unfinished: dict[int, str]  # seed → state


def parse_bounds(words: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return environment → (score that maps to 0, score that maps to 1), of words `env=low:high`."""
    bounds = {}
    for word in words:
        env, equals, numbers = word.partition("=")
        low, colon, high = numbers.partition(":")
        try:
            bounds[env] = (float(low), float(high))
        except ValueError:
            equals = ""
        if not equals or not colon or bounds[env][0] == bounds[env][1]:
            raise ConfigError(f"--normalize {word}: give an environment and two different scores, env=low:high")
    return bounds


def make_report(groups: Sequence[str | Path], bounds: Bounds | None = None) -> dict[str, Any]:
    """Return the report on groups as plain values. Groups of one algorithm in several environments are one label."""
    opened = [SeedGroup.open(group) for group in groups]
    series = [_read(group, label) for group, label in zip(opened, _labels(opened), strict=True)]
    if unknown := (bounds or {}).keys() - {one.env for one in series}:
        raise UsageError(f"--normalize {min(unknown)}: no group is of that environment")
    return compute_report(series, bounds or {})


def compute_report(series: Sequence[SeedSeries], bounds: Bounds) -> dict[str, Any]:
    """Return the report on series of scores as plain values."""
    empty = [one.group for one in series if not len(one.scores)]
    if empty:
        raise UsageError(f"{empty[0]} has no run with a final evaluation yet: wait for it, or resume it")
    envs = list(dict.fromkeys(one.env for one in series))
    sections = [_section(env, [one for one in series if one.env == env]) for env in envs]
    report: dict[str, Any] = {
        "format": FORMAT,
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "environments": sections,
        "normalized": None,
    }
    if bounds:
        missing = [env for env in envs if env not in bounds]
        if missing:
            raise UsageError(f"--normalize is missing for {missing[0]}: give env=low:high for every environment")
        report["normalized"] = _normalized(series, envs, bounds)
    return report


def _labels(groups: Sequence[SeedGroup]) -> list[str]:
    """Return each group's algorithm, or its name where two groups share algorithm and environment."""
    keys = [(group.manifest.config["algo"], group.manifest.config["env"]) for group in groups]
    repeated = {algo for (algo, _), count in Counter(keys).items() if count > 1}
    return [group.id if algo in repeated else str(algo) for group, (algo, _) in zip(groups, keys, strict=True)]


def _read(group: SeedGroup, label: str) -> SeedSeries:
    seeds, scores, curves, unfinished = [], [], [], {}
    runs = group.existing()
    for result in group.results():
        score = result.summary.get("eval_return_mean")
        if result.state != "SUCCEEDED" or score is None:
            unfinished[result.seed] = result.state
            continue
        view = RunView(runs[result.seed])
        view.refresh()
        seeds.append(result.seed)
        scores.append(float(score))
        curves.append(list(view.evaluations))
    return SeedSeries(label, group.id, str(group.manifest.config["env"]), seeds, np.array(scores), curves, unfinished)


def _section(env: str, series: Sequence[SeedSeries]) -> dict[str, Any]:
    """Return the statistics of one environment, in its own scores."""
    return {
        "env": env,
        "series": [_row(one) for one in series],
        "improvement": _improvements({one.label: [one.scores] for one in series}),
        "profile": _profiles({one.label: [one.scores] for one in series}),
        "efficiency": _efficiency({one.label: [one.curves] for one in series}),
    }


def _row(one: SeedSeries) -> dict[str, Any]:
    return {
        "label": one.label,
        "group": one.group,
        "seeds": one.seeds,
        "unfinished": {str(seed): state for seed, state in one.unfinished.items()},
        "scores": one.scores.tolist(),
        **_estimates([one.scores]),
        "worst": float(one.scores.min()),
        "best": float(one.scores.max()),
        "steps_to_learn": _steps_to_learn(one),
    }


def _estimates(scores: Sequence[np.ndarray]) -> dict[str, Any]:
    return {name: asdict(estimate_with_interval(scores, statistic)) for name, statistic in STATISTICS.items()}


def _steps_to_learn(one: SeedSeries) -> int | None:
    """Return the steps by which half of the runs got EFFICIENT_SHARE of the way to the final score; None if fewer did."""
    firsts = [curve[0][1] for curve in one.curves if curve]
    if len(firsts) < len(one.curves):
        return None
    final, first = float(interquartile_mean(one.scores)), float(np.mean(firsts))
    reached = [steps_to_reach(curve, first + EFFICIENT_SHARE * (final - first)) for curve in one.curves]
    ordered = sorted(np.inf if steps is None else steps for steps in reached)
    typical = ordered[(len(ordered) - 1) // 2]
    return int(typical) if np.isfinite(typical) else None


def _improvements(scores: Mapping[str, list[np.ndarray]]) -> list[dict[str, Any]]:
    """Return, for each ordered pair of labels, how probably a run of the first is better."""
    pairs = [(one, other) for one in scores for other in scores if one != other]
    return [
        {"label": one, "over": other, **asdict(probability_of_improvement(scores[one], scores[other]))}
        for one, other in pairs
        if len(scores[one]) == len(scores[other])
    ]


def _profiles(scores: Mapping[str, list[np.ndarray]]) -> dict[str, Any]:
    together = np.concatenate([stratum for strata in scores.values() for stratum in strata])
    margin = 0.05 * float(np.ptp(together)) or 1.0
    thresholds = np.linspace(together.min() - margin, together.max() + margin, PROFILE_POINTS)
    found: dict[str, Any] = {"thresholds": thresholds.tolist(), "series": {}}
    for label, strata in scores.items():
        values, low, high = performance_profile(strata, thresholds)
        found["series"][label] = {"value": values.tolist(), "low": low.tolist(), "high": high.tolist()}
    return found


def _efficiency(curves: Mapping[str, list[list[list[tuple[int, float]]]]]) -> dict[str, Any]:
    """Return the interquartile mean of evaluations over the steps that all runs of all labels have in common."""
    flat = [curve for strata in curves.values() for runs in strata for curve in runs]
    if not all(flat):
        return {"steps": [], "series": {}}
    start, end = max(curve[0][0] for curve in flat), max(curve[-1][0] for curve in flat)
    steps = np.unique(np.linspace(start, end, CURVE_POINTS).astype(int)).tolist()
    found: dict[str, Any] = {"steps": steps, "series": {}}
    for label, strata in curves.items():
        estimates = [asdict(one) for one in sample_efficiency(strata, steps)]
        found["series"][label] = {key: [one[key] for one in estimates] for key in ("value", "low", "high")}
    return found


def _normalized(series: Sequence[SeedSeries], envs: Sequence[str], bounds: Bounds) -> dict[str, Any]:
    """Return the statistics over all environments, of labels that have runs in each of them."""
    by_label: dict[str, dict[str, SeedSeries]] = {}
    for one in series:
        by_label.setdefault(one.label, {})[one.env] = one
    whole = {label: [found[env] for env in envs] for label, found in by_label.items() if len(found) == len(envs)}
    if not whole:
        raise UsageError(
            "no algorithm has a group in every environment: leave out --normalize, or give the other groups"
        )
    scores = {label: [normalize(one.scores, *bounds[one.env]) for one in found] for label, found in whole.items()}
    curves = {label: [_normalized_curves(one, bounds[one.env]) for one in found] for label, found in whole.items()}
    return {
        "bounds": {env: list(bounds[env]) for env in envs},
        "series": [
            {"label": label, "runs": sum(map(len, strata)), **_estimates(strata)} for label, strata in scores.items()
        ],
        "improvement": _improvements(scores),
        "profile": _profiles(scores),
        "efficiency": _efficiency(curves),
    }


def _normalized_curves(one: SeedSeries, bounds: tuple[float, float]) -> list[list[tuple[int, float]]]:
    return [[(step, float(normalize(np.array(value), *bounds))) for step, value in curve] for curve in one.curves]

"""Targets and measured values, and whether each target is met."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.measuring import Row, finite


@dataclass(frozen=True)
class Claim:
    """A target and the measured value; None if it could not be measured."""

    what: str
    asked: float
    measured: float | None
    unit: str = "×"
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.asked if self.at_least else self.measured <= self.asked

    def record(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "asked": self.asked,
            "at_least": self.at_least,
            "unit": self.unit,
            "measured": finite(self.measured),
            "met": self.met,
        }


def ratio(rows: Mapping[str, Row], ours: str, *theirs: str) -> float | None:
    """Ratio of our median to the largest of theirs; None if one is missing."""
    return _over(rows, ours, theirs, max)


def ratio_to_smallest(rows: Mapping[str, Row], ours: str, *theirs: str) -> float | None:
    """Ratio of our median to the smallest of theirs, for figures where less is better."""
    return _over(rows, ours, theirs, min)


def further(rows: Mapping[str, Row], label: str, key: str) -> float | None:
    """Median of an additional figure of a row; None if it is missing."""
    found = [run.reading.extra.get(key) for run in rows[label].runs]
    values = [float(value) for value in found if value is not None]
    return statistics.median(values) if values and not rows[label].error else None


def further_ratio(rows: Mapping[str, Row], key: str, ours: str, theirs: str) -> float | None:
    """Ratio of our median to theirs for an additional figure."""
    mine, other = further(rows, ours, key), further(rows, theirs, key)
    return mine / other if mine is not None and other else None


def same_settings(
    rows: Mapping[str, Row], ours: str, theirs: str, keys: Sequence[str] = ("envs", "rollout", "epochs", "minibatch")
) -> bool:
    """Whether both sides printed the same values of these settings; otherwise a claim about equal settings is void."""
    typical = [rows[label].typical for label in (ours, theirs)]
    used = [tuple(run.reading.settings.get(key) for key in keys) for run in typical if run is not None]
    return len(used) == 2 and used[0] == used[1]


def _over(rows: Mapping[str, Row], ours: str, theirs: Sequence[str], choose: Any) -> float | None:
    medians = [rows[label].median for label in (ours, *theirs)]
    if any(median is None for median in medians):
        return None
    mine, *others = (float(median) for median in medians if median is not None)
    other = choose(others)
    return mine / other if other > 0 and math.isfinite(mine) else None

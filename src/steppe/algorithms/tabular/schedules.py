"""Schedules of a learning rate or of epsilon over the number of environment steps."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from steppe.core.contracts.errors import ConfigError


class Schedule(ABC):
    """A rate between 0 and 1 as a function of the number of steps taken so far."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the rate after `step` steps."""

    def values(self, steps: np.ndarray) -> np.ndarray:
        """Return the rate after each of these numbers of steps."""
        return np.array([self(int(step)) for step in steps], np.float64)


@dataclass(frozen=True)
class ConstantSchedule(Schedule):
    """A constant rate."""

    value: float

    def __post_init__(self) -> None:
        _require_rate(self, "value")

    def __call__(self, step: int) -> float:
        """Return the constant."""
        return self.value


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """Linear from `start` to `end` over `num_steps` steps, then `end`."""

    start: float
    end: float
    num_steps: int

    def __post_init__(self) -> None:
        _require_rate(self, "start", "end")
        if self.num_steps < 1:
            raise ConfigError(f"LinearSchedule: num_steps={self.num_steps} must be at least 1")

    def __call__(self, step: int) -> float:
        """Return the interpolated rate, or `end` after the last step."""
        return self.start + (self.end - self.start) * min(step / self.num_steps, 1.0)


@dataclass(frozen=True)
class ExponentialSchedule(Schedule):
    """`start` times `decay` for every step, but never less than `minimum`."""

    start: float
    decay: float
    minimum: float = 0.0

    def __post_init__(self) -> None:
        _require_rate(self, "start", "decay", "minimum")
        if self.minimum > self.start:
            raise ConfigError(f"ExponentialSchedule: minimum={self.minimum} is above start={self.start}")

    @classmethod
    def over(cls, start: float, end: float, num_steps: int) -> ExponentialSchedule:
        """Return a schedule that falls from `start` to `end` in `num_steps` steps and stays there."""
        if not (0.0 < end <= start and num_steps >= 1):
            raise ConfigError(f"cannot fall from {start} to {end} in {num_steps} steps: give 0 < end <= start")
        return cls(start, (end / start) ** (1.0 / num_steps), end)

    def __call__(self, step: int) -> float:
        """Return start · decay^step, or the minimum if that is larger."""
        return max(self.start * self.decay**step, self.minimum)


_KINDS: dict[str, type[Schedule]] = {
    kind.__name__: kind for kind in (ConstantSchedule, LinearSchedule, ExponentialSchedule)
}


def to_plain(rate: float | Schedule) -> Any:
    """Return a rate as plain data for `from_plain`; ConfigError for a user's own schedule class."""
    if not isinstance(rate, Schedule):
        return rate
    if type(rate).__name__ not in _KINDS or not dataclasses.is_dataclass(rate):
        raise ConfigError(f"a {type(rate).__name__} cannot be saved: set a plain rate or one of {', '.join(_KINDS)}")
    return {"kind": type(rate).__name__, **dataclasses.asdict(rate)}


def from_plain(plain: Any) -> float | Schedule:
    """Return the rate that `to_plain` encoded."""
    if not isinstance(plain, dict):
        return float(plain)
    values = dict(plain)
    return _KINDS[values.pop("kind")](**values)


def require_rate(value: float, name: str, *, least: float = 0.0) -> float:
    """Return the value as a float; ConfigError unless it is a finite number from `least` to 1."""
    if isinstance(value, bool) or not (isinstance(value, int | float | np.number) and math.isfinite(value)):
        raise ConfigError(f"{name}={value!r} must be a number or a schedule")
    if not least <= value <= 1.0:
        raise ConfigError(f"{name}={value} must be between {least:g} and 1")
    return float(value)


def _require_rate(schedule: Schedule, *names: str) -> None:
    for name in names:
        require_rate(getattr(schedule, name), f"{type(schedule).__name__}: {name}")

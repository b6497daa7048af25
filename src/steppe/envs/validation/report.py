"""Report shared by the environment checks: one sentence per mistake, without duplicates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

MAX_FINDINGS = 10  # a check stops after this many


class EnvCheckReport:
    """Trace of a random rollout through an environment, and the mistakes found in it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.trace: list[tuple[Any, ...]] = []

    def report(self, sentence: str) -> None:
        """Add a sentence to the findings unless it is already there."""
        if sentence not in self.found:
            self.found.append(sentence)

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a user's function; if it raises, report that and return None."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any exception of the user's code is reported
            self.report(f"{what} raised {type(error).__name__}: {error}")
            return None

    def flag(self, value: Any, name: str) -> None:
        """Report a termination or truncation flag that is not a bool."""
        if not isinstance(value, (bool, np.bool_)):
            self.report(f"step() must return {name} as a bool, not {shorten(value)}")

    def reward(self, reward: Any, whose: str = "the reward") -> None:
        """Report a reward that is not a finite number."""
        try:
            number = float(reward)
        except (TypeError, ValueError):
            self.report(f"{whose} must be a number, not {shorten(reward)}")
            return
        if not math.isfinite(number):
            self.report(f"{whose} is {number}")

    def observation(self, space: gym.Space[Any], raw: Any, whose: str) -> None:
        """Report an observation outside its space, or with a NaN or an infinity."""
        box = isinstance(space, gym.spaces.Box)
        if (not box or isinstance(raw, (np.ndarray, np.generic))) and space.contains(raw):
            if box and not np.isfinite(raw).all():  # infinite bounds contain infinity
                self.report(f"{whose} has a NaN or an infinity: {shorten(raw)}")
            return
        self.report(f"{whose} is outside its space {space}: {_reason(space, raw)}")


def _reason(space: gym.Space[Any], raw: Any) -> str:
    if not isinstance(space, gym.spaces.Box):
        return f"it is {shorten(raw)}"
    if not isinstance(raw, np.ndarray):
        return f"it is a {type(raw).__name__}, not an array"
    if raw.shape != space.shape:
        return f"its shape is {raw.shape}, not {space.shape}"
    if not np.can_cast(raw.dtype, space.dtype):
        return f"its dtype is {raw.dtype}, not {space.dtype}"
    if not np.isfinite(raw).all():
        return f"it has a NaN or an infinity: {shorten(raw)}"
    return f"it is outside the bounds: {shorten(raw)}"


def shorten(value: Any) -> str:
    """Return the repr of a value, cut to at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

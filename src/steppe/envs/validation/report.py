"""What checks of environments share: one sentence for each thing that is wrong, said once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

MOST = 10  # a check that finds this much has said enough


class Findings:
    """Everything seen on a walk through an environment, and everything found wrong."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.trace: list[tuple[Any, ...]] = []

    def say(self, sentence: str) -> None:
        """Say it, unless it has been said."""
        if sentence not in self.found:
            self.found.append(sentence)

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a user's function returns; None, and a sentence, if it raises."""
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - to report whatever a user's code raises is the purpose
            self.say(f"{what} raised {type(error).__name__}: {error}")
            return None

    def flag(self, value: Any, name: str) -> None:
        """An end must be a bool."""
        if not isinstance(value, (bool, np.bool_)):
            self.say(f"step() must return {name} as a bool, not {short(value)}")

    def reward(self, reward: Any, whose: str = "the reward") -> None:
        """A reward must be a finite number."""
        try:
            number = float(reward)
        except (TypeError, ValueError):
            self.say(f"{whose} must be a number, not {short(reward)}")
            return
        if not math.isfinite(number):
            self.say(f"{whose} is {number}")

    def observation(self, space: gym.Space[Any], raw: Any, whose: str) -> None:
        """An observation must lie in its space."""
        box = isinstance(space, gym.spaces.Box)
        if (not box or isinstance(raw, (np.ndarray, np.generic))) and space.contains(raw):
            if box and not np.isfinite(raw).all():  # infinite bounds contain infinity
                self.say(f"{whose} has a NaN or an infinity: {short(raw)}")
            return
        self.say(f"{whose} is outside its space {space}: {_reason(space, raw)}")


def _reason(space: gym.Space[Any], raw: Any) -> str:
    if not isinstance(space, gym.spaces.Box):
        return f"it is {short(raw)}"
    if not isinstance(raw, np.ndarray):
        return f"it is a {type(raw).__name__}, not an array"
    if raw.shape != space.shape:
        return f"its shape is {raw.shape}, not {space.shape}"
    if not np.can_cast(raw.dtype, space.dtype):
        return f"its dtype is {raw.dtype}, not {space.dtype}"
    if not np.isfinite(raw).all():
        return f"it has a NaN or an infinity: {short(raw)}"
    return f"it lies beyond the bounds: {short(raw)}"


def short(value: Any) -> str:
    """A value in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""Says in plain sentences what is wrong with an environment, before a run finds out."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import data_equivalence

from steppe.core import factory
from steppe.core.config import EnvConfig
from steppe.core.errors import UsageError, WorldError
from steppe.envs.finding import find
from steppe.envs.making import make_env
from steppe.envs.spaces import action_rule, observation_rule

Env = gym.Env[Any, Any]
_MOST = 10  # a check that finds this much has said enough


def require_sound(env: str | Callable[..., Env], *, steps: int = 300, seed: int = 0, **kwargs: Any) -> None:
    """Raise WorldError with everything `check` finds."""
    found = check(env, steps=steps, seed=seed, **kwargs)
    if found:
        raise WorldError(f"{factory.reference(env)}: " + "; ".join(found))


def check(env: str | Callable[..., Env], *, steps: int = 300, seed: int = 0, **kwargs: Any) -> list[str]:
    """What is wrong with an environment, one sentence each; empty if `steps` random steps, taken twice, show nothing.

    `kwargs` go to the environment's constructor.
    """
    text = factory.reference(env)
    config = EnvConfig(kwargs=kwargs, vector="loop")
    try:
        source = find(text)
        made = make_env(text, source, config)
    except UsageError as error:
        return [str(error)]
    with made:
        found = _spaces(made, text) or _signature(made)
        if found:
            return found
        walk = _Walk(made)
        walk.go(steps, seed)
    if walk.found:
        return walk.found
    with make_env(text, source, config) as again:
        second = _Walk(again)
        second.go(steps, seed)
    return _differences(walk, second, seed)


def _spaces(env: Env, text: str) -> list[str]:
    found = []
    for rule, space in ((observation_rule, env.observation_space), (action_rule, env.action_space)):
        try:
            rule(space, text)
        except UsageError as error:
            found.append(str(error))
    return found


def _signature(env: Env) -> list[str]:
    parameters = inspect.signature(env.unwrapped.reset).parameters
    if "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return ["reset() takes no seed: define it as reset(self, *, seed=None, options=None)"]


class _Walk:
    """Random steps through one environment, with everything seen and everything found wrong."""

    def __init__(self, env: Env) -> None:
        self.env = env
        self.found: list[str] = []
        self.trace: list[tuple[Any, ...]] = []

    def go(self, steps: int, seed: int) -> None:
        """Walk until the steps are done or what was found leaves no way on."""
        self.env.action_space.seed(seed)
        going = self._reset(seed)
        while going and len(self.trace) < steps and len(self.found) < _MOST:
            going = self._step()

    def _say(self, sentence: str) -> None:
        if sentence not in self.found:
            self.found.append(sentence)

    def _call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - to report whatever a user's code raises is the purpose
            self._say(f"{what} raised {type(error).__name__}: {error}")
            return None

    def _reset(self, seed: int | None) -> bool:
        result = self._call("reset()", self.env.reset, seed=seed)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            self._say(f"reset() must return (observation, info), info being a dict, not {_short(result)}")
            return False
        self._observation(result[0], "reset()")
        self.trace.append((copy.deepcopy(result[0]),))
        return True

    def _step(self) -> bool:
        action = self.env.action_space.sample()
        result = self._call(f"step({_short(action)})", self.env.step, action)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 5):
            self._say(f"step() must return (observation, reward, terminated, truncated, info), not {_short(result)}")
            return False
        raw, reward, terminated, truncated, info = result
        self._observation(raw, "step()")
        self._reward(reward)
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, (bool, np.bool_)):
                self._say(f"step() must return {name} as a bool, not {_short(value)}")
        if not isinstance(info, dict):
            self._say(f"step() must return info as a dict, not {_short(info)}")
        self.trace.append((copy.deepcopy(raw), reward, bool(terminated), bool(truncated)))
        return self._reset(None) if terminated or truncated else True

    def _reward(self, reward: Any) -> None:
        try:
            number = float(reward)
        except (TypeError, ValueError):
            self._say(f"the reward must be a number, not {_short(reward)}")
            return
        if not math.isfinite(number):
            self._say(f"the reward is {number}")

    def _observation(self, raw: Any, where: str) -> None:
        space = self.env.observation_space
        box = isinstance(space, gym.spaces.Box)
        if (not box or isinstance(raw, (np.ndarray, np.generic))) and space.contains(raw):
            if box and not np.isfinite(raw).all():  # infinite bounds contain infinity
                self._say(f"the observation from {where} has a NaN or an infinity: {_short(raw)}")
            return
        self._say(f"the observation from {where} is outside its space {space}: {_reason(space, raw)}")


def _reason(space: gym.Space[Any], raw: Any) -> str:
    if not isinstance(space, gym.spaces.Box):
        return f"it is {_short(raw)}"
    if not isinstance(raw, np.ndarray):
        return f"it is a {type(raw).__name__}, not an array"
    if raw.shape != space.shape:
        return f"its shape is {raw.shape}, not {space.shape}"
    if not np.can_cast(raw.dtype, space.dtype):
        return f"its dtype is {raw.dtype}, not {space.dtype}"
    if not np.isfinite(raw).all():
        return f"it has a NaN or an infinity: {_short(raw)}"
    return f"it lies beyond the bounds: {_short(raw)}"


def _differences(first: _Walk, second: _Walk, seed: int) -> list[str]:
    for number, (one, other) in enumerate(zip(first.trace, second.trace, strict=False)):
        if not data_equivalence(one, other, exact=True):
            return [
                f"two copies with the same seed ({seed}) and the same actions differ after {number} calls "
                f"({_short(one)} and {_short(other)}): draw random numbers from self.np_random, "
                "which super().reset(seed=seed) prepares"
            ]
    return second.found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

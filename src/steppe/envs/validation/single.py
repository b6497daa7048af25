"""Says in plain sentences what is wrong with an environment, before a run finds out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium as gym
from gymnasium.utils.env_checker import data_equivalence

from steppe.core.config import references
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import UsageError, WorldError
from steppe.envs.factory import is_team, make_env
from steppe.envs.lookup import find
from steppe.envs.validation.multi import TeamWalk, team_spaces
from steppe.envs.validation.report import MOST, Findings, short
from steppe.envs.vector.spaces import action_rule, observation_rule

Env = gym.Env[Any, Any]


def require_sound(env: str | Callable[..., Any], *, steps: int = 300, seed: int = 0, **kwargs: Any) -> None:
    """Raise WorldError with everything `check` finds."""
    found = check(env, steps=steps, seed=seed, **kwargs)
    if found:
        raise WorldError(f"{references.reference(env)}: " + "; ".join(found))


def check(env: str | Callable[..., Any], *, steps: int = 300, seed: int = 0, **kwargs: Any) -> list[str]:
    """What is wrong with an environment, one sentence each; empty if `steps` random steps, taken twice, show nothing.

    It may be Gymnasium's or PettingZoo's. `kwargs` go to its constructor.
    """
    text = references.reference(env)
    config = EnvConfig(kwargs=kwargs, vector="loop")
    try:
        source = find(text)
        made = make_env(text, source, config)
    except UsageError as error:
        return [str(error)]
    team = is_team(made)
    with closing(made):
        found = (team_spaces(made, text) if team else _spaces(made, text)) or _signature(made)
        if found:
            return found
        walk: Walk | TeamWalk = TeamWalk(made) if team else Walk(made)
        walk.go(steps, seed)
    if walk.found:
        return walk.found
    with closing(make_env(text, source, config)) as again:
        second: Walk | TeamWalk = TeamWalk(again) if team else Walk(again)
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


def _signature(env: Any) -> list[str]:
    parameters = inspect.signature(getattr(env, "unwrapped", env).reset).parameters
    if "seed" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return []
    return ["reset() takes no seed: define it as reset(self, *, seed=None, options=None)"]


class Walk(Findings):
    """Random steps through one environment."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.env = env

    def go(self, steps: int, seed: int) -> None:
        """Walk until the steps are done or what was found leaves no way on."""
        self.env.action_space.seed(seed)
        going = self._reset(seed)
        while going and len(self.trace) < steps and len(self.found) < MOST:
            going = self._step()

    def _reset(self, seed: int | None) -> bool:
        result = self.call("reset()", self.env.reset, seed=seed)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            self.say(f"reset() must return (observation, info), info being a dict, not {short(result)}")
            return False
        self.observation(self.env.observation_space, result[0], "the observation from reset()")
        self.trace.append((copy.deepcopy(result[0]),))
        return True

    def _step(self) -> bool:
        action = self.env.action_space.sample()
        result = self.call(f"step({short(action)})", self.env.step, action)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 5):
            self.say(f"step() must return (observation, reward, terminated, truncated, info), not {short(result)}")
            return False
        raw, reward, terminated, truncated, info = result
        self.observation(self.env.observation_space, raw, "the observation from step()")
        self.reward(reward)
        self.flag(terminated, "terminated")
        self.flag(truncated, "truncated")
        if not isinstance(info, dict):
            self.say(f"step() must return info as a dict, not {short(info)}")
        self.trace.append((copy.deepcopy(raw), reward, bool(terminated), bool(truncated)))
        return self._reset(None) if terminated or truncated else True


def _differences(first: Findings, second: Findings, seed: int) -> list[str]:
    for number, (one, other) in enumerate(zip(first.trace, second.trace, strict=False)):
        if not data_equivalence(one, other, exact=True):
            return [
                f"two copies with the same seed ({seed}) and the same actions differ after {number} calls "
                f"({short(one)} and {short(other)}): draw random numbers from self.np_random, "
                "which super().reset(seed=seed) prepares"
            ]
    return second.found

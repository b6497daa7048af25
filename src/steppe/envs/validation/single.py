"""Check an environment and describe its mistakes in plain sentences, before they break a run."""

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
from steppe.envs.factory import is_multi_agent, make_env
from steppe.envs.lookup import find_env
from steppe.envs.validation.multi import MultiAgentChecker, check_agent_spaces
from steppe.envs.validation.report import MAX_FINDINGS, EnvCheckReport, shorten
from steppe.envs.vector.spaces import make_action_decoder, make_observation_encoder

GymEnv = gym.Env[Any, Any]


def require_valid_env(env: str | Callable[..., Any], *, steps: int = 300, seed: int = 0, **kwargs: Any) -> None:
    """Raise WorldError with everything `check_env` finds."""
    found = check_env(env, steps=steps, seed=seed, **kwargs)
    if found:
        raise WorldError(f"{references.make_reference(env)}: " + "; ".join(found))


def check_env(env: str | Callable[..., Any], *, steps: int = 300, seed: int = 0, **kwargs: Any) -> list[str]:
    """Return one sentence per mistake in an environment; empty if two random rollouts of `steps` steps find none.

    `env` may be a Gymnasium or a PettingZoo environment. `kwargs` are passed to its constructor.
    """
    text = references.make_reference(env)
    config = EnvConfig(kwargs=kwargs, vector="loop")
    try:
        source = find_env(text)
        made = make_env(text, source, config)
    except UsageError as error:
        return [str(error)]
    team = is_multi_agent(made)
    with closing(made):
        found = (check_agent_spaces(made, text) if team else _spaces(made, text)) or _signature(made)
        if found:
            return found
        walk: SingleAgentChecker | MultiAgentChecker = MultiAgentChecker(made) if team else SingleAgentChecker(made)
        walk.run(steps, seed)
    if walk.found:
        return walk.found
    with closing(make_env(text, source, config)) as again:
        second: SingleAgentChecker | MultiAgentChecker = MultiAgentChecker(again) if team else SingleAgentChecker(again)
        second.run(steps, seed)
    return _compare_traces(walk, second, seed)


def _spaces(env: GymEnv, text: str) -> list[str]:
    found = []
    for rule, space in ((make_observation_encoder, env.observation_space), (make_action_decoder, env.action_space)):
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


class SingleAgentChecker(EnvCheckReport):
    """Random rollout through one environment."""

    def __init__(self, env: GymEnv) -> None:
        super().__init__()
        self.env = env

    def run(self, steps: int, seed: int) -> None:
        """Step until `steps` are done, MAX_FINDINGS is reached, or a mistake makes it impossible to continue."""
        self.env.action_space.seed(seed)
        going = self._reset(seed)
        while going and len(self.trace) < steps and len(self.found) < MAX_FINDINGS:
            going = self._step()

    def _reset(self, seed: int | None) -> bool:
        result = self.call("reset()", self.env.reset, seed=seed)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            self.report(f"reset() must return (observation, info), info being a dict, not {shorten(result)}")
            return False
        self.observation(self.env.observation_space, result[0], "the observation from reset()")
        self.trace.append((copy.deepcopy(result[0]),))
        return True

    def _step(self) -> bool:
        action = self.env.action_space.sample()
        result = self.call(f"step({shorten(action)})", self.env.step, action)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 5):
            self.report(f"step() must return (observation, reward, terminated, truncated, info), not {shorten(result)}")
            return False
        raw, reward, terminated, truncated, info = result
        self.observation(self.env.observation_space, raw, "the observation from step()")
        self.reward(reward)
        self.flag(terminated, "terminated")
        self.flag(truncated, "truncated")
        if not isinstance(info, dict):
            self.report(f"step() must return info as a dict, not {shorten(info)}")
        self.trace.append((copy.deepcopy(raw), reward, bool(terminated), bool(truncated)))
        return self._reset(None) if terminated or truncated else True


def _compare_traces(first: EnvCheckReport, second: EnvCheckReport, seed: int) -> list[str]:
    for number, (one, other) in enumerate(zip(first.trace, second.trace, strict=False)):
        if not data_equivalence(one, other, exact=True):
            return [
                f"two copies with the same seed ({seed}) and the same actions differ after {number} calls "
                f"({shorten(one)} and {shorten(other)}): draw random numbers from self.np_random, "
                "which super().reset(seed=seed) prepares"
            ]
    return second.found

"""Check a multi-agent environment; single.py has the entry point and report.py the checks shared by all."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np

from steppe.core.contracts.errors import UsageError
from steppe.envs.validation.report import MAX_FINDINGS, EnvCheckReport, shorten
from steppe.envs.vector.spaces import make_action_decoder, make_observation_encoder

AgentDict = dict[Any, Any]  # by agent
_PARTS = ("observations", "rewards", "terminations", "truncations", "infos")


def check_agent_spaces(env: Any, text: str) -> list[str]:
    """Return one sentence per mistake in the agents' spaces."""
    found: list[str] = []
    for agent in env.possible_agents:
        for name, rule in (("observation_space", make_observation_encoder), ("action_space", make_action_decoder)):
            sentence = _space(env, agent, name, rule, text)
            if sentence is not None and sentence not in found:
                found.append(sentence)
    return found


def _space(env: Any, agent: Any, name: str, rule: Any, text: str) -> str | None:
    ask = getattr(env, name, None)
    if not callable(ask):
        return f"{name} must be a function of the agent, as in {name}({agent!r}), not {shorten(ask)}"
    try:
        space, again = ask(agent), ask(agent)
    except Exception as error:  # noqa: BLE001 - any exception of the user's code is reported
        return f"{name}({agent!r}) raised {type(error).__name__}: {error}"
    if not isinstance(space, gym.Space):
        return f"{name}({agent!r}) must be a gymnasium space, not {shorten(space)}"
    if space != again:
        return f"{name}({agent!r}) is another space at every call: make it once and keep it"
    try:
        rule(space, f"{agent} of {text}")
    except UsageError as error:
        return str(error)
    return None


class MultiAgentChecker(EnvCheckReport):
    """Random rollout through one environment, with an action for every agent in `agents`."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.env = env
        self.gone: set[Any] = set()  # agents that ended in this episode

    def run(self, steps: int, seed: int) -> None:
        """Step until `steps` are done, MAX_FINDINGS is reached, or a mistake makes it impossible to continue."""
        for index, agent in enumerate(self.env.possible_agents):
            self.env.action_space(agent).seed(seed + index)
        going = self._reset(seed)
        while going and len(self.trace) < steps and len(self.found) < MAX_FINDINGS:
            going = self._step()

    def _reset(self, seed: int) -> bool:
        result = self.call("reset()", self.env.reset, seed=seed)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, dict) for part in result)):
            self.report(f"reset() must return (observations, infos), two dicts by agent, not {shorten(result)}")
            return False
        self.gone = set()
        if not self._known():
            return False
        if not self.env.agents:
            self.report("`agents` is empty after reset(): an episode begins with at least one agent")
            return False
        self._complete(result[0], list(self.env.agents), "observations of reset()")
        self._observations(result[0], "reset()")
        self._infos(result[1], "reset()")
        self.trace.append((copy.deepcopy(result[0]), list(self.env.agents)))
        return True

    def _step(self) -> bool:
        acting = list(self.env.agents)
        actions = {agent: self.env.action_space(agent).sample() for agent in acting}
        result = self.call(f"step({shorten(actions)})", self.env.step, actions)
        if result is None and self.found:
            return False
        if not (isinstance(result, tuple) and len(result) == 5 and all(isinstance(part, dict) for part in result)):
            self.report(f"step() must return {', '.join(_PARTS)}: five dicts by agent, not {shorten(result)}")
            return False
        for name, part in zip(_PARTS[:4], result[:4], strict=True):
            self._complete(part, acting, name)
        observations, rewards, terminated, truncated, infos = result
        self._observations(observations, "step()")
        self._infos(infos, "step()")
        for agent, reward in rewards.items():
            self.reward(reward, f"the reward of {agent!r}")
        for name, ends in (("terminations", terminated), ("truncations", truncated)):
            for agent, value in ends.items():
                self.flag(value, f"{name}[{agent!r}]")
        if not self._known() or not self._check_agents_list(acting, terminated, truncated):
            return False
        self.trace.append((copy.deepcopy(observations), dict(rewards), dict(terminated), dict(truncated)))
        return True if self.env.agents else self._reset(len(self.trace))

    def _known(self) -> bool:
        """Report and return False unless `agents` is a list of distinct possible agents."""
        agents = self.env.agents
        if not isinstance(agents, list):
            self.report(f"`agents` must be a list, not {shorten(agents)}")
            return False
        unlisted = [agent for agent in agents if agent not in self.env.possible_agents]
        if unlisted:
            self.report(
                f"{unlisted[0]!r} is in `agents` but not in `possible_agents`: list every agent that may appear"
            )
        repeated = len(set(agents)) < len(agents)
        if repeated:
            self.report(f"`agents` contains an agent twice: {shorten(agents)}")
        return not unlisted and not repeated

    def _complete(self, part: AgentDict, agents: list[Any], name: str) -> None:
        for agent in agents:
            if agent not in part:
                self.report(f"the {name} have nothing for {agent!r}, which was in `agents`")
        for agent in part:
            if agent not in self.env.possible_agents:
                self.report(f"the {name} have something for {agent!r}, which is not in `possible_agents`")
            elif agent in self.gone:
                self.report(f"the {name} have something for {agent!r}, whose episode ended at an earlier step")

    def _observations(self, observations: AgentDict, where: str) -> None:
        for agent, raw in observations.items():
            if agent in self.env.possible_agents:
                self.observation(self.env.observation_space(agent), raw, f"the observation of {agent!r} from {where}")

    def _infos(self, infos: AgentDict, where: str) -> None:
        count = len(self.env.possible_agents)
        for agent, info in infos.items():
            if not isinstance(info, dict):
                self.report(f"{where} must return a dict as the info of {agent!r}, not {shorten(info)}")
            elif "comm_mask" in info and np.shape(info["comm_mask"]) != (count,):
                shape = np.shape(info["comm_mask"])
                self.report(
                    f"the comm_mask of {agent!r} has shape {shape}, not ({count},), one for each possible agent"
                )

    def _check_agents_list(self, acting: list[Any], terminated: AgentDict, truncated: AgentDict) -> bool:
        """Report and return False unless `agents` is consistent with the agents that acted and those that ended."""
        ended = {agent for agent in acting if terminated.get(agent) or truncated.get(agent)}
        self.gone |= ended
        ghosts = [agent for agent in self.env.agents if agent in self.gone]
        for agent in ghosts:
            again = "is still" if agent in ended else "is again"
            self.report(f"{agent!r} {again} in `agents` after its episode ended: take it out, until the next reset()")
        lost = [agent for agent in acting if agent not in ended and agent not in self.env.agents]
        for agent in lost:
            self.report(f"{agent!r} left `agents` without having been terminated or truncated")
        return not ghosts and not lost

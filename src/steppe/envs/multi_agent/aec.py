"""Convert PettingZoo's turn-based (AEC) environments to parallel ones.

If an environment is parallelizable (`is_parallelizable`), a step is a round in which every agent acts. Otherwise a step
is one turn: only the selected agent acts. The other agents still get observations and rewards and may terminate, but
their actions are ignored. One more component of the observation says whether it is the agent's turn, unless the
observation is an image or a state index.
"""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from steppe.core.contracts.errors import MissingExtra
from steppe.envs.multi_agent.masked_numbers import MaskedStateIndexer
from steppe.envs.wrappers.images import is_image

AgentDict = dict[Any, Any]  # by agent


def is_aec(env: Any) -> bool:
    """Return whether `env` is turn-based, with PettingZoo's AEC interface."""
    return callable(getattr(env, "agent_iter", None)) and callable(getattr(env, "last", None))


def to_parallel_env(env: Any, *, numbered: bool = False) -> Any:
    """Return an AEC environment as a parallel one; with `numbered`, observations are state indices, no turn flag.

    Raises MissingExtra if PettingZoo is needed and not installed.
    """
    if not env.metadata.get("is_parallelizable", False):
        return Turns(env, numbered=numbered)
    try:
        from pettingzoo.utils.conversions import aec_to_parallel
    except ImportError as error:
        raise MissingExtra("an AEC environment", "multiagent") from error
    return aec_to_parallel(env)


class Turns:
    """Parallel interface to an AEC environment; each step is one agent's turn."""

    def __init__(self, env: Any, *, numbered: bool = False) -> None:
        self.env = env
        self.metadata = env.metadata
        self.render_mode = getattr(env, "render_mode", None)
        self.possible_agents = list(env.possible_agents)
        self.agents: list[Any] = []
        self._spaces: AgentDict = {}
        self._numbers = {
            agent: MaskedStateIndexer.of(env.observation_space(agent)) if numbered else None
            for agent in self.possible_agents
        }
        self._plain = {agent: numbered or is_image(env.observation_space(agent)) for agent in self.possible_agents}

    @property
    def unwrapped(self) -> Any:
        return self.env.unwrapped

    def is_turn_hidden(self, agent: Any) -> bool:
        """Return whether this agent's observation does not say whose turn it is."""
        return self._plain[agent]

    def observation_space(self, agent: Any) -> spaces.Space[Any]:
        """Return the environment's space, with a turn flag unless that is hidden."""
        if agent not in self._spaces:
            numbers = self._numbers[agent]
            space = self.env.observation_space(agent) if numbers is None else numbers.space
            self._spaces[agent] = space if self._plain[agent] else spaces.Tuple((space, spaces.MultiBinary(1)))
        return self._spaces[agent]  # type: ignore[no-any-return]

    def action_space(self, agent: Any) -> spaces.Space[Any]:
        """Return the environment's action space."""
        return self.env.action_space(agent)  # type: ignore[no-any-return]

    def reset(self, seed: int | None = None, options: AgentDict | None = None) -> tuple[AgentDict, AgentDict]:
        """Start a new episode."""
        self.env.reset(seed=seed, options=options)
        self._remove_finished_agents()
        return self._observe(self.agents), self._allowed(dict(self.env.infos))

    def step(self, actions: AgentDict) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        """Apply the selected agent's action; the other agents' actions are ignored."""
        env, playing = self.env, self.agents
        env.step(actions[env.agent_selection])
        rewards = {agent: env.rewards.get(agent, 0.0) for agent in playing}
        terminated = {agent: bool(env.terminations.get(agent, False)) for agent in playing}
        truncated = {agent: bool(env.truncations.get(agent, False)) for agent in playing}
        infos = {agent: env.infos.get(agent, {}) for agent in env.agents}
        last = self._observe([agent for agent in playing if terminated[agent] or truncated[agent]])
        self._remove_finished_agents()
        return last | self._observe(self.agents), rewards, terminated, truncated, self._allowed(infos)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _show(self, agent: Any, raw: Any) -> Any:
        numbers = self._numbers[agent]
        return raw if numbers is None else numbers.number(raw)

    def _allowed(self, infos: AgentDict) -> AgentDict:
        """Return the infos, with `action_mask` added for agents whose observations were Dicts with a mask."""
        found = dict(infos)
        for agent in self.agents:
            numbers = self._numbers[agent]
            if numbers is not None:
                mask = numbers.mask(self.env.observe(agent))
                found[agent] = {**found.get(agent, {}), "action_mask": mask}
        return found

    def _remove_finished_agents(self) -> None:
        """Update `agents`; AEC environments need a step with None for each agent that terminated or was truncated."""
        env = self.env
        while env.agents and (env.terminations[env.agent_selection] or env.truncations[env.agent_selection]):
            env.step(None)
        gone = {agent for agent in env.agents if env.terminations[agent] or env.truncations[agent]}
        self.agents = [agent for agent in env.agents if agent not in gone]

    def _observe(self, agents: list[Any]) -> AgentDict:
        env = self.env
        shown = {agent: self._show(agent, env.observe(agent)) for agent in agents}
        turn = env.agent_selection if env.agents else None
        return {agent: raw if self._plain[agent] else (raw, [agent == turn]) for agent, raw in shown.items()}

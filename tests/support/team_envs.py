"""Small environments of several agents for the tests of worlds, with everything about them known in advance."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Visitors(ParallelEnv):
    """Three agents who come and go: each one's visits are drawn at reset. Observes (step, own number, chance); is paid its
    action plus its number. Odd visitors are truncated when they leave, even ones terminated."""

    metadata: ClassVar[Any] = {"name": "visitors", "render_modes": []}

    def __init__(self, length: int = 9) -> None:
        self.length = length
        self.possible_agents = ["zero", "one", "two"]
        self.agents: list[str] = []
        self._box, self._choice = spaces.Box(-100, 100, (3,), np.float32), spaces.Discrete(4)
        self.stream = np.random.default_rng(0)
        self.visits: list[list[int]] = []
        self.t = 0
        self.render_mode = None

    def observation_space(self, agent: str) -> Any:
        return self._box

    def action_space(self, agent: str) -> Any:
        return self._choice

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.stream = np.random.default_rng(seed)
        self.t = 0
        firsts = self.stream.integers(0, 3, 3).tolist()
        firsts[int(self.stream.integers(3))] = 0
        self.visits = [[first, first + int(self.stream.integers(1, self.length))] for first in firsts]
        self.visits[0] = [0, self.length]  # somebody stays to the end, so that nobody comes after it
        self.agents = self.due(0)
        return self._see(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert actions.keys() == set(self.agents)
        acting, self.t = self.agents, self.t + 1
        ended = [agent for agent in acting if self.visits[self.possible_agents.index(agent)][1] == self.t]
        self.agents = [] if self.t == self.length else self.due(self.t)
        observations = self._see(acting + [agent for agent in self.agents if agent not in acting])
        rewards = {agent: float(actions[agent] + self.possible_agents.index(agent)) for agent in acting}
        odd = {agent: self.possible_agents.index(agent) % 2 == 1 for agent in acting}
        terminated = {agent: agent in ended and not odd[agent] for agent in acting}
        truncated = {agent: agent in ended and odd[agent] for agent in acting}
        if self.t == self.length:
            for agent in acting:
                truncated[agent] = not terminated[agent]
        return observations, rewards, terminated, truncated, {agent: {} for agent in observations}

    def due(self, t: int) -> list[str]:
        return [
            agent for agent, (first, end) in zip(self.possible_agents, self.visits, strict=True) if first <= t < end
        ]

    def _see(self, agents: list[str]) -> Any:
        chance = self.stream.random(3)
        places = {agent: self.possible_agents.index(agent) for agent in agents}
        return {agent: np.array([self.t, place, chance[place]], np.float32) for agent, place in places.items()}


class Unlike(ParallelEnv):
    """A tall agent that sees three numbers and chooses of two, a wide one that sees five and chooses of four."""

    metadata: ClassVar[Any] = {"name": "unlike", "render_modes": []}
    sizes: ClassVar[Any] = {"tall": (3, 2), "wide": (5, 4)}

    def __init__(self, length: int = 5) -> None:
        self.length = length
        self.possible_agents = list(self.sizes)
        self.agents: list[str] = []
        self._seen = {agent: spaces.Box(-9, 9, (size,), np.float32) for agent, (size, _) in self.sizes.items()}
        self._done = {agent: spaces.Discrete(count) for agent, (_, count) in self.sizes.items()}
        self.stream = np.random.default_rng(0)
        self.t = 0
        self.render_mode = None

    def observation_space(self, agent: str) -> Any:
        return self._seen[agent]

    def action_space(self, agent: str) -> Any:
        return self._done[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.stream = np.random.default_rng(seed)
        self.t, self.agents = 0, list(self.possible_agents)
        return self._see(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        for agent, action in actions.items():
            assert self._done[agent].contains(action), (agent, action)
        playing, self.t = self.agents, self.t + 1
        over = self.t >= self.length
        rewards = {agent: float(actions[agent]) for agent in playing}
        observations = self._see()
        self.agents = [] if over else playing
        return (
            observations,
            rewards,
            dict.fromkeys(playing, over),
            dict.fromkeys(playing, False),
            {a: {} for a in playing},
        )

    def _see(self) -> Any:
        return {
            agent: self.stream.normal(size=size).clip(-9, 9).astype(np.float32)
            for agent, (size, _) in self.sizes.items()
        }


class Reaches(ParallelEnv):
    """Two agents with boxes of different size: one gives one number, the other a grid of four; both are paid their sum."""

    metadata: ClassVar[Any] = {"name": "reaches", "render_modes": []}

    def __init__(self) -> None:
        self.possible_agents = ["short", "long"]
        self.agents: list[str] = []
        self._seen = spaces.Box(0, 9, (1,), np.float32)
        self._done = {"short": spaces.Box(-1, 1, (1,), np.float32), "long": spaces.Box(-2, 2, (2, 2), np.float32)}
        self.t = 0
        self.render_mode = None

    def observation_space(self, agent: str) -> Any:
        return self._seen

    def action_space(self, agent: str) -> Any:
        return self._done[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        for agent, action in actions.items():
            assert self._done[agent].contains(action), (agent, action)
        playing, self.t = self.agents, self.t + 1
        over = self.t >= 4
        self.agents = [] if over else playing
        observations = {agent: np.full(1, self.t, np.float32) for agent in playing}
        rewards = {agent: float(actions[agent].sum()) for agent in playing}
        return (
            observations,
            rewards,
            dict.fromkeys(playing, over),
            dict.fromkeys(playing, False),
            {a: {} for a in playing},
        )


class Countdown(AECEnv):
    """Three agents count down in turns: who says 0 first is terminated and pays 1 to each who is left; the last one ends."""

    metadata: ClassVar[Any] = {"name": "countdown", "render_modes": [], "is_parallelizable": False}

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["a", "b", "c"]
        self._seen, self._done = spaces.Box(0, 9, (2,), np.float32), spaces.Discrete(3)
        self.render_mode = None

    def observation_space(self, agent: str) -> Any:
        return self._seen

    def action_space(self, agent: str) -> Any:
        return self._done

    def observe(self, agent: str) -> Any:
        return np.array([self.left, self.possible_agents.index(agent)], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.stream = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: Any = {agent: {} for agent in self.agents}
        self.left = int(self.stream.integers(3, 7))
        self.agent_selection = self.agents[0]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.left = max(0, self.left - int(action))
        live = [other for other in self.agents if not self.terminations[other]]
        after = live[(live.index(agent) + 1) % len(live)]
        if self.left == 0:
            self.terminations[agent] = True
            self.rewards = {other: float(other != agent and not self.terminations[other]) for other in self.agents}
            self.left = int(self.stream.integers(3, 7))
            if len(live) == 2:
                self.truncations[after] = True
        self.agent_selection = after
        self._accumulate_rewards()
        self._deads_step_first()

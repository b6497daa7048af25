"""Pathfinding as a PettingZoo parallel environment: one world, stepped by the same compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError, MissingExtra, WorldError
from steppe.envs.pathfinding.drawing import draw
from steppe.envs.pathfinding.kernels import NUM_ACTIONS, NUM_PLANES, STAY, PathfindingOutput
from steppe.envs.pathfinding.worlds import Map, PathfindingWorlds, Size

try:
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise MissingExtra("Pathfinding for PettingZoo", "multiagent") from error

AgentInfos = dict[str, dict[str, Any]]


class PathfindingParallel(ParallelEnv):  # type: ignore[misc]  # PettingZoo brings no types
    """Guide several agents to their goals on one grid map, all acting at once; arguments as in PathfindingWorlds.

    `infos[agent]["comm_mask"]` [num_agents] says from which agents it receives messages. All agents' episodes end
    together. The options `num_agents` and `size` of `reset` apply from that episode on, up to the constructor's values.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "steppe_pathfinding_v0", "render_modes": ["rgb_array"], "is_parallelizable": True, "render_fps": 8, "planes": True,
    }  # fmt: skip

    def __init__(
        self,
        num_agents: int = 4,
        *,
        size: Size | None = None,
        density: float | None = None,
        maps: Sequence[Map] = (),
        view: int = 9,
        max_steps: int = 256,
        progress: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode={render_mode!r} must be 'rgb_array' or None")
        self.render_mode = render_mode
        self.worlds = PathfindingWorlds(
            1,
            num_agents,
            size=size,
            density=density,
            maps=maps,
            view=view,
            max_steps=max_steps,
            progress=progress,
            autoreset=False,
        )
        self.possible_agents = [f"agent_{index}" for index in range(num_agents)]
        self.agents: list[str] = []
        self._trail: list[np.ndarray] = []  # positions of all agents at each step; only kept for rendering
        self._observations = {
            agent: spaces.Box(0, 1, (NUM_PLANES, view, view), np.uint8) for agent in self.possible_agents
        }
        self._actions = {agent: spaces.Discrete(NUM_ACTIONS) for agent in self.possible_agents}

    @property
    def largest_stage(self) -> tuple[int, int] | None:
        """The maximum number of agents and side length in cells for the options of `reset`."""
        return self.worlds.largest_stage

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of an agent's view: six planes of 0 and 1."""
        return self._observations[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of the five actions: stay, up, down, left, right."""
        return self._actions[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], AgentInfos]:
        """Start an episode on a new map; options other than `num_agents` and `size` are ignored."""
        options = options or {}
        self.worlds.assign(options.get("num_agents"), options.get("size"))
        seen = self.worlds.reset(seed)
        self.agents = self.possible_agents[: int(self.worlds.agents[0])]
        self._trail = [self.worlds.positions(0)] if self.render_mode else []
        return self._seen(seen), self._told(seen)

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], AgentInfos]:
        """Move all agents; `actions` must have an entry for every agent in `agents`, and no other."""
        if actions.keys() != set(self.agents):
            odd = sorted(actions.keys() ^ set(self.agents))[0]
            what = "has no action" if odd in self.agents else "is not among the agents of this episode"
            raise ConfigError(f"{odd} {what}: give one to each of {len(self.agents)} agents")
        if not self.agents:
            return {}, {}, {}, {}, {}
        moves = np.full((1, len(self.possible_agents)), STAY, np.int64)
        moves[0, : len(self.agents)] = [actions[agent] for agent in self.agents]
        seen = self.worlds.step(moves)
        if self.render_mode:
            self._trail.append(self.worlds.positions(0))
        terminated, truncated = bool(seen.terminated[0]), bool(seen.truncated[0])
        rewards = dict(zip(self.agents, seen.rewards[0].tolist(), strict=False))
        ends = dict.fromkeys(self.agents, terminated), dict.fromkeys(self.agents, truncated)
        result = self._seen(seen), rewards, *ends, self._told(seen)
        if terminated or truncated:
            self.agents = []
        return result

    def render(self) -> np.ndarray | None:
        """Return an RGB image of map, agents, goals, trails and communication; None without a render mode."""
        if not self.render_mode:
            return None
        if not self._trail:
            raise WorldError("there is nothing to draw yet: call reset() first")
        worlds, count = self.worlds, int(self.worlds.agents[0])
        mask = worlds.seen.comm_mask[0, :count, :count]
        return draw(worlds.obstacles(0), worlds.positions(0), worlds.goals(0), mask, np.array(self._trail))

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def snapshot(self) -> Tree | None:
        """Return the state for `restore`; None before the first reset."""
        worlds = self.worlds.snapshot()
        if worlds is None:
            return None
        return {"worlds": worlds, "live": len(self.agents), "trail": np.array(self._trail, np.int64)}

    def restore(self, state: Tree) -> None:
        """Restore a snapshot of an environment built with the same arguments."""
        self.worlds.restore(state["worlds"])
        self.agents = self.possible_agents[: int(state["live"])]
        self._trail = list(np.array(state["trail"], np.int64)) if self.render_mode else []

    def _seen(self, seen: PathfindingOutput) -> dict[str, np.ndarray]:
        return dict(zip(self.agents, seen.obs[0].copy(), strict=False))

    def _told(self, seen: PathfindingOutput) -> AgentInfos:
        return {agent: {"comm_mask": mask} for agent, mask in zip(self.agents, seen.comm_mask[0].copy(), strict=False)}


def parallel_env(**kwargs: Any) -> PathfindingParallel:
    """Build the environment; PettingZoo's usual name for this function."""
    return PathfindingParallel(**kwargs)

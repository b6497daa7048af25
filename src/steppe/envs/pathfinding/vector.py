"""Pathfinding as a Gymnasium vector environment: `gymnasium.make_vec("steppe/Pathfinding-v0", 16, num_agents=8)`.

Each world is one environment; its observations, actions and rewards have an agent axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.errors import ConfigError
from steppe.envs.pathfinding.kernels import NUM_ACTIONS, NUM_PLANES, PathfindingOutput
from steppe.envs.pathfinding.worlds import Map, PathfindingWorlds, Size


class PathfindingVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Vector version of PathfindingWorlds, with the same arguments; rewards are [num_envs, num_agents].

    A world whose episode ended is reset in the same step: `info["final_obs"]` holds its last observations,
    `info["final_mask"]` its last mask. `info["comm_mask"]` [num_envs, num_agents, num_agents] says from which agents
    each agent receives messages.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int = 1,
        *,
        num_agents: int = 4,
        size: Size | None = None,
        density: float | None = None,
        maps: Sequence[Map] = (),
        view: int = 9,
        max_episode_steps: int = 256,
        progress: float = 0.0,
    ) -> None:
        self.num_envs = num_envs
        self.worlds = PathfindingWorlds(
            num_envs,
            num_agents,
            size=size,
            density=density,
            maps=maps,
            view=view,
            max_steps=max_episode_steps,
            progress=progress,
        )
        self.single_observation_space = spaces.Box(0, 1, (num_agents, NUM_PLANES, view, view), np.uint8)
        self.single_action_space = spaces.MultiDiscrete([NUM_ACTIONS] * num_agents)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start new episodes in all worlds; one integer seeds them all."""
        if isinstance(seed, list):
            raise ConfigError("one number seeds all worlds, not a list")
        output = self.worlds.reset(seed)
        return output.obs.copy(), self._info(output)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Move every agent in every world."""
        output = self.worlds.step(actions)
        info = self._info(output)
        ended = output.terminated | output.truncated
        if ended.any():
            info |= {"final_obs": output.final_obs.copy(), "_final_obs": ended}
            info |= {"final_mask": output.final_mask.copy(), "_final_mask": ended}
        return output.obs.copy(), output.rewards.copy(), output.terminated.copy(), output.truncated.copy(), info

    def snapshot(self) -> Tree | None:
        """Return the state of all worlds for `restore`; None before the first reset."""
        return self.worlds.snapshot()

    def restore(self, state: Tree) -> None:
        """Restore a snapshot of an environment built with the same arguments."""
        self.worlds.restore(state)

    def _info(self, output: PathfindingOutput) -> dict[str, Any]:
        return {"comm_mask": output.comm_mask.copy(), "_comm_mask": np.ones(self.num_envs, np.bool_)}

"""Pathfinding as a segment environment: one compiled call steps all worlds and writes into the segment."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np

from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import ConfigError, EnvironmentFault, SteppeError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.core.system.seeding import env_seeds
from steppe.envs.multi_agent.env import MultiAgentSegmentEnv
from steppe.envs.pathfinding.kernels import NUM_ACTIONS, NUM_PLANES, PathfindingOutput
from steppe.envs.pathfinding.worlds import PathfindingWorlds
from steppe.envs.snapshot.snapshots import EnvSnapshots
from steppe.envs.wrappers.rewards import EpisodeStatistics


class PathfindingSegmentEnv(MultiAgentSegmentEnv):
    """N worlds with up to num_agents agents each; `assign` sets the curriculum stage of their next episodes."""

    def __init__(self, worlds: PathfindingWorlds, spec: EnvSpec, statistics: EpisodeStatistics, seed: int) -> None:
        super().__init__(worlds.num_worlds, spec, statistics, EnvSnapshots([worlds]), [seed])
        self.worlds = worlds
        self._blank = worlds.blank()
        self._blank = self._blank._replace(comm_mask=self.comm_mask.reshape(self._blank.comm_mask.shape))

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Start new episodes in all worlds; the first call, and every call with `seeds`, seeds them."""
        if seeds is not None:
            self.seeds, self._seeded = env_seeds(seeds, 1), False
        self._statistics.restart()
        into = self._into(obs, self._blank.final_obs)
        self._call_env(lambda: self.worlds.reset(None if self._seeded else self.seeds[0], into=into), None)
        if not self._seeded:
            self._snapshots.settle()
        self._seeded = True
        self._look()
        self.starts[...] = self.present

    def assign(self, stages: np.ndarray) -> None:
        """Set the curriculum stage of each world's next episode [N, 2]: agents, and side length in cells."""
        for stage in np.unique(stages, axis=0):
            agents, size = stage.tolist()
            self.worlds.assign(agents, size, worlds=np.flatnonzero((stages == stage).all(axis=1)))

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Step every world once; see the contract in core/contracts/env.py."""
        columns, agents = segment.columns, self.spec.num_agents
        into = self._into(columns["obs"][t + 1], columns["final_obs"][t])
        if "lesson" in columns:
            stage = np.stack([self.worlds.agents, self.worlds.sizes[:, 0]], axis=1)
            columns["lesson"][t] = np.repeat(stage, agents, axis=0)
        if "final_comm_mask" in columns:
            into = into._replace(final_mask=columns["final_comm_mask"][t].reshape(into.final_mask.shape))
        moves = actions.reshape(self.num_envs, agents)
        self._call_env(lambda: self.worlds.step(moves, into), actions)
        valid = columns["valid"][t]
        valid[...] = self.present
        for name, over in (("terminated", into.terminated), ("truncated", into.truncated)):
            np.logical_and(np.repeat(over, agents), valid, out=columns[name][t])
        self._statistics.rewards[...] = into.rewards.reshape(-1)
        self._book(segment, t)
        self._look()
        np.logical_and(np.repeat(into.terminated | into.truncated, agents), self.present, out=self.starts)

    def render(self) -> np.ndarray | None:
        """Return None; `make_segment_env(…, render=True)` builds an environment that can render."""
        return None

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _look(self) -> None:
        """Update `there`: the first agents of each world are present in the current episode."""
        counts = np.repeat(self.worlds.agents, self.spec.num_agents)
        np.less(np.tile(np.arange(self.spec.num_agents), self.num_envs), counts, out=self.present)

    def _into(self, obs: np.ndarray, final_obs: np.ndarray) -> PathfindingOutput:
        shape = self._blank.obs.shape
        return self._blank._replace(obs=obs.reshape(shape), final_obs=final_obs.reshape(shape))

    def _call_env(self, call: Any, actions: np.ndarray | None) -> None:
        try:
            call()
        except Exception as error:
            last = None if actions is None else actions.tolist()
            details = {
                "traceback": "".join(traceback.format_exception(error)),
                "env_id": self.spec.id,
                "env_index": None,
                "seed": self.seeds[0],
                "episode": None,
                "step": None,
                "last_action": last,
            }
            raise EnvironmentFault(f"{self.spec.id} raised {type(error).__name__}: {error}", details) from error


def make_pathfinding_env(
    env: str, config: EnvConfig, num_envs: int, seed: np.random.SeedSequence
) -> PathfindingSegmentEnv:
    """Build the compiled segment environment; raises ConfigError for options that need single environments."""
    if (config.frame_stack or 1) > 1 or config.observations == "index":
        raise ConfigError(f"environment.vector='native' is not possible for {env} with frame_stack or numbered states")
    kwargs = {"num_agents": 4, **config.kwargs}
    steps = int(kwargs.pop("max_steps", 256))
    limit = min(steps, config.time_limit or steps)
    try:
        worlds = PathfindingWorlds(num_envs, max_steps=limit, **kwargs)
    except SteppeError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"cannot make {env} with {config.kwargs}: {error}") from error
    agents = worlds.num_agents
    spec = EnvSpec(
        env,
        FieldSpec("obs", (NUM_PLANES, worlds.view, worlds.view), "uint8", most=1),
        ActionSpec("discrete", (NUM_ACTIONS,)),
        True,
        limit,
        num_agents=agents,
        agents=tuple(f"agent_{index}" for index in range(agents)),
        largest_stage=worlds.largest_stage,
    )
    statistics = EpisodeStatistics(num_envs, config.reward_scale, config.reward_clip or None, agents)
    return PathfindingSegmentEnv(worlds, spec, statistics, env_seeds(seed, 1)[0])

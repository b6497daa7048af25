"""Segment environment around Gymnasium's native vector environments, which step many copies in one call.

They reset on the next step (AutoresetMode.NEXT_STEP): the step that ends an episode returns its last observation, and
the step after it ignores the action, has reward 0 and returns the first observation of the next episode. The row of
that reset step is written with `valid == False` and without an end, and `starts` is True after it.
"""

from __future__ import annotations

import traceback
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import ResumeKind
from steppe.core.contracts.errors import EnvironmentFault, WorldError
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import EnvSpec
from steppe.core.system.seeding import env_seeds
from steppe.envs.snapshot.snapshots import EnvSnapshots, SegmentEnvState
from steppe.envs.vector.rendering import render_rgb
from steppe.envs.vector.spaces import ActionDecoder, ObservationEncoder
from steppe.envs.wrappers.frame_stack import FrameStack
from steppe.envs.wrappers.rewards import EpisodeStatistics


def require_supported_vector_env(env: VectorEnv[Any, Any, Any], whose: str, *, numbered: bool = False) -> None:
    """Raise WorldError unless NativeSegmentEnv supports `env`; `numbered` allows state indices as observations."""
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise WorldError(f"the vector version of {whose} resets by {mode}, not on the next step: use vector='loop'")
    space = env.single_observation_space
    if numbered and isinstance(space, gym.spaces.Discrete):
        return
    if not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
        raise WorldError(f"the vector version of {whose} observes {space}, not a plain vector: use vector='loop'")


class NativeSegmentEnv:
    """B environments stepped by one call; they share one random stream, seeded once with one integer."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        spec: EnvSpec,
        observations: ObservationEncoder | FrameStack,
        actions: ActionDecoder,
        statistics: EpisodeStatistics,
        seed: int,
    ) -> None:
        require_supported_vector_env(env, spec.id, numbered=spec.num_states is not None)
        self.spec = spec
        self.num_envs = env.num_envs
        self.starts = np.ones(env.num_envs, np.bool_)
        self.masks = np.ones((env.num_envs, *spec.action.sizes), np.bool_) if spec.num_states is not None else None
        self.seeds = [seed]
        self.ended = np.zeros(env.num_envs, np.bool_)  # environments whose next step is a reset
        self.steps = 0  # since the last call of `reset`
        self._env = env
        self._frames = observations if isinstance(observations, FrameStack) else None
        self._actions = actions
        self._statistics = statistics
        self._seeded = False
        self._snapshots = EnvSnapshots([env])
        frames = self._frames.memory if self._frames else None
        arrays = {"starts": self.starts, "ended": self.ended, "frames": frames, "masks": self.masks}
        self._start = int(getattr(env.single_observation_space, "start", 0))
        self._state = SegmentEnvState(self, self._snapshots, statistics, arrays)

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Start new episodes in all environments; the first call, and every call with `seeds`, seeds them."""
        if seeds is not None:
            self.seeds, self._seeded = env_seeds(seeds, 1), False
        self._statistics.restart()
        self.ended.fill(False)
        self.starts.fill(True)
        self.steps = 0
        try:
            batch, info = self._env.reset() if self._seeded else self._env.reset(seed=self.seeds[0])
        except Exception as error:
            raise self._fault(error, None) from error
        if not self._seeded:
            self._snapshots.settle()
        self._seeded = True
        self._update_action_masks(info)
        self._write(obs, batch)

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Step every environment once; see the contract in core/contracts/env.py."""
        columns, statistics = segment.columns, self._statistics
        self.steps += 1
        try:
            batch, rewards, terminated, truncated, info = self._env.step(self._actions.batch(actions))
        except Exception as error:
            raise self._fault(error, actions) from error
        resetting = self.ended
        live = np.logical_not(resetting, out=columns["valid"][t])
        np.logical_and(terminated, live, out=columns["terminated"][t])
        np.logical_and(truncated, live, out=columns["truncated"][t])
        np.multiply(rewards, live, out=statistics.rewards)
        statistics.add_step(columns["reward"][t], live)
        self.starts[...] = resetting
        following = columns["obs"][t + 1]
        self._write(following, batch)
        np.logical_or(columns["terminated"][t], columns["truncated"][t], out=self.ended)
        if self.ended.any():
            ended = np.flatnonzero(self.ended)
            columns["final_obs"][t, ended] = following[ended]
            statistics.end(ended)
        self._update_action_masks(info)

    def take_finished(self) -> list[tuple[float, int]]:
        """Return (return, length) of the episodes that ended since the last call."""
        return self._statistics.take()

    def unfinished(self) -> list[tuple[float, int]]:
        """Return (return, length) so far of the current episode in each environment."""
        return self._statistics.running()

    def render(self) -> np.ndarray | None:
        """Return an RGB image of the first environment, or None if it was not built for rendering."""
        return render_rgb(self._env)

    @property
    def resume_kind(self) -> ResumeKind:
        """How a run in this environment can be resumed; known after the first reset."""
        return self._snapshots.kind

    def snapshot(self) -> Tree | None:
        """Return everything the next steps depend on; None before the first reset, or if it cannot be read."""
        state = self._state.take() if self._seeded else None
        return None if state is None else {**state, "steps": self.steps}

    def restore(self, state: Tree) -> None:
        """Restore the state of a snapshot; raises CannotResume."""
        self._state.give(state)
        self.steps = int(state.get("steps", 0))

    def close(self) -> None:
        """Close the environments."""
        self._env.close()

    def _update_action_masks(self, info: dict[str, Any]) -> None:
        """Write the current action masks; all actions are allowed after an end, where the next action is ignored."""
        if self.masks is not None:
            self.masks[...] = info.get("action_mask", True)
            self.masks[self.ended] = True

    def _write(self, obs: np.ndarray, batch: np.ndarray) -> None:
        if self._frames is None:
            obs[...] = batch if not self._start else batch - self._start
        else:
            self._frames.put_all(obs, batch, self.starts)

    def _fault(self, error: Exception, actions: np.ndarray | None) -> EnvironmentFault:
        last = None if actions is None else actions.tolist()
        position = f"at its step {self.steps}" if self.steps else "while resetting"
        return EnvironmentFault(
            f"the vector version of {self.spec.id} raised {type(error).__name__}: {error} ({position}, {self.num_envs} "
            f"environments seeded together with {self.seeds[0]})",
            {
                "traceback": "".join(traceback.format_exception(error)),
                "env_id": self.spec.id,
                "env_index": None,
                "seed": self.seeds[0],
                "episode": None,
                "step": self.steps,
                "last_action": last,
            },
        )

"""Segment environment that loops over single environments, writes straight into the segment and resets within the step.

When an episode ends, row t of `final_obs` holds its last observation and row t + 1 of `obs` the first observation of
the next episode, so every row is a valid transition. envs/factory.py builds the environments.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import ResumeKind
from steppe.core.contracts.errors import EnvironmentFault
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import EnvSpec
from steppe.core.system.seeding import env_seeds
from steppe.envs.snapshot.snapshots import LoopEnvSnapshots, SegmentEnvState
from steppe.envs.vector.rendering import render_rgb
from steppe.envs.vector.spaces import ActionDecoder, ObservationEncoder
from steppe.envs.wrappers.frame_stack import FrameStack
from steppe.envs.wrappers.rewards import EpisodeStatistics

GymEnv = gym.Env[Any, Any]


class LoopSegmentEnv:
    """B environments stepped sequentially; each is seeded once and then continues its own random stream."""

    def __init__(
        self,
        envs: list[GymEnv],
        spec: EnvSpec,
        observations: ObservationEncoder | FrameStack,
        actions: ActionDecoder,
        statistics: EpisodeStatistics,
        seeds: list[int],
    ) -> None:
        self.spec = spec
        self.num_envs = len(envs)
        self.starts = np.ones(len(envs), np.bool_)
        self.masks = np.ones((len(envs), *spec.action.sizes), np.bool_) if spec.num_states is not None else None
        self.seeds = seeds
        self._envs = envs
        self._snapshots = LoopEnvSnapshots(envs)
        self._steps, self._resets = self._snapshots.steps, self._snapshots.resets
        self._put = observations.put
        self._put_first = observations.restart if isinstance(observations, FrameStack) else observations.put_checked
        self._actions = actions
        self._statistics = statistics
        self._seeded = False
        self._first: list[Any] = [None] * len(envs)  # raw first observation of the current episode
        self._inactive: list[int] = []
        frames = observations.memory if isinstance(observations, FrameStack) else None
        arrays = {"starts": self.starts, "frames": frames, "masks": self.masks}
        self._state = SegmentEnvState(self, self._snapshots, statistics, arrays)

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Start new episodes in all environments; the first call, and every call with `seeds`, seeds them."""
        if seeds is not None:
            self.seeds, self._seeded = env_seeds(seeds, self.num_envs), False
        self._statistics.restart()
        for index in range(self.num_envs):
            self._begin(index, obs, None if self._seeded else self.seeds[index])
        if not self._seeded:
            self._snapshots.settle()
        self._seeded = True
        self.starts.fill(True)

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Step every environment once; see the contract in core/contracts/env.py."""
        columns = segment.columns
        following, rewards, put = columns["obs"][t + 1], self._statistics.rewards, self._put
        masks, steps = self.masks, self._steps_with_inactive() if self._inactive else self._steps
        ended: list[tuple[int, bool, bool]] = []
        index, action = 0, None
        try:
            for index, action in enumerate(self._actions.each(actions)):
                raw, rewards[index], terminated, truncated, info = steps[index](action)
                if masks is not None:
                    masks[index] = info.get("action_mask", True)
                if terminated or truncated:
                    ended.append((index, bool(terminated), bool(truncated)))
                    put(columns["final_obs"][t], index, raw)
                else:
                    put(following, index, raw)
        except Exception as error:
            raise self._fault(error, index, int(self._statistics.lengths[index]) + 1, action) from error
        columns["valid"][t] = True
        columns["terminated"][t] = False
        columns["truncated"][t] = False
        self.starts.fill(False)
        if self._inactive:
            columns["valid"][t, self._inactive] = False
            self.starts[self._inactive] = True
        self._statistics.add_step(columns["reward"][t], columns["valid"][t] if self._inactive else None)
        for index, died, cut in ended:
            columns["terminated"][t, index] = died
            columns["truncated"][t, index] = cut
            self._statistics.end([index])
            self._begin(index, following, None)
            self.starts[index] = True

    def retire(self, indices: list[int]) -> None:
        """Stop stepping these environments until a call without them; each must be at the start of an episode.

        Their rows are written with `valid == False`, and no episode ends in them.
        """
        self._inactive = list(indices)

    def _steps_with_inactive(self) -> list[Callable[[Any], Any]]:
        """Return one step function per environment; retired environments get a no-op."""
        steps = list(self._steps)
        for index in self._inactive:
            steps[index] = partial(self._rest, index)
        return steps

    def _rest(self, index: int, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the result of a no-op step: the first observation of the episode, and no reward."""
        info = {} if self.masks is None else {"action_mask": self.masks[index]}
        return self._first[index], 0.0, False, False, info

    def take_finished(self) -> list[tuple[float, int]]:
        """Return (return, length) of the episodes that ended since the last call."""
        return self._statistics.take()

    def unfinished(self) -> list[tuple[float, int]]:
        """Return (return, length) so far of the current episode in each environment."""
        return self._statistics.running()

    def render(self) -> np.ndarray | None:
        """Return an RGB image of the first environment, or None if it was not built for rendering."""
        return render_rgb(self._envs[0])

    @property
    def resume_kind(self) -> ResumeKind:
        """How a run in this environment can be resumed; known after the first reset."""
        return self._snapshots.kind

    def snapshot(self) -> Tree | None:
        """Return everything the next steps depend on; None before the first reset, or if it cannot be read."""
        return self._state.take() if self._seeded else None

    def restore(self, state: Tree) -> None:
        """Restore the state of a snapshot; raises CannotResume."""
        self._state.give(state)

    def close(self) -> None:
        """Close every environment, even if closing one of them fails."""
        with ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)

    def _begin(self, index: int, obs: np.ndarray, seed: int | None) -> None:
        try:
            raw, info = self._resets[index]() if seed is None else self._resets[index](seed=seed)
            self._put_first(obs, index, raw)
            self._first[index] = raw
            if self.masks is not None:
                self.masks[index] = info.get("action_mask", True)
        except Exception as error:
            raise self._fault(error, index, 0, None) from error

    def _fault(self, error: Exception, index: int, step: int, action: Any) -> EnvironmentFault:
        """Describe an exception of an environment; `step` counts from 1 within the episode, 0 means `reset` failed."""
        episode, seed = int(self._statistics.episodes[index]) + 1, self.seeds[index]
        last = np.asarray(action).tolist() if action is not None else None
        position = f"at step {step} of episode {episode}" if step else f"at the reset before episode {episode}"
        return EnvironmentFault(
            f"{self.spec.id} raised {type(error).__name__}: {error} ({position}, environment {index} of {self.num_envs}, "
            f"seeded with {seed}, last action {last})",
            {
                "traceback": "".join(traceback.format_exception(error)),
                "env_id": self.spec.id,
                "env_index": index,
                "seed": seed,
                "episode": episode,
                "step": step,
                "last_action": last,
            },
        )

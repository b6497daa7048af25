"""Our own loop over plain environments: it writes straight into the segment and resets within the step that ended.

After an end, row t of `final_obs` holds the last observation of the old episode and row t + 1 of `obs` the first of the
new one, so every row is experience. How the environments were made is envs/factory.py's business.
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
    """B environments stepped one after the other; each is seeded and then follows its own random numbers."""

    def __init__(
        self,
        envs: list[GymEnv],
        spec: EnvSpec,
        observations: ObservationEncoder | FrameStack,
        actions: ActionDecoder,
        ledger: EpisodeStatistics,
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
        self._ledger = ledger
        self._seeded = False
        self._first: list[Any] = [None] * len(envs)  # the newest episode's first observation, as it came
        self._inactive: list[int] = []
        frames = observations.memory if isinstance(observations, FrameStack) else None
        arrays = {"starts": self.starts, "frames": frames, "masks": self.masks}
        self._state = SegmentEnvState(self, self._snapshots, ledger, arrays)

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Begin new episodes everywhere; the first call seeds, and every call with `seeds`."""
        if seeds is not None:
            self.seeds, self._seeded = env_seeds(seeds, self.num_envs), False
        self._ledger.restart()
        for index in range(self.num_envs):
            self._begin(index, obs, None if self._seeded else self.seeds[index])
        if not self._seeded:
            self._snapshots.settle()
        self._seeded = True
        self.starts.fill(True)

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Act once everywhere; see the contract in core/contracts/env.py."""
        columns = segment.columns
        following, rewards, put = columns["obs"][t + 1], self._ledger.rewards, self._put
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
            raise self._fault(error, index, int(self._ledger.lengths[index]) + 1, action) from error
        columns["valid"][t] = True
        columns["terminated"][t] = False
        columns["truncated"][t] = False
        self.starts.fill(False)
        if self._inactive:
            columns["valid"][t, self._inactive] = False
            self.starts[self._inactive] = True
        self._ledger.add_step(columns["reward"][t], columns["valid"][t] if self._inactive else None)
        for index, died, cut in ended:
            columns["terminated"][t, index] = died
            columns["truncated"][t, index] = cut
            self._ledger.end([index])
            self._begin(index, following, None)
            self.starts[index] = True

    def retire(self, indices: list[int]) -> None:
        """Step these environments, each at the start of an episode, no more, until a call that leaves them out.

        Their rows are written with `valid == False`, and nothing ends in them.
        """
        self._inactive = list(indices)

    def _steps_with_inactive(self) -> list[Callable[[Any], Any]]:
        """How to step each environment; those that are retired stay where they are."""
        steps = list(self._steps)
        for index in self._inactive:
            steps[index] = partial(self._rest, index)
        return steps

    def _rest(self, index: int, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A step of an environment that is retired."""
        info = {} if self.masks is None else {"action_mask": self.masks[index]}
        return self._first[index], 0.0, False, False, info

    def take_finished(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes that ended since the last call."""
        return self._ledger.take()

    def unfinished(self) -> list[tuple[float, int]]:
        """(return, length) so far of the episode under way in each environment."""
        return self._ledger.running()

    def render(self) -> np.ndarray | None:
        """The first environment as an RGB image, where it was made for that."""
        return render_rgb(self._envs[0])

    @property
    def resume_kind(self) -> ResumeKind:
        """How a run in this world can be resumed, known once it has been reset."""
        return self._snapshots.kind

    def snapshot(self) -> Tree | None:
        """Everything the next steps depend on; None before the first reset, or when it cannot be had."""
        return self._state.take() if self._seeded else None

    def restore(self, state: Tree) -> None:
        """Go where the world of a snapshot was; raises CannotResume."""
        self._state.give(state)

    def close(self) -> None:
        """Close every environment, also when one of them fails to."""
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
        """`step` counts from 1 within the episode; 0 means that `reset` failed."""
        episode, seed = int(self._ledger.episodes[index]) + 1, self.seeds[index]
        last = np.asarray(action).tolist() if action is not None else None
        place = f"at step {step} of episode {episode}" if step else f"at the reset before episode {episode}"
        return EnvironmentFault(
            f"{self.spec.id} raised {type(error).__name__}: {error} ({place}, environment {index} of {self.num_envs}, "
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

"""Save and restore the state of a segment environment, by reading its environments or by replaying their episodes.

Reading (reader.py) is exact. Environments with state in a C object get a replay log: the state that could be read
before the last reset, and the actions since. On resuming, the actions are replayed, and accepted if they lead to the
same last observation. The segment environment's own state (episode statistics, stacked frames) is saved here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import ResumeKind, SegmentEnv, num_rows
from steppe.core.contracts.errors import CannotResume
from steppe.core.io import codec
from steppe.envs.snapshot.reader import SnapshotReader, TableDigests, Unreadable
from steppe.envs.snapshot.writer import SnapshotWriter
from steppe.envs.wrappers.rewards import EpisodeStatistics

MAX_REPLAY_STEPS = 20_000
_MISMATCH_ERRORS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


class SeededEnv(SegmentEnv, Protocol):
    """A segment environment that keeps its seeds."""

    seeds: list[int]


class EnvSnapshots:
    """Saves and restores the state of environments; `unreadable_reason` says why they cannot be read, if so."""

    def __init__(self, envs: list[Any]) -> None:
        self.unreadable_reason: str | None = None
        self._envs = envs
        self._digests = TableDigests()

    @property
    def kind(self) -> ResumeKind:
        """How exactly a snapshot taken now can be restored."""
        return "exact" if self.unreadable_reason is None else "episode-boundary"

    def take(self) -> Tree | None:
        """Return the environments as a tree, None if they cannot be read."""
        reading = SnapshotReader(self._digests)
        try:
            trees = [reading.object(env) for env in self._envs]
        except (Unreadable, RecursionError) as reason:
            self.unreadable_reason = str(reason)
            return None
        self.unreadable_reason = None
        return {"by": "reading", "envs": trees}

    def settle(self) -> None:
        """Determine, after the first reset, whether the environments can be read."""
        self.take()

    def give(self, tree: Tree) -> None:
        """Restore the environments; raises CannotResume if that is impossible."""
        if tree["by"] != "reading":
            raise CannotResume("the snapshot holds actions to repeat, which only single environments can do")
        building = SnapshotWriter()
        for env, state in zip(self._envs, tree["envs"], strict=True):
            building.fill(env, state)
        building.finish()


class LoopEnvSnapshots(EnvSnapshots):
    """EnvSnapshots for single environments, with replay logs if they cannot be read.

    The owner must step and reset the environments through `steps` and `resets`.
    """

    def __init__(self, envs: list[gym.Env[Any, Any]]) -> None:
        super().__init__(envs)
        self.steps: list[Callable[[Any], Any]] = []
        self.resets: list[Callable[..., Any]] = []
        self._tapes: list[EpisodeReplayLog] = []
        self._record(on=True)  # until the first reset shows whether replay logs are needed

    @property
    def kind(self) -> ResumeKind:
        """How exactly a snapshot taken now can be restored."""
        if not self._tapes:
            return super().kind
        return "replay" if all(tape.usable for tape in self._tapes) else "episode-boundary"

    def settle(self) -> None:
        """Drop the replay logs after the first reset if the environments can be read."""
        if super().take() is not None:
            self._record(on=False)

    def take(self) -> Tree | None:
        """Return the environments as read, or their replay logs; None if neither is possible now."""
        if not self._tapes:
            tree = super().take()
            if tree is None:
                self._record(on=True)  # something unreadable appeared: log from the next episodes on
            return tree
        trees = [tape.take() for tape in self._tapes]
        return None if None in trees else {"by": "replay", "envs": trees}

    def give(self, tree: Tree) -> None:
        """Restore the environments; raises CannotResume if that is impossible."""
        if tree["by"] != "replay":
            super().give(tree)
            self._record(on=False)
            return
        self._record(on=True)
        for tape, state in zip(self._tapes, tree["envs"], strict=True):
            tape.give(state)

    def _record(self, *, on: bool) -> None:
        # Keep the list objects: the loop holds references to them.
        self._tapes = [EpisodeReplayLog(env) for env in self._envs] if on else []
        acting: list[Any] = self._tapes or self._envs
        self.steps[:] = [each.step for each in acting]
        self.resets[:] = [each.reset for each in acting]


class EpisodeReplayLog:
    """Wraps one environment and records how to replay its current episode, for at most MAX_REPLAY_STEPS steps."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self._env = env
        self._before: Tree | None = None
        self._seed: int | None = None
        self._actions: list[Any] = []
        self._seen: Any = None

    def reset(self, *, seed: int | None = None) -> Any:
        """Start an episode and a new log."""
        self._seed, self._actions = seed, []
        try:
            self._before = SnapshotReader(partial=True).object(self._env, partial=True)
        except (Unreadable, RecursionError):
            self._before = None
        result = self._env.reset() if seed is None else self._env.reset(seed=seed)
        self._seen = result[0]
        return result

    def step(self, action: Any) -> Any:
        """Step and record the action, without a copy: ActionDecoder (envs/vector/spaces.py) returns new memory."""
        if len(self._actions) < MAX_REPLAY_STEPS:
            self._actions.append(action)
        else:
            self._before = None
        result = self._env.step(action)
        self._seen = result[0]
        return result

    @property
    def usable(self) -> bool:
        """Whether the log holds the episode from its first step."""
        return self._before is not None

    def take(self) -> Tree | None:
        """Return the log and the last observation; None if the log is incomplete or the observation cannot be read."""
        if self._before is None:
            return None
        try:
            seen = SnapshotReader().value(self._seen)
        except Unreadable:
            return None
        together = np.array(self._actions)
        return {"before": self._before, "seed": self._seed, "actions": together, "seen": seen}

    def give(self, tree: Tree) -> None:
        """Replay a log and continue recording after it; raises CannotResume if it leads to another observation."""
        name = type(self._env.unwrapped).__name__
        building = SnapshotWriter()
        building.fill(self._env, tree["before"])
        building.finish()
        try:
            self.reset(seed=tree["seed"])
            ended = any(terminated or truncated for _, _, terminated, truncated, _ in map(self.step, tree["actions"]))
        except Exception as error:
            raise CannotResume(
                f"{name} raised {type(error).__name__} while its episode was repeated: {error}"
            ) from error
        arrived = self.take()
        if ended or arrived is None or codec.pack(arrived["seen"]) != codec.pack(tree["seen"]):
            raise CannotResume(f"repeating the actions of the episode under way did not lead {name} where it was")


class SegmentEnvState:
    """Complete state of a segment environment: its environments, arrays, seeds and episode statistics."""

    def __init__(
        self, world: SeededEnv, envs: EnvSnapshots, statistics: EpisodeStatistics, arrays: dict[str, np.ndarray | None]
    ) -> None:
        """Hold references: `arrays` and those of the episode statistics are read and written in place."""
        mine = {**arrays, "returns": statistics.returns, "lengths": statistics.lengths, "episodes": statistics.episodes}
        mine["played"] = statistics.played
        self._arrays = {name: array for name, array in mine.items() if array is not None}
        self._world = world
        self._envs = envs
        self._statistics = statistics

    def take(self) -> Tree | None:
        """Return a copy of the whole state, None if the environments cannot be saved."""
        envs = self._envs.take()
        if envs is None:
            return None
        world = self._world
        return {
            "env": world.spec.id,
            "num_envs": world.num_envs,
            "envs": envs,
            "seeds": list(world.seeds),
            "arrays": {name: array.copy() for name, array in self._arrays.items()},
            "finished": self._statistics.finished.copy(),
        }

    def give(self, state: Tree) -> None:
        """Restore the state; raises CannotResume if it does not fit, also for a tree that `take` did not return."""
        world = self._world
        try:
            if (state["env"], state["num_envs"]) != (world.spec.id, world.num_envs):
                raise CannotResume(
                    f"the snapshot is of {state['num_envs']} × {state['env']}, not {world.num_envs} × {world.spec.id}"
                )
            if state["arrays"].keys() != self._arrays.keys():
                raise CannotResume("the snapshot is of a world that was made in another way")
            world.reset(np.empty((num_rows(world), *world.spec.obs.shape), world.spec.obs.dtype))
            self._envs.give(state["envs"])
            for name, array in self._arrays.items():
                _fill(array, state["arrays"][name], name)
            world.seeds[:] = [int(seed) for seed in state["seeds"]]
            self._statistics.refill(state["finished"])
        except _MISMATCH_ERRORS as error:
            raise CannotResume(f"the snapshot is not one of this world: {type(error).__name__}: {error}") from error


def _fill(array: np.ndarray, saved: np.ndarray, name: str) -> None:
    if saved.shape != array.shape or saved.dtype != array.dtype:
        raise CannotResume(f"{name} is {saved.dtype}{saved.shape} in the snapshot, {array.dtype}{array.shape} here")
    array[...] = saved

"""Where the environments of a world are, and how to get there again: by reading them, else by repeating the episode.

Reading (reader.py) is exact. Environments that hide something behind an object in C get a tape: what could be read
before the last reset, and the actions since. On resuming these are repeated, and accepted if they lead to the same last
observation. The rest of a world's state (accounts, frames) is small and written here too.
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
    """A world that knows what it was seeded with."""

    seeds: list[int]


class EnvSnapshots:
    """Takes and gives back the state of environments; `obstacle` says why they cannot be read, if so."""

    def __init__(self, envs: list[Any]) -> None:
        self.unreadable_reason: str | None = None
        self._envs = envs
        self._digests = TableDigests()

    @property
    def kind(self) -> ResumeKind:
        """What `take` can promise now."""
        return "exact" if self.unreadable_reason is None else "episode-boundary"

    def take(self) -> Tree | None:
        """The environments as a tree, None if they cannot be read."""
        reading = SnapshotReader(self._digests)
        try:
            trees = [reading.object(env) for env in self._envs]
        except (Unreadable, RecursionError) as reason:
            self.unreadable_reason = str(reason)
            return None
        self.unreadable_reason = None
        return {"by": "reading", "envs": trees}

    def settle(self) -> None:
        """After the first reset: see whether the environments can be read."""
        self.take()

    def give(self, tree: Tree) -> None:
        """Bring the environments where they were; raises CannotResume if they do not get there."""
        if tree["by"] != "reading":
            raise CannotResume("the snapshot holds actions to repeat, which only single environments can do")
        building = SnapshotWriter()
        for env, state in zip(self._envs, tree["envs"], strict=True):
            building.fill(env, state)
        building.finish()


class LoopEnvSnapshots(EnvSnapshots):
    """The same for single environments, with tapes for those that cannot be read; `steps` and `resets` are to be called."""

    def __init__(self, envs: list[gym.Env[Any, Any]]) -> None:
        super().__init__(envs)
        self.steps: list[Callable[[Any], Any]] = []
        self.resets: list[Callable[..., Any]] = []
        self._tapes: list[EpisodeReplayLog] = []
        self._record(on=True)  # until the first reset has shown whether they are needed

    @property
    def kind(self) -> ResumeKind:
        """What `take` can promise now."""
        if not self._tapes:
            return super().kind
        return "replay" if all(tape.usable for tape in self._tapes) else "episode-boundary"

    def settle(self) -> None:
        """After the first reset: tapes only stay where they are needed."""
        if super().take() is not None:
            self._record(on=False)

    def take(self) -> Tree | None:
        """By reading, or what is on the tapes; None if neither is possible now."""
        if not self._tapes:
            tree = super().take()
            if tree is None:
                self._record(on=True)  # something unreadable appeared: from the next episodes on there are tapes
            return tree
        trees = [tape.take() for tape in self._tapes]
        return None if None in trees else {"by": "replay", "envs": trees}

    def give(self, tree: Tree) -> None:
        """Bring the environments where they were; raises CannotResume if they do not get there."""
        if tree["by"] != "replay":
            super().give(tree)
            self._record(on=False)
            return
        self._record(on=True)
        for tape, state in zip(self._tapes, tree["envs"], strict=True):
            tape.give(state)

    def _record(self, *, on: bool) -> None:
        # The lists stay the same objects: the loop holds on to them.
        self._tapes = [EpisodeReplayLog(env) for env in self._envs] if on else []
        acting: list[Any] = self._tapes or self._envs
        self.steps[:] = [each.step for each in acting]
        self.resets[:] = [each.reset for each in acting]


class EpisodeReplayLog:
    """Stands before one environment and remembers how its episode can be repeated, for at most MAX_TAPE_STEPS steps."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self._env = env
        self._before: Tree | None = None
        self._seed: int | None = None
        self._actions: list[Any] = []
        self._seen: Any = None

    def reset(self, *, seed: int | None = None) -> Any:
        """Begin an episode, and a new tape with it."""
        self._seed, self._actions = seed, []
        try:
            self._before = SnapshotReader(partial=True).object(self._env, partial=True)
        except (Unreadable, RecursionError):
            self._before = None
        result = self._env.reset() if seed is None else self._env.reset(seed=seed)
        self._seen = result[0]
        return result

    def step(self, action: Any) -> Any:
        """Act, and write the action down: it lies in memory of its own by the rule of envs/vector/spaces.py."""
        if len(self._actions) < MAX_REPLAY_STEPS:
            self._actions.append(action)
        else:
            self._before = None
        result = self._env.step(action)
        self._seen = result[0]
        return result

    @property
    def usable(self) -> bool:
        """Whether it holds the episode from its beginning."""
        return self._before is not None

    def take(self) -> Tree | None:
        """What to repeat and where it leads; None without the beginning, or if that cannot be written down."""
        if self._before is None:
            return None
        try:
            seen = SnapshotReader().value(self._seen)
        except Unreadable:
            return None
        together = np.array(self._actions)
        return {"before": self._before, "seed": self._seed, "actions": together, "seen": seen}

    def give(self, tree: Tree) -> None:
        """Repeat a tape, and go on recording behind it."""
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
    """A world's state: its environments, and the little it knows besides them."""

    def __init__(
        self, world: SeededEnv, envs: EnvSnapshots, ledger: EpisodeStatistics, arrays: dict[str, np.ndarray | None]
    ) -> None:
        """`arrays` of the world itself are read and written in place, as the ledger's are."""
        mine = {**arrays, "returns": ledger.returns, "lengths": ledger.lengths, "episodes": ledger.episodes}
        mine["played"] = ledger.played
        self._arrays = {name: array for name, array in mine.items() if array is not None}
        self._world = world
        self._envs = envs
        self._ledger = ledger

    def take(self) -> Tree | None:
        """All of it in memory of its own, None if the environments cannot be had."""
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
            "finished": self._ledger.finished.copy(),
        }

    def give(self, state: Tree) -> None:
        """Bring the world there; raises CannotResume if it does not fit, also for a tree that is none of `take`'s."""
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
            self._ledger.refill(state["finished"])
        except _MISMATCH_ERRORS as error:
            raise CannotResume(f"the snapshot is not one of this world: {type(error).__name__}: {error}") from error


def _fill(array: np.ndarray, saved: np.ndarray, name: str) -> None:
    if saved.shape != array.shape or saved.dtype != array.dtype:
        raise CannotResume(f"{name} is {saved.dtype}{saved.shape} in the snapshot, {array.dtype}{array.shape} here")
    array[...] = saved

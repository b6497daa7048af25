"""Episode quotas: a run that is to play N episodes counts those that end, and stops environments when theirs are played.

EpisodeQuota gives every environment of every actor an equal share. EpisodeClaims plays what a worker was given by the table
that it shares with others. Where actors run free, in mode async, the learner hides what comes after the last episode.
"""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import SegmentEnv
from steppe.core.contracts.segment import Segment, find_episode_ends


class _EpisodeCounter:
    """Counts the episodes of open environments. Steps of closed ones are written with `valid == False`; worlds that can
    (`retire`) do not step them. Subclasses decide which are open."""

    def __init__(self, world: SegmentEnv) -> None:
        self._world, self._num_agents = world, world.spec.num_agents
        self._open = np.zeros(world.num_envs, np.bool_)
        self._counts: list[bool] = []  # of the episodes that the world has finished: whether each was counted

    def count(self, segment: Segment, t: int) -> None:
        """Take the step that the world has just written: hide closed environments, count the episodes that ended."""
        valid = segment["valid"][t]
        cut = segment["terminated"][t] | segment["truncated"][t]
        closed = ~np.repeat(self._open, self._num_agents)
        # A world may leave `valid` as it was in the segment before, where closed rows are hidden already.
        over = find_episode_ends(valid | closed, cut, self._num_agents)
        self._counts += self._open[over].tolist()
        valid &= ~closed
        self._end(over)

    def counted_only(self, finished: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Of the episodes that the world says have finished, those that were counted."""
        counts, self._counts = self._counts[: len(finished)], self._counts[len(finished) :]
        return [episode for episode, counted in zip(finished, counts, strict=False) if counted]

    def _end(self, over: np.ndarray) -> None:
        """Decide which environments are open after a step; `over`: where an episode ended, also a closed one."""
        raise NotImplementedError

    def _retire(self) -> None:
        retire = getattr(self._world, "retire", None)
        if retire is not None:
            retire(np.flatnonzero(~self._open).tolist())


class EpisodeQuota(_EpisodeCounter):
    """One actor's shares: an environment that has played its share is closed."""

    def __init__(self, total_episodes: int, actor: int, num_actors: int, world: SegmentEnv) -> None:
        super().__init__(world)
        num_envs = world.num_envs
        lanes = actor * num_envs + np.arange(num_envs)
        whole, rest = divmod(total_episodes, num_actors * num_envs)
        self._shares = whole + (lanes < rest).astype(np.int64)
        self.played = np.zeros(num_envs, np.int64)
        self._close()

    @property
    def exhausted(self) -> bool:
        """Whether every environment has played its share."""
        return not self._open.any()

    def state(self) -> Tree:
        """What `restore` needs, in memory of its own."""
        return {"played": self.played.copy(), "counts": list(self._counts)}

    def restore(self, state: Tree, *, exact: bool) -> None:
        """Go on after `state`; `exact`: whether the world does too, with the episodes that it has not told of yet."""
        self.played[...] = state["played"]
        self._counts = [bool(counted) for counted in state["counts"]] if exact else []
        self._close()

    def blank(self, segment: Segment, t: int) -> None:
        """Write a step in which nobody plays."""
        for name, column in segment.columns.items():
            if name != "obs" and t < len(column):
                column[t] = name == "mask"
        segment["obs"][t + 1] = segment["obs"][t]

    def _end(self, over: np.ndarray) -> None:
        finished = over & self._open
        if finished.any():
            self.played += finished
            self._close()

    def _close(self) -> None:
        self._open = self.played < self._shares
        self._retire()


class EpisodeClaims(_EpisodeCounter):
    """The episodes that a worker may still play. An environment begins one only if it is not taken by another environment;
    until then it is closed."""

    def __init__(self, world: SegmentEnv) -> None:
        super().__init__(world)
        self.left = 0  # episodes to play, those under way included
        self._can_retire = hasattr(
            world, "retire"
        )  # otherwise closed environments go on, and open when their episode ends
        self._at_start = np.ones(world.num_envs, np.bool_)

    @property
    def exhausted(self) -> bool:
        """Whether no episode is left to play."""
        return self.left == 0

    def allow(self, num_episodes: int) -> None:
        """Set how many episodes are left to play, those under way included."""
        self.left = num_episodes
        self._admit(self._at_start & ~self._open)

    def unrestricted(self, num_rows: int) -> bool:
        """Whether no environment can run out of episodes within so many rows of steps, so that nothing needs counting."""
        return bool(self._open.all()) and self.left >= (num_rows + 1) * len(self._open)

    def _end(self, over: np.ndarray) -> None:
        self._at_start = self._at_start & ~self._open | over if self._can_retire else over
        if over.any():
            self.left -= int(np.count_nonzero(over & self._open))
            self._open &= ~over
            self._admit(over)

    def _admit(self, waiting: np.ndarray) -> None:
        """Open as many of the environments that are about to begin an episode as there are episodes for."""
        free = self.left - int(np.count_nonzero(self._open))
        self._open[np.flatnonzero(waiting)[: max(0, free)]] = True
        self._retire()


def invalidate_after_episodes(segment: Segment, episodes: int) -> None:
    """Hide what comes after so many episodes of a segment, if it has as many: by time, then by environment.

    Every environment keeps its rows up to its last episode that counts. The others are written with `valid == False`.
    """
    over = segment.ended
    rows, envs = np.nonzero(over)
    if len(rows) < episodes:
        return
    kept = np.zeros(over.shape[1], np.int64)
    np.maximum.at(kept, envs[:episodes], rows[:episodes] + 1)
    beyond = np.arange(len(over))[:, None] >= kept
    segment["valid"][np.repeat(beyond, segment.spec.num_agents, axis=1)] = False

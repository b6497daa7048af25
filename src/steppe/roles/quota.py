"""Episode quotas: a run that is to play N episodes gives every environment an equal share, and stops each at its own."""

from __future__ import annotations

import numpy as np

from steppe.core.agent import Tree
from steppe.core.experience import Segment, ended
from steppe.core.world import World


class EpisodeQuota:
    """One actor's shares. Steps of an environment that has played its share are written with `valid == False`; worlds that
    can (`retire`) stop stepping it."""

    def __init__(self, total_episodes: int, actor: int, num_actors: int, world: World) -> None:
        num_envs = world.num_envs
        lanes = actor * num_envs + np.arange(num_envs)
        whole, rest = divmod(total_episodes, num_actors * num_envs)
        self._shares = whole + (lanes < rest).astype(np.int64)
        self._world, self._num_agents = world, world.spec.num_agents
        self._counts: list[bool] = []  # of the episodes that the world has finished: whether each is within its share
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

    def count(self, segment: Segment, t: int) -> None:
        """Take the step that the world has just written: hide what is beyond the shares, count the episodes that ended."""
        valid = segment["valid"][t]
        cut = segment["terminated"][t] | segment["truncated"][t]
        closed = ~np.repeat(self._open, self._num_agents)
        # A world may leave `valid` as it was in the segment before, where closed rows are hidden already.
        over = ended(valid | closed, cut, self._num_agents)
        self._counts += self._open[over].tolist()
        valid &= ~closed
        finished = over & self._open
        if finished.any():
            self.played += finished
            self._close()

    def blank(self, segment: Segment, t: int) -> None:
        """Write a step in which nobody plays."""
        for name, column in segment.columns.items():
            if name != "obs" and t < len(column):
                column[t] = name == "mask"
        segment["obs"][t + 1] = segment["obs"][t]

    def within(self, finished: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Of the episodes that the world says have finished, those within the shares."""
        counts, self._counts = self._counts[: len(finished)], self._counts[len(finished) :]
        return [episode for episode, counted in zip(finished, counts, strict=False) if counted]

    def _close(self) -> None:
        self._open = self.played < self._shares
        retire = getattr(self._world, "retire", None)
        if retire is not None:
            retire(np.flatnonzero(~self._open).tolist())

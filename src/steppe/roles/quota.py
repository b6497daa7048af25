"""Episode quotas: a run limited to N episodes counts them, and stops environments that have played their share.

EpisodeQuota gives every environment of every actor an equal share. EpisodeClaims plays the episodes that a worker
claimed from the shared table. In mode async, where actors run freely, the learner invalidates the rows after the last
episode.
"""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import RetiringEnv, SegmentEnv
from steppe.core.contracts.segment import Segment, find_episode_ends


class _EpisodeCounter:
    """Count the episodes of open environments. Steps of closed ones are written with `valid == False`; environments
    of the kind RetiringEnv do not step them. Subclasses decide which are open."""

    def __init__(self, env: SegmentEnv) -> None:
        self._num_agents = env.spec.num_agents
        self._retiring_env = env if isinstance(env, RetiringEnv) else None
        self._open = np.zeros(env.num_envs, np.bool_)
        self._counts: list[bool] = []  # for each finished episode of the environment: whether it was counted

    def count(self, segment: Segment, t: int) -> None:
        """Process the step that the environment has written: invalidate closed rows, count finished episodes."""
        valid = segment["valid"][t]
        cut = segment["terminated"][t] | segment["truncated"][t]
        closed = ~np.repeat(self._open, self._num_agents)
        # An environment may leave `valid` as it was in the previous segment, where closed rows are already invalid.
        ended = find_episode_ends(valid | closed, cut, self._num_agents)
        self._counts += self._open[ended].tolist()
        valid &= ~closed
        self._update_after_step(ended)

    def counted_only(self, finished: list[tuple[float, int]]) -> list[tuple[float, int]]:
        """Return those of the environment's finished episodes that were counted."""
        counts, self._counts = self._counts[: len(finished)], self._counts[len(finished) :]
        return [episode for episode, counted in zip(finished, counts, strict=False) if counted]

    def _update_after_step(self, ended: np.ndarray) -> None:
        """Decide which environments are open after a step; `ended`: where an episode ended, in closed ones too."""
        raise NotImplementedError

    def _retire(self) -> None:
        if self._retiring_env is not None:
            self._retiring_env.retire(np.flatnonzero(~self._open).tolist())


class EpisodeQuota(_EpisodeCounter):
    """One actor's quota: an environment that has played its share of episodes is closed."""

    def __init__(self, total_episodes: int, actor: int, num_actors: int, env: SegmentEnv) -> None:
        super().__init__(env)
        num_envs = env.num_envs
        env_ids = actor * num_envs + np.arange(num_envs)
        base, extra = divmod(total_episodes, num_actors * num_envs)
        self._episodes_per_env = base + (env_ids < extra).astype(np.int64)
        self.played = np.zeros(num_envs, np.int64)
        self._update_open()

    @property
    def exhausted(self) -> bool:
        """Whether every environment has played its share."""
        return not self._open.any()

    def state(self) -> Tree:
        """Return a copy of what `restore` needs."""
        return {"played": self.played.copy(), "counts": list(self._counts)}

    def restore(self, state: Tree, *, exact: bool) -> None:
        """Restore `state`; `exact`: whether the environment was restored too, with its episodes not yet reported."""
        self.played[...] = state["played"]
        self._counts = [bool(counted) for counted in state["counts"]] if exact else []
        self._update_open()

    def write_invalid(self, segment: Segment, t: int) -> None:
        """Write an invalid step that repeats the observations."""
        for name, column in segment.columns.items():
            if name != "obs" and t < len(column):
                column[t] = name == "mask"
        segment["obs"][t + 1] = segment["obs"][t]

    def _update_after_step(self, ended: np.ndarray) -> None:
        finished = ended & self._open
        if finished.any():
            self.played += finished
            self._update_open()

    def _update_open(self) -> None:
        self._open = self.played < self._episodes_per_env
        self._retire()


class EpisodeClaims(_EpisodeCounter):
    """The episodes that a worker may still play. An environment is closed until there is an episode for it."""

    def __init__(self, env: SegmentEnv) -> None:
        super().__init__(env)
        self.remaining = 0  # episodes to play, those in progress included
        self._at_start = np.ones(env.num_envs, np.bool_)

    @property
    def exhausted(self) -> bool:
        """Whether no episode is left to play."""
        return self.remaining == 0

    def set_remaining(self, num_episodes: int) -> None:
        """Set how many episodes are left to play, those in progress included."""
        self.remaining = num_episodes
        self._open_for(self._at_start & ~self._open)

    def cannot_exhaust(self, num_rows: int) -> bool:
        """Whether no environment can run out of episodes within `num_rows` steps, so that counting is unnecessary."""
        return bool(self._open.all()) and self.remaining >= (num_rows + 1) * len(self._open)

    def _update_after_step(self, ended: np.ndarray) -> None:
        # Without `retire`, closed environments keep stepping and can open when their episode ends.
        self._at_start = self._at_start & ~self._open | ended if self._retiring_env is not None else ended
        if ended.any():
            self.remaining -= int(np.count_nonzero(ended & self._open))
            self._open &= ~ended
            self._open_for(ended)

    def _open_for(self, waiting: np.ndarray) -> None:
        """Open as many environments at an episode start as there are episodes left."""
        free = self.remaining - int(np.count_nonzero(self._open))
        self._open[np.flatnonzero(waiting)[: max(0, free)]] = True
        self._retire()


def invalidate_after_episodes(segment: Segment, episodes: int) -> None:
    """Set `valid` to False after the first `episodes` of a segment, ordered by time, then by environment.

    Every environment keeps its rows up to its last counted episode. A segment with fewer episodes is unchanged.
    """
    ended = segment.ended
    rows, envs = np.nonzero(ended)
    if len(rows) < episodes:
        return
    kept = np.zeros(ended.shape[1], np.int64)
    np.maximum.at(kept, envs[:episodes], rows[:episodes] + 1)
    excess = np.arange(len(ended))[:, None] >= kept
    segment["valid"][np.repeat(excess, segment.spec.num_agents, axis=1)] = False

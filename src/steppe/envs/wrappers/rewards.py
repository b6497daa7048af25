"""Rewards on their way to the agent, and the account of episodes as the environment paid them."""

from __future__ import annotations

import numpy as np


class EpisodeStatistics:
    """Sums rewards over running episodes before they are scaled or clipped, by row: agent after agent of each environment."""

    def __init__(self, num_envs: int, scale: float, clip: float | None, num_agents: int = 1) -> None:
        self.num_agents = num_agents
        self.rewards = np.zeros(num_envs * num_agents, np.float64)  # of the step under way, written by the world
        self.returns = np.zeros(num_envs * num_agents, np.float64)
        self.lengths = np.zeros(num_envs, np.int64)
        self.episodes = np.zeros(num_envs, np.int64)  # finished by each environment
        # With several agents: who took part in the episode, written by the world.
        self.played = np.zeros(num_envs * num_agents, np.bool_) if num_agents > 1 else None
        # (return, length) of the episodes that ended and were not taken; with several agents each one's part behind it
        self._room = np.zeros((64, 2 + num_agents * (num_agents > 1)), np.float64)
        self.finished = self._room[:0]
        self._scale = scale
        self._clip = clip

    def restart(self) -> None:
        """Forget the running episodes."""
        self.returns.fill(0.0)
        self.lengths.fill(0)
        if self.played is not None:
            self.played.fill(False)

    def add_step(self, row: np.ndarray, live: np.ndarray | None = None) -> None:
        """Add the step's rewards and write what the agent sees of them, scaled first, then clipped.

        `live` leaves out environments whose step was no experience; their rewards must be 0.
        """
        self.returns += self.rewards
        self.lengths += 1 if live is None else live
        if self._clip is None and self._scale == 1.0:
            row[...] = self.rewards
            return
        np.multiply(self.rewards, self._scale, out=row, casting="same_kind")
        if self._clip is not None:
            np.clip(row, -self._clip, self._clip, out=row)

    def end(self, indices: np.ndarray | list[int]) -> None:
        """Close the episodes of these environments, in this order."""
        before, after = len(self.finished), len(self.finished) + len(indices)
        if after > len(self._room):
            more = np.zeros((max(after, len(self._room)), self._room.shape[1]))
            self._room = np.concatenate([self._room, more])
        self.finished = self._room[:after]
        returns = self.returns.reshape(-1, self.num_agents)
        self.finished[before:, 0] = returns[indices].sum(axis=1)
        self.finished[before:, 1] = self.lengths[indices]
        if self.played is not None:
            played = self.played.reshape(-1, self.num_agents)
            self.finished[before:, 2:] = np.where(played[indices], returns[indices], np.nan)
            played[indices] = False
        returns[indices] = 0.0
        self.lengths[indices] = 0
        self.episodes[indices] += 1

    def running(self) -> list[tuple[float, int]]:
        """(return, length) so far of each running episode."""
        totals = self.returns.reshape(-1, self.num_agents).sum(axis=1)
        return list(zip(totals.tolist(), self.lengths.tolist(), strict=True))

    def take(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes that ended since the last call."""
        taken = [(total, int(length)) for total, length in self.finished[:, :2].tolist()]
        self.finished = self._room[:0]
        return taken

    def shares(self) -> np.ndarray:
        """Each agent's part of what `take` would give [episodes, num_agents], NaN for who took no part."""
        return self.finished[:, 2:].copy()

    def refill(self, finished: np.ndarray) -> None:
        """Have these episodes ended and not taken."""
        width = self._room.shape[1]
        self._room = np.concatenate([np.asarray(finished, np.float64).reshape(-1, width), np.zeros((64, width))])
        self.finished = self._room[: len(finished)]

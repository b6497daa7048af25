"""Reward scaling and clipping, and episode statistics from the unscaled rewards."""

from __future__ import annotations

import numpy as np


class EpisodeStatistics:
    """Returns and lengths of episodes, from rewards before scaling and clipping.

    Rows are ordered by environment, then by agent.
    """

    def __init__(self, num_envs: int, scale: float, clip: float | None, num_agents: int = 1) -> None:
        self.num_agents = num_agents
        self.rewards = np.zeros(num_envs * num_agents, np.float64)  # current step, written by the environment
        self.returns = np.zeros(num_envs * num_agents, np.float64)
        self.lengths = np.zeros(num_envs, np.int64)
        self.episodes = np.zeros(num_envs, np.int64)  # finished episodes per environment
        # With several agents: which took part in the episode; written by the segment environment.
        self.played = np.zeros(num_envs * num_agents, np.bool_) if num_agents > 1 else None
        # (return, length) of the finished episodes not taken yet; with several agents followed by each agent's return
        self._buffer = np.zeros((64, 2 + num_agents * (num_agents > 1)), np.float64)
        self.finished = self._buffer[:0]
        self._scale = scale
        self._clip = clip

    def restart(self) -> None:
        """Discard the running episodes."""
        self.returns.fill(0.0)
        self.lengths.fill(0)
        if self.played is not None:
            self.played.fill(False)

    def add_step(self, row: np.ndarray, live: np.ndarray | None = None) -> None:
        """Add the step's rewards to the statistics and write them to `row`, scaled first, then clipped.

        `live` is False for environments whose step is not a valid transition; their rewards must be 0.
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
        """Finish the episodes of these environments, in this order."""
        before, after = len(self.finished), len(self.finished) + len(indices)
        if after > len(self._buffer):
            more = np.zeros((max(after, len(self._buffer)), self._buffer.shape[1]))
            self._buffer = np.concatenate([self._buffer, more])
        self.finished = self._buffer[:after]
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
        """Return (return, length) so far of each running episode."""
        totals = self.returns.reshape(-1, self.num_agents).sum(axis=1)
        return list(zip(totals.tolist(), self.lengths.tolist(), strict=True))

    def take(self) -> list[tuple[float, int]]:
        """Return (return, length) of the episodes that ended since the last call."""
        taken = [(total, int(length)) for total, length in self.finished[:, :2].tolist()]
        self.finished = self._buffer[:0]
        return taken

    def shares(self) -> np.ndarray:
        """Return each agent's share of the returns of `take` [episodes, num_agents]; NaN for absent agents."""
        return self.finished[:, 2:].copy()

    def refill(self, finished: np.ndarray) -> None:
        """Restore finished episodes that were not taken yet."""
        width = self._buffer.shape[1]
        self._buffer = np.concatenate([np.asarray(finished, np.float64).reshape(-1, width), np.zeros((64, width))])
        self.finished = self._buffer[: len(finished)]

"""Rewards on their way to the agent, and the account of episodes as the environment paid them."""

from __future__ import annotations

import numpy as np


class Ledger:
    """Sums rewards over B running episodes before they are scaled or clipped."""

    def __init__(self, num_envs: int, scale: float, clip: float | None) -> None:
        self.rewards = np.zeros(num_envs, np.float64)  # of the step under way, written by the world
        self.returns = np.zeros(num_envs, np.float64)
        self.lengths = np.zeros(num_envs, np.int64)
        self.episodes = np.zeros(num_envs, np.int64)  # finished by each environment
        self.finished: list[tuple[float, int]] = []
        self._scale = scale
        self._clip = clip

    def restart(self) -> None:
        """Forget the running episodes."""
        self.returns.fill(0.0)
        self.lengths.fill(0)

    def book(self, row: np.ndarray, live: np.ndarray | None = None) -> None:
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

    def end(self, index: int) -> None:
        """Close one environment's episode."""
        self.finished.append((float(self.returns[index]), int(self.lengths[index])))
        self.returns[index] = 0.0
        self.lengths[index] = 0
        self.episodes[index] += 1

    def running(self) -> list[tuple[float, int]]:
        """(return, length) so far of each running episode."""
        return list(zip(self.returns.tolist(), self.lengths.tolist(), strict=True))

    def take(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes that ended since the last call."""
        taken, self.finished = self.finished, []
        return taken

"""TrainingStatistics: what classic training went through, kept in memory and summed up on request."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np


class TrainingStatistics:
    """Rewards and lengths of episodes, times of steps, and whatever else is recorded under a name."""

    def __init__(self) -> None:
        self.start_time = time.monotonic()
        self.episode_rewards: list[float] = []
        self.episode_lengths: list[int] = []
        self.unlisted_episodes = 0  # that ended besides those above
        self.step_times: list[float] = []
        self.metrics: defaultdict[str, list[float]] = defaultdict(list)

    def record_episode(self, reward: float, length: int | None = None) -> None:
        """An episode's return and, where known, its steps."""
        self.episode_rewards.append(float(reward))
        if length is not None:
            self.episode_lengths.append(int(length))

    def count_unlisted(self, num_episodes: int) -> None:
        """Episodes of which no more is known than that there were so many: of very many, only some are listed."""
        self.unlisted_episodes += num_episodes

    def record_step_time(self, step_time: float) -> None:
        """Seconds that one step took."""
        self.step_times.append(float(step_time))

    def record_metric(self, name: str, value: float) -> None:
        """A value of one's own."""
        self.metrics[name].append(float(value))

    def get_summary(self) -> dict[str, Any]:
        """The statistics of all episodes so far, times in seconds; empty before the first."""
        if not self.episode_rewards:
            return {}
        rewards = np.asarray(self.episode_rewards)
        return {
            "total_episodes": len(rewards) + self.unlisted_episodes,
            "mean_reward": float(rewards.mean()),
            "std_reward": float(rewards.std()),
            "min_reward": float(rewards.min()),
            "max_reward": float(rewards.max()),
            "mean_episode_length": float(np.mean(self.episode_lengths)) if self.episode_lengths else None,
            "total_training_time": time.monotonic() - self.start_time,
            "mean_step_time": float(np.mean(self.step_times)) if self.step_times else None,
        }

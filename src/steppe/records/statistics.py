"""TrainingStatistics: rewards, lengths and times of classic training, kept in memory and summarized on request."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np


class TrainingStatistics:
    """Rewards and lengths of episodes, step times, and custom metrics by name."""

    def __init__(self) -> None:
        self.start_time = time.monotonic()
        self.episode_rewards: list[float] = []
        self.episode_lengths: list[int] = []
        self.unlisted_episodes = 0  # that ended in addition to those above
        self.step_times: list[float] = []
        self.metrics: defaultdict[str, list[float]] = defaultdict(list)

    def record_episode(self, reward: float, length: int | None = None) -> None:
        """Record an episode's return and, if known, its length in steps."""
        self.episode_rewards.append(float(reward))
        if length is not None:
            self.episode_lengths.append(int(length))

    def count_unlisted(self, num_episodes: int) -> None:
        """Count episodes whose returns are not recorded: of very many episodes, only some are."""
        self.unlisted_episodes += num_episodes

    def record_step_time(self, step_time: float) -> None:
        """Record how many seconds one step took."""
        self.step_times.append(float(step_time))

    def record_metric(self, name: str, value: float) -> None:
        """Record a value of a custom metric."""
        self.metrics[name].append(float(value))

    def get_summary(self) -> dict[str, Any]:
        """Return statistics of all episodes so far, times in seconds; empty before the first episode."""
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

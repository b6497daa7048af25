"""A baseline for pathfinding: random moves that lead nearer to the goal."""

from __future__ import annotations

import numpy as np

NUM_MAP_PLANES = 2  # planes before those of the moves that lead nearer: other agents, and obstacles


def greedy_walk(obs: np.ndarray, stream: np.random.Generator, noise: float = 0.1) -> np.ndarray:
    """Return random actions [B, N] that lead nearer to the goal, or any action with probability `noise`: a baseline."""
    middle = obs.shape[-1] // 2
    nearer = obs[..., NUM_MAP_PLANES:, middle, middle]
    draws = stream.random(nearer.shape) * nearer
    actions = np.where(nearer.any(axis=-1), draws.argmax(axis=-1) + 1, 0)
    wild = stream.random(actions.shape) < noise
    return np.where(wild, stream.integers(0, 1 + nearer.shape[-1], actions.shape), actions)

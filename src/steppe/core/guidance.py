"""Moves that an observation itself advises: where its planes from the third on say which moves lead nearer to a goal."""

from __future__ import annotations

import numpy as np

from steppe.core.specs import EnvSpec

BEFORE = 2  # planes ahead of the advice: others, and obstacles


def advises(spec: EnvSpec) -> bool:
    """Whether observations have a plane of advice for every move, around a cell in the middle; the first action is to stay."""
    planes, height, width = spec.obs.shape if spec.is_image else (0, 0, 0)
    return planes == BEFORE + spec.action.sizes[0] - 1 and height == width and height % 2 == 1


def greedy_walk(obs: np.ndarray, stream: np.random.Generator, noise: float = 0.1) -> np.ndarray:
    """Actions [B, N] that lead nearer to the goal, any of them alike, and with probability `noise` anything: a baseline."""
    middle = obs.shape[-1] // 2
    nearer = obs[..., BEFORE:, middle, middle]
    draws = stream.random(nearer.shape) * nearer
    actions = np.where(nearer.any(axis=-1), draws.argmax(axis=-1) + 1, 0)
    wild = stream.random(actions.shape) < noise
    return np.where(wild, stream.integers(0, 1 + nearer.shape[-1], actions.shape), actions)

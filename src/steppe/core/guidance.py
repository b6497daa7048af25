"""Moves that an observation itself advises: where its planes from the third on say which moves lead nearer to a goal."""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.specs import EnvSpec

NUM_MAP_PLANES = 2  # planes ahead of the advice: others, and obstacles
MOVE_OFFSETS = (
    (-1, 0),
    (1, 0),
    (0, -1),
    (0, 1),
)  # rows down and columns right, for the actions after the first, which is to stay


def has_expert_planes(spec: EnvSpec) -> bool:
    """Whether observations have a plane of advice for every move, around a cell in the middle."""
    planes, height, width = spec.obs.shape if spec.is_image else (0, 0, 0)
    moves = spec.action.sizes[0] - 1
    return len(MOVE_OFFSETS) == moves == planes - NUM_MAP_PLANES and height == width and height % 2 == 1


def expert_action_mask(obs: np.ndarray) -> np.ndarray:
    """Which actions [..., actions] observations [..., planes, cells, cells] advise.

    Alone: any move that leads nearer, or to stay where none does. With somebody beside: to make way, so any move nearer or to
    a free cell, and to stay only where there is none.
    """
    middle = obs.shape[-1] // 2
    others, blocked = (
        np.stack([obs[..., plane, middle + down, middle + right] != 0 for down, right in MOVE_OFFSETS], axis=-1)
        for plane in range(NUM_MAP_PLANES)
    )
    nearer = obs[..., NUM_MAP_PLANES:, middle, middle] != 0
    beside = others.any(axis=-1, keepdims=True)
    moves = nearer | (beside & ~others & ~blocked)
    found: np.ndarray = np.concatenate([~moves.any(axis=-1, keepdims=True), moves], axis=-1)
    return found


def greedy_walk(obs: np.ndarray, stream: np.random.Generator, noise: float = 0.1) -> np.ndarray:
    """Actions [B, N] that lead nearer to the goal, any of them alike, and with probability `noise` anything: a baseline."""
    middle = obs.shape[-1] // 2
    nearer = obs[..., NUM_MAP_PLANES:, middle, middle]
    draws = stream.random(nearer.shape) * nearer
    actions = np.where(nearer.any(axis=-1), draws.argmax(axis=-1) + 1, 0)
    wild = stream.random(actions.shape) < noise
    return np.where(wild, stream.integers(0, 1 + nearer.shape[-1], actions.shape), actions)

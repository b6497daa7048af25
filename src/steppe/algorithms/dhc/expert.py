"""Expert actions from observations whose planes from the third on mark the moves that lead nearer to a goal."""

from __future__ import annotations

import numpy as np

from steppe.core.contracts.specs import EnvSpec

NUM_MAP_PLANES = 2  # planes before the expert planes: other agents, and obstacles
# (rows down, columns right) of each action after the first, which is to stay.
MOVE_OFFSETS = (
    (-1, 0),
    (1, 0),
    (0, -1),
    (0, 1),
)


def has_expert_planes(spec: EnvSpec) -> bool:
    """Return whether observations have an expert plane for every move, around a cell in the middle."""
    planes, height, width = spec.obs.shape if spec.is_image else (0, 0, 0)
    moves = spec.action.sizes[0] - 1
    return len(MOVE_OFFSETS) == moves == planes - NUM_MAP_PLANES and height == width and height % 2 == 1


def expert_action_mask(obs: np.ndarray) -> np.ndarray:
    """Return the expert actions [..., actions] for observations [..., planes, cells, cells].

    Without an adjacent agent: any move that leads nearer, or to stay if none does. With an adjacent agent, make way:
    any move that leads nearer or to a free cell, and to stay only if there is none.
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

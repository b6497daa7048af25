"""State indices from PettingZoo's usual Dict of an observation and an action mask, for tabular agents."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

MAX_STATES = 2**24  # larger tables would take too long to learn


class MaskedStateIndexer:
    """Maps the `observation` of a Dict with an `action_mask`, an array of bounded integers, to a state index."""

    def __init__(self, low: np.ndarray, sizes: np.ndarray) -> None:
        self._low = low.ravel().astype(np.int64)
        self._weights = np.concatenate([[1], np.cumprod(sizes.ravel().astype(np.int64))[:-1]])
        self._sizes = sizes.ravel().astype(np.int64)
        self.space = spaces.Discrete(math.prod(self._sizes.tolist()))

    @classmethod
    def of(cls, space: spaces.Space[Any]) -> MaskedStateIndexer | None:
        """Return the indexer for a space; None if it is not such a Dict, or has more than MAX_STATES states."""
        if not isinstance(space, spaces.Dict) or set(space) != {"observation", "action_mask"}:
            return None
        obs_space = space["observation"]
        if isinstance(obs_space, spaces.MultiBinary):
            low, high = np.zeros(obs_space.shape, np.int64), np.ones(obs_space.shape, np.int64)
        elif (
            isinstance(obs_space, spaces.Box)
            and obs_space.dtype is not None
            and np.dtype(obs_space.dtype).kind in "iub"
        ):
            low, high = obs_space.low.astype(np.int64), obs_space.high.astype(np.int64)
        else:
            return None
        sizes = high - low + 1
        return cls(low, sizes) if math.prod(sizes.ravel().tolist()) <= MAX_STATES else None

    def number(self, raw: Any) -> int:
        """Return the state index of an observation; ValueError if it is outside its bounds."""
        digits = np.asarray(raw["observation"], np.int64).ravel() - self._low
        if digits.shape != self._sizes.shape or ((digits < 0) | (digits >= self._sizes)).any():
            raise ValueError(f"the observation {raw['observation']} is not within its space's bounds")
        return int(digits @ self._weights)

    def mask(self, raw: Any) -> np.ndarray:
        """Return the allowed actions; all of them if the mask allows none, as for an agent whose turn it is not."""
        mask = np.asarray(raw["action_mask"], np.bool_)
        return mask if mask.any() else ~mask

"""DiscretizeWrapper: maps Box observations to state indices, for tabular agents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from steppe.core.contracts.errors import ConfigError, WorldError


class DiscretizeWrapper(gym.ObservationWrapper[int, Any, Any]):
    """Split each component of a Box into `bins` equal bins between `low` and `high`, and observe the cell's index.

    The last component varies fastest. Bounds default to the space's own. Values outside fall into the outermost bins.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        bins: int | Sequence[int] = 10,
        low: Sequence[float] | None = None,
        high: Sequence[float] | None = None,
    ) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box):
            raise WorldError(f"{space} has no components to cut into bins: DiscretizeWrapper is for Box spaces")
        size = math.prod(space.shape)
        self.bins = np.full(size, bins) if isinstance(bins, int) else np.asarray(bins, np.int64)
        self.low, self.high = _bound(space.low, low), _bound(space.high, high)
        if any(array.shape != (size,) for array in (self.bins, self.low, self.high)):
            raise ConfigError(f"{space} has {size} components: give bins, low and high for each of them")
        if (self.bins < 1).any():
            raise ConfigError(f"bins={bins}: there must be at least one for each component")
        open_ended = np.flatnonzero(~np.isfinite(self.low) | ~np.isfinite(self.high) | (self.low >= self.high))
        if len(open_ended):
            raise ConfigError(
                f"component {open_ended[0]} of {space} has no finite bounds: wrap it in a function of your own that returns "
                "DiscretizeWrapper(env, bins=…, low=[…], high=[…])"
            )
        self.observation_space: spaces.Space[Any] = spaces.Discrete(math.prod(self.bins.tolist()))

    def observation(self, observation: Any) -> int:
        """Return the index of the cell that contains an observation; WorldError if it is not finite."""
        fraction = (np.ravel(observation) - self.low) / (self.high - self.low)
        if not np.isfinite(fraction).all():
            raise WorldError(f"the observation {observation} is not finite and lies in no bin")
        cell = np.clip((fraction * self.bins).astype(np.int64), 0, self.bins - 1)
        return int(np.ravel_multi_index(tuple(cell), tuple(self.bins)))


def _bound(own: np.ndarray, given: Sequence[float] | None) -> np.ndarray:
    """Return the given or the space's own bounds; huge ones, Gymnasium's way to say unbounded, become infinite."""
    if given is not None:
        return np.asarray(given, np.float64)
    bound = own.ravel().astype(np.float64)
    return np.where(np.abs(bound) > 1e30, np.inf, bound)

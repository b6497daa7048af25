"""The contract of a world: B environments that step together and write straight into a segment."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from steppe.core.experience import Segment
from steppe.core.specs import EnvSpec


class World(Protocol):
    """B copies of one environment. Resets happen inside; the caller only steps.

    `starts[b]` says whether the observation written last is the first of an episode. A world may reset within the step
    that ended an episode, or spend the next step on it; in the second case that row is written with `valid == False`.
    """

    spec: EnvSpec
    num_envs: int
    starts: np.ndarray  # bool [B]

    def reset(self, obs: np.ndarray, seeds: np.random.SeedSequence | None = None) -> None:
        """Begin new episodes everywhere and write the first observations into `obs` [B, …].

        With `seeds`, everything random from here on depends on them alone; without, it goes on from where it was.
        """

    def step(self, actions: np.ndarray, segment: Segment, t: int) -> None:
        """Act once everywhere.

        Writes reward, terminated, truncated, valid at row t, final_obs at row t where an episode was cut, and the
        observations to act on next at `obs[t + 1]`. Raises EnvironmentFault when an environment does.
        """

    def take_finished(self) -> list[tuple[float, int]]:
        """(return, length) of the episodes that ended since the last call, by step, then by environment.

        Returns are as the environment gave them, before clipping and scaling.
        """

    def unfinished(self) -> list[tuple[float, int]]:
        """(return, length) so far of the episode under way in each environment."""

    def render(self) -> np.ndarray | None:
        """The first environment as an RGB image [height, width, 3], where it can."""

    def close(self) -> None:
        """Close every environment."""

"""The target network of Q-learners: a copy of the online network that is updated periodically.

The period of DQN and R2D2 is in environment steps, not updates, so the target stays fixed within a block of updates
between two segments. DHC counts updates.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.weights import Weights


class TargetNetwork:
    """A copy of `online`, built on first use: actors never need one."""

    def __init__(self, online: FlatModule, every_steps: int | None) -> None:
        assert every_steps is not None, "a resolved configuration has this number"
        self.online, self.every_steps = online, every_steps
        self._synced_at = 0

    @cached_property
    def flat(self) -> FlatModule:
        """The target network."""
        return self.online.clone()

    def follow(self, env_steps: int) -> None:
        """Copy the online network if `every_steps` have passed since the last copy."""
        target = self.flat
        if not 0 <= env_steps - self._synced_at < self.every_steps:  # env_steps restarts at 0 in a new run
            target.copy_from(self.online)
            self._synced_at = env_steps

    def state(self) -> Tree:
        return {"synced_at": self._synced_at, "target": self.flat.weights().buffer.copy()}

    def restore(self, state: Tree, whose: str) -> None:
        self._synced_at = int(state["synced_at"])
        self.flat.load(Weights(self.flat.layout, np.asarray(state["target"])), f"{whose}'s target network")

"""Frame stacking: the newest observations of each environment, concatenated along the first axis, oldest first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from steppe.core.contracts.specs import FieldSpec
from steppe.envs.vector.spaces import ObservationEncoder


class FrameStack:
    """Stacks `count` observations per environment; an episode starts with copies of its first observation."""

    def __init__(self, num_envs: int, rule: ObservationEncoder, count: int) -> None:
        unit, *rest = rule.field.shape
        self.field: FieldSpec = replace(rule.field, shape=(unit * count, *rest), frames=count)
        self.memory = np.zeros((num_envs, *self.field.shape), rule.field.dtype)
        self._rule = rule
        self._unit = unit
        self._newest = self.memory[:, -unit:]
        self._split = self.memory.reshape(num_envs, count, unit, *rest)

    def put(self, target: np.ndarray, index: int, raw: Any) -> None:
        """Add the next observation of one environment and write its row."""
        stack = self.memory[index]
        stack[: -self._unit] = stack[self._unit :]
        self._rule.put(self._newest, index, raw)
        target[index] = stack

    def restart(self, target: np.ndarray, index: int, raw: Any) -> None:
        """Fill the stack with the first observation of an episode and write its row."""
        self._rule.put_checked(self._newest, index, raw)
        self._split[index, :-1] = self._newest[index]
        target[index] = self.memory[index]

    def put_all(self, target: np.ndarray, batch: np.ndarray, first: np.ndarray) -> None:
        """Add one observation of every environment and write all rows; `first` marks those that start an episode."""
        self.memory[:, : -self._unit] = self.memory[:, self._unit :]
        self._newest[...] = batch
        self._split[first, :-1] = self._newest[first][:, None]
        target[...] = self.memory

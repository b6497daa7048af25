"""Names, shapes and dtypes of segments, environments and actions: plain data, no arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

COLUMNS_WITH_BOOTSTRAP_ROW = ("obs", "mask", "comm_mask")  # columns with an extra row after the last step
_ALIGN = 64  # cache line size: columns of a segment never share a cache line


@dataclass(frozen=True)
class FieldSpec:
    """One column: its name, its shape for a single step of a single environment, and its dtype.

    `frames` > 1 means that this many observations of equal shape are stacked along the first axis, the newest last.
    A column with `once` has one row per segment, for its first step: the recurrent state of a policy. `most` is the
    largest value of an image: 1 for planes of 0 and 1. `below` is for integers that are used as indices: each is at
    least 0 and below the bound at its position. The bounds repeat over components, agents and rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    frames: int = 1
    once: bool = False
    most: int = 255
    below: tuple[int, ...] = field(default=(), compare=False)  # not part of a column's identity

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ActionSpec:
    """Action space: one choice of n, several choices, or a box of real numbers."""

    kind: Literal["discrete", "multi_discrete", "box"]
    sizes: tuple[int, ...]  # discrete: (n,); multi_discrete: choices per component; box: the shape
    low: tuple[float, ...] = ()  # box only, flattened
    high: tuple[float, ...] = ()

    @property
    def field(self) -> FieldSpec:
        if self.kind == "discrete":
            return FieldSpec("action", (), "int64", below=self.sizes)
        if self.kind == "multi_discrete":
            return FieldSpec("action", (len(self.sizes),), "int64", below=self.sizes)
        return FieldSpec("action", self.sizes, "float32")


@dataclass(frozen=True)
class AgentSpec:
    """Observation and action of one agent of several, where the agents differ."""

    obs: FieldSpec
    action: ActionSpec


@dataclass(frozen=True)
class EnvSpec:
    """What an agent must know about an environment.

    Observations are flattened or kept as images by the rules of envs/vector/spaces.py.

    With several agents, `obs` and `action` apply to each of them. Where agents differ, `members` has the spec of each,
    and `obs` and `action` are as large as the largest.
    """

    id: str
    obs: FieldSpec  # "obs": float32 vector (d,), uint8 image (channels, height, width), or one int64 state index ()
    action: ActionSpec
    native_vector: bool = False  # the environment steps many copies in one call
    max_episode_steps: int | None = None
    num_states: int | None = None  # observations are state indices below this, for tabular agents
    in_turns: bool = False  # turn-based, two agents: the next state is the opponent's to move in
    # Per environment; row n · num_agents + a of every [T, B, …] array is agent a of environment n.
    num_agents: int = 1
    agents: tuple[str, ...] = ()  # agent names, if there are several agents
    members: tuple[AgentSpec, ...] = ()  # specs of the agents, only if they differ
    largest_stage: tuple[int, int] | None = None  # largest curriculum stage: agents, cells along a side

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> EnvSpec:
        """Return the spec that `dataclasses.asdict` made `record` of; `largest_stage` was called `largest_lesson` in 0.1."""
        renamed = {"largest_stage": record["largest_lesson"]} if "largest_lesson" in record else {}
        return msgspec.convert({**record, **renamed}, cls)

    @property
    def is_image(self) -> bool:
        return len(self.obs.shape) == 3

    @cached_property
    def fields(self) -> tuple[FieldSpec, FieldSpec]:
        """The observation and action columns of a segment, with the bounds of integers that are used as indices."""
        obs = self.obs if self.num_states is None else replace(self.obs, below=(self.num_states,))
        action = self.action.field
        if not self.members or not action.below:
            return obs, action
        width = math.prod(action.shape)  # the unused components of an agent are 0
        padded = [(*each.action.sizes, *[1] * width)[:width] for each in self.members]
        return obs, replace(action, below=tuple(size for sizes in padded for size in sizes))


@dataclass(frozen=True)
class SegmentSpec:
    """Memory layout of one segment: T steps of B environments, column after column in one buffer.

    With several agents in an environment, B counts all agents, those of one environment next to each other. `obs` has T
    + 1 rows; the last is the observation after the last step. For agents that declare them, so do `mask`, the allowed
    actions, and `comm_mask`, the communication mask. `final_obs` is meaningful only where `terminated | truncated`:
    untouched pages of it cost nothing.
    """

    num_steps: int
    num_envs: int
    obs: FieldSpec
    action: FieldSpec
    extras: tuple[FieldSpec, ...] = ()
    num_agents: int = 1
    fields: tuple[FieldSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        base = (
            self.obs,
            self.action,
            FieldSpec("reward", (), "float32"),
            FieldSpec("terminated", (), "bool"),
            FieldSpec("truncated", (), "bool"),
            FieldSpec("valid", (), "bool"),
            FieldSpec("final_obs", self.obs.shape, self.obs.dtype, below=self.obs.below),
        )
        object.__setattr__(self, "fields", base + self.extras)

    def shape(self, column: FieldSpec) -> tuple[int, ...]:
        rows = 1 if column.once else self.num_steps + (column.name in COLUMNS_WITH_BOOTSTRAP_ROW)
        return (rows, self.num_envs, *column.shape)

    @cached_property
    def layout(self) -> tuple[tuple[FieldSpec, tuple[int, ...], np.dtype[Any]], ...]:
        """Each column with its shape in a segment and its dtype."""
        return tuple((column, self.shape(column), np.dtype(column.dtype)) for column in self.fields)

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offset of each column in the buffer, in bytes; the key "" has the total size."""
        offsets, end = {}, 0
        for column in self.fields:
            offsets[column.name] = end
            size = math.prod(self.shape(column)) * np.dtype(column.dtype).itemsize
            end += -(-size // _ALIGN) * _ALIGN
        offsets[""] = end
        return offsets

    @property
    def nbytes(self) -> int:
        return self.offsets[""]

    def columns(self, buffer: memoryview | bytearray | np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns as arrays that share `buffer`, which must hold at least `nbytes`."""
        return {
            column.name: np.ndarray(
                self.shape(column), np.dtype(column.dtype), buffer=buffer, offset=self.offsets[column.name]
            )
            for column in self.fields
        }


@dataclass(frozen=True)
class PushSpec(SegmentSpec):
    """Memory layout of one gradient push, sent like a segment: a worker's gradient instead of experience.

    `gradient` [1, 1, size], of which the trainable numbers are used; `counts` [1, 1, 4]: rows behind the gradient (0:
    no gradient), environment steps and episodes since the last push, and the updates of the weights it was computed
    with.
    """

    ROWS, STEPS, EPISODES, UPDATES = range(4)

    @classmethod
    def of(cls, size: int) -> PushSpec:
        """Return the spec for gradients of up to `size` numbers."""
        return cls(1, 1, FieldSpec("gradient", (size,), "float32"), FieldSpec("counts", (4,), "int64"))

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", (self.obs, self.action))

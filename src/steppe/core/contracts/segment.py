"""Segment: the experience of one actor over T steps of B environments. Batch: the input of one `learn` call.

All consumers follow one rule: the observation after step t is `final_obs[t]` where the episode was cut
(`terminated | truncated`), and `obs[t + 1]` elsewhere. Rows with `valid == False` are autoreset steps or absent agents:
they are excluded from trajectories, losses, replay and counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from steppe.core.contracts.specs import SegmentSpec

SCHEMA = 1


class SegmentHeader(msgspec.Struct, frozen=True):
    """Origin of a segment: actor, position in the actor's sequence, and policy version."""

    run: str
    actor: int
    epoch: int  # number of restarts of this actor
    sequence: int  # 0, 1, 2, … per actor, across epochs
    version: int  # of the weights it was collected with
    started_s: float = 0.0  # the run's clock when its first step began
    schema: int = SCHEMA


@dataclass
class Segment:
    """Preallocated `[T, B, …]` columns (`obs` has T + 1 rows) and a header; `slot` belongs to the transport.

    `state` is the packed state of the actor just after the segment, from which it or its replacement continues.
    """

    spec: SegmentSpec
    columns: dict[str, np.ndarray]
    header: SegmentHeader | None = None
    state: bytes | None = None
    slot: int = -1

    @classmethod
    def blank(cls, spec: SegmentSpec) -> Segment:
        """Return a new segment in private memory."""
        return cls(spec, spec.columns(bytearray(spec.nbytes)))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    @property
    def num_valid(self) -> int:
        """Number of valid rows: steps of environments, or of their agents where there are several."""
        return int(np.count_nonzero(self.columns["valid"]))

    @property
    def env_steps(self) -> int:
        """Number of environment steps: with several agents, the steps in which at least one agent was present."""
        valid, num_agents = self.columns["valid"], self.spec.num_agents
        present = valid if num_agents == 1 else valid.reshape(len(valid), -1, num_agents).any(axis=2)
        return int(np.count_nonzero(present))

    @property
    def ended(self) -> np.ndarray:
        """Where the episode of an environment ended [T, N]."""
        return find_episode_ends(self.columns["valid"], self.cut, self.spec.num_agents)

    @property
    def cut(self) -> np.ndarray:
        """Where an episode was terminated or truncated [T, B]."""
        cut: np.ndarray = self.columns["terminated"] | self.columns["truncated"]
        return cut

    def write(self, t: int, chosen: Mapping[str, np.ndarray]) -> None:
        """Write the output of `Policy.act` into row t; columns with `once` are written for row 0 only."""
        for name, values in chosen.items():
            column = self.columns[name]
            if t < len(column):
                column[t] = values

    def next_obs(self) -> np.ndarray:
        """Return the observation after each step, as a new `[T, B, …]` array."""
        following = self.columns["obs"][1:].copy()
        cut = self.cut
        following[cut] = self.columns["final_obs"][cut]
        return following

    def transitions(self) -> dict[str, np.ndarray]:
        """Return the valid steps as flat columns, time-major.

        These are obs, action, reward, next_obs, terminated, truncated and extras.
        """
        keep = self.columns["valid"]
        flat = {
            column.name: self.columns[column.name][: self.spec.num_steps][keep]
            for column in self.spec.fields
            if column.name not in ("valid", "final_obs") and not column.once
        }
        flat["next_obs"] = self.next_obs()[keep]
        return flat


def find_episode_ends(valid: np.ndarray, cut: np.ndarray, num_agents: int) -> np.ndarray:
    """Return where episodes of environments ended, from rows [..., B] to [..., N]: all agents present were cut."""
    if num_agents == 1:
        return valid & cut  # type: ignore[no-any-return]
    present = valid.reshape(*valid.shape[:-1], -1, num_agents)
    continuing = present & ~cut.reshape(present.shape)
    over: np.ndarray = present.any(axis=-1) & ~continuing.any(axis=-1)
    return over


@dataclass
class Batch:
    """The input of one `learn` call: columns with a common leading shape.

    From a rollout the columns are those of segments, concatenated over actors along B (`obs` with T + 1 rows,
    `final_obs`, `valid`). From replay they are flat: obs, action, reward (n-step sum), next_obs, terminated, discount
    (gamma ** n, n <= n_step).
    """

    columns: dict[str, np.ndarray]
    weights: np.ndarray | None = None  # importance weights, replay only
    indices: np.ndarray | None = None  # of the rows in the memory, for `Memory.update`
    versions: tuple[int, ...] = field(default=())

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Iterate over the columns in order, so that a batch can be unpacked: `obs, action, reward, … = batch`."""
        return iter(self.columns.values())

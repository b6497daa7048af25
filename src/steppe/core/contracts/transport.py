"""The contracts between roles: segments one way, weights the other, records to whoever watches.

A transport is a Channel and a WeightStore for one medium. A Board carries small messages: the run's SQLite store here,
topics of the same names on Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from steppe.core.contracts.segment import Segment
from steppe.core.contracts.weights import Weights
from steppe.core.io.codec import Buffer

TRAINING = "metrics.training"
ACTORS = "metrics.actors"
EVALUATIONS = "metrics.evaluations"
EVENTS = "events"
COMMANDS = "commands.control"
START = "start"  # the command to whoever has runs; those of one that is under way know others
SET, SCALE = "set", "scale"  # commands that carry `values` (hyperparameters) and `actors` (a count)
TOPICS = (TRAINING, ACTORS, EVALUATIONS, EVENTS, COMMANDS)


class Channel(Protocol):
    """Bounded, many writers to one reader. Segments of one writer arrive in order, whole, at most once."""

    def blank(self, actor: int) -> Segment | None:
        """Memory for this actor's next segment, or None while its share of the channel is full (back-pressure).

        Asking again before offering returns the same segment.
        """

    def offer(self, segment: Segment) -> bool:
        """Hand over a filled segment that came from `blank`, header set. False: no room, try again."""

    def poll(self) -> Segment | None:
        """The oldest segment that is waiting, or None. It stays the reader's until `release`."""

    def release(self, segment: Segment) -> None:
        """Give a polled segment's memory back to its writer."""

    def recall(self, actor: int) -> tuple[int, bytes | None] | None:
        """Sequence number and `state` of the last segment that this actor offered; None when there was none."""

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        """Let `recall` answer as if this segment had been offered and learned from: how a resumed run begins."""


@runtime_checkable
class ValidatingChannel(Protocol):
    """A Channel that checks what it carries before it hands it out."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """What it carried and did not hand out: cause → messages."""


@runtime_checkable
class Checkpointable(ValidatingChannel, Protocol):
    """A Channel that keeps what it carried: another reader can go on where this one was."""

    def mark(self) -> dict[str, Any]:
        """In front of it, everything was released. For a checkpoint."""

    def stats(self) -> dict[str, float]:
        """How much waits in it, how much came through it, how old that was; for the records."""


@runtime_checkable
class RoundOffset(Protocol):
    """A Channel, as a writer holds it whom the reader's rounds may have gone on without."""

    @property
    def shift(self) -> int:
        """The number of the round that the writer's next segment is for, less the segment's own."""


@runtime_checkable
class WeightStore(Protocol):
    """One writer per policy, many readers, newest wins."""

    def publish(self, policy: str, weights: Weights) -> None:
        """Make `weights` visible to every reader. Copies; versions must grow."""

    def newer_than(self, policy: str, version: int) -> Weights | None:
        """The newest weights if their version is above `version`, never torn; None otherwise. The copy is the caller's."""


class TableTotals(NamedTuple):
    """What all workers together have merged into a table."""

    steps: int
    episodes: int
    started_s: float  # the run's clock when the first step was given out; 0 before
    merged_s: float  # and at the newest merge
    lost_steps: int = 0  # given out to workers that were killed before they merged them; given out again since


class TableDelta(NamedTuple):
    """What a worker has done since its last merge."""

    candidates: np.ndarray  # int64: the rows that it may have changed; none: any
    # [rows, actions]: how much of the value before is left in the entries that it changed (core/table_merge.py).
    kept: np.ndarray
    steps: int
    episodes: int


class SharedTable(Protocol):
    """One table [rows, actions] that workers learn together. Each learns in a copy of its own and merges what it added."""

    def begin(self, worker: int, local: np.ndarray) -> int | None:
        """Take the table over into a worker's copy, which it merges from then on; None while there is no table yet.

        Returns the steps that an earlier worker of this number was given and did not bring; they are given out again.
        """

    def claim(self, worker: int, num_steps: int, now_s: float) -> int | None:
        """How many of so many steps the worker is to take now: 0 when all are taken, None while the answer is under way."""

    def claim_episodes(self, worker: int, num_episodes: int) -> int | None:
        """How many of so many episodes the worker may play besides those that it was given; 0 and None as for steps.

        Only in a table that was created with a number of episodes.
        """

    def merge(self, worker: int, change: TableDelta, now_s: float) -> None:
        """Put what the worker's copy learned into the table, and count what it took for that."""

    def totals(self) -> TableTotals:
        """As far as is known here."""

    def create(
        self,
        values: np.ndarray,
        num_workers: int,
        limit: int | None,
        steps: int = 0,
        episodes: int = 0,
        *,
        episode_limit: int | None = None,
    ) -> None:
        """By the role that keeps it: let workers begin with these values, and give out steps up to `limit` and episodes up
        to `episode_limit` in total; `steps` and `episodes` of them were taken before."""

    def read(self, values: np.ndarray) -> TableTotals:
        """By the role that keeps it: copy the table as all have merged it so far."""


class RpcClient(Protocol):
    """Questions of one role to one other, answered in the order in which they are asked."""

    name: str  # of the other role

    def send(self, request: bytes) -> None:
        """Ask; waits while the other side takes nothing in. RoleDied when it is gone."""

    def receive(self) -> Buffer:
        """The answer to the oldest question that has none yet. RoleDied when the other side is gone."""


class RpcServer(Protocol):
    """The other end of a Line."""

    def take(self, timeout_s: float) -> Buffer | None:
        """The next question, or None when none has come within `timeout_s`."""

    def reply(self, response: bytes) -> None:
        """Answer the question that was taken last."""


class Board(Protocol):
    """Small messages by topic, in order, kept for late readers."""

    def post(self, topic: str, record: dict[str, Any]) -> int:
        """Append a record of plain values; returns its number, which grows by one per topic or faster."""

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        """The records numbered above `after`, oldest first."""


class Role(Protocol):
    """One piece of a run. `step` does a bounded piece of work and is called again and again by a runtime."""

    name: str
    done: bool

    def step(self) -> bool:
        """Do something; False when there was nothing to do."""

    def close(self) -> None:
        """Last words and clean-up, called once, also after a failure elsewhere."""

"""Contracts between roles: segments flow to the learner, weights flow back, records flow to observers.

A transport implements Channel and WeightStore for one medium. A Board carries small messages: in the run's SQLite
store, or on Kafka topics of the same names.
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
START = "start"  # the command to a control service to start a run; a running run refuses it
SET, SCALE = "set", "scale"  # commands with the fields `values` (hyperparameters) and `actors` (a count)
TOPICS = (TRAINING, ACTORS, EVALUATIONS, EVENTS, COMMANDS)


class Channel(Protocol):
    """Bounded queue, many writers to one reader. Segments of one writer arrive in order, complete, at most once."""

    def blank(self, actor: int) -> Segment | None:
        """Return memory for this actor's next segment, or None while its share of the channel is full (backpressure).

        Calling this again before `offer` returns the same segment.
        """

    def offer(self, segment: Segment) -> bool:
        """Enqueue a filled segment from `blank` with its header set. Return False if the channel is full: retry."""

    def poll(self) -> Segment | None:
        """Return the oldest pending segment, or None. The reader owns it until `release`."""

    def release(self, segment: Segment) -> None:
        """Return the memory of a polled segment to its writer."""

    def recall(self, actor: int) -> tuple[int, bytes | None] | None:
        """Return sequence number and `state` of the last segment that this actor offered; None if there was none."""

    def prime(self, actor: int, sequence: int, state: bytes | None) -> None:
        """Set what `recall` returns, as if this segment had been offered and learned from; used to resume a run."""


@runtime_checkable
class ValidatingChannel(Protocol):
    """A Channel that validates each message before `poll` returns it."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of messages that were received but not returned by `poll`, by cause."""


@runtime_checkable
class Checkpointable(ValidatingChannel, Protocol):
    """A Channel that retains its messages, so that another reader can continue from this reader's position."""

    def mark(self) -> dict[str, Any]:
        """Return the position, for a checkpoint: everything before it was released."""

    def stats(self) -> dict[str, float]:
        """Return pending messages, throughput and message age, for the records."""


@runtime_checkable
class RoundOffset(Protocol):
    """Writer-side channel that reports how far its round number is offset after it was skipped."""

    @property
    def round_offset(self) -> int:
        """Number of the round that the writer's next segment belongs to, minus that segment's sequence number."""


@runtime_checkable
class WeightStore(Protocol):
    """Published weights: one writer per policy, many readers; readers see the newest version."""

    def publish(self, policy: str, weights: Weights) -> None:
        """Make a copy of `weights` visible to every reader. Versions must increase."""

    def newer_than(self, policy: str, version: int) -> Weights | None:
        """Return the newest weights if their version is above `version`, else None.

        The result is a consistent copy (never torn) that the caller owns.
        """


class TableTotals(NamedTuple):
    """Totals over everything that all workers have merged into a table."""

    steps: int
    episodes: int
    started_s: float  # the run's clock when the first step was granted; 0 before
    merged_s: float  # the run's clock at the newest merge
    lost_steps: int = 0  # granted to workers that were killed before merging them, and reclaimed since


class TableDelta(NamedTuple):
    """A worker's changes since its last merge."""

    candidates: np.ndarray  # int64: the rows that it may have changed; empty: any row
    # [rows, actions]: weight of the previous value in the entries that the worker changed (core/table_merge.py).
    kept: np.ndarray
    steps: int
    episodes: int


class SharedTable(Protocol):
    """One table [rows, actions] that several workers train. Each worker trains its own copy and merges its changes."""

    def begin(self, worker: int, local: np.ndarray) -> int | None:
        """Copy the table into a worker's local copy, which the worker merges from then on.

        Return None while there is no table yet. Otherwise return the number of steps that an earlier worker with this
        index was granted but did not merge; they are reclaimed and will be granted again.
        """

    def claim(self, worker: int, num_steps: int, now_s: float) -> int | None:
        """Request up to `num_steps` steps; return how many are granted.

        0 means that none are left, None that the reply is still pending.
        """

    def claim_episodes(self, worker: int, num_episodes: int) -> int | None:
        """Request up to `num_episodes` more episodes; return how many are granted, with 0 and None as in `claim`.

        Only for a table that was created with an episode limit.
        """

    def merge(self, worker: int, change: TableDelta, now_s: float) -> None:
        """Merge the changes of the worker's copy into the table, and add its steps and episodes to the totals."""

    def totals(self) -> TableTotals:
        """Return the totals as far as this process knows them."""

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
        """Create the table with initial values, called by the table owner; workers may begin afterwards.

        Grants steps up to `limit` and episodes up to `episode_limit` in total; `steps` and `episodes` of them are
        already used.
        """

    def read(self, values: np.ndarray) -> TableTotals:
        """Copy the table with everything merged so far into `values`, called by the table owner."""


@runtime_checkable
class ValidatingTable(Protocol):
    """A SharedTable that validates each message of its workers."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of rejected messages, by cause."""


class RpcClient(Protocol):
    """Requests from one role to one other role; replies arrive in the order of the requests."""

    name: str  # of the other role

    def send(self, request: bytes) -> None:
        """Send a request; block while the server's queue is full. Raise RoleDied when the server has exited."""

    def receive(self) -> Buffer:
        """Block for the reply to the oldest unanswered request. Raise RoleDied when the server has exited."""


class RpcServer(Protocol):
    """Server side of an RpcClient."""

    def take(self, timeout_s: float) -> Buffer | None:
        """Return the next request, or None when none arrives within `timeout_s`."""

    def reply(self, response: bytes) -> None:
        """Reply to the request that was taken last."""


class Board(Protocol):
    """Small messages by topic, in order, retained for late readers."""

    def post(self, topic: str, record: dict[str, Any]) -> int:
        """Append a record of plain values; return its number, which increases within a topic, possibly with gaps."""

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        """Return the records numbered above `after`, oldest first."""


class Role(Protocol):
    """A component of a run. A runtime calls `step` repeatedly; each call does a bounded amount of work."""

    name: str
    done: bool

    def step(self) -> bool:
        """Do a bounded amount of work; return False when there was nothing to do."""

    def close(self) -> None:
        """Send the final report and clean up; called once, also after a failure elsewhere."""

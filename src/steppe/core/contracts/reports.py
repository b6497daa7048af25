"""What roles say about themselves: small typed records that travel over a Board as plain values.

Adding a field with a default is compatible; renaming or removing one needs a new SCHEMA.
"""

from __future__ import annotations

import time
from typing import Any, Self

import msgspec

SCHEMA = 1


class Report(msgspec.Struct, kw_only=True):
    """What every record carries."""

    run: str
    time_s: float = msgspec.field(default_factory=time.time)
    schema: int = SCHEMA

    def record(self) -> dict[str, Any]:
        """Plain values for a Board."""
        return msgspec.to_builtins(self, str_keys=True)  # type: ignore[no-any-return]

    @classmethod
    def read(cls, record: dict[str, Any]) -> Self:
        """The typed record again; raises msgspec.ValidationError when it is not one."""
        return msgspec.convert(record, cls, strict=False)


class TrainingReport(Report, kw_only=True):
    """The learner, twice a second and at the end. Counts and seconds are totals since the run began."""

    version: int
    updates: int
    env_steps: int
    episodes: int | None = None  # ended in what was learned from; older records do not say
    agent_steps: int | None = None  # with several agents in an environment, what all of them did
    train_s: float
    stats: dict[str, float] = {}  # losses and the like, averaged since the last report
    memory: dict[str, float] = {}
    phases: dict[str, float] = {}  # seconds in wait, sample, remember, learn, publish, other
    lags: dict[int, int] = {}  # versions behind → segments
    dropped: dict[str, int] = {}  # cause → segments
    weights_sha256: str | None = None  # with the last report only
    rss_bytes: int | None = None
    cpu_s: float | None = None  # of the process, since it began
    final: bool = False


class ActorReport(Report, kw_only=True):
    """An actor, twice a second and at the end. `episodes` are those finished since its last report.

    An actor that was killed and goes on from an earlier segment lists some of them again: `total_episodes` tells which.
    """

    actor: int
    epoch: int
    version: int
    sequence: int
    env_steps: int
    episodes: list[tuple[float, int]] = []  # (return, length); of very many the newest, or their means
    num_episodes: int | None = None  # how many there were; as many as are listed if absent
    total_episodes: int | None = None  # of its segments since the run began; absent where nothing is ever listed again
    agent_returns: dict[str, float] = {}  # with several agents, each one's mean part of these returns
    phases: dict[str, float] = {}  # seconds in env, policy, blocked, other
    rss_bytes: int | None = None
    cpu_s: float | None = None  # of the process, since it began
    state: str = "running"


class EvaluationReport(Report, kw_only=True):
    """The manager, after each evaluation. `train_s` is the run's clock when the judged weights were published."""

    version: int
    updates: int
    env_steps: int
    train_s: float
    episodes: int = 0  # training episodes behind the judged weights
    returns: list[float]
    lengths: list[int]
    return_mean: float
    return_std: float
    agent_returns: dict[str, float] = {}  # with several agents, each one's mean part of the returns
    terminated_share: float | None = None  # of episodes that came to an end of their own, not by a time limit
    duration_s: float
    weights_sha256: str
    reached: bool = False  # the target return
    final: bool = False
    recording: str | None = None
    rss_bytes: int | None = None


class EventReport(Report, kw_only=True):
    """Something that happened: state changes, faults, checkpoints, restarts, spans for timelines."""

    kind: (
        str  # state | fault | checkpoint | restart | resume | member | plan | warning | span | command | metric | note
    )
    role: str = ""
    details: dict[str, Any] = {}

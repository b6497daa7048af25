"""Status reports of roles: small typed records that are sent over a Board as plain values.

Adding a field with a default is compatible; renaming or removing one needs a new SCHEMA.
"""

from __future__ import annotations

import time
from typing import Any, Self

import msgspec

SCHEMA = 1


class Report(msgspec.Struct, kw_only=True):
    """Fields that every report has."""

    run: str
    time_s: float = msgspec.field(default_factory=time.time)
    schema: int = SCHEMA

    def record(self) -> dict[str, Any]:
        """Return the report as plain values for a Board."""
        return msgspec.to_builtins(self, str_keys=True)  # type: ignore[no-any-return]

    @classmethod
    def read(cls, record: dict[str, Any]) -> Self:
        """Parse a record; raises msgspec.ValidationError when it does not match."""
        return msgspec.convert(record, cls, strict=False)


class TrainingReport(Report, kw_only=True):
    """Report of the learner, twice a second and at the end. Counts and seconds are totals of the run."""

    version: int
    updates: int
    env_steps: int
    episodes: int | None = None  # finished in the learned segments; None in older records
    agent_steps: int | None = None  # with several agents per environment: steps of all agents
    train_s: float
    stats: dict[str, float] = {}  # losses and similar statistics, averaged since the last report
    memory: dict[str, float] = {}
    phases: dict[str, float] = {}  # seconds in wait, sample, remember, learn, publish, other
    lags: dict[int, int] = {}  # policy lag in versions → number of segments
    dropped: dict[str, int] = {}  # cause → number of segments
    weights_sha256: str | None = None  # in the last report only
    rss_bytes: int | None = None
    cpu_s: float | None = None  # of the process, since its start
    final: bool = False


class ActorReport(Report, kw_only=True):
    """Report of an actor, twice a second and at the end. `episodes` are those finished since its last report.

    An actor that was killed and restarted from an earlier segment reports some episodes twice: `total_episodes` tells
    which.
    """

    actor: int
    epoch: int
    version: int
    sequence: int
    env_steps: int
    episodes: list[tuple[float, int]] = []  # (return, length); if very many, the newest or their means
    num_episodes: int | None = None  # number of finished episodes; default: len(episodes)
    total_episodes: int | None = None  # in its segments since the run began; None if none is reported twice
    agent_returns: dict[str, float] = {}  # with several agents: mean return of each agent
    phases: dict[str, float] = {}  # seconds in env, policy, blocked, other
    rss_bytes: int | None = None
    cpu_s: float | None = None  # of the process, since its start
    state: str = "running"


class EvaluationReport(Report, kw_only=True):
    """Report of the manager after each evaluation.

    `train_s` is the run's clock when the evaluated weights were published.
    """

    version: int
    updates: int
    env_steps: int
    train_s: float
    episodes: int = 0  # training episodes before the evaluated weights
    returns: list[float]
    lengths: list[int]
    return_mean: float
    return_std: float
    agent_returns: dict[str, float] = {}  # with several agents: mean return of each agent
    terminated_share: float | None = None  # share of episodes that terminated, not truncated by a time limit
    duration_s: float
    weights_sha256: str
    reached: bool = False  # whether the target return was reached
    final: bool = False
    recording: str | None = None
    rss_bytes: int | None = None


class EventReport(Report, kw_only=True):
    """An event: state changes, faults, checkpoints, restarts, spans for timelines."""

    kind: (
        str  # state | fault | checkpoint | restart | resume | member | plan | warning | span | command | metric | note
    )
    role: str = ""
    details: dict[str, Any] = {}

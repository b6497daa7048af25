"""How many actors a run should have, from the waiting times of learner and actors.

CPU use and queue length are misleading here: an actor is busy whether or not the learner can use what it collects, and
queued experience is not remaining work but grows stale before it is learned from. The waiting times decide: a learner
that waits for experience needs more actors, actors that are blocked by the learner are too many, and segments that are
dropped for their age were collected for nothing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from steppe.records.profiling.diagnosis import format_percent
from steppe.records.view import RunView


@dataclass(frozen=True)
class ScalingPolicy:
    """Limits and thresholds of scaling decisions."""

    least: int = 1
    most: int = 16
    consecutive: int = 3  # decisions that must agree on the direction
    cooldown_s: float = 60.0  # after a change, until its effect is measurable
    starving: float = 0.25  # share of its time that the learner waits, above which more actors are needed
    flooded: float = 0.30  # share of their time that actors are blocked, above which there are too many
    dropped: float = 0.05  # share of segments dropped for their age, above which there are too many actors
    target_utilization: float = 0.90  # share of its time that the slower side should be busy
    max_growth: float = 2.0  # maximum factor of one step


@dataclass(frozen=True)
class RunLoad:
    """Load of a run in one time window. Shares are 0 to 1."""

    actors: int
    waits: float  # the learner, for experience
    blocked: float  # the actors, by the learner; mean over actors
    dropped: float = 0.0  # segments too old, of all that arrived
    lag: float | None = None  # versions between collecting and learning, on average
    samples_per_insert: float | None = None  # sampled per inserted step; None without a replay buffer
    configured_samples_per_insert: float | None = None

    @property
    def missing_samples_share(self) -> float:
        """Share of the configured samples per insert that was not sampled."""
        if not self.configured_samples_per_insert or self.samples_per_insert is None:
            return 0.0
        return max(0.0, 1.0 - self.samples_per_insert / self.configured_samples_per_insert)


@dataclass(frozen=True)
class ScalingDecision:
    """The recommended number of actors, and the reason; `act` once it should be set."""

    actors: int
    target: int
    reason: Literal["starving", "flooded", "dropped", "behind", "both", "balanced"]
    message: str
    act: bool = False


def decide_scaling(load: RunLoad, policy: ScalingPolicy) -> ScalingDecision:
    """Return the decision for one window."""
    reason, target, cause = _target_actors(load, policy)
    bounded = max(policy.least, min(policy.most, target, math.ceil(load.actors * policy.max_growth)))
    message = f"{cause}: {_describe_change(load.actors, bounded)}"
    if bounded != target and reason != "balanced":
        limits = f"{policy.least} to {policy.most} actors, and growth by a factor of {policy.max_growth:g} per change"
        message += f" (unlimited: {target}; the limits are {limits})"
    return ScalingDecision(load.actors, bounded, reason, message)


def _target_actors(
    load: RunLoad, policy: ScalingPolicy
) -> tuple[Literal["starving", "flooded", "dropped", "behind", "both", "balanced"], int, str]:
    n = max(1, load.actors)
    lag = "" if load.lag is None else f", on average {load.lag:.1f} versions behind"
    if load.dropped >= policy.dropped:
        fewer = max(1, math.floor(n * (1.0 - load.dropped)))
        return "dropped", fewer, f"{format_percent(load.dropped)} of the segments are dropped for their age{lag}"
    if load.missing_samples_share >= policy.flooded and load.waits < policy.starving:
        fewer = max(1, math.ceil(n * (1.0 - load.missing_samples_share)))
        return (
            "behind",
            fewer,
            f"{load.samples_per_insert:.2f} of {load.configured_samples_per_insert:g} samples per insert are drawn",
        )
    starving, flooded = load.waits >= policy.starving, load.blocked >= policy.flooded
    if starving and flooded:
        shares = (
            f"the learner waits {format_percent(load.waits)} and the actors are blocked {format_percent(load.blocked)}"
        )
        return "both", n, f"{shares}: the transport between them is slow, and another number of actors does not help"
    if starving:
        busy = max(0.02, 1.0 - load.waits)
        return (
            "starving",
            math.ceil(n * policy.target_utilization / busy),
            f"the learner waits {format_percent(load.waits)} for experience",
        )
    if flooded:
        fewer = max(1, math.ceil(n * (1.0 - load.blocked) / policy.target_utilization))
        return "flooded", fewer, f"the actors are blocked {format_percent(load.blocked)} by the learner{lag}"
    return (
        "balanced",
        n,
        f"the learner waits {format_percent(load.waits)}, the actors are blocked {format_percent(load.blocked)}",
    )


def _describe_change(now: int, then: int) -> str:
    if now == then:
        return f"{now} actors are the right number"
    return f"{then} actors instead of {now}"


@dataclass
class Autoscaler:
    """Hysteresis over a run's windows: nothing changes until several decisions agree, nor soon after a change."""

    policy: ScalingPolicy
    _recent: deque[ScalingDecision] = field(default_factory=deque)
    _cooldown_until_s: float = 0.0

    def decide(self, load: RunLoad, now_s: float) -> ScalingDecision:
        """Return the decision for the newest window; with `act`, set the most cautious of the agreeing numbers."""
        decision = decide_scaling(load, self.policy)
        if now_s < self._cooldown_until_s or (self._recent and self._recent[-1].actors != load.actors):
            self._recent.clear()
        if now_s < self._cooldown_until_s:
            return decision
        self._recent.append(decision)
        while len(self._recent) > self.policy.consecutive:
            self._recent.popleft()
        directions = {_sign(one.target - one.actors) for one in self._recent}
        if len(self._recent) < self.policy.consecutive or directions not in ({1}, {-1}):
            return decision
        cautious = (min if directions == {1} else max)(self._recent, key=lambda one: one.target)
        self._recent.clear()
        self._cooldown_until_s = now_s + self.policy.cooldown_s
        return ScalingDecision(cautious.actors, cautious.target, cautious.reason, cautious.message, act=True)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


class LoadWindows:
    """Splits a run's cumulative totals into windows."""

    def __init__(self) -> None:
        self._before: tuple[dict[str, dict[str, float]], int, int, dict[str, float]] | None = None

    def next(self, view: RunView, actors: int, least_s: float = 5.0) -> RunLoad | None:
        """Return the load since the last window; None while that is less than `least_s` of the learner's time."""
        if view.training is None:
            return None
        old, learned = view.training.dropped.get("too_old", 0), sum(view.training.lags.values())
        now = ({role: dict(spent) for role, spent in view.phases.items()}, old, learned, dict(view.training.memory))
        before = self._before
        if before is None:
            self._before = now
            return None
        spent = {role: _subtract_phases(phases, before[0].get(role, {})) for role, phases in now[0].items()}
        learner = spent.get("learner", {})
        if sum(learner.values()) < least_s:
            return None
        self._before = now
        acting = [_phase_share(phases, "blocked") for role, phases in spent.items() if role.startswith("actor-")]
        known = [share for share in acting if share is not None]
        arrived = (old - before[1]) + (learned - before[2])
        sampled, inserted = (now[3].get(key, 0.0) - before[3].get(key, 0.0) for key in ("sampled", "inserted"))
        return RunLoad(
            actors=actors,
            waits=_phase_share(learner, "wait") or 0.0,
            blocked=sum(known) / len(known) if known else 0.0,
            dropped=(old - before[1]) / arrived if arrived else 0.0,
            lag=view.lag_mean,
            samples_per_insert=sampled / inserted if inserted > 0 else None,
            configured_samples_per_insert=getattr(view.config.agent, "samples_per_insert", None),
        )


def _subtract_phases(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {phase: max(0.0, seconds - before.get(phase, 0.0)) for phase, seconds in now.items()}


def _phase_share(phases: dict[str, float], phase: str) -> float | None:
    total = sum(phases.values())
    return phases.get(phase, 0.0) / total if total > 0 else None

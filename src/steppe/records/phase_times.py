"""Where a run's time went: seconds by role and phase over all of its attempts, as the roles reported them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Seconds = dict[str, float]


@dataclass(frozen=True)
class TimeTotals:
    """What a run has spent up to some time, or between two times."""

    time_s: float = 0.0
    phases: dict[str, Seconds] = field(default_factory=dict)  # role → phase → seconds
    cpu_s: Seconds = field(default_factory=dict)
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    too_old: int = 0  # segments dropped for lag
    refused: int = 0  # segments rejected because of invalid values
    lags: dict[int, int] = field(default_factory=dict)  # versions behind → segments learned from

    def since(self, before: TimeTotals) -> TimeTotals:
        """Return what was spent since an earlier total."""
        return TimeTotals(
            self.time_s - before.time_s,
            {role: _difference(spent, before.phases.get(role, {})) for role, spent in self.phases.items()},
            _difference(self.cpu_s, before.cpu_s),
            self.evaluation_s - before.evaluation_s,
            self.checkpoint_s - before.checkpoint_s,
            max(0, self.too_old - before.too_old),
            max(0, self.refused - before.refused),
            {lag: more for lag, count in self.lags.items() if (more := count - before.lags.get(lag, 0)) > 0},
        )


def _difference(now: Seconds, before: Seconds) -> Seconds:
    return {name: max(0.0, seconds - before.get(name, 0.0)) for name, seconds in now.items()}


class PhaseTimes:
    """Sums the times of each role over its restarts: a restarted role counts from zero."""

    def __init__(self) -> None:
        self._before: dict[str, Seconds] = {}
        self._now: dict[str, Seconds] = {}

    def set_times(self, role: str, phases: Mapping[str, float], cpu_s: float | None = None) -> None:
        """Set a role's newest times: seconds by phase, and of CPU, since it was started."""
        self._now[role] = {**phases, "cpu": cpu_s} if cpu_s is not None else dict(phases)

    def end_attempt(self, role: str | None = None) -> None:
        """Keep the times of a role, or of all roles, before it restarts and counts from zero."""
        for name in list(self._now) if role is None else [role]:
            self._before[name] = self._of(name)
            self._now.pop(name, None)

    @property
    def phases(self) -> dict[str, Seconds]:
        """Role → phase → seconds, in the order of `role_order`."""
        return {role: {key: s for key, s in self._of(role).items() if key != "cpu"} for role in self._roles()}

    @property
    def cpu_s(self) -> Seconds:
        """Role → CPU seconds of its process, if known."""
        return {role: found["cpu"] for role in self._roles() if "cpu" in (found := self._of(role))}

    def _roles(self) -> list[str]:
        return sorted({*self._before, *self._now}, key=role_order)

    def _of(self, role: str) -> Seconds:
        before, now = self._before.get(role, {}), self._now.get(role, {})
        return {key: before.get(key, 0.0) + now.get(key, 0.0) for key in {**before, **now}}


def role_order(role: str) -> tuple[int, str, int]:
    """Sort key: actors by number, then the learner, then the rest."""
    kind, _, number = role.partition("-")
    rank = {"actor": 0, "learner": 1}.get(kind, 2)
    return rank, kind, int(number) if number.isdigit() else 0

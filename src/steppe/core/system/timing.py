"""Time accounting: named phases that add up to the total time, and the clock of a run."""

from __future__ import annotations

import time
from collections.abc import Callable


class PhaseTimer:
    """Attributes all time to one phase at a time; `switch` ends one phase and begins the next (about 100 ns)."""

    def __init__(self, *names: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(names, 0.0)
        self._clock = clock
        self._phase = names[-1]
        self._since = clock()

    def switch(self, phase: str) -> None:
        """Add the time since the last switch to the old phase and enter `phase`."""
        now = self._clock()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def shares(self) -> dict[str, float]:
        """Return each phase's share of the total time so far."""
        self.switch(self._phase)
        total = sum(self.seconds.values()) or 1.0
        return {name: seconds / total for name, seconds in self.seconds.items()}


class RunClock:
    """Seconds on the machine's monotonic clock, minus the time given to `exclude` (evaluation on `inline`)."""

    def __init__(self) -> None:
        self._excluded = 0.0

    def __call__(self) -> float:
        return time.monotonic() - self._excluded

    def exclude(self, seconds: float) -> None:
        """Subtract time that was not training."""
        self._excluded += seconds

"""What scales a run: how many of each role are wanted, and how many are there. Machines and clusters do it in their own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ACTOR, LEARNER, MANAGER = "actor", "learner", "manager"
ROLES = (ACTOR, LEARNER, MANAGER)


@dataclass(frozen=True)
class RoleStatus:
    """What was last seen of one role, and why some of it is not ready."""

    ready: int = 0
    starting: int = 0
    ending: int = 0
    old: int = 0  # made for settings that have changed since
    restarts: int = 0
    trouble: str | None = None
    exit_code: int | None = None  # of the last process that ended
    complete: bool = False  # one has said that the run has come to its end

    @property
    def there(self) -> int:
        """All that have not ended."""
        return self.ready + self.starting + self.ending


@dataclass(frozen=True)
class RunSpec:
    """The run that is to be trained: its name and settings, and the state of both for whoever changes them."""

    run: str
    settings: str  # TOML
    version: str


class Orchestrator(Protocol):
    """Blocking, for several threads. Unreachable while nobody answers; Conflict where somebody else decides."""

    def wanted(self, role: str) -> int:
        """How many there are to be."""

    def scale(self, role: str, count: int) -> None:
        """Have so many; whoever goes is asked to, and hands over what it has."""

    def seen(self, role: str, digest: str) -> RoleStatus:
        """As of the last news; `digest` is that of the settings which it should have."""

    def described(self) -> RunSpec:
        """Which run is to be trained."""

    def describe(self, run: str, settings: str, version: str) -> None:
        """Change that, unless somebody else has since `version`."""

    def roll(self, role: str, digest: str) -> None:
        """Replace all of a role by ones that read the settings anew."""

    @property
    def lost(self) -> str | None:
        """Why what was seen may be old; None while news come."""

    def close(self) -> None: ...

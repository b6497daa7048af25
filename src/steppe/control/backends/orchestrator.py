"""Contract of an orchestrator: desired and observed replicas of each role. Every kind of cluster implements it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ACTOR, LEARNER, MANAGER = "actor", "learner", "manager"
ROLES = (ACTOR, LEARNER, MANAGER)


@dataclass(frozen=True)
class RoleStatus:
    """The last observed state of one role, and why some replicas are not ready."""

    ready: int = 0
    starting: int = 0
    ending: int = 0
    outdated: int = 0  # started with settings that have changed since
    restarts: int = 0
    problem: str | None = None
    exit_code: int | None = None  # of the last process that ended
    complete: bool = False  # one has reported that the run is complete

    @property
    def total(self) -> int:
        """Number of replicas that have not ended."""
        return self.ready + self.starting + self.ending


@dataclass(frozen=True)
class RunSpec:
    """The run to train: its name and settings, and their version for optimistic locking."""

    run: str
    settings: str  # TOML
    version: str


class Orchestrator(Protocol):
    """Scales the roles of a run. Blocking and thread-safe.

    Methods raise Unreachable while the cluster does not answer, and Conflict if another owner decides.
    """

    def desired(self, role: str) -> int:
        """Return the desired number of replicas."""

    def scale(self, role: str, count: int) -> None:
        """Set the number of replicas; removed ones are asked to end, and send their collected segments first."""

    def observed(self, role: str, digest: str) -> RoleStatus:
        """Return the last observed state; `digest` identifies the settings that the replicas should have."""

    def run_spec(self) -> RunSpec:
        """Return the run to train."""

    def set_run_spec(self, run: str, settings: str, version: str) -> None:
        """Change the run to train; raises Conflict if it was changed after `version`."""

    def restart(self, role: str, digest: str) -> None:
        """Replace all replicas of a role, so that they read the settings again."""

    @property
    def lost_reason(self) -> str | None:
        """Why the observed state may be outdated; None while updates arrive."""

    def close(self) -> None: ...

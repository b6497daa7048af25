"""Start a run on the `processes` runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steppe.records.run_directory import RunDirectory
from steppe.runtimes.plan import Plan
from steppe.runtimes.processes.supervisor import ProcessHandle

if TYPE_CHECKING:
    from steppe.runtimes.builder import SuppliedComponents


def require(plan: Plan) -> None:
    """Do nothing: every plan can run here."""


def launch(plan: Plan, directory: RunDirectory, parts: SuppliedComponents | None = None) -> ProcessHandle:
    """Start a process per worker slot; they begin to work at once.

    With the caller's own parts, the learner is built here, and works during `advance`.
    """
    if parts is None:
        return ProcessHandle(plan, directory)
    from steppe.runtimes.processes.hosted_learner import InProcessLearnerHandle

    return InProcessLearnerHandle(plan, directory, parts)

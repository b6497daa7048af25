"""The result of a run: the summary that the command line prints, with attributes for Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steppe.core.contracts.errors import EnvironmentFault, NotFinite, RoleDied, RunFailed
from steppe.runtimes.handle import Fault

_ERRORS: dict[str, type[RunFailed]] = {kind.reason: kind for kind in (EnvironmentFault, NotFinite, RoleDied)}


@dataclass(frozen=True)
class RunResult:
    """A finished run: its path, how it ended, and its figures (`summary`, or as attributes)."""

    path: Path
    summary: Mapping[str, Any]
    message: str = ""
    fault: Fault | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.summary[name]
        except KeyError:
            raise AttributeError(f"a run's result has no {name!r}; it has: {', '.join(self.summary)}") from None

    def raise_for_fault(self) -> None:
        """Raise the fault that ended the run early, if any, with its original traceback in the message."""
        if self.fault is None:
            return
        raise to_exception(self.fault)


def to_exception(fault: Fault) -> RunFailed:
    """Convert a fault to its exception, with its original traceback in the message."""
    traceback = str(fault.details.get("traceback", "")).rstrip()
    error = _ERRORS.get(fault.reason, RunFailed)(f"{fault.message}\n\n{traceback}" if traceback else fault.message)
    if isinstance(error, EnvironmentFault):
        error.details = fault.details
    return error

"""Map exceptions to HTTP status, machine-readable code and a detail that discloses nothing about this machine."""

from __future__ import annotations

import re

from steppe.control.database import KeyReused, Stale
from steppe.core.contracts.errors import (
    Conflict,
    DiskFull,
    RunExists,
    RunNotFound,
    SteppeError,
    Unreachable,
    UsageError,
)

_STATUS: dict[type[SteppeError], int] = {
    RunNotFound: 404, RunExists: 409, Stale: 412, KeyReused: 422, Conflict: 409, UsageError: 422, DiskFull: 503,
    Unreachable: 503,
}  # fmt: skip


def to_problem(error: SteppeError) -> tuple[int, str, str]:
    """Return status, code and detail of the problem response."""
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    code = re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
    if status < 500 or isinstance(error, Unreachable):
        return status, code, str(error)[:1_000]
    return status, code, "internal error: see the log of the service"

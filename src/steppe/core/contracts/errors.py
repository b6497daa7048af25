"""The exception tree of Steppe.

SteppeError
├── UsageError             the caller can fix it: one sentence, exit code 2
│   ├── ConfigError          an unknown key, a wrong type, a value out of range
│   ├── WorldError           an environment that cannot be built or does not fit the algorithm
│   ├── FactoryError         a callable that another process cannot import
│   ├── MissingExtra         an optional dependency that is not installed
│   ├── RunNotFound          no such run, or nothing in it to load
│   └── RunExists            a directory that already holds a run
├── Unreachable            no server responds at an address, exit code 3
├── Conflict               a resource is in use by another process, such as a run directory; exit code 4
├── RunFailed              training stopped with a reason, exit code 1
│   ├── EnvironmentFault     the user's environment raised; carries seed, step and last action
│   ├── NotFinite            NaN or infinity in observations, rewards or losses
│   ├── RoleDied             a process ended without reporting a reason
│   ├── DiskFull             not enough disk space for a required write
│   ├── Overtaken            another process has replaced this one, exit code 4
│   └── BudgetSpent          the next private release would exceed the promised epsilon
├── CannotResume           an environment snapshot that cannot be restored: start new episodes
└── DamagedFile            bytes that do not match their checksum or schema
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SteppeError(Exception):
    """Root of the tree: catching this catches everything that Steppe raises on purpose."""

    exit_code = 1


class UsageError(SteppeError):
    """An error that the caller can fix; the message says how."""

    exit_code = 2


class RenamedKeyWarning(DeprecationWarning):
    """A configuration key is set by a deprecated name."""


class ConfigError(UsageError):
    """An unknown key, a wrong type or a value out of range."""


class WorldError(UsageError):
    """An environment that cannot be built, or that the algorithm cannot act in."""


class FactoryError(UsageError):
    """A callable that another process cannot import by name."""


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'steppe[{extra}]'")


class RunNotFound(UsageError):
    """No such run, or nothing in it to load."""


class RunExists(UsageError):
    """The directory for a new run already holds one; nothing was written."""


class Unreachable(SteppeError):
    """No server responded at an address before the caller's deadline."""

    reason = "unreachable"
    exit_code = 3


class Conflict(SteppeError):
    """A resource is in use by another process, such as a run directory that it writes."""

    exit_code = 4


class RunFailed(SteppeError):
    """Training stopped before its end; `reason` is a short machine-readable code."""

    reason = "failed"


class EnvironmentFault(RunFailed):
    """The user's environment raised; `details` carries its traceback, seed, step and last action."""

    reason = "environment_fault"

    def __init__(self, message: str, details: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


class NotFinite(RunFailed):
    """NaN or infinity appeared; the message names the field and the step."""

    reason = "not_finite"


class RoleDied(RunFailed):
    """A process of the run ended without reporting a reason."""

    reason = "role_died"


class DiskFull(RunFailed):
    """Not enough disk space for a required write; existing files are untouched."""

    reason = "disk_full"


class Overtaken(RunFailed):
    """Another process has replaced this one, which must exit."""

    reason = "overtaken"
    exit_code = 4


class BudgetSpent(RunFailed):
    """The next private release would exceed the promised epsilon; nothing was released."""

    reason = "budget_spent"


class CannotResume(SteppeError):
    """A snapshot does not fit the environment, or replaying its episode diverged; the environment must be reset."""


class DamagedFile(SteppeError):
    """Bytes that do not match their checksum, size or schema."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""

"""Every error Steppe raises, drawn as one tree.

SteppeError
├── UsageError             the caller can fix it: one sentence, exit code 2
│   ├── ConfigError          an unknown key, a wrong type, a value out of range
│   ├── WorldError           an environment that cannot be made or does not fit the algorithm
│   ├── FactoryError         a callable that another process cannot find
│   ├── MissingExtra         an optional dependency that is not installed
│   ├── RunNotFound          no such run, or nothing in it to load
│   └── RunExists            a directory that already holds a run
├── Unreachable            nobody answers at an address, exit code 3
├── Conflict               somebody else has it: a run directory in use, exit code 4
├── RunFailed              training stopped with a reason, exit code 1
│   ├── EnvironmentFault     the user's environment raised; carries seed, step and last action
│   ├── NotFinite            NaN or infinity in observations, rewards or losses
│   ├── RoleDied             a process ended without saying why
│   ├── DiskFull             no room for what has to be written down
│   ├── Overtaken            another process has taken this one's place, exit code 4
│   └── BudgetSpent          the next private release would pass the promised epsilon
├── CannotResume           a world's snapshot that does not bring this world where it was: begin new episodes
└── DamagedFile            bytes that are not what their checksum or schema says
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SteppeError(Exception):
    """The root: catching this catches everything Steppe raises on purpose."""

    exit_code = 1


class UsageError(SteppeError):
    """The caller can fix this; the message says how."""

    exit_code = 2


class ConfigError(UsageError):
    """An unknown key, a wrong type or a value out of range."""


class WorldError(UsageError):
    """An environment that cannot be made, or that the algorithm cannot act in."""


class FactoryError(UsageError):
    """A callable that another process cannot find by name."""


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional dependency: pip install 'steppe[{extra}]'")


class RunNotFound(UsageError):
    """No such run, or nothing in it to load."""


class RunExists(UsageError):
    """The directory for a new run already holds one; nothing was written."""


class Unreachable(SteppeError):
    """Nobody answers at an address, after trying for as long as was asked."""

    reason = "unreachable"
    exit_code = 3


class Conflict(SteppeError):
    """Somebody else has it: a run that another process writes."""

    exit_code = 4


class RunFailed(SteppeError):
    """Training stopped before its end; `reason` is a short word for machines."""

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
    """A process of the run ended without saying why."""

    reason = "role_died"


class DiskFull(RunFailed):
    """There is no room for what has to be written down; what was there before is untouched."""

    reason = "disk_full"


class Overtaken(RunFailed):
    """Another process has taken the place of this one, which is to end."""

    reason = "overtaken"
    exit_code = 4


class BudgetSpent(RunFailed):
    """The next private release would pass the promised epsilon; nothing was released."""

    reason = "budget_spent"


class CannotResume(SteppeError):
    """A snapshot does not fit a world, or repeating its episode led elsewhere; the world must be reset."""


class DamagedFile(SteppeError):
    """Bytes that are not what their checksum, size or schema says."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""

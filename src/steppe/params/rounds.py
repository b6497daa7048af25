"""Which pushes count, and when they are enough: every worker's pushes are accounted for by (worker, round).

In asynchronous use a round is the worker's own number of pushes, and pushes are old when newer weights were made since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.params.parameter_layout import Refusal

MAX_WORKERS = 65_536
MAX_NAME = 128


@dataclass(frozen=True)
class Rounds:
    """Synchronous: one push per worker and round; a round ends when all have pushed, or at `deadline_s` after its first push
    if at least `quorum` did, and is given up otherwise. Asynchronous: a push that is s versions old counts (1 + s)^−`damping`
    as much, and not at all beyond `max_staleness`."""

    synchronous: bool = False
    quorum: int = 1
    deadline_s: float | None = None
    damping: float = 0.0
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.quorum < 1 or (self.deadline_s is not None and not self.deadline_s > 0):
            raise ConfigError("a round has a quorum of at least 1, and a deadline_s above 0 or None")
        if not self.damping >= 0 or (self.max_staleness is not None and self.max_staleness < 0):
            raise ConfigError("damping and max_staleness are at least 0")
        if self.synchronous and (self.damping or self.max_staleness is not None):
            raise ConfigError(
                "damping and max_staleness are for asynchronous pushes: in a synchronous round none is old"
            )
        if not self.synchronous and (self.quorum != 1 or self.deadline_s is not None):
            raise ConfigError("quorum and deadline_s are for synchronous rounds: say Rounds(synchronous=True, …)")


class Receipt(msgspec.Struct, frozen=True):
    """What became of a push: true when it counts. `reason` is a word and `message` a sentence when it does not.

    `round_number` and `version` are the server's after the push, so that a worker left behind knows where to go on.
    """

    accepted: bool
    round_number: int
    version: int
    reason: str = ""
    message: str = ""

    def __bool__(self) -> bool:
        return self.accepted


class WorkerAccount(msgspec.Struct):
    """One worker's pushes: `last` is the newest round that counted, `version` the weights that it was given last."""

    last: int = -1
    version: int = 0
    accepted: int = 0
    refused: dict[str, int] = {}


class WorkerRegistry:
    """Who is registered, and everyone's account; an account outlives its worker's registration."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        self.accounts: dict[str, WorkerAccount] = {}
        self.refused: dict[str, int] = {}

    def add(self, worker: str, version: int) -> bool:
        """Register; False when it was registered already."""
        if not 0 < len(worker) <= MAX_NAME or not worker.isprintable():
            raise UsageError(f"a worker's name has 1 to {MAX_NAME} printable characters")
        if worker in self.registered:
            return False
        if worker not in self.accounts:
            if len(self.accounts) >= MAX_WORKERS:
                raise UsageError(f"the server knows {MAX_WORKERS} workers already: let them keep their names")
            self.accounts[worker] = WorkerAccount()
        self.accounts[worker].version = version
        self.registered.add(worker)
        return True

    def account(self, worker: str) -> WorkerAccount:
        """UsageError unless it is registered."""
        if worker not in self.registered:
            raise UsageError(f"worker {worker!r} is not registered: call register_worker first")
        return self.accounts[worker]

    def refuse(self, worker: str, reason: str) -> None:
        """Count a refused push, for its worker too if that is known."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
        account = self.accounts.get(worker)
        if account is not None:
            account.refused[reason] = account.refused.get(reason, 0) + 1

    def state(self) -> dict[str, Any]:
        accounts = {name: msgspec.to_builtins(account) for name, account in self.accounts.items()}
        return {"present": sorted(self.registered), "accounts": accounts, "refused": dict(self.refused)}

    def load(self, state: dict[str, Any]) -> None:
        self.registered = set(state["present"])
        self.accounts = {name: msgspec.convert(found, WorkerAccount) for name, found in state["accounts"].items()}
        self.refused = dict(state["refused"])


@dataclass
class PendingPushes:
    """The pushes of the round under way, as rows of one array that grows by doubling and is used again."""

    size: int
    workers: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    opened_at: float | None = None

    def __post_init__(self) -> None:
        self._rows = np.empty((0, self.size), np.float32)
        self._lent: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def rows(self) -> np.ndarray:
        """float32 `[pushes, parameters]`, valid until the next `blank`."""
        return self._rows[: len(self)] if self._lent is None else self._lent[None]

    def blank(self) -> np.ndarray:
        """Where the next update is written; it counts once `add` was called."""
        if len(self) == len(self._rows):
            grown = np.empty((max(1, 2 * len(self)), self.size), np.float32)
            grown[: len(self)] = self.rows
            self._rows = grown
        row: np.ndarray = self._rows[len(self)]
        return row

    def use_row_in_place(self, row: np.ndarray) -> None:
        """Let the only push of a round be a row of somebody else's, until `clear`; instead of `blank`."""
        self._lent = row

    def add(self, worker: str, weight: float, now: float) -> None:
        self.workers.append(worker)
        self.weights.append(weight)
        self.opened_at = now if self.opened_at is None else self.opened_at

    def clear(self) -> None:
        self.workers, self.weights, self.opened_at, self._lent = [], [], None, None

    def state(self) -> dict[str, Any]:
        return {"workers": list(self.workers), "weights": list(self.weights), "rows": self.rows}

    def load(self, state: dict[str, Any], now: float) -> None:
        self.workers, self.weights = list(state["workers"]), [float(weight) for weight in state["weights"]]
        self._rows = np.array(state["rows"], np.float32).reshape(len(self.workers), self.size)
        self.opened_at = now if self.workers else None


def check_round(account: WorkerAccount, rounds: Rounds, current: int, given: int | None) -> Refusal | None:
    """Why a push for round `given` does not belong here, or None. Asynchronous: `given` is the worker's own count."""
    if rounds.synchronous:
        number = current if given is None else given
        if number > current:
            return Refusal("future_round", f"round {number} has not begun: the server is in round {current}")
        if number < current:
            return Refusal("stale_round", f"round {number} is over: the server is in round {current}")
        if account.last == number:
            return Refusal("pushed_twice", f"round {number} has this worker's push already")
        return None
    if given is None or given > account.last:
        return None
    if given == account.last:
        return Refusal("pushed_twice", f"push {given} of this worker was counted already")
    return Refusal("stale_round", f"push {given} is older than push {account.last}, which was counted")

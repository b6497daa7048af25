"""Rounds: which pushes are accepted and when a round is complete. Pushes are identified by (worker, round).

In asynchronous use, a worker numbers its own pushes. A push is stale if newer weights exist than it was computed with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.params.parameter_layout import Refusal

MAX_WORKERS = 65_536
MAX_NAME = 128


@dataclass(frozen=True)
class Rounds:
    """Rules for rounds of pushes.

    Synchronous: one push per worker and round. A round ends when all workers have pushed, or `deadline_s` after its
    first push if at least `quorum` have; otherwise it is abandoned. Asynchronous: a push that is s versions old is
    scaled by (1 + s)^−`damping`, and refused beyond `max_staleness`.
    """

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


class Push(NamedTuple):
    """Metadata of an update."""

    worker: str
    weight: float = 1.0
    number: int | None = None  # the round if synchronous, else the worker's own count of pushes
    version: int | None = None  # of the weights that it was computed with


class Receipt(msgspec.Struct, frozen=True):
    """Result of a push; true if it was accepted. If refused, `reason` is a code and `message` a sentence.

    `round_number` and `version` are the server's after the push, so that a worker that fell behind can catch up.
    """

    accepted: bool
    round_number: int
    version: int
    reason: str = ""
    message: str = ""

    def __bool__(self) -> bool:
        return self.accepted


class WorkerAccount(msgspec.Struct):
    """Counters of one worker: `last` is its newest accepted round, `version` the weights that it last received."""

    last: int = -1
    version: int = 0
    accepted: int = 0
    refused: dict[str, int] = {}


class WorkerRegistry:
    """The registered workers, and the accounts of all workers; unregistering keeps the account."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        self.accounts: dict[str, WorkerAccount] = {}
        self.refused: dict[str, int] = {}

    def add(self, worker: str, version: int) -> bool:
        """Register a worker; return False if it was registered already."""
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
        """Return a worker's account; raise UsageError unless it is registered."""
        if worker not in self.registered:
            raise UsageError(f"worker {worker!r} is not registered: call register_worker first")
        return self.accounts[worker]

    def refuse(self, worker: str, reason: str) -> None:
        """Count a refused push, in total and for its worker if known."""
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
    """The pushes of the current round, as rows of one reused array that grows by doubling."""

    size: int
    workers: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    opened_at: float | None = None

    def __post_init__(self) -> None:
        self._rows = np.empty((0, self.size), np.float32)
        self._borrowed_row: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def rows(self) -> np.ndarray:
        """float32 `[pushes, parameters]`, valid until the next `blank`."""
        return self._rows[: len(self)] if self._borrowed_row is None else self._borrowed_row[None]

    def blank(self) -> np.ndarray:
        """Return the row for the next update; it becomes part of the round when `add` is called."""
        if len(self) == len(self._rows):
            grown = np.empty((max(1, 2 * len(self)), self.size), np.float32)
            grown[: len(self)] = self.rows
            self._rows = grown
        row: np.ndarray = self._rows[len(self)]
        return row

    def use_row_in_place(self, row: np.ndarray) -> None:
        """Use the caller's row, without a copy, as the only push of the round until `clear`; replaces `blank`."""
        self._borrowed_row = row

    def add(self, worker: str, weight: float, now: float) -> None:
        self.workers.append(worker)
        self.weights.append(weight)
        self.opened_at = now if self.opened_at is None else self.opened_at

    def clear(self) -> None:
        self.workers, self.weights, self.opened_at, self._borrowed_row = [], [], None, None

    def state(self) -> dict[str, Any]:
        return {"workers": list(self.workers), "weights": list(self.weights), "rows": self.rows}

    def load(self, state: dict[str, Any], now: float) -> None:
        self.workers, self.weights = list(state["workers"]), [float(weight) for weight in state["weights"]]
        self._rows = np.array(state["rows"], np.float32).reshape(len(self.workers), self.size)
        self.opened_at = now if self.workers else None


def check_round(account: WorkerAccount, rounds: Rounds, current: int, given: int | None) -> Refusal | None:
    """Return why a push for round `given` is refused, or None. Asynchronous: `given` is the worker's own count."""
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

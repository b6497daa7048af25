"""Process a push from arrival to a new version: accept or refuse it, keep it until its round ends, aggregate, apply.

server.py is the interface for callers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import numpy as np

from steppe.core.contracts.errors import ConfigError, NotFinite, RunFailed, UsageError
from steppe.params.aggregation import Aggregation
from steppe.params.kernels import all_finite
from steppe.params.optimizers import Optimizer
from steppe.params.parameter_layout import ParameterLayout, Refusal
from steppe.params.round_sum import RoundSum
from steppe.params.rounds import PendingPushes, Push, Receipt, Rounds, WorkerAccount, WorkerRegistry, check_round
from steppe.params.versions import VersionedParameters


class PushAdmission:
    """The part of a server that processes pushes. Methods with a leading underscore require the lock `_changed`."""

    _whole = False  # whether workers push parameters instead of updates

    def __init__(
        self,
        space: ParameterLayout,
        initial: np.ndarray,
        aggregation: Aggregation,
        optimizer: Optimizer,
        rounds: Rounds,
    ) -> None:
        self.aggregation = aggregation
        self.rounds = rounds
        self.update_frequency = 1
        self.round_number = self.abandoned_rounds = self.failed_saves = 0
        self.last_trouble = ""  # why the last failed round produced no version, in a sentence
        self._space = space
        self._values = VersionedParameters(space, initial, optimizer)
        self._registry = WorkerRegistry()
        self._pending = PendingPushes(space.size)
        self._round_sum = RoundSum()
        self._waiting: np.ndarray | None = None  # aggregated but not yet applied
        self._staleness: dict[int, int] = {}
        self.clock: Callable[[], float] = time.monotonic  # seconds; the clock for deadlines
        self._changed = threading.Condition(threading.RLock())

    @property
    def version(self) -> int:
        """Number of the newest version, from 0."""
        return self._values.version

    @property
    def updates(self) -> int:
        """Number of updates that led to the newest version."""
        return self._values.updates

    def broadcast_parameters(self) -> int:
        """Publish the newest version and return its number."""
        raise NotImplementedError

    def _keep(self) -> None:
        """Run before a new version is published; an exception rolls the version back."""

    def _take(self, push: Push, write: Callable[[np.ndarray], Refusal | None]) -> Receipt:
        """Accept or refuse a push; `write` copies its numbers into a row."""
        self._close_expired_round()
        refusal = self._check_admissible(push)
        row = self._pending.blank()
        if refusal is None:
            refusal = write(row) or self._to_delta(push, row)
        return self._settle(push, row, refusal)

    def take_row(self, push: Push, row: np.ndarray, *, finite: bool = False) -> Receipt:
        """Accept or refuse a push given as a flat row; if a round is a single push, the row is used without a copy.

        `finite`: whether all numbers are known to be finite.
        """
        with self._changed:
            if not self._can_use_row_in_place():
                return self._take(push, lambda into: self._space.copy_row(row, into))
            self._close_expired_round()
            refusal = self._check_admissible(push) or self._space.validate_row(row)
            if refusal is None and not finite and not all_finite(row):
                refusal = self._space.not_finite(row)
            if refusal is None:
                self._pending.use_row_in_place(row)
            return self._settle(push, row, refusal)

    def move(self, rows: np.ndarray) -> None:
        """Move the parameters to the first of these rows of memory; later versions use the rows in turn."""
        with self._changed:
            self._values.move(rows)

    def _can_use_row_in_place(self) -> bool:
        return self.update_frequency == 1 and not self.rounds.damping and not self._whole

    def _settle(self, push: Push, row: np.ndarray, refusal: Refusal | None) -> Receipt:
        if refusal is not None:
            self._registry.refuse(push.worker, refusal.reason)
            return Receipt(False, self.round_number, self.version, *refusal)
        self._accept(push, row)
        self._close_if_complete()
        return Receipt(True, self.round_number, self.version)

    def _check_admissible(self, push: Push) -> Refusal | None:
        """Return why a push must be refused regardless of its numbers, or None."""
        if push.worker not in self._registry.registered:
            return Refusal("unknown_worker", f"worker {push.worker!r} is not registered: call register_worker first")
        if not 0.0 < push.weight < math.inf:
            return Refusal("bad_weight", f"weight={push.weight} must be above 0 and finite")
        if push.weight != 1.0 and not self.aggregation.uses_weights:
            word = self.aggregation.method
            return Refusal("bad_weight", f"aggregation {word!r} counts every push alike: leave weight at 1")
        account = self._registry.accounts[push.worker]
        if push.version is not None and push.version > self.version:
            return Refusal("future_version", f"version {push.version} does not exist: the newest is {self.version}")
        limit = self.rounds.max_staleness
        if limit is not None and self._age(account, push.version) > limit:
            age = self._age(account, push.version)
            return Refusal("too_stale", f"it was made {age} versions ago, {limit} are allowed")
        return check_round(account, self.rounds, self.round_number, push.number)

    def _add_to_sum(self, worker: str, values: np.ndarray) -> np.ndarray | None:
        """Add a worker's numbers to the sum of the current round; return the sum, or None until it is complete.

        It is complete when all registered workers have contributed, or a quorum of them at the deadline.
        """
        now, found = self.clock(), self._round_sum
        found.open(self.round_number, now)
        found.add(worker, values)
        present = found.workers | set(self._pending.workers)  # a worker that pushed got its sum before a restart
        late = self.rounds.deadline_s is not None and now >= found.opened_at + self.rounds.deadline_s
        if found.total is None and len(present) >= self._quorum() and (late or present >= self._registry.registered):
            found.close()
        return found.total

    def _to_delta(self, push: Push, row: np.ndarray) -> Refusal | None:
        """Convert pushed parameters in `row` to a delta from the newest version, in place; updates stay as they are."""
        return None

    def _age(self, account: WorkerAccount, version: int | None) -> int:
        return max(0, self.version - (account.version if version is None else version))

    def _accept(self, push: Push, row: np.ndarray) -> None:
        account = self._registry.accounts[push.worker]
        if not self.rounds.synchronous:
            age = self._age(account, push.version)
            self._staleness[age] = self._staleness.get(age, 0) + 1
            if age and self.rounds.damping:
                row *= np.float32((1.0 + age) ** -self.rounds.damping)
        own = account.last + 1 if push.number is None else push.number
        account.last = self.round_number if self.rounds.synchronous else own
        account.accepted += 1
        self._pending.add(push.worker, push.weight, self.clock())

    def _expected(self) -> set[str]:
        """Return the workers whose pushes a synchronous round waits for.

        Once the round's sum is complete, these are only the workers that contributed to it: the server has waited for
        the others already.
        """
        complete = self._round_sum.total is not None and self._round_sum.number == self.round_number
        return self._registry.registered & self._round_sum.workers if complete else self._registry.registered

    def _close_if_complete(self) -> None:
        count = len(self._pending)
        everyone = self.rounds.synchronous and self._expected() <= set(self._pending.workers)
        if count >= self.update_frequency or (everyone and count >= self._quorum()):
            self._close()

    def _quorum(self) -> int:
        return max(self.rounds.quorum, self.aggregation.at_least)

    def _deadline(self) -> float:
        opened, limit = self._pending.opened_at, self.rounds.deadline_s
        return math.inf if opened is None or limit is None else opened + limit

    def _close_expired_round(self) -> None:
        """End a round whose deadline has passed: aggregate its pushes or, below the quorum, abandon it."""
        if self.clock() < self._deadline():
            return
        if len(self._pending) >= self._quorum():
            self._close()
        else:
            self._abandon()

    def _abandon(self) -> None:
        self.abandoned_rounds += 1
        self.last_trouble = f"round {self.round_number} had {len(self._pending)} pushes at its deadline, too few"
        self._next_round()

    def _next_round(self) -> None:
        self._pending.clear()
        self.round_number += 1

    def _require_enough(self) -> None:
        if len(self._pending) < self._quorum():
            raise UsageError(f"{len(self._pending)} pushes are waiting, {self._quorum()} are needed: push more first")

    def _close(self) -> None:
        """Aggregate and apply the round's pushes, after a pending aggregate of the caller; count a failure."""
        try:
            if self._waiting is not None:
                self._apply(None)
            self._waiting = self._aggregate()
            self._apply(None)
        except (RunFailed, UsageError) as error:  # not the fault of the worker that pushed last
            self.abandoned_rounds += 1
            self.last_trouble = str(error)

    def _aggregate(self) -> np.ndarray:
        """Combine the round's pushes to one update, valid until the next push. The round ends even on failure."""
        try:
            return self._combine(self._pending.rows, np.array(self._pending.weights))
        finally:
            self._next_round()

    def _combine(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return rows[0] if len(rows) == self.aggregation.at_least == 1 else self.aggregation.combine(rows, weights)

    def _apply(self, learning_rate: float | None) -> None:
        """Apply the pending update as the next version; one that is not finite is dropped and changes no parameters."""
        update, self._waiting = self._waiting, None
        assert update is not None
        if not self._values.step(update, learning_rate):
            raise NotFinite("the update would make a parameter infinite and was dropped: lower the learning rate")
        try:
            self._keep()
        except BaseException:
            self._values.undo()  # not visible to others yet: the lock is held
            raise
        self.broadcast_parameters()


def resolve_optimizer(given: str | Optimizer | None, *, deltas: bool) -> Optimizer:
    """Return the given optimizer or the default; raise ConfigError if it does not match what workers push."""
    found = Optimizer(given) if isinstance(given, str) else given or Optimizer("fedavg" if deltas else "sgd")
    if found.for_deltas != deltas:
        kinds = "fedavg, fedadam or fedyogi" if deltas else "sgd, momentum or adam"
        raise ConfigError(f"optimizer {found.kind!r} does not fit: {'deltas' if deltas else 'gradients'} need {kinds}")
    return found

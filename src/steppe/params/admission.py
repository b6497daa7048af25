"""What happens to a push between its arrival and a new version: admitted or refused, counted, kept until its round ends,
combined, applied. Who calls, and from where, is server.py's."""

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
from steppe.params.push_api import Push
from steppe.params.round_sum import RoundSum
from steppe.params.rounds import PendingPushes, Receipt, Rounds, WorkerAccount, WorkerRegistry, check_round
from steppe.params.versions import VersionedParameters


class PushAdmission:
    """The part of a server that takes pushes. What begins with an underscore is called with `_changed` held."""

    _whole = False  # whether workers push parameters and not changes

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
        self.last_trouble = ""  # why a round ended without result, in a sentence
        self._space = space
        self._values = VersionedParameters(space, initial, optimizer)
        self._registry = WorkerRegistry()
        self._pending = PendingPushes(space.size)
        self._tally = RoundSum()
        self._waiting: np.ndarray | None = None  # aggregated and not yet applied
        self._staleness: dict[int, int] = {}
        self.clock: Callable[[], float] = time.monotonic  # seconds; what deadlines are measured with
        self._changed = threading.Condition(threading.RLock())

    @property
    def version(self) -> int:
        """Counts results, from 0."""
        return self._values.version

    @property
    def updates(self) -> int:
        """How many updates are behind the newest version."""
        return self._values.updates

    def broadcast_parameters(self) -> int:
        """Let everyone see the newest version."""
        raise NotImplementedError

    def _keep(self) -> None:
        """Called before a new version is seen; what it raises takes the version back."""

    def _take(self, push: Push, write: Callable[[np.ndarray], Refusal | None]) -> Receipt:
        """Count a push whose numbers `write` puts into a row, or refuse it."""
        self._close_expired_round()
        refusal = self._check_admissible(push)
        row = self._pending.blank()
        if refusal is None:
            refusal = write(row) or self._to_delta(push, row)
        return self._settle(push, row, refusal)

    def take_row(self, push: Push, row: np.ndarray, *, finite: bool = False) -> Receipt:
        """The same for numbers that are a row already; where a round is one push they are used where they lie.

        `finite`: whether it is known that all of them are.
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
        """Go on in these rows of memory, beginning with the first."""
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
        """What is wrong with a push before its numbers are looked at."""
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

    def _count(self, worker: str, counted: np.ndarray) -> np.ndarray | None:
        """Everyone's sum for the round under way: once all have counted, or at the deadline so many as are enough."""
        now, tally = self.clock(), self._tally
        tally.open(self.round_number, now)
        tally.add(worker, counted)
        there = tally.workers | set(self._pending.workers)  # who pushed already had a sum, of a server before this one
        late = self.rounds.deadline_s is not None and now >= tally.opened_at + self.rounds.deadline_s
        if tally.total is None and len(there) >= self._quorum() and (late or there >= self._registry.registered):
            tally.close()
        return tally.total

    def _to_delta(self, push: Push, row: np.ndarray) -> Refusal | None:
        """Turn what was pushed into a change of the newest version, in place, where it is not one."""
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
        """Whose pushes a synchronous round waits for: those who counted, where the others were waited for once already."""
        counted = self._tally.total is not None and self._tally.number == self.round_number
        return self._registry.registered & self._tally.workers if counted else self._registry.registered

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
        """End a round whose deadline has passed: with what is there, or, below the quorum, without result."""
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
        """Combine and apply by itself, after what a caller has aggregated and not yet applied."""
        try:
            if self._waiting is not None:
                self._apply(None)
            self._waiting = self._aggregate()
            self._apply(None)
        except (RunFailed, UsageError) as error:  # whoever pushed last is not to blame: the next round goes on
            self.abandoned_rounds += 1
            self.last_trouble = str(error)

    def _aggregate(self) -> np.ndarray:
        """One update from the round's pushes, valid until the next push; the next round begins whether or not that works."""
        try:
            return self._combine(self._pending.rows, np.array(self._pending.weights))
        finally:
            self._next_round()

    def _combine(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return rows[0] if len(rows) == self.aggregation.at_least == 1 else self.aggregation.combine(rows, weights)

    def _apply(self, learning_rate: float | None) -> None:
        """The next version, made aside so that a step into infinity leaves everything as it was."""
        update, self._waiting = self._waiting, None
        assert update is not None
        if not self._values.step(update, learning_rate):
            raise NotFinite("the update would make a parameter infinite and was dropped: lower the learning rate")
        try:
            self._keep()
        except BaseException:
            self._values.undo()  # nobody has seen it: the lock is held
            raise
        self.broadcast_parameters()


def resolve_optimizer(given: str | Optimizer | None, *, deltas: bool) -> Optimizer:
    """The optimizer that was asked for, or the usual one; ConfigError when it does not fit what workers push."""
    found = Optimizer(given) if isinstance(given, str) else given or Optimizer("fedavg" if deltas else "sgd")
    if found.for_deltas != deltas:
        kinds = "fedavg, fedadam or fedyogi" if deltas else "sgd, momentum or adam"
        raise ConfigError(f"optimizer {found.kind!r} does not fit: {'deltas' if deltas else 'gradients'} need {kinds}")
    return found

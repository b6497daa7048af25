"""ParameterServer: one set of parameters that many workers improve. Every result has a version, every push an account.

Used from any thread of one process. What combines updates, applies them, keeps count and makes them private is in the files
beside this one; the network is service.py's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.core.checked import checked
from steppe.core.durable import noticing_full_disk
from steppe.core.errors import ConfigError, DiskFull, NotFinite, RunFailed, UsageError
from steppe.core.links import WeightStore
from steppe.core.weights import Weights
from steppe.params.aggregation import Aggregation
from steppe.params.checkpoints import read_checkpoint, write_checkpoint
from steppe.params.optimizers import Optimizer, Stepper
from steppe.params.privacy import PrivateSum
from steppe.params.rounds import Account, Pending, Receipt, Roster, Rounds, misplaced
from steppe.params.space import Refusal, Space
from steppe.params.wire import Tls

if TYPE_CHECKING:
    from steppe.params.service import Service

POLICY = "policy"


class ParameterServer:
    """Collects workers' gradients and applies them together, `update_frequency` accepted pushes at a time.

    `aggregation_method`: a name or an Aggregation with settings. With "federated", workers push deltas (new minus old
    parameters) weighted by their samples. Bad pushes are refused with a reason, counted, and change nothing. A checkpoint is
    written to `checkpoint_path` every `save_frequency` updates. `store`: where each new version is published as well.
    """

    _private: PrivateSum | None = None

    @checked
    def __init__(
        self,
        initial_params: Mapping[str, np.ndarray],
        aggregation_method: str | Aggregation = "average",
        update_frequency: int = 10,
        save_frequency: int = 100,
        checkpoint_path: str | Path | None = None,
        *,
        optimizer: str | Optimizer | None = None,
        rounds: Rounds = Rounds(),  # noqa: B008 (frozen)
        store: WeightStore | None = None,
    ) -> None:
        if update_frequency < 1 or save_frequency < 1:
            raise ConfigError("update_frequency and save_frequency are at least 1")
        method = aggregation_method
        self.aggregation = Aggregation(method) if isinstance(method, str) else method
        self.optimizer = _optimizer(optimizer, deltas=self._takes_deltas())
        self.rounds = rounds
        self.update_frequency = update_frequency
        self.save_frequency = save_frequency
        self.checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path)
        if update_frequency < self.aggregation.at_least:
            raise ConfigError(
                f"{self.aggregation.method} needs {self.aggregation.at_least} pushes, update_frequency is {update_frequency}"
            )
        self.version = self.updates = self.round_number = self.abandoned_rounds = self.failed_saves = 0
        self.fell_back = False
        self.last_trouble = ""  # why a round ended without result, in a sentence
        self._space = Space(initial_params)
        self._values = self._space.flat(initial_params)
        self._spare = np.empty_like(self._values)
        self._stepper = Stepper(self.optimizer, self._space.size)
        self._roster = Roster()
        self._pending = Pending(self._space.size)
        self._waiting: np.ndarray | None = None  # aggregated and not yet applied
        self._store = store
        self._staleness: dict[int, int] = {}
        self._clock: Callable[[], float] = time.monotonic
        self._changed = threading.Condition(threading.RLock())
        self._published = -1
        self._service: Service | None = None
        self.broadcast_parameters()

    @checked
    def register_worker(self, worker_id: str) -> bool:
        """Let a worker push; False when it was registered already."""
        with self._changed:
            self._tick()
            return self._roster.add(worker_id, self.version)

    @checked
    def unregister_worker(self, worker_id: str) -> bool:
        """Wait for this worker no longer; what it pushed already counts. False when it was not registered."""
        with self._changed:
            if worker_id not in self._roster.present:
                return False
            self._roster.present.discard(worker_id)
            self._tick()
            self._close_if_complete()
            return True

    @checked
    def get_parameters(self, worker_id: str) -> dict[str, np.ndarray]:
        """Copies of the newest parameters; the worker's next push is taken to be made with them."""
        return self.pull(worker_id).arrays()

    @checked
    def pull(self, worker_id: str) -> Weights:
        """The same as one flat buffer with its version."""
        with self._changed:
            self._tick()
            self._roster.account(worker_id).version = self.version
            return self.weights()

    @checked
    def push_gradients(
        self,
        worker_id: str,
        gradients: Mapping[str, np.ndarray],
        weight: float = 1.0,
        *,
        round_number: int | None = None,
        version: int | None = None,
    ) -> Receipt:
        """Hand in one update; the receipt is false, with the reason, when it does not count.

        `round_number` makes repeating a push harmless: the round in synchronous use, the worker's own count otherwise.
        `version`: the weights that it was made with, by default those that the worker was given last.
        """
        with self._changed:
            self._tick()
            refusal = self._inadmissible(worker_id, weight, round_number, version)
            if refusal is None:
                row = self._pending.blank()
                refusal = self._fill(worker_id, row, gradients, version)
            if refusal is not None:
                self._roster.refuse(worker_id, refusal.reason)
                return Receipt(False, self.round_number, self.version, *refusal)
            self._accept(worker_id, row, weight, round_number, version)
            self._close_if_complete()
            return Receipt(True, self.round_number, self.version)

    def aggregate_gradients(self) -> dict[str, np.ndarray]:
        """End the round and combine its pushes; `update_parameters` applies the result, which is returned by name."""
        with self._changed:
            self._tick()
            if self._waiting is not None:
                raise UsageError("the last aggregate is not applied yet: call update_parameters first")
            self._require_enough()
            self._waiting = self._aggregate().copy()
            return {name: array.copy() for name, array in self._space.named(self._waiting).items()}

    @checked
    def update_parameters(self, learning_rate: float | None = None) -> None:
        """Apply what was aggregated, or aggregate and apply what was pushed so far, as the next version.

        `learning_rate`: for this update only; by default the optimizer's, which is 0.001 for gradients and 1 for deltas.
        """
        if learning_rate is not None and not 0.0 < learning_rate < math.inf:
            raise ConfigError(f"learning_rate={learning_rate} must be above 0")
        with self._changed:
            if self._waiting is None:
                self.aggregate_gradients()
            self._apply(learning_rate)

    def broadcast_parameters(self) -> int:
        """Publish the newest version to the store, if that has not been done, and wake whoever waits; the version."""
        with self._changed:
            if self._store is not None and self.version > self._published:
                self._store.publish(POLICY, self.weights())
            self._published = max(self._published, self.version)
            self._changed.notify_all()
            return self.version

    def weights(self) -> Weights:
        """The newest parameters as one flat buffer of the caller's, with their version."""
        with self._changed:
            found = Weights.from_arrays(self._space.arrays(self._values))
            return found.stamped(version=self.version, updates=self.updates, env_steps=0)

    @checked
    def newer_than(self, policy: str, version: int) -> Weights | None:
        """The newest parameters if they are newer than `version`: reads like any WeightStore, with one policy."""
        if policy != POLICY:
            raise UsageError(f"a parameter server has one policy, {POLICY!r}, not {policy!r}")
        return self.weights() if self.version > version else None

    @checked
    def wait_newer(self, version: int, timeout_s: float) -> bool:
        """Wait until there is a version above `version`, ending rounds whose deadline passes; False when time is up."""
        until = self._clock() + timeout_s
        with self._changed:
            while True:
                self._tick()
                now = self._clock()
                if self.version > version or now >= until:
                    return self.version > version
                self._changed.wait(max(0.0, min(until, self._deadline()) - now))

    def get_server_stats(self) -> dict[str, Any]:
        """Counters of everything that was accepted and refused, with reasons; per worker unless the server is private."""
        with self._changed:
            self._tick()
            accounts = self._roster.accounts
            stats: dict[str, Any] = {
                "version": self.version,
                "updates": self.updates,
                "round": self.round_number,
                "num_workers": len(self._roster.present),
                "num_parameters": self._space.size,
                "pending_pushes": len(self._pending),
                "accepted_pushes": sum(account.accepted for account in accounts.values()),
                "refused_pushes": dict(self._roster.refused),
                "abandoned_rounds": self.abandoned_rounds,
                "last_trouble": self.last_trouble,
                "failed_saves": self.failed_saves,
                "fell_back": self.fell_back,
                "aggregation_method": self.aggregation.method,
                "optimizer": self.optimizer.kind,
                "refused_calls": {} if self._service is None else dict(self._service.refused),
            }
            if self._private is not None:
                return {**stats, "privacy": self._private.report()}
            stats["staleness"] = dict(sorted(self._staleness.items()))
            stats["workers"] = {name: _public(found, name in self._roster.present) for name, found in accounts.items()}
            return stats

    @checked
    def save_checkpoint(self, path: str | Path | None = None) -> Path:
        """Write everything that `load_checkpoint` needs to go on exactly, pushes of the round under way included.

        The file is replaced atomically; the one before stays beside it as NAME.previous.
        """
        target = self.checkpoint_path if path is None else Path(path)
        if target is None:
            raise UsageError("where should the checkpoint go? Give a path, or the server a checkpoint_path")
        with self._changed, noticing_full_disk(target):
            write_checkpoint(target, self._state())
        return target

    @checked
    def load_checkpoint(self, path: str | Path) -> None:
        """Go on where the checkpoint was written; if it is damaged, where the one before it was."""
        with self._changed:
            state, self.fell_back = read_checkpoint(Path(path))
            self._load(state)
            self.broadcast_parameters()

    @checked
    def start_server(
        self,
        host: str = "localhost",
        port: int = 8888,
        *,
        token: str | Mapping[str, str] | None = None,
        tls: Tls | None = None,
    ) -> int:
        """Serve clients on the network from threads of this process; the port, a free one for 0.

        `token`: what clients must know, one for all or one per worker; by default a new one that clients of the same user
        on this machine find by themselves. Other machines are let in only with a token and TLS.
        """
        from steppe.params.service import Service

        if self._service is not None:
            raise UsageError(f"the server listens on port {self._service.port} already: stop_server first")
        self._service = Service(self, host, port, token, tls)
        return self._service.port

    def stop_server(self) -> None:
        """Take no more calls and let those under way end; nothing happens when it does not serve."""
        if self._service is not None:
            self._service.stop()
            self._service = None

    def close(self) -> None:
        """Stop serving and give back what the server holds; a private one lets go of its ledger."""
        self.stop_server()
        if self._private is not None:
            self._private.ledger.close()

    @property
    def is_private(self) -> bool:
        """Whether what it releases is differentially private."""
        return self._private is not None

    @property
    def num_parameters(self) -> int:
        """How many numbers are trained."""
        return self._space.size

    def standing(self, worker_id: str) -> dict[str, Any]:
        """What a worker needs to know to push: the round, its own last push, the newest version."""
        with self._changed:
            self._tick()
            account = self._roster.account(worker_id)
            found = {"round_number": self.round_number, "last": account.last, "version": self.version}
            return {**found, "synchronous": self.rounds.synchronous}

    def _takes_deltas(self) -> bool:
        return self.aggregation.method == "federated"

    def _inadmissible(self, worker: str, weight: float, number: int | None, version: int | None) -> Refusal | None:
        """What is wrong with a push before its numbers are looked at."""
        if worker not in self._roster.present:
            return Refusal("unknown_worker", f"worker {worker!r} is not registered: call register_worker first")
        if not 0.0 < weight < math.inf:
            return Refusal("bad_weight", f"weight={weight} must be above 0 and finite")
        if weight != 1.0 and not self.aggregation.weighs:
            word = self.aggregation.method
            return Refusal("bad_weight", f"aggregation {word!r} counts every push alike: leave weight at 1")
        account = self._roster.accounts[worker]
        if version is not None and version > self.version:
            return Refusal("future_version", f"version {version} does not exist: the newest is {self.version}")
        limit = self.rounds.max_staleness
        if limit is not None and self._age(account, version) > limit:
            return Refusal("too_stale", f"it was made {self._age(account, version)} versions ago, {limit} are allowed")
        return misplaced(account, self.rounds, self.round_number, number)

    def _fill(
        self, worker: str, row: np.ndarray, update: Mapping[str, np.ndarray], version: int | None
    ) -> Refusal | None:
        return self._space.fill(row, update)

    def _age(self, account: Account, version: int | None) -> int:
        return max(0, self.version - (account.version if version is None else version))

    def _accept(self, worker: str, row: np.ndarray, weight: float, number: int | None, version: int | None) -> None:
        account = self._roster.accounts[worker]
        if not self.rounds.synchronous:
            age = self._age(account, version)
            self._staleness[age] = self._staleness.get(age, 0) + 1
            if age and self.rounds.damping:
                row *= np.float32((1.0 + age) ** -self.rounds.damping)
        own = account.last + 1 if number is None else number
        account.last = self.round_number if self.rounds.synchronous else own
        account.accepted += 1
        self._pending.add(worker, weight, self._clock())

    def _expected(self) -> set[str]:
        """Whose pushes a synchronous round waits for."""
        return self._roster.present

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

    def _tick(self) -> None:
        """End a round whose deadline has passed: with what is there, or, below the quorum, without result."""
        if self._clock() < self._deadline():
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
        if not self._stepper.step(self._values, update, self._spare, learning_rate):
            raise NotFinite("the update would make a parameter infinite and was dropped: lower the learning rate")
        self._turn(1)
        try:
            self._keep()
        except BaseException:
            self._turn(-1)  # nobody has seen it: the lock is held
            raise
        self.broadcast_parameters()

    def _turn(self, step: int) -> None:
        self._values, self._spare = self._spare, self._values
        self.version += step
        self.updates += step

    def _keep(self) -> None:
        """Checkpoint when it is time; a full disk is counted, and the next time is soon enough."""
        if self.checkpoint_path is None or self.updates % self.save_frequency:
            return
        try:
            self.save_checkpoint()
        except DiskFull:
            self.failed_saves += 1

    def _state(self) -> dict[str, Any]:
        return {
            "parameters": self._space.arrays(self._values),
            "carried": sorted(self._space.carried),
            "optimizer": self._stepper.state(),
            "method": self.aggregation.method,
            "roster": self._roster.state(),
            "pending": self._pending.state(),
            "waiting": self._waiting,
            "counters": {name: getattr(self, name) for name in _COUNTERS},
            "staleness": dict(self._staleness),
        }

    def _load(self, state: dict[str, Any]) -> None:
        """All or nothing: whatever does not fit is found before anything changes."""
        if state["method"] != self.aggregation.method:
            raise ConfigError(
                f"the checkpoint was made with aggregation {state['method']!r}, not {self.aggregation.method!r}"
            )
        values = self._space.flat(state["parameters"])
        stepper, roster, pending = Stepper(self.optimizer, len(values)), Roster(), Pending(len(values))
        stepper.load(state["optimizer"])
        roster.load(state["roster"])
        pending.load(state["pending"], self._clock())
        for name in _COUNTERS:
            setattr(self, name, int(state["counters"][name]))
        self._space.carried = {name: state["parameters"][name] for name in state["carried"]}
        self._values, self._stepper, self._roster, self._pending = values, stepper, roster, pending
        self._waiting = state["waiting"]
        self._staleness = {int(age): int(times) for age, times in state["staleness"].items()}


_COUNTERS = ("version", "updates", "round_number", "abandoned_rounds", "failed_saves")


def _optimizer(given: str | Optimizer | None, *, deltas: bool) -> Optimizer:
    found = Optimizer(given) if isinstance(given, str) else given or Optimizer("fedavg" if deltas else "sgd")
    if found.for_deltas != deltas:
        kinds = "fedavg, fedadam or fedyogi" if deltas else "sgd, momentum or adam"
        raise ConfigError(f"optimizer {found.kind!r} does not fit: {'deltas' if deltas else 'gradients'} need {kinds}")
    return found


def _public(account: Account, present: bool) -> dict[str, Any]:
    return {
        "registered": present,
        "accepted": account.accepted,
        "refused": dict(account.refused),
        "last_round": account.last,
        "version": account.version,
    }

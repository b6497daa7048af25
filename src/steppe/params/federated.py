"""FederatedParameterServer: workers train locally and push one delta per round; optionally differentially private.

Order of a private release: write the charge to disk, add noise, write a checkpoint, mark the release on disk, publish.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from steppe.core.contracts.errors import BudgetSpent, ConfigError
from steppe.core.contracts.transport import WeightStore
from steppe.core.system.typecheck import typechecked
from steppe.params.aggregation import Aggregation
from steppe.params.optimizers import Optimizer
from steppe.params.parameter_layout import Refusal, as_update
from steppe.params.privacy import PrivacyPlan, PrivateSum
from steppe.params.rounds import PendingPushes, Push, Rounds
from steppe.params.server import ParameterServer

NO_PUSH_LIMIT = 2**31  # effectively unlimited: a number of pushes never ends a round early
_PRIVATE_METHODS = ("federated", "average")


class FederatedParameterServer(ParameterServer):
    """Parameter server with synchronous rounds of deltas.

    A round ends when every registered worker has pushed, when `update_frequency` workers have, or `deadline_s` after
    its first push if at least `min_workers_for_update` have. `updates`: whether workers push "deltas" or full
    "parameters", from which the server subtracts its own. With `differential_privacy`, `privacy` is the privacy plan
    and `noise_scale` the noise multiplier z.
    """

    @typechecked
    def __init__(
        self,
        initial_params: Mapping[str, Any],
        min_workers_for_update: int = 2,
        differential_privacy: bool = False,
        noise_scale: float = 1.0,
        *,
        aggregation_method: str | Aggregation = "federated",
        update_frequency: int | None = None,
        save_frequency: int = 100,
        checkpoint_path: str | Path | None = None,
        optimizer: str | Optimizer | None = None,
        deadline_s: float | None = None,
        updates: Literal["deltas", "parameters"] = "deltas",
        privacy: PrivacyPlan | None = None,
        store: WeightStore | None = None,
    ) -> None:
        method = Aggregation(aggregation_method) if isinstance(aggregation_method, str) else aggregation_method
        _require_private(differential_privacy, privacy, method, deadline_s)
        if update_frequency is not None and update_frequency < min_workers_for_update:
            raise ConfigError(
                f"update_frequency={update_frequency} is below min_workers_for_update={min_workers_for_update}: "
                "a round would end before it may"
            )
        self._whole = updates == "parameters"
        # Sampled once per worker and round: registering again does not sample a worker again.
        self._drawn: set[str] = set()
        self._decided: set[str] = set()
        super().__init__(
            initial_params,
            method,
            NO_PUSH_LIMIT if update_frequency is None else update_frequency,
            save_frequency,
            checkpoint_path,
            optimizer=optimizer,
            rounds=Rounds(synchronous=True, quorum=min_workers_for_update, deadline_s=deadline_s),
            store=store,
        )
        self._released = 0
        self._spent = False
        if privacy is not None:
            self._private = PrivateSum(privacy, noise_scale)
            self._released = self._private.ledger.count
            self._draw()

    @typechecked
    def register_worker(self, worker_id: str) -> bool:
        """Allow a worker to push; return False if it was registered already.

        A private server may leave it out of the current round's sample.
        """
        with self._changed:
            new = super().register_worker(worker_id)
            if self._private is not None and worker_id not in self._decided:
                self._decided.add(worker_id)
                self._drawn |= self._private.draw([worker_id])
            return new

    @typechecked
    def is_drawn(self, worker_id: str) -> bool:
        """Return whether the current round waits for this worker.

        True for every registered worker, unless a private server samples its clients.
        """
        with self._changed:
            self._close_expired_round()
            return worker_id in self._expected()

    @typechecked
    def federated_averaging(self, worker_updates: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Run one round with these updates and return the new parameters.

        Updates that `validate_worker_update` would refuse are skipped and counted. Raises UsageError if fewer than
        `min_workers_for_update` remain. Unknown workers are registered, unless the server is private.
        """
        with self._changed:
            self._close_expired_round()
            begun = self.round_number
            for worker, update in worker_updates.items():
                if self._private is None:
                    self._registry.add(worker, self.version)
                if self.round_number == begun:
                    self.push_gradients(worker, update, version=self.version)
            if self.round_number == begun:
                self._require_enough()
                self.update_parameters()
            elif self._spent:
                self._raise_spent()
            return self.weights().arrays()

    @typechecked
    def validate_worker_update(self, worker_id: str, update: Mapping[str, Any]) -> bool:
        """Return whether a push of this update would be accepted now; nothing is counted or changed."""
        with self._changed:
            if self._check_admissible(Push(worker_id, version=self.version)) is not None:
                return False
            row = np.empty(self._space.size, np.float32)
            return self._space.fill(row, as_update(update), whole=self._whole) is None

    def _takes_deltas(self, aggregation: Aggregation) -> bool:
        return True

    def _check_admissible(self, push: Push) -> Refusal | None:
        refusal = super()._check_admissible(push)
        if refusal is not None or self._private is None:
            return refusal
        if push.weight != 1.0:
            return Refusal("bad_weight", "privacy counts every client alike: leave weight at 1")
        if self._spent:
            return Refusal("budget_spent", "the privacy budget is spent: nothing more is released")
        if push.worker not in self._drawn:
            return Refusal("not_drawn", "the server did not draw this worker for the round: wait for the next")
        return None

    def _to_delta(self, push: Push, row: np.ndarray) -> Refusal | None:
        """Convert pushed parameters to a delta from the version they were computed from, which must be the newest."""
        if not self._whole:
            return None
        base = self._registry.accounts[push.worker].version if push.version is None else push.version
        if base != self.version:
            return Refusal("stale_round", f"these are parameters made from version {base}, not from {self.version}")
        row -= self._values.newest
        return None

    def _expected(self) -> set[str]:
        return self._registry.registered if self._private is None else self._registry.registered & self._drawn

    def _draw(self) -> None:
        if self._private is not None:
            self._decided = set(self._registry.registered)
            self._drawn = self._private.draw(self._decided)
            if self._private.plan.sampling_rate < 1.0:
                self._pending.opened_at = self.clock()  # the deadline applies even if no client was sampled

    def _next_round(self) -> None:
        super()._next_round()
        self._draw()

    def _combine(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        if self._private is None:
            return super()._combine(rows, weights)
        try:
            update, self._released = self._private.release(rows)
        except BudgetSpent:
            self._spent = True
            raise
        return update

    def _raise_spent(self) -> None:
        assert self._private is not None
        report = self._private.report()
        raise BudgetSpent(
            f"the privacy budget is spent: epsilon {report['epsilon_spent']:.4g} of {report['epsilon_budget']:g}; "
            "the round was given up"
        )

    def _keep(self) -> None:
        """Write a private version to disk before it is published; afterwards the ledger rejects older checkpoints."""
        if self._private is None:
            super()._keep()
            return
        if self.checkpoint_path is not None:
            self.save_checkpoint()
        self._private.ledger.mark_released(self._released)

    def _state(self) -> dict[str, Any]:
        """Return the state; a private server omits clients' deltas, so clients of the current round must push again."""
        state = {**super()._state(), "released": self._released}
        if self._private is not None:
            for worker in self._pending.workers:
                account = state["roster"]["accounts"][worker]
                account["last"], account["accepted"] = self.round_number - 1, account["accepted"] - 1
            state["pending"] = PendingPushes(self._space.size).state()
        return state

    def _load(self, state: dict[str, Any]) -> None:
        released = state.get("released", 0)
        if self._private is not None:
            self._private.ledger.require(released)
        super()._load(state)
        self._released = released
        self._draw()


def _require_private(private: bool, plan: PrivacyPlan | None, method: Aggregation, deadline_s: float | None) -> None:
    """Raise ConfigError if the requested settings cannot be private."""
    if private != (plan is not None):
        raise ConfigError(
            "differential_privacy=True needs privacy=PrivacyPlan(ledger=…, epsilon=…, expected_clients=…), and a plan needs "
            "differential_privacy=True: without clipping, a budget and a ledger, noise promises nothing"
        )
    if plan is None:
        return
    if method.method not in _PRIVATE_METHODS:
        raise ConfigError(
            f"aggregation {method.method!r} is not private: one client may change its result by more than clip_norm / "
            f"expected_clients, which the noise is made for; use {' or '.join(map(repr, _PRIVATE_METHODS))}"
        )
    if plan.sampling_rate < 1.0 and deadline_s is None:
        raise ConfigError("a private server that draws its clients needs deadline_s, for rounds in which few are drawn")

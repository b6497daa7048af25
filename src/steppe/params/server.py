"""ParameterServer: one set of parameters that many workers update. Results are versioned, pushes counted per worker.

Thread-safe within one process. admission.py processes pushes; aggregation, optimizers and privacy are in the modules
beside it. Other processes on this machine connect through params/rpc/shm_server.py, other machines through
params/rpc/grpc_server.py.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steppe.core.arrays import to_numpy
from steppe.core.contracts.errors import ConfigError, DiskFull, UsageError
from steppe.core.contracts.transport import WeightStore
from steppe.core.contracts.weights import Weights, WeightsLayout
from steppe.core.io.atomic_files import raising_disk_full
from steppe.core.system.typecheck import typechecked
from steppe.params.admission import PushAdmission, resolve_optimizer
from steppe.params.aggregation import Aggregation
from steppe.params.checkpoints import read_checkpoint, write_checkpoint
from steppe.params.client import POLICY, ParameterServerApi, as_metrics
from steppe.params.optimizers import Optimizer
from steppe.params.parameter_layout import ParameterLayout, Refusal
from steppe.params.privacy import PrivateSum
from steppe.params.round_sum import validate_numbers
from steppe.params.rounds import PendingPushes, Push, Receipt, Rounds, WorkerAccount, WorkerRegistry
from steppe.params.rpc.protocol import Tls

if TYPE_CHECKING:
    from steppe.params.rpc.grpc_server import GrpcServer
    from steppe.params.rpc.shm_server import ShmServer


class ParameterServer(ParameterServerApi, PushAdmission):
    """Collect workers' gradients and apply them together, `update_frequency` accepted pushes at a time.

    `aggregation_method`: a name or an Aggregation with settings. With "federated", workers push deltas (new minus old
    parameters) weighted by their samples. Invalid pushes are refused with a reason, counted, and change nothing. A
    checkpoint is written to `checkpoint_path` every `save_frequency` updates. `store`: each new version is also
    published there. The attribute `clock` returns the seconds that deadlines are measured with; default:
    `time.monotonic`.
    """

    _private: PrivateSum | None = None

    @typechecked
    def __init__(
        self,
        initial_params: Mapping[str, Any],
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
        aggregation = Aggregation(method) if isinstance(method, str) else method
        self.optimizer = resolve_optimizer(optimizer, deltas=self._takes_deltas(aggregation))
        if update_frequency < aggregation.at_least:
            raise ConfigError(
                f"{aggregation.method} needs {aggregation.at_least} pushes, update_frequency is {update_frequency}"
            )
        initial_params = {name: to_numpy(value, repr(name)) for name, value in initial_params.items()}
        space = ParameterLayout(initial_params)
        super().__init__(space, space.flat(initial_params), aggregation, self.optimizer, rounds)
        self.update_frequency = update_frequency
        self.save_frequency = save_frequency
        self.checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path)
        self.run = secrets.token_hex(8)  # run id, the same for all workers; kept by checkpoints
        self.fell_back = False
        self._store = store
        self._published = -1
        self._reports: dict[str, dict[str, float]] = {}
        self._service: GrpcServer | None = None
        self._shared: ShmServer | None = None
        self.broadcast_parameters()

    @typechecked
    def register_worker(self, worker_id: str) -> bool:
        """Allow a worker to push; return False if it was registered already."""
        with self._changed:
            self._close_expired_round()
            return self._registry.add(worker_id, self.version)

    @typechecked
    def unregister_worker(self, worker_id: str) -> bool:
        """Stop waiting for this worker; its earlier pushes still count. Return False if it was not registered."""
        with self._changed:
            if worker_id not in self._registry.registered:
                return False
            self._registry.registered.discard(worker_id)
            self._close_expired_round()
            self._close_if_complete()
            return True

    @typechecked
    def pull(self, worker_id: str) -> Weights:
        """Return the newest parameters as one flat buffer with its version.

        The worker's next push is assumed to be computed with them.
        """
        with self._changed:
            self._close_expired_round()
            self._registry.account(worker_id).version = self.version
            return self.weights()

    @typechecked
    def pull_newer(self, worker_id: str, version: int) -> tuple[Weights | None, int]:
        """Return the newest weights if newer than `version`, else None, and the round, both read at the same moment."""
        with self._changed:
            self._close_expired_round()
            self._registry.account(worker_id)
            return self.pull(worker_id) if self.version > version else None, self.round_number

    @typechecked
    def sum_over_workers(
        self, worker_id: str, round_number: int, values: Sequence[float]
    ) -> tuple[int, list[float] | None]:
        """Add numbers to the sum over all workers of a round; see ParameterServerApi."""
        if not self._supports_sums:
            raise UsageError(
                "numbers are summed over workers in synchronous rounds of average, sum or weighted, without privacy"
            )
        with self._changed:
            self._close_expired_round()
            if worker_id not in self._registry.registered:
                return -1, None
            found = self._add_to_sum(worker_id, validate_numbers(values)) if round_number == self.round_number else None
            return self.round_number, None if found is None else found.tolist()

    @typechecked
    def refuse_push(self, push: Push, refusal: Refusal) -> Receipt:
        """Count a push that the transport or the client found to be invalid."""
        with self._changed:
            return self._take(push, lambda _: refusal)

    def aggregate_gradients(self) -> dict[str, np.ndarray]:
        """End the round and combine its pushes; return the result by name. `update_parameters` applies it."""
        with self._changed:
            self._close_expired_round()
            if self._waiting is not None:
                raise UsageError("the last aggregate is not applied yet: call update_parameters first")
            self._require_enough()
            self._waiting = self._aggregate().copy()
            return {name: array.copy() for name, array in self._space.named(self._waiting).items()}

    @typechecked
    def update_parameters(self, learning_rate: float | None = None) -> None:
        """Apply the pending aggregate as the next version; without one, aggregate the pushes so far first.

        `learning_rate`: for this update only. Default: the optimizer's, which itself defaults to 0.001 for gradients
        and 1 for deltas.
        """
        if learning_rate is not None and not 0.0 < learning_rate < math.inf:
            raise ConfigError(f"learning_rate={learning_rate} must be above 0")
        with self._changed:
            if self._waiting is None:
                self.aggregate_gradients()
            self._apply(learning_rate)

    def broadcast_parameters(self) -> int:
        """Publish the newest version to the store, unless done already, wake waiting threads; return the version."""
        with self._changed:
            if self._store is not None and self.version > self._published:
                self._store.publish(POLICY, self.weights())
            self._published = max(self._published, self.version)
            if self._shared is not None:
                self._shared.show()
            self._changed.notify_all()
            return self.version

    def weights(self) -> Weights:
        """Return a copy of the newest parameters as one flat buffer, with their version."""
        with self._changed:
            return self._values.weights()

    @typechecked
    def wait_newer(self, version: int, timeout_s: float) -> bool:
        """Wait for a version above `version`, closing rounds whose deadline passes; return False after `timeout_s`."""
        until = self.clock() + timeout_s
        with self._changed:
            while True:
                self._close_expired_round()
                now = self.clock()
                if self.version > version or now >= until:
                    return self.version > version
                self._changed.wait(max(0.0, min(until, self._deadline()) - now))

    def get_server_stats(self) -> dict[str, Any]:
        """Return counters of accepted and refused pushes, with reasons; per worker unless the server is private."""
        with self._changed:
            self._close_expired_round()
            accounts = self._registry.accounts
            stats: dict[str, Any] = {
                "run": self.run,
                "version": self.version,
                "updates": self.updates,
                "round": self.round_number,
                "num_workers": len(self._registry.registered),
                "num_parameters": self._space.size,
                "pending_pushes": len(self._pending),
                "accepted_pushes": sum(account.accepted for account in accounts.values()),
                "refused_pushes": dict(self._registry.refused),
                "abandoned_rounds": self.abandoned_rounds,
                "last_trouble": self.last_trouble,
                "failed_saves": self.failed_saves,
                "fell_back": self.fell_back,
                "aggregation_method": self.aggregation.method,
                "optimizer": self.optimizer.kind,
                "takes": self.takes,
                "synchronous": self.rounds.synchronous,
                "refused_calls": {} if self._service is None else dict(self._service.refused),
            }
            if self._private is not None:
                return {**stats, "privacy": self._private.report()}
            stats["staleness"] = dict(sorted(self._staleness.items()))
            stats["workers"] = {
                name: _worker_stats(found, name in self._registry.registered) | {"metrics": self._reports.get(name, {})}
                for name, found in accounts.items()
            }
            return stats

    @typechecked
    def report(self, worker_id: str, metrics: Mapping[str, float]) -> None:
        """Publish a worker's newest metrics in the statistics; a private server raises UsageError."""
        if self._private is not None:
            raise UsageError("a private server publishes nothing about one client: report no metrics to it")
        found = as_metrics(metrics)
        with self._changed:
            self._registry.account(worker_id)
            self._reports[worker_id] = found

    @typechecked
    def save_checkpoint(self, path: str | Path | None = None) -> Path:
        """Write everything that `load_checkpoint` needs to continue exactly, including the pushes of the current round.

        The file is replaced atomically; the previous one is kept beside it as NAME.previous. Returns the path.
        """
        target = self.checkpoint_path if path is None else Path(path)
        if target is None:
            raise UsageError("where should the checkpoint go? Give a path, or the server a checkpoint_path")
        with self._changed, raising_disk_full(target):
            write_checkpoint(target, self._state())
        return target

    @typechecked
    def load_checkpoint(self, path: str | Path) -> None:
        """Continue from a checkpoint; if it is corrupt, from the previous one."""
        with self._changed:
            state, self.fell_back = read_checkpoint(Path(path))
            self.restore(state)

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's content as plain values and copied arrays, for callers that store it themselves."""
        with self._changed:
            return copy.deepcopy(self._state())

    @typechecked
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        with self._changed:
            self._load(state)
            if self._shared is not None:
                self._shared.remap()
            self.broadcast_parameters()

    @typechecked
    def start_server(
        self,
        host: str = "localhost",
        port: int = 8888,
        *,
        token: str | Mapping[str, str] | None = None,
        tls: Tls | None = None,
    ) -> int:
        """Serve clients over gRPC from threads of this process; return the port (`port=0` chooses a free one).

        `token`: the token that clients must send, one for all or one per worker; default: a new one that clients of the
        same user on this machine find automatically. Serving other machines requires a token and TLS.
        """
        from steppe.params.rpc.grpc_server import GrpcServer

        if self._service is not None:
            raise UsageError(f"the server listens on port {self._service.port} already: stop_server first")
        self._service = GrpcServer(self, host, port, token, tls)
        return self._service.port

    @typechecked
    def share(self, room: str | Path | None = None, *, by_steps: bool = False) -> str:
        """Serve processes of this machine through shared memory, from a thread; return the address for ParameterClient.

        `room`: the shared directory in memory (/dev/shm); default: a new one. With `by_steps` there is no thread, and
        the caller must call `serve_step` repeatedly.
        """
        from steppe.params.rpc.shm_server import ShmServer

        if self._private is not None:
            raise ConfigError("a private server has to know who pushes, which shared memory does not say: start_server")
        if self._shared is not None:
            raise UsageError(f"the server is shared already, at {self._shared.url}: stop_server first")
        with self._changed:
            self._shared = ShmServer(self, None if room is None else Path(room))
        if not by_steps:
            self._shared.start()
        return self._shared.url

    @typechecked
    def serve_step(self, timeout_s: float = 0.0) -> bool:
        """Handle pending shared-memory requests; wait at most `timeout_s` for one. Return whether there was any."""
        if self._shared is None:
            raise UsageError("there is nothing to serve: call share(by_steps=True) first")
        return self._shared.step(timeout_s)

    def stop_server(self) -> None:
        """Stop accepting calls and let those in progress finish; do nothing if the server is not serving."""
        if self._service is not None:
            self._service.stop()
            self._service = None
        if self._shared is not None:
            self._shared.stop()
            self._shared = None

    def close(self) -> None:
        """Stop serving and release resources; a private server releases its ledger."""
        self.stop_server()
        if self._private is not None:
            self._private.ledger.close()

    @property
    def is_serving(self) -> bool:
        """Whether the server accepts calls from the network."""
        return self._service is not None

    @property
    def is_private(self) -> bool:
        """Whether released parameters are differentially private."""
        return self._private is not None

    @property
    def takes(self) -> str:
        """What workers push: "gradients", "deltas" (new minus old parameters) or "parameters"."""
        return "parameters" if self._whole else "deltas" if self.optimizer.for_deltas else "gradients"

    @property
    def layout(self) -> WeightsLayout:
        """Names, shapes, dtypes and offsets of all parameters in a pulled buffer."""
        return self._space.whole

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return self._space.size

    @typechecked
    def standing(self, worker_id: str) -> dict[str, Any]:
        """Return what a worker needs in order to push: the round, its own last push, the newest version."""
        with self._changed:
            self._close_expired_round()
            account = self._registry.account(worker_id)
            found = {"round_number": self.round_number, "last": account.last, "version": self.version}
            return {**found, "synchronous": self.rounds.synchronous}

    def description(self) -> dict[str, Any]:
        """Return what a client needs to convert updates to rows, and rows to weights."""
        with self._changed:
            about = {"whole": self._whole, "deltas": self.optimizer.for_deltas, "run": self.run}
            about["supports_sums"], about["private"] = self._supports_sums, self.is_private
            about["uses_weights"] = self.aggregation.uses_weights and self._private is None
            return {**about, "fields": self._space.fields, "carried": self._space.carried}

    def tick(self) -> None:
        """Close a round whose deadline has passed; serving loops call this regularly."""
        with self._changed:
            self._close_expired_round()

    def _push(self, push: Push, update: Mapping[str, np.ndarray] | np.ndarray) -> Receipt:
        row = update if isinstance(update, np.ndarray) else self._space.view_as_row(update)
        with self._changed:
            if isinstance(update, np.ndarray) or (row is not None and self._can_use_row_in_place()):
                assert row is not None
                return self.take_row(push, row)
            return self._take(push, lambda into: self._space.fill(into, update, whole=self._whole))

    def _newer_than(self, version: int) -> Weights | None:
        return self.weights() if self.version > version else None

    @property
    def _supports_sums(self) -> bool:
        """Whether `sum_over_workers` is allowed: not if a worker's numbers could mislead other workers or leak to them."""
        return self.rounds.synchronous and self.aggregation.linear and self._private is None

    def _takes_deltas(self, aggregation: Aggregation) -> bool:
        return aggregation.method == "federated"

    def _keep(self) -> None:
        """Write a checkpoint every `save_frequency` updates; on a full disk, count the failure and continue."""
        if self.checkpoint_path is None or self.updates % self.save_frequency:
            return
        try:
            self.save_checkpoint()
        except DiskFull:
            self.failed_saves += 1

    def _state(self) -> dict[str, Any]:
        return {
            **self._values.state(),
            "run": self.run,
            "method": self.aggregation.method,
            "roster": self._registry.state(),
            "pending": self._pending.state(),
            "waiting": self._waiting,
            "counters": {name: getattr(self, name) for name in (*_COUNTERS, "version", "updates")},
            "staleness": dict(self._staleness),
        }

    def _load(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's state, all or nothing: mismatches are detected before anything changes."""
        if state["method"] != self.aggregation.method:
            raise ConfigError(
                f"the checkpoint was made with aggregation {state['method']!r}, not {self.aggregation.method!r}"
            )
        roster, pending = WorkerRegistry(), PendingPushes(self._space.size)
        roster.load(state["roster"])
        pending.load(state["pending"], self.clock())
        self._values.load(state)
        for name in _COUNTERS:
            setattr(self, name, int(state["counters"][name]))
        self._values.version, self._values.updates = (int(state["counters"][name]) for name in ("version", "updates"))
        self.run = str(state.get("run", self.run))
        self._registry, self._pending, self._waiting = roster, pending, state["waiting"]
        self._staleness = {int(age): int(times) for age, times in state["staleness"].items()}


_COUNTERS = ("round_number", "abandoned_rounds", "failed_saves")


def _worker_stats(account: WorkerAccount, present: bool) -> dict[str, Any]:
    return {
        "registered": present,
        "accepted": account.accepted,
        "refused": dict(account.refused),
        "last_round": account.last,
        "version": account.version,
    }

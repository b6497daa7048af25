"""One role of a run over Kafka in an unsupervised process, such as a container; roles may be started in any order.

It waits for the run's manifest, obeys the manifest and the commands after it, and ends with the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

from steppe.core.config import references
from steppe.core.config.run import KafkaConfig, ResolvedConfig, flatten, unflatten
from steppe.core.config.validation import validate_config
from steppe.core.contracts.errors import ConfigError, Conflict, Overtaken, RunFailed, RunNotFound, Unreachable
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVENTS
from steppe.envs import probe
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory, runs_root
from steppe.records.telemetry.role_endpoint import RoleEndpoint
from steppe.roles.context import STOP
from steppe.runtimes.handle import Fault, RoleScheduler, configure_torch
from steppe.runtimes.kafka import launch as kafka
from steppe.runtimes.kafka.manifest import RunManifest, find_manifest, make_command, wire_name
from steppe.runtimes.kafka.worker import KafkaWorkerSlot
from steppe.runtimes.memory_need import require_memory
from steppe.runtimes.plan import Plan, make_plan
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection, ensure_topics, lost_broker_within

POLL_INTERVAL_S = 0.5  # between polls for a manifest
RECENT_RECORDS = 5_000  # newest records, which include reports of every live actor
LIVENESS_TIMEOUT_S = 6.0  # an actor that has not reported for this long counts as gone
# Keys that are taken from this process's configuration, not from the run's.
LOCAL_KAFKA_KEYS = (
    "address",
    "security",
    "username",
    "mechanism",
    "ca",
    "certificate",
    "key",
    "claims",
)


class StopSignals:
    """Handle SIGTERM and Ctrl-C: the first requests a graceful end, a second one interrupts at once.

    While `exit_immediately`, as during the import of torch, which takes seconds, the first one exits at once too.
    """

    def __init__(self) -> None:
        self.stopped = False
        self.exit_immediately = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True
        if self.exit_immediately:
            os._exit(0)


def run_standalone_role(
    kind: str,
    config: KafkaConfig,
    run: str,
    index: int | None = None,
    resolved: ResolvedConfig | None = None,
    endpoint: RoleEndpoint | None = None,
) -> None:
    """Run one role until the run ends or this process is asked to stop; raises the role's failure.

    `resolved` configures the run, for a learner that may have to create it. An actor without `index` takes the first
    free index.
    """
    signals, endpoint = StopSignals(), endpoint or RoleEndpoint(run, kind)
    endpoint.log_event("begins")
    manifest = _find_manifest_with_retry(config, run, signals)
    if manifest is None and kind == "learner" and resolved is not None:
        manifest = _create_run(config, run, resolved)
    elif manifest is not None and resolved is not None:
        changed = _changed_hyperparameters(manifest, resolved)
        manifest = _publish_hyperparameters(manifest, config, changed) if changed and kind == "learner" else manifest
    while manifest is None:
        time.sleep(POLL_INTERVAL_S)
        manifest = _find_manifest_with_retry(config, run, signals)
    _StandaloneRole(kind, config, manifest, signals, endpoint).run(index)
    endpoint.log_event("ends", asked=signals.stopped)


def _find_manifest_with_retry(config: KafkaConfig, run: str, signals: StopSignals) -> RunManifest | None:
    """Return the run's manifest, or None. Raises Unreachable if no broker responds within kafka.wait_s."""
    until = time.monotonic() + config.wait_s
    while not signals.stopped:
        try:
            return find_manifest(config, run)
        except Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_INTERVAL_S)
    return None


class _StandaloneRole:
    def __init__(
        self, kind: str, config: KafkaConfig, manifest: RunManifest, signals: StopSignals, endpoint: RoleEndpoint
    ) -> None:
        self._kind, self._manifest, self._signals, self._endpoint = kind, manifest, signals, endpoint
        references.set_main_script(manifest.launch_spec.script)
        plan = manifest.launch_spec.plan()
        own = plan.config.kafka.model_copy(update={name: getattr(config, name) for name in LOCAL_KAFKA_KEYS})
        self._plan = replace(plan, config=plan.config.model_copy(update={"kafka": own}))
        self._connection = manifest.connection(own)
        self._taken_over: dict[int, float] = {}  # actor indices that another process took over, and when

    def run(self, index: int | None) -> None:
        directory = _open_run_directory(self._manifest, self._plan, self._kind)
        if self._kind == "learner":
            directory.acquire()
            newest = Checkpoints(directory.checkpoints, run=directory.key).latest()
            self._plan = replace(self._plan, resume=newest.number if newest else None)
        configure_torch(self._plan.config)
        self._signals.exit_immediately = False
        try:
            while not self._run_once(directory, index):
                pass
        finally:
            directory.release()
            directory.store.close()

    def _run_once(self, directory: RunDirectory, index: int | None) -> bool:
        """Run the role once; return False if another process took over its index and another index can be tried."""
        actor = self._find_free_index() if self._kind == "actor" and index is None else index
        if self._signals.stopped:
            return True
        worker_slot = f"actor-{actor}" if self._kind == "actor" else self._kind
        scheduler = RoleScheduler([])
        slot = KafkaWorkerSlot(
            self._manifest,
            self._plan,
            worker_slot,
            0,
            directory,
            self._endpoint.heartbeat,
            stopped=lambda: self._signals.stopped,
            wrap_board=self._endpoint.observe,
        )
        try:
            commands = slot.run(scheduler)
        except Overtaken as error:
            scheduler.faults.append(Fault.of(worker_slot, error))
        if scheduler.faults and scheduler.faults[0].reason == Overtaken.reason:
            if self._kind == "actor" and index is None and actor is not None:
                self._taken_over[actor] = time.monotonic()
                return False
            raise Overtaken(scheduler.faults[0].message)
        if scheduler.faults:
            self._report_faults(directory, scheduler.faults)
            raise RunFailed(scheduler.faults[0].message)
        if self._kind == "learner" and not self._signals.stopped and commands.requested["learner"] != STOP:
            self._post(COMMANDS, make_command("finish", "learner", run=directory.id, expires_s=None))
            _write_termination_message("complete")
        return True

    def _find_free_index(self) -> int:
        """Return the first actor index without recent reports. Waits until a killed actor no longer counts as alive.

        Raises Conflict if all indices stay taken.
        """
        until = time.monotonic() + 2 * LIVENESS_TIMEOUT_S
        while True:
            taken = self._live_actors() | {
                actor for actor, at_s in self._taken_over.items() if time.monotonic() - at_s < LIVENESS_TIMEOUT_S
            }
            free = [actor for actor in range(self._plan.num_writers) if actor not in taken]
            if free or self._signals.stopped:
                return free[0] if free else 0
            if time.monotonic() > until and not lost_broker_within(self._plan.config.kafka.wait_s):
                count = self._plan.num_writers
                raise Conflict(f"{self._connection.name} has {count} actors already: all worker slots are taken")
            time.sleep(POLL_INTERVAL_S)

    def _live_actors(self) -> set[int]:
        number = self._plan.num_writers
        board, now = KafkaBoard(self._connection, refuse=lambda message, reason: None, num_actors=number), time.time()
        try:
            recent = board.read(ACTORS, max(0, board.end(ACTORS) - RECENT_RECORDS))
        except Unreachable:
            return set(range(number))  # no actor can be observed: count all as alive
        finally:
            board.close()
        states = {
            report["actor"]: report.get("state") for _, report in recent if now - report["time_s"] < LIVENESS_TIMEOUT_S
        }
        return {actor for actor, state in states.items() if state != "stopped"}

    def _report_faults(self, directory: RunDirectory, faults: list[Fault]) -> None:
        for fault in faults:
            details = {"reason": fault.reason, "message": fault.message, "details": fault.details}
            event = EventReport(run=directory.id, kind="fault", role=fault.role, details=details)
            self._post(EVENTS, event.record())
            self._endpoint.log_event("fault", **details)
            print(fault.details.get("traceback", ""), file=sys.stderr)

    def _post(self, topic: str, record: dict[str, Any]) -> None:
        board = KafkaBoard(self._connection)
        board.post(topic, record)
        board.close(self._plan.config.kafka.wait_s)


def _write_termination_message(text: str) -> None:
    """Write `text` to $TERMINATION_LOG, to distinguish a completed run from a stopped one: both exit with 0."""
    if path := os.environ.get("TERMINATION_LOG"):
        Path(path).write_text(text)


def _create_run(config: KafkaConfig, run: str, resolved: ResolvedConfig) -> RunManifest:
    """Create a new run and post its manifest."""
    settings = resolved.config.model_copy(update={"kafka": config, "runtime": "kafka", "name": run})
    plan = make_plan(settings, probe(settings.env, settings.environment))
    require_memory(plan.config, plan.spec)
    kafka.require(plan)
    ensure_topics(KafkaConnection(config, run))
    directory = RunDirectory.create(plan.config, resolved.sources, {"spec": asdict(plan.spec)})
    directory.release()
    manifest = RunManifest.of(plan, directory)
    board = KafkaBoard(KafkaConnection(config, wire_name(directory)))
    manifest.post(board)
    board.close()
    return manifest


def _changed_hyperparameters(manifest: RunManifest, resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the changed hyperparameters. Raises ConfigError if any other given setting differs from the run's."""
    known, requested = manifest.launch_spec.config, flatten(resolved.config)
    given = [key for key, source in resolved.sources.items() if source != "default" and not key.startswith("kafka.")]
    changed = [
        key for key in given if key not in ("name", "run_dir", "runtime") and known.get(key) != requested.get(key)
    ]
    fixed_names = {f"agent.{name}" for name in resolved.config.agent.fixed}
    others = [key for key in changed if not key.startswith("agent.") or key in fixed_names]
    if others:
        raise ConfigError(
            f"the run {manifest.launch_spec.run} is under way with {others[0]}={known.get(others[0])!r}: leave {others[0]} out, "
            "or choose another --run"
        )
    return {key.removeprefix("agent."): requested[key] for key in changed}


def _publish_hyperparameters(manifest: RunManifest, config: KafkaConfig, changed: Mapping[str, Any]) -> RunManifest:
    """Post an updated manifest with other hyperparameters, which apply from the run's newest checkpoint on."""
    plan = manifest.launch_spec.plan()
    agent = plan.config.agent
    values = agent.model_dump(mode="json") | dict(changed)
    tuned = plan.config.model_copy(update={"agent": validate_config(type(agent), values, "agent.")})
    directory = _open_run_directory(manifest, plan, "learner")
    manifest = manifest.updated(replace(plan, config=tuned), directory)
    board = KafkaBoard(manifest.connection(config))
    manifest.post(board)
    details = {"what": "settings", "values": dict(changed)}
    board.post(EVENTS, EventReport(run=directory.id, kind="note", role="learner", details=details).record())
    board.close()
    return manifest


def _open_run_directory(manifest: RunManifest, plan: Plan, kind: str) -> RunDirectory:
    """Open the run directory if it is visible here; otherwise open or create a local one for this process's files."""
    key = manifest.run.rpartition("~")[2]
    name = manifest.launch_spec.run if kind == "learner" else f"{manifest.launch_spec.run}-{kind}"
    shared = (Path(manifest.launch_spec.directory), runs_root() / manifest.launch_spec.run) if kind != "actor" else ()
    for path in (*shared, runs_root() / name):
        with contextlib.suppress(RunNotFound):
            found = RunDirectory.open(path)
            if found.key.startswith(key):
                return found
    config = unflatten(flatten(plan.config) | {"name": name})
    about = {"id": manifest.launch_spec.run, "key": key}
    directory = RunDirectory.create(config.model_copy(update={"run_dir": None}), {}, about)
    directory.release()
    return directory

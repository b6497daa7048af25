"""The driver of a run on a Ray cluster: starts a Ray actor per worker slot, monitors them, and replaces those that die.

If the calling process does not use Ray, it supervises (launch.py), and this driver is a separate process for the run:
Ray may end its driver at any time, but never the supervisor. In a program that has called `ray.init` itself, that
program is the driver.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import Any, NoReturn

import msgspec

from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS
from steppe.core.system.process import format_mib, oom_kills
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH, RUN, STOP
from steppe.runtimes.handle import Fault
from steppe.runtimes.launch_spec import ROLE_KINDS, LaunchSpec, import_path
from steppe.runtimes.plan import REPLAY, WRITERS
from steppe.runtimes.processes.worker import FAULT_EXIT_CODE
from steppe.runtimes.ray.actor import START_S, SlotAssignment
from steppe.runtimes.ray.placement import RayCluster
from steppe.runtimes.resume import prime_channel
from steppe.runtimes.subprocess_driver.child import LineReader, relay_commands, reserve_stdout_for_replies, send_reply
from steppe.transport.local import LocalChannel
from steppe.transport.ray.links import LastSegment, import_ray

HEALTH_CHECK_INTERVAL_S = 1.0  # between health checks
TRACEBACK_TIMEOUT_S = 2.0  # how long a hung actor has to return its stack
ATTACH_S = 30.0  # how long the learner has to connect to a new actor
_run_count = 0  # runs of this driver so far


class _SlotHandle:
    """A worker slot's Ray actor and its known state."""

    def __init__(self, ray_actor: Any, now: float) -> None:
        self.ray_actor, self.since_s = ray_actor, now
        self.location_ref = ray_actor.process_location.remote()
        self.location: dict[str, Any] | None = None  # the result of `process_location`
        self.result: Any = None  # object reference of the result of `run`
        self.health: Any = None  # object reference of the newest health check
        self.health_checked_s = now
        self.rss_bytes: int | None = None


class RayDriverHandle:
    """A run on a Ray cluster, controlled by the driver."""

    def __init__(
        self, launch_spec: LaunchSpec, directory: RunDirectory, cluster: RayCluster, *, keep_cluster: bool = False
    ) -> None:
        """`keep_cluster` leaves the cluster, and the Ray actors that ended normally, to the caller."""
        global _run_count
        _run_count += 1
        self._ray, self._cluster, self._keep_cluster, self._run_number = import_ray(), cluster, keep_cluster, _run_count
        self._order, self._directory = launch_spec.stamped(), directory
        self._plan = launch_spec.plan()
        self._slots: dict[str, _SlotHandle] = {}
        self._ended: set[str] = set()
        self._faults: dict[str, Fault] = {}
        self._epochs: Counter[str] = Counter()
        self._requested = dict.fromkeys(ROLE_KINDS, RUN)
        self._oom_kills = oom_kills()
        self._processes = cluster.processes()
        self._polled_s = time.monotonic()
        self._closed = False
        try:
            self._begin()
        except UsageError as error:
            self._faults["ray"] = Fault("ray", "usage", str(error))

    def _begin(self) -> None:
        self._cluster.require_resources(self._plan)
        last = self._resume_points()
        for worker_slot in self._plan.worker_slots():
            self._create_actor(worker_slot)
        learner = self._slots["learner"].ray_actor
        others = {
            worker_slot: handle.ray_actor for worker_slot, handle in self._slots.items() if worker_slot != "learner"
        }
        for worker_slot, handle in self._slots.items():
            self._run_slot(worker_slot, last, others if handle.ray_actor is learner else self._table_peers(worker_slot))

    def _resume_points(self) -> dict[int, LastSegment]:
        """Return each actor's last segment in a resumed run."""
        known = LocalChannel(self._plan.segment, self._plan.config.actors, 0)
        prime_channel(known, self._plan, self._directory)
        found = {actor: known.recall(actor) for actor in range(self._plan.config.actors)}
        return {actor: last for actor, last in found.items() if last is not None}

    def _create_actor(self, worker_slot: str) -> None:
        taken = Counter(
            handle.location["node"]
            for name, handle in self._slots.items()
            if handle.location and name.startswith(WRITERS)
        )
        limited = self._plan.config.ray.actors_per_node is not None and worker_slot.startswith(WRITERS)
        self._slots[worker_slot] = handle = _SlotHandle(
            self._cluster.acquire_actor(self._plan, worker_slot, taken), time.monotonic()
        )
        if limited:  # the next actor's node depends on this one's
            handle.location = self._ray.get(handle.location_ref, timeout=START_S)

    def _table_peers(self, worker_slot: str) -> dict[str, Any]:
        """Return the learner's Ray actor for workers that share a table, which call it."""
        calls = self._plan.uses_table and worker_slot.startswith(WRITERS)
        return {"learner": self._slots["learner"].ray_actor} if calls else {}

    def _run_slot(self, worker_slot: str, last: dict[int, LastSegment], peers: dict[str, Any]) -> None:
        launch_spec = self._order
        assignment = SlotAssignment(
            self._run_number, worker_slot, self._epochs[worker_slot], launch_spec, tuple(import_path()), os.getcwd()
        )
        own = {
            actor: known
            for actor, known in last.items()
            if worker_slot in ("learner", *(f"{kind}-{actor}" for kind in WRITERS))
        }
        handle = self._slots[worker_slot]
        handle.result = handle.ray_actor.run.remote(msgspec.json.encode(assignment), own, peers)

    def advance(self, timeout_s: float) -> None:
        running = [handle.result for worker_slot, handle in self._slots.items() if self._is_running(worker_slot)]
        if running:
            self._ray.wait(running, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)
        self._check_actors()

    def ended(self, kind: str) -> bool:
        return {role.worker_slot for role in self._plan.roles if role.kind == kind} <= self._ended_slots()

    def faults(self) -> list[Fault]:
        self._check_actors()
        return list(self._faults.values())

    def ask(self, kind: str, what: int) -> None:
        self._requested[kind] = what
        for handle in self._slots.values():
            handle.ray_actor.ask.remote(self._run_number, kind, what)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        try:
            for kinds in (
                [kind for kind in ROLE_KINDS if kind != REPLAY],
                [REPLAY],
            ):  # the learner's last checkpoint needs replay
                for kind in kinds:
                    self.ask(kind, STOP)
                stopping = {worker_slot for worker_slot in self._slots if worker_slot.startswith(tuple(kinds))}
                while not stopping <= self._ended_slots() and (left_s := deadline - time.monotonic()) > 0:
                    self.advance(min(left_s, HEALTH_CHECK_INTERVAL_S))
        finally:
            for worker_slot, handle in self._slots.items():
                if self._keep_cluster and worker_slot in self._ended:
                    self._cluster.release_actor(self._plan, worker_slot, handle.ray_actor)
                else:
                    self._ray.kill(handle.ray_actor)
            if not self._keep_cluster:
                self._cluster.close()

    def state(self) -> dict[str, Any]:
        """Return ended worker slots, faults and process locations as plain data."""
        faults = [asdict(fault) for fault in self.faults()]
        ranks = {worker_slot: handle.location for worker_slot, handle in self._slots.items() if handle.location}
        return {"ended": sorted(self._ended_slots()), "faults": faults, "ranks": ranks | self._processes}

    def _ended_slots(self) -> set[str]:
        """Return the worker slots that have ended, normally or with a fault."""
        return self._ended | (set(self._faults) & set(self._slots))

    def _is_running(self, worker_slot: str) -> bool:
        return worker_slot not in self._ended_slots() and self._slots[worker_slot].result is not None

    def _check_actors(self) -> None:
        """Check every Ray actor: kill hung ones, restart killed ones, record permanent faults."""
        if (part := self._cluster.ended_head_process()) is not None:
            message = f"the {part} of the run's own Ray cluster was killed or crashed; its output is in logs/ray.log"
            self._faults.setdefault("ray", Fault("ray", "role_died", message))
            return
        slot_of_result = {
            handle.result: worker_slot for worker_slot, handle in self._slots.items() if self._is_running(worker_slot)
        }
        if not slot_of_result:
            return
        done, _ = self._ray.wait(list(slot_of_result), num_returns=len(slot_of_result), timeout=0)
        for result in done:
            self._receive_result(slot_of_result[result], result)
        if time.monotonic() - self._polled_s > HEALTH_CHECK_INTERVAL_S:
            self._polled_s = time.monotonic()
            self._processes = self._cluster.processes()
            for worker_slot in [worker_slot for worker_slot in self._slots if self._is_running(worker_slot)]:
                self._check_health(worker_slot, self._slots[worker_slot])

    def _receive_result(self, worker_slot: str, result: Any) -> None:
        try:
            faults = msgspec.json.decode(self._ray.get(result), type=list[Fault])
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.RayTaskError) or "creation task" in str(error):
                message = f"{worker_slot} could not be started on Ray; is the same Steppe installed on every node?"
                self._faults[worker_slot] = Fault(worker_slot, "error", message, {"traceback": str(error)})
            else:
                self._restart_or_fail(worker_slot, self._explain(worker_slot, error))
        else:
            self._ended.add(worker_slot)
            for fault in faults:
                self._faults.setdefault(worker_slot, fault)

    def _restart_or_fail(self, worker_slot: str, fault: Fault) -> None:
        """Restart a worker slot on a new Ray actor, or record the fault if it cannot be restarted or the run is ending.
        The state of learner and replay is only in checkpoints, so they are not restarted."""
        self._ray.kill(self._slots[worker_slot].ray_actor)  # it may only have been unreachable
        limit = self._plan.config.flow.max_restarts
        ending = max(self._requested.values()) >= FINISH
        if (
            worker_slot == "learner"
            or worker_slot in self._plan.replay
            or ending
            or self._closed
            or self._epochs[worker_slot] >= limit
        ):
            self._faults[worker_slot] = fault
            return
        self._epochs[worker_slot] += 1
        details = {"message": fault.message, **fault.details, "epoch": self._epochs[worker_slot]}
        event = EventReport(run=self._directory.id, kind="restart", role=worker_slot, details=details)
        self._directory.board.post(EVENTS, event.record())
        try:
            self._restart_slot(worker_slot)
        except (UsageError, self._ray.exceptions.RayError) as error:
            self._faults[worker_slot] = Fault(worker_slot, fault.reason, f"{fault.message}; {error}", fault.details)

    def _restart_slot(self, worker_slot: str) -> None:
        del self._slots[worker_slot]
        self._create_actor(worker_slot)
        ray_actor, learner = self._slots[worker_slot].ray_actor, self._slots["learner"].ray_actor
        last = self._ray.get(learner.attach.remote(self._run_number, worker_slot, ray_actor), timeout=ATTACH_S)
        self._run_slot(
            worker_slot,
            {} if last is None else {int(worker_slot.partition("-")[2]): last},
            self._table_peers(worker_slot),
        )
        for kind, what in self._requested.items():
            if what != RUN:
                ray_actor.ask.remote(self._run_number, kind, what)

    def _check_health(self, worker_slot: str, handle: _SlotHandle) -> None:
        """Check that a Ray actor has started and sends heartbeats; record a fault or kill it if not."""
        now = time.monotonic()
        if handle.location is None:
            if self._is_ready(handle.location_ref):
                handle.location = self._get_or_none(handle.location_ref)
            elif now - handle.since_s > START_S:
                free = self._ray.available_resources().get("CPU", 0.0)
                message = f"Ray found no room for {worker_slot} within {START_S:g} s; {free:g} of its CPUs are free"
                self._faults[worker_slot] = Fault(worker_slot, "no_room", message)
            return
        silence_s = 0.0
        if handle.health is not None:
            if self._is_ready(handle.health):
                silence_s, handle.rss_bytes = self._get_or_none(handle.health) or (0.0, handle.rss_bytes)
                handle.health = None
            else:
                silence_s = now - handle.health_checked_s
        if handle.health is None:
            handle.health, handle.health_checked_s = handle.ray_actor.health.remote(self._run_number), now
        if worker_slot != "learner" and silence_s > self._plan.config.flow.hang_s:
            self._kill_hung(worker_slot, handle)

    def _kill_hung(self, worker_slot: str, handle: _SlotHandle) -> None:
        stack = handle.ray_actor.stack.remote()
        found, _ = self._ray.wait([stack], timeout=TRACEBACK_TIMEOUT_S)
        text = self._get_or_none(stack) if found else ""
        message = f"{worker_slot} took longer than flow.hang_s={self._plan.config.flow.hang_s:g} for one step"
        self._restart_or_fail(worker_slot, Fault(worker_slot, "hung", message, {"traceback": text or ""}))

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def _get_or_none(self, reference: Any) -> Any:
        """Return a result, or None if the Ray actor died meanwhile, which the result of `run` will show."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError:
            return None

    def _explain(self, worker_slot: str, error: Exception) -> Fault:
        handle = self._slots[worker_slot]
        details = {"rss_bytes": handle.rss_bytes, "ray": str(error)}
        if "running low on memory" in str(error) or oom_kills() > self._oom_kills:
            self._oom_kills = oom_kills()
            message = f"{worker_slot} was killed because memory ran out; it had {format_mib(handle.rss_bytes)}: use fewer or smaller environments"
            return Fault(worker_slot, "out_of_memory", message, details)
        location = handle.location or self._get_or_none(handle.location_ref) or {}
        if location and location["node"] not in self._cluster.nodes():
            return Fault(worker_slot, "role_died", f"the node of {worker_slot} ({location['host']}) is gone", details)
        message = f"the process of {worker_slot} was killed or crashed (it had {format_mib(handle.rss_bytes)}); its output is in logs/{worker_slot}.log"
        return Fault(worker_slot, "role_died", message, details)


def main() -> NoReturn:
    """Drive one run for the supervisor at the other end of standard input and output."""
    reply_fd, scratch = reserve_stdout_for_replies(), sys.argv[2]
    try:
        relay_commands(
            LineReader(0), reply_fd, "ray.log", lambda launch_spec, directory: _launch(launch_spec, directory, scratch)
        )
    except EOFError:  # the supervisor is gone: no role may be orphaned
        import_ray().shutdown()
        os._exit(FAULT_EXIT_CODE)
    send_reply(reply_fd, {"exiting": True})
    sys.exit(0)


def _launch(launch_spec: LaunchSpec, directory: RunDirectory, scratch: str) -> RayDriverHandle:
    return RayDriverHandle(launch_spec, directory, RayCluster(launch_spec.plan(), scratch))

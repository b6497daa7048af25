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

    def __init__(self, seat: Any, now: float) -> None:
        self.seat, self.since_s = seat, now
        self.process_location = seat.process_location.remote()
        self.about: dict[str, Any] | None = None  # the result of `process_location`
        self.life: Any = None  # object reference of the result of `live`
        self.pulse: Any = None  # object reference of the newest health check
        self.asked_s = now
        self.size: int | None = None


class RayDriverHandle:
    """A run on a Ray cluster, controlled by the driver."""

    def __init__(self, order: LaunchSpec, directory: RunDirectory, cluster: RayCluster, *, keep: bool = False) -> None:
        """`keep` leaves the cluster, and the Ray actors that ended normally, to the caller."""
        global _run_count
        _run_count += 1
        self._ray, self._cluster, self._keep, self._number = import_ray(), cluster, keep, _run_count
        self._order, self._directory = order.stamped(), directory
        self._plan = order.plan()
        self._slots: dict[str, _SlotHandle] = {}
        self._ended: set[str] = set()
        self._faults: dict[str, Fault] = {}
        self._epochs: Counter[str] = Counter()
        self._asked = dict.fromkeys(ROLE_KINDS, RUN)
        self._oom_kills = oom_kills()
        self._processes = cluster.processes()
        self._looked_s = time.monotonic()
        self._closed = False
        try:
            self._begin()
        except UsageError as error:
            self._faults["ray"] = Fault("ray", "usage", str(error))

    def _begin(self) -> None:
        self._cluster.require_resources(self._plan)
        last = self._resume_points()
        for place in self._plan.places():
            self._sit(place)
        learner = self._slots["learner"].seat
        others = {place: chair.seat for place, chair in self._slots.items() if place != "learner"}
        for place, chair in self._slots.items():
            self._live(place, last, others if chair.seat is learner else self._table_peers(place))

    def _resume_points(self) -> dict[int, LastSegment]:
        """Return each actor's last segment in a resumed run."""
        known = LocalChannel(self._plan.segment, self._plan.config.actors, 0)
        prime_channel(known, self._plan, self._directory)
        found = {actor: known.recall(actor) for actor in range(self._plan.config.actors)}
        return {actor: last for actor, last in found.items() if last is not None}

    def _sit(self, place: str) -> None:
        taken = Counter(
            chair.about["node"] for name, chair in self._slots.items() if chair.about and name.startswith(WRITERS)
        )
        limited = self._plan.config.ray.actors_per_node is not None and place.startswith(WRITERS)
        self._slots[place] = chair = _SlotHandle(self._cluster.seat(self._plan, place, taken), time.monotonic())
        if limited:  # the next actor's node depends on this one's
            chair.about = self._ray.get(chair.process_location, timeout=START_S)

    def _table_peers(self, place: str) -> dict[str, Any]:
        """Return the learner's Ray actor for workers that share a table, which call it."""
        calls = self._plan.uses_table and place.startswith(WRITERS)
        return {"learner": self._slots["learner"].seat} if calls else {}

    def _live(self, place: str, last: dict[int, LastSegment], peers: dict[str, Any]) -> None:
        order = self._order
        ticket = SlotAssignment(self._number, place, self._epochs[place], order, tuple(import_path()), os.getcwd())
        own = {
            actor: known
            for actor, known in last.items()
            if place in ("learner", *(f"{kind}-{actor}" for kind in WRITERS))
        }
        chair = self._slots[place]
        chair.life = chair.seat.live.remote(msgspec.json.encode(ticket), own, peers)

    def advance(self, timeout_s: float) -> None:
        under_way = [chair.life for place, chair in self._slots.items() if self._is_running(place)]
        if under_way:
            self._ray.wait(under_way, num_returns=1, timeout=timeout_s)
        else:
            time.sleep(timeout_s)
        self._tend()

    def ended(self, kind: str) -> bool:
        return {role.place for role in self._plan.roles if role.kind == kind} <= self._over()

    def faults(self) -> list[Fault]:
        self._tend()
        return list(self._faults.values())

    def ask(self, kind: str, what: int) -> None:
        self._asked[kind] = what
        for chair in self._slots.values():
            chair.seat.ask.remote(self._number, kind, what)

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
                mine = {place for place in self._slots if place.startswith(tuple(kinds))}
                while not mine <= self._over() and (left_s := deadline - time.monotonic()) > 0:
                    self.advance(min(left_s, HEALTH_CHECK_INTERVAL_S))
        finally:
            for place, chair in self._slots.items():
                if self._keep and place in self._ended:
                    self._cluster.release_actor(self._plan, place, chair.seat)
                else:
                    self._ray.kill(chair.seat)
            if not self._keep:
                self._cluster.close()

    def state(self) -> dict[str, Any]:
        """Return ended worker slots, faults and process locations as plain data."""
        faults = [asdict(fault) for fault in self.faults()]
        ranks = {place: chair.about for place, chair in self._slots.items() if chair.about}
        return {"ended": sorted(self._over()), "faults": faults, "ranks": ranks | self._processes}

    def _over(self) -> set[str]:
        """Return the worker slots that have ended, normally or with a fault."""
        return self._ended | (set(self._faults) & set(self._slots))

    def _is_running(self, place: str) -> bool:
        return place not in self._over() and self._slots[place].life is not None

    def _tend(self) -> None:
        """Check every Ray actor: kill hung ones, restart killed ones, record permanent faults."""
        if (part := self._cluster.lost()) is not None:
            message = f"the {part} of the run's own Ray cluster was killed or crashed; its output is in logs/ray.log"
            self._faults.setdefault("ray", Fault("ray", "role_died", message))
            return
        lives = {chair.life: place for place, chair in self._slots.items() if self._is_running(place)}
        if not lives:
            return
        done, _ = self._ray.wait(list(lives), num_returns=len(lives), timeout=0)
        for life in done:
            self._hear(lives[life], life)
        if time.monotonic() - self._looked_s > HEALTH_CHECK_INTERVAL_S:
            self._looked_s = time.monotonic()
            self._processes = self._cluster.processes()
            for place in [place for place in self._slots if self._is_running(place)]:
                self._look_at(place, self._slots[place])

    def _hear(self, place: str, life: Any) -> None:
        try:
            told = msgspec.json.decode(self._ray.get(life), type=list[Fault])
        except self._ray.exceptions.RayError as error:
            if isinstance(error, self._ray.exceptions.RayTaskError) or "creation task" in str(error):
                message = f"{place} could not be started on Ray; is the same Steppe installed on every node?"
                self._faults[place] = Fault(place, "error", message, {"traceback": str(error)})
            else:
                self._restart_or_fail(place, self._explain(place, error))
        else:
            self._ended.add(place)
            for fault in told:
                self._faults.setdefault(place, fault)

    def _restart_or_fail(self, place: str, fault: Fault) -> None:
        """Restart a worker slot on a new Ray actor, or record the fault if it cannot be restarted or the run is ending.
        The state of learner and replay is only in checkpoints, so they are not restarted."""
        self._ray.kill(self._slots[place].seat)  # it may only have been unreachable
        limit = self._plan.config.flow.max_restarts
        ending = max(self._asked.values()) >= FINISH
        if place == "learner" or place in self._plan.replay or ending or self._closed or self._epochs[place] >= limit:
            self._faults[place] = fault
            return
        self._epochs[place] += 1
        details = {"message": fault.message, **fault.details, "epoch": self._epochs[place]}
        event = EventReport(run=self._directory.id, kind="restart", role=place, details=details)
        self._directory.board.post(EVENTS, event.record())
        try:
            self._restart_slot(place)
        except (UsageError, self._ray.exceptions.RayError) as error:
            self._faults[place] = Fault(place, fault.reason, f"{fault.message}; {error}", fault.details)

    def _restart_slot(self, place: str) -> None:
        del self._slots[place]
        self._sit(place)
        seat, learner = self._slots[place].seat, self._slots["learner"].seat
        last = self._ray.get(learner.attach.remote(self._number, place, seat), timeout=ATTACH_S)
        self._live(place, {} if last is None else {int(place.partition("-")[2]): last}, self._table_peers(place))
        for kind, what in self._asked.items():
            if what != RUN:
                seat.ask.remote(self._number, kind, what)

    def _look_at(self, place: str, chair: _SlotHandle) -> None:
        """Check that a Ray actor has started and sends heartbeats; record a fault or kill it if not."""
        now = time.monotonic()
        if chair.about is None:
            if self._is_ready(chair.process_location):
                chair.about = self._get_or_none(chair.process_location)
            elif now - chair.since_s > START_S:
                free = self._ray.available_resources().get("CPU", 0.0)
                message = f"Ray found no room for {place} within {START_S:g} s; {free:g} of its CPUs are free"
                self._faults[place] = Fault(place, "no_room", message)
            return
        silence_s = 0.0
        if chair.pulse is not None:
            if self._is_ready(chair.pulse):
                silence_s, chair.size = self._get_or_none(chair.pulse) or (0.0, chair.size)
                chair.pulse = None
            else:
                silence_s = now - chair.asked_s
        if chair.pulse is None:
            chair.pulse, chair.asked_s = chair.seat.pulse.remote(self._number), now
        if place != "learner" and silence_s > self._plan.config.flow.hang_s:
            self._kill_hung(place, chair)

    def _kill_hung(self, place: str, chair: _SlotHandle) -> None:
        where = chair.seat.where.remote()
        found, _ = self._ray.wait([where], timeout=TRACEBACK_TIMEOUT_S)
        text = self._get_or_none(where) if found else ""
        message = f"{place} took longer than flow.hang_s={self._plan.config.flow.hang_s:g} for one step"
        self._restart_or_fail(place, Fault(place, "hung", message, {"traceback": text or ""}))

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    def _get_or_none(self, reference: Any) -> Any:
        """Return a result, or None if the Ray actor died meanwhile, which the result of `live` will show."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError:
            return None

    def _explain(self, place: str, error: Exception) -> Fault:
        chair = self._slots[place]
        details = {"rss_bytes": chair.size, "ray": str(error)}
        if "running low on memory" in str(error) or oom_kills() > self._oom_kills:
            self._oom_kills = oom_kills()
            message = f"{place} was killed because memory ran out; it had {format_mib(chair.size)}: use fewer or smaller environments"
            return Fault(place, "out_of_memory", message, details)
        about = chair.about or self._get_or_none(chair.process_location) or {}
        if about and about["node"] not in self._cluster.nodes():
            return Fault(place, "role_died", f"the node of {place} ({about['host']}) is gone", details)
        message = f"the process of {place} was killed or crashed (it had {format_mib(chair.size)}); its output is in logs/{place}.log"
        return Fault(place, "role_died", message, details)


def main() -> NoReturn:
    """Drive one run for the supervisor at the other end of standard input and output."""
    answers, scratch = reserve_stdout_for_replies(), sys.argv[2]
    try:
        relay_commands(LineReader(0), answers, "ray.log", lambda order, directory: _launch(order, directory, scratch))
    except EOFError:  # the supervisor is gone: no role may be orphaned
        import_ray().shutdown()
        os._exit(FAULT_EXIT_CODE)
    send_reply(answers, {"farewell": True})
    sys.exit(0)


def _launch(order: LaunchSpec, directory: RunDirectory, scratch: str) -> RayDriverHandle:
    return RayDriverHandle(order, directory, RayCluster(order.plan(), scratch))

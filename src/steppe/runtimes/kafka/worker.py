"""One worker slot over Kafka: its links and roles.

Its process was started by the supervisor (launch.py), or is unsupervised, in a container or on another machine
(standalone.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from steppe.core.contracts.errors import Unreachable
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS, Board, Channel, Role
from steppe.records.profiling.sampler import sample_roles
from steppe.records.run_directory import RunDirectory
from steppe.records.store import HEARTBEAT_S
from steppe.roles.actor import Actor
from steppe.roles.context import FINISH, POLICY, STOP
from steppe.roles.learner import Learner
from steppe.runtimes.handle import RoleScheduler, configure_torch
from steppe.runtimes.kafka.manifest import CommandReceiver, RunManifest
from steppe.runtimes.kafka.membership import RoundMembership
from steppe.runtimes.launch_spec import build_roles
from steppe.runtimes.plan import Plan
from steppe.runtimes.processes.worker import WorkerSpec
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.channel import KafkaReader, KafkaWriter
from steppe.transport.kafka.client import PartitionReader, count_partitions, get_watermarks, open_consumer
from steppe.transport.kafka.dead_letters import DeadLetterQueue
from steppe.transport.kafka.weights import KafkaWeights, WeightPublisher
from steppe.transport.local import LocalChannel
from steppe.transport.shm import ShmControl

IDLE_S = 0.02  # longest idle wait: messages wake a worker slot, but the supervisor's requests do not
RETRY_S = 0.5  # between two attempts to reach brokers
FLUSH_TIMEOUT_S = 10.0  # how long delivery of the last messages may take


@dataclass(frozen=True)
class SplitBoard:
    """A Board that posts to one Board (Kafka) and reads from another (the supervisor's copy)."""

    posts_to: Board
    reads_from: Board

    def post(self, topic: str, record: dict[str, Any]) -> int:
        return self.posts_to.post(topic, record)

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        return self.reads_from.read(topic, after, limit)


@dataclass(frozen=True)
class OfflineTolerantBoard:
    """A Board that returns no records while no broker responds."""

    board: KafkaBoard

    def post(self, topic: str, record: dict[str, Any]) -> int:
        return self.board.post(topic, record)

    def read(self, topic: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, dict[str, Any]]]:
        try:
            return self.board.read(topic, after, limit)
        except Unreachable:
            return []


class KafkaLinks:
    """The links of a worker slot: board, channel, weights, dead-letter queue."""

    def __init__(self, manifest: RunManifest, plan: Plan, worker_slot: str, directory: RunDirectory) -> None:
        """Open the links. Raises Unreachable, and leaves nothing open, if no broker responds."""
        self.connection = connection = manifest.connection(plan.config.kafka)
        self.dead_letters = DeadLetterQueue(connection, worker_slot, self._post_warning)
        self.board = KafkaBoard(connection, refuse=self.dead_letters.refuse, num_actors=plan.num_writers)
        self._run, self._worker_slot = directory.id, worker_slot
        self.publisher: WeightPublisher | None = None
        self.channel: Channel = LocalChannel(plan.segment, 0, 0)
        self.partition_reader = PartitionReader(
            connection, group=f"steppe-{manifest.run}" if worker_slot == "learner" else None
        )
        try:
            self._connect(manifest, plan, worker_slot, directory)
        except BaseException:
            self.close()
            raise

    def _connect(self, manifest: RunManifest, plan: Plan, worker_slot: str, directory: RunDirectory) -> None:
        connection, (kind, _, index) = self.connection, worker_slot.partition("-")
        claims = (plan.config.kafka.claims or Path(manifest.launch_spec.directory) / "claims") / manifest.run
        if kind == "learner":
            reader = self._open_reader(manifest, plan, directory)
            self.publisher = WeightPublisher(connection, reader, claims)
            self.weights = KafkaWeights(connection, None, claims, self.publisher)
        else:
            self.weights = KafkaWeights(connection, self.partition_reader, claims, dead_letters=self.dead_letters)
        if kind == "actor":
            slots, partitions = plan.slots_per_actor, count_partitions(connection)
            self.channel = KafkaWriter(
                connection, self.partition_reader, plan.segment, int(index), slots, partitions, self.dead_letters
            )

    def _open_reader(self, manifest: RunManifest, plan: Plan, directory: RunDirectory) -> KafkaReader | None:
        """Open the learner's channel; return its KafkaReader, or None if actor and learner share a slot."""
        actors, slots = plan.num_writers, plan.slots_per_actor
        if any(role.kind == "actor" for role in plan.worker_slots()["learner"]):
            self.channel = LocalChannel(plan.segment, actors, slots)
            if plan.resume is not None:
                from steppe.runtimes.resume import prime_channel

                prime_channel(self.channel, plan, directory)
            return None
        marks, epochs = manifest.read_positions(plan, directory, self.connection)
        reader = KafkaReader(
            self.connection, self.partition_reader, plan.segment, actors, slots, marks, epochs, self.dead_letters
        )
        self.channel = reader
        return reader

    def follow(self, commands: CommandReceiver) -> None:
        """Subscribe to commands, including earlier ones."""
        with open_consumer(self.connection) as consumer:
            low, high = get_watermarks(consumer, self.connection.topic(COMMANDS))
        commands.first_live_offset = high
        self.partition_reader.follow(self.connection.topic(COMMANDS), 0, low, commands.receive)

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for messages. The learner's messages stay queued until it polls them."""
        self.dead_letters.progress()
        if self.publisher is not None:
            self.publisher.require()
            if not isinstance(self.channel, KafkaReader):
                self.partition_reader.progress()
            self.partition_reader.handle_next(timeout_s)
        else:
            self.partition_reader.progress(timeout_s)

    def close(self) -> None:
        """Flush all messages, if a broker responds, and close the links."""
        try:
            if isinstance(self.channel, KafkaReader | KafkaWriter):
                self.channel.close(FLUSH_TIMEOUT_S)
            if self.publisher is not None:
                self.publisher.close(FLUSH_TIMEOUT_S)
        finally:
            self.dead_letters.close()
            self.board.close(FLUSH_TIMEOUT_S)
            self.partition_reader.close()

    def _post_warning(self, details: dict[str, Any]) -> None:
        """Post a warning about a refused message to the event log."""
        event = EventReport(run=self._run, kind="warning", role=self._worker_slot, details=details)
        self.board.post(EVENTS, event.record())


@contextlib.contextmanager
def open_kafka_links(
    manifest: RunManifest, plan: Plan, worker_slot: str, directory: RunDirectory, heartbeat: Callable[[], object]
) -> Iterator[KafkaLinks]:
    """Open links and close them at the end. Raises Unreachable if no broker responds within kafka.wait_s."""
    until = time.monotonic() + plan.config.kafka.wait_s
    while True:
        heartbeat()
        try:
            links = KafkaLinks(manifest, plan, worker_slot, directory)
            break
        except Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)
    try:
        yield links
    finally:
        links.close()


@dataclass(frozen=True)
class KafkaWorkerSlot:
    """One worker slot of a run, and the callbacks that control it."""

    manifest: RunManifest
    plan: Plan
    worker_slot: str
    epoch: int
    directory: RunDirectory
    heartbeat: Callable[[], object]
    requested: Callable[[str], int] | None = None  # the supervisor's request; None: commands decide
    stopped: Callable[[], bool] = lambda: False  # whether this process was asked to end
    wrap_board: Callable[[Board], Board] = lambda board: board  # wraps the roles' Board

    def run(self, scheduler: RoleScheduler) -> CommandReceiver:
        """Build the roles and step them in turn until they are done."""
        with open_kafka_links(self.manifest, self.plan, self.worker_slot, self.directory, self.heartbeat) as links:
            reads_from = OfflineTolerantBoard(links.board) if self.requested is None else self.directory.store
            board: Board = SplitBoard(links.board, reads_from)
            # Only the learner refuses, so that each message is refused once.
            refuse = links.dead_letters.refuse if self.worker_slot == "learner" else _ignore_refused
            commands = CommandReceiver(
                self.manifest, self.plan.config.agent, self._make_result_poster(links.board), refuse
            )
            requested = _CatchUpBeforeFinish(self.requested or self._requested_by(commands), links, self.heartbeat)
            launch_spec, channel_and_weights = self.manifest.launch_spec_now(), (links.channel, links.weights)
            roles = build_roles(
                launch_spec,
                self.plan,
                self.worker_slot,
                self.directory,
                channel_and_weights,
                requested,
                self.heartbeat,
                epoch=self.epoch,
                board=self.wrap_board(board),
                commands=commands.settings_after if self.requested is None else self._copied,
            )
            self._prepare(roles, links, commands)
            membership = RoundMembership(
                roles, links.channel, links.board, self.plan.config.kafka.replan_s, time.monotonic
            )
            profile_dir = self.directory.profile if self.plan.config.flow.profile else None
            with sample_roles(roles, profile_dir, waiting=self.worker_slot) as scheduler.roles:
                host_role = next(
                    role for role in scheduler.roles if role.name == self.worker_slot
                )  # other roles end with it
                while not host_role.done and not scheduler.faults:
                    self.heartbeat()
                    if not scheduler.step():
                        _send_due_reports(roles)
                        membership.update()
                        links.wait(IDLE_S)
                scheduler.close()
            return commands

    def _requested_by(self, commands: CommandReceiver) -> Callable[[str], int]:
        return lambda kind: STOP if self.stopped() else commands.requested[kind]

    def _prepare(self, roles: list[Role], links: KafkaLinks, commands: CommandReceiver) -> None:
        for role in roles:
            if isinstance(role, Learner) and not self.plan.lockstep:
                # Actors that survived an earlier learner may have its versions, so start after the last one published.
                role.version = max(role.version, links.weights.last_published_version(POLICY) + 1)
        if self.requested is None:
            links.follow(commands)

    def _copied(self, after: int) -> Sequence[tuple[int, dict[str, Any]]]:
        """Return commands that the supervisor has copied to the store."""
        return self.directory.store.read(COMMANDS, after)

    def _make_result_poster(self, board: Board) -> Callable[[dict[str, Any]], object]:
        def post_result(details: dict[str, Any]) -> None:
            event = EventReport(run=self.directory.id, kind="command", role=self.worker_slot, details=details)
            board.post(EVENTS, event.record())

        return post_result


def _ignore_refused(message: object, reason: str) -> None:
    """Do nothing: the learner puts the message into the dead-letter queue."""


def _send_due_reports(roles: list[Role]) -> None:
    for role in roles:
        if isinstance(role, Actor | Learner):
            role.report_if_silent(HEARTBEAT_S)


class _CatchUpBeforeFinish:
    """Returns the request for a role; before the manager receives FINISH, it catches up with all published messages."""

    def __init__(self, requested: Callable[[str], int], links: KafkaLinks, heartbeat: Callable[[], object]) -> None:
        self._requested, self._links, self._heartbeat = requested, links, heartbeat
        self._caught_up = False

    def __call__(self, kind: str) -> int:
        what = self._requested(kind)
        if kind == "manager" and what == FINISH and not self._caught_up:
            self._caught_up = True
            until = time.monotonic() + self._links.connection.config.wait_s
            while not self._links.partition_reader.catch_up(FLUSH_TIMEOUT_S) and time.monotonic() < until:
                self._heartbeat()
        return what


def run_kafka_worker(worker_spec: WorkerSpec, run: RunDirectory, scheduler: RoleScheduler) -> None:
    """Run a worker slot in a process that the supervisor started."""
    manifest = msgspec.json.decode(worker_spec.plan, type=RunManifest)
    plan = replace(manifest.launch_spec.plan(), resume=worker_spec.resume)
    configure_torch(plan.config)
    control = ShmControl(Path(worker_spec.shared_dir) / "control")
    requested = lambda kind: STOP if control.dismissed(worker_spec.slot_index) else control.get(kind)  # noqa: E731
    KafkaWorkerSlot(
        manifest,
        plan,
        worker_spec.worker_slot,
        worker_spec.epoch,
        run,
        lambda: control.heartbeat(worker_spec.slot_index),
        requested,
    ).run(scheduler)

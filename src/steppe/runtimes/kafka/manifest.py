"""The manifest of a run over Kafka (its plan, and where its messages begin in the topics), and the run's commands.

Both use the topic commands.control: the process that creates a run posts its manifest there, and commands follow.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from steppe.core.config import references
from steppe.core.config.agent import AgentConfig
from steppe.core.config.run import KafkaConfig
from steppe.core.config.tunables import validate_changes
from steppe.core.contracts.errors import ConfigError, DamagedFile
from steppe.core.contracts.transport import COMMANDS, SCALE, SET, START
from steppe.core.io.record_validation import validate_record
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH, PAUSE, RUN, STOP
from steppe.runtimes.launch_spec import ROLE_KINDS, LaunchSpec
from steppe.runtimes.plan import Plan
from steppe.transport.kafka.board import KafkaBoard, OnRefused
from steppe.transport.kafka.channel import Marks, marks_at_end
from steppe.transport.kafka.client import (
    EXPERIENCES,
    MODEL_UPDATES,
    PROGRESS,
    KafkaConnection,
    Message,
    count_partitions,
    decode_headers,
    find_newest,
    get_watermarks,
    open_consumer,
    require_allowed,
    topic_id,
)

MANIFEST = "charter"  # the command that describes a run, as messages call it
MEMBERSHIP = "plan"  # the command with the members of mode sync's rounds from a given round on
CONTROL_COMMANDS = ("stop", "finish", "pause", "resume")
PUBLISHED_ORIGIN = "published"  # origin of commands that the service executes itself: all other readers skip them
COMMAND_TTL_S = 300.0  # default lifetime of a command
MAX_REMEMBERED_IDS = 4096  # ids of executed commands
_MAX_REASON_CHARS = 500  # of a command's result


class RunManifest(msgspec.Struct, frozen=True, rename={"launch_spec": "order", "start_offsets": "since"}):
    """A run's description for every process that joins it."""

    run: str  # its name and key, as in every message
    launch_spec: LaunchSpec
    topic: str  # id of the topic with its segments
    marks: list[tuple[int, int, list[int]]]  # where the segments begin, by partition
    start_offsets: list[tuple[str, int]]  # start offsets in the single-partition topics
    time_s: float  # wall clock at order.clock_s
    generation: int = 1  # number of starts and resumes: commands for an earlier generation are stale

    @classmethod
    def of(cls, plan: Plan, directory: RunDirectory) -> RunManifest:
        """Return the manifest of a new run, whose messages begin at the present ends of the topics."""
        connection = KafkaConnection(plan.config.kafka, wire_name(directory))
        marks = marks_at_end(connection, count_partitions(connection))
        launch_spec = LaunchSpec.of(plan, directory, references.main_script()).stamped()
        rows = [(number, low, done) for number, (low, done) in marks.items()]
        with open_consumer(connection) as consumer:
            since = [(name, get_watermarks(consumer, connection.topic(name))[1]) for name in (PROGRESS, MODEL_UPDATES)]
        return cls(connection.run, launch_spec, topic_id(connection), rows, since, time.time())

    def connection(self, config: KafkaConfig) -> KafkaConnection:
        """Return a connection for a process that joins the run, with the run's start offsets."""
        topic = config.prefix + EXPERIENCES
        since = [(topic, number, low) for number, low, _ in self.marks]
        since += [(config.prefix + name, 0, offset) for name, offset in self.start_offsets]
        return KafkaConnection(config, self.run, tuple(since))

    def updated(self, plan: Plan, directory: RunDirectory) -> RunManifest:
        """Return the next generation: steps, addresses and the checkpoint to resume from may have changed."""
        launch_spec = LaunchSpec.of(plan, directory, references.main_script()).stamped()
        return msgspec.structs.replace(
            self, launch_spec=launch_spec, time_s=time.time(), generation=self.generation + 1
        )

    def launch_spec_now(self) -> LaunchSpec:
        """Return the launch spec with the run's clock advanced to now, by the wall clock; valid on any host."""
        passed_s = max(0.0, time.time() - self.time_s)
        return msgspec.structs.replace(self.launch_spec, clock_s=self.launch_spec.clock_s + passed_s)

    def read_positions(
        self, plan: Plan, directory: RunDirectory, connection: KafkaConnection
    ) -> tuple[Marks, dict[int, int]]:
        """Return where the learner reads from, and the actors' incarnations by then: at the plan's checkpoint, or at
        the run's start. If the topic was recreated or replaced since, all of the run's messages in it are read."""
        topic = topic_id(connection)
        known: dict[str, Any] = {"topic": self.topic, "marks": self.marks}
        if plan.resume is not None:
            saved = Checkpoints(directory.checkpoints, run=directory.key).load(plan.resume).state.get("channel", known)
            known = saved if saved["topic"] == topic else known
        if known["topic"] != topic:
            return {number: (0, []) for number in range(count_partitions(connection))}, {}
        epochs = {int(actor): int(epoch) for actor, epoch in known.get("lives", ())}
        return {int(number): (int(low), list(done)) for number, low, done in known["marks"]}, epochs

    def post(self, board: KafkaBoard) -> None:
        """Post the manifest to the topic commands.control."""
        board.post(
            COMMANDS, make_command(MANIFEST, "steppe", run=self.launch_spec.run, charter=msgspec.to_builtins(self))
        )


def wire_name(directory: RunDirectory) -> str:
    """Return the run's name in messages, with a part of its key: an earlier run of the same name had another key."""
    return f"{directory.id}~{directory.key[:8]}"


def find_manifest(config: KafkaConfig, run: str, since: int = 0) -> RunManifest | None:
    """Return the newest manifest of a run at or after offset `since`, or None.

    `run` is the run's name, or its name and key. Raises Unreachable if no broker responds.
    """
    connection = KafkaConnection(config, run)
    if connection.topic(COMMANDS) not in connection.fetch_metadata().topics:
        with open_consumer(connection) as consumer:
            require_allowed(consumer, connection.topic(COMMANDS))
        return None

    def matches(message: Message) -> bool:
        name = decode_headers(message).get("run", b"").decode(errors="replace")
        return run in (name, name.partition("~")[0]) and _manifest_in(message) is not None

    found, _ = find_newest(connection, connection.topic(COMMANDS), 0, matches, since=since)
    return None if found is None else _manifest_in(found)


def newest_control_command(connection: KafkaConnection, since: int = 0) -> str | None:
    """Return the newest of CONTROL_COMMANDS and MANIFEST for a run at or after offset `since`, or None."""
    run = connection.run.encode()

    def control_command(message: Message) -> str | None:
        if decode_headers(message).get("run") != run or is_published(message):
            return None
        try:
            command = str(validate_record(COMMANDS, message.value())["command"])
        except DamagedFile:
            return None
        return command if command in (MANIFEST, *CONTROL_COMMANDS) else None

    found, _ = find_newest(
        connection, connection.topic(COMMANDS), 0, lambda message: control_command(message) is not None, since=since
    )
    return None if found is None else control_command(found)


def is_published(message: Message) -> bool:
    """Whether a command is on Kafka only for information: the service that published it executes it."""
    return decode_headers(message).get("origin") == PUBLISHED_ORIGIN.encode()


def _manifest_in(message: Message) -> RunManifest | None:
    """Return the valid manifest in a message, or None."""
    if b'"command":"charter"' not in (message.value() or b"")[:200]:
        return None
    try:
        return parse_manifest(
            validate_record(COMMANDS, message.value()), decode_headers(message).get("run", b"").decode()
        )
    except (DamagedFile, UnicodeDecodeError):
        return None


def parse_manifest(record: Mapping[str, Any], run: str) -> RunManifest:
    """Return the manifest in a command. Raises DamagedFile if it is invalid or belongs to another run."""
    try:
        manifest = msgspec.convert(record.get("charter"), RunManifest)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise DamagedFile(f"its manifest is not valid: {error}"[:300]) from None
    if manifest.run != run:
        raise DamagedFile("its manifest is that of another run")
    return manifest


def make_command(name: str, issuer: str, **more: Any) -> dict[str, Any]:
    """Return a command as a record for a Board."""
    now = time.time()
    fields = {
        "command": name,
        "id": uuid.uuid4().hex,
        "issuer": issuer,
        "time_s": now,
        "expires_s": now + COMMAND_TTL_S,
    }
    return {**fields, **more}


def stale_reason(record: Mapping[str, Any], run: str, generation: int, now_s: float) -> str | None:
    """Return why a command does not apply to the run's present generation, or None if it does."""
    expires_s = record.get("expires_s")
    if isinstance(expires_s, int | float) and now_s > expires_s:
        return "it has expired"
    if record.get("run", run) != run:
        return f"it is for the run {record['run']!r}, not for this one"
    if record.get("generation", generation) != generation:
        return f"it is for generation {record['generation']!r} of this run, which is at {generation}"
    return None


class CommandValidator:
    """Validates commands: each is executed once, before it expires, for this generation, with valid values."""

    def __init__(self, manifest: RunManifest, agent: AgentConfig, commands: tuple[str, ...] = CONTROL_COMMANDS) -> None:
        self._agent, self._commands = agent, commands
        self._run, self.generation = manifest.launch_spec.run, manifest.generation
        self._executed_ids: OrderedDict[str, None] = OrderedDict()

    def refusal(self, record: Mapping[str, Any], now_s: float) -> str | None:
        """Return why a command must not be executed, or None if it may be. Its id is remembered either way."""
        command_id = str(record.get("id"))
        if command_id in self._executed_ids:
            return "it was executed before"
        self._executed_ids[command_id] = None
        while len(self._executed_ids) > MAX_REMEMBERED_IDS:
            self._executed_ids.popitem(last=False)
        reason = stale_reason(record, self._run, self.generation, now_s)
        if reason is not None:
            return reason
        if record.get("command") == START:
            return "the run is under way already"
        if record.get("command") == SET:
            return self._check_values(record.get("values"))
        if record.get("command") == SCALE and SCALE not in self._commands:
            return "this run has no supervisor: start and stop actors where they run"
        return None if record.get("command") in self._commands else "this command is unknown"

    def _check_values(self, values: object) -> str | None:
        if not isinstance(values, dict) or not values:
            return "it sets nothing: give values"
        for name in values:
            if name not in self._agent.live:
                return f"{name} cannot change while a run is under way; these can: {', '.join(self._agent.live)}"
        try:
            validate_changes(self._agent, values)
        except ConfigError as error:
            return str(error)
        return None


def command_result(record: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    """Return a command's outcome for the event log: executed, or why not."""
    fields = {name: record.get(name) for name in ("id", "command", "issuer")}
    return {**fields, "obeyed": reason is None, "message": reason and reason[:_MAX_REASON_CHARS]}


def with_live_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a command for roles: all its values are marked live, so they take effect at once."""
    more = {"live": sorted(record["values"])} if record.get("command") == SET else {}
    return {**record, **more}


class CommandReceiver:
    """Receives commands for the roles of an unsupervised process.

    `on_result` is called with each command's result, and `on_refused` with invalid records.
    """

    def __init__(
        self,
        manifest: RunManifest,
        agent: AgentConfig,
        on_result: Callable[[dict[str, Any]], object],
        on_refused: OnRefused = lambda message, reason: None,
    ) -> None:
        self._run, self._on_result, self._validator = manifest.run, on_result, CommandValidator(manifest, agent)
        self._on_refused = on_refused
        self.requested = dict.fromkeys(ROLE_KINDS, RUN)
        self.first_live_offset = 0  # offset of the first command after this process's start
        self._settings: list[tuple[int, dict[str, Any]]] = []

    def settings_after(self, number: int) -> list[tuple[int, dict[str, Any]]]:
        """Return hyperparameter commands above `number`, for the learner, which reports their results itself."""
        return [one for one in self._settings if one[0] > number]

    def receive(self, message: Message) -> None:
        """Execute a valid command for this run. Results of commands older than this process are not reported again."""
        if decode_headers(message).get("run") != self._run.encode() or is_published(message):
            return
        old = message.offset() < self.first_live_offset
        try:
            record = validate_record(COMMANDS, message.value())
            if record["command"] == MANIFEST:
                self._validator.generation = parse_manifest(record, self._run).generation
                self.requested |= dict.fromkeys(ROLE_KINDS, RUN)
        except DamagedFile as error:
            if not old:
                self._on_refused(message, str(error))
            return
        if record["command"] in (MANIFEST, MEMBERSHIP):
            return
        reason = self._validator.refusal(record, message.timestamp()[1] / 1000 if old else time.time())
        if reason is None:
            self._execute(record, message.offset() + 1)
        if not old and (reason is not None or record["command"] != SET):
            self._on_result(command_result(record, reason))

    def _execute(self, record: dict[str, Any], number: int) -> None:
        control_command = record["command"]
        if control_command == SET:
            self._settings.append((number, with_live_names(record)))
        elif control_command == "finish":
            self.requested |= {"actor": STOP, "worker": STOP, "learner": STOP, "manager": FINISH}
        elif control_command == "pause":
            self.requested |= dict.fromkeys(("actor", "learner"), PAUSE)
        else:
            self.requested |= dict.fromkeys(ROLE_KINDS, STOP if control_command == "stop" else RUN)

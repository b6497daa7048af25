"""What everybody who joins a run over Kafka has to know: its plan, where its segments begin, and what it is told to do.

Both go over the topic commands.control: whoever creates a run puts its charter there, and commands follow.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from steppe.core.algorithms import AgentConfig
from steppe.core.config import references
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

MANIFEST = "charter"  # the command that says what a run is
MEMBERSHIP = "plan"  # the one that says who is in the rounds of mode sync from one of them on
CONTROL_COMMANDS = ("stop", "finish", "pause", "resume")
PUBLISHED_ORIGIN = "published"  # the origin of commands that a service carries out itself: all others pass them over
COMMAND_TTL_S = 300.0  # of a command that does not say how long it is good for
MAX_REMEMBERED_IDS = 4096  # ids of commands that were carried out
_MAX_REASON_CHARS = 500  # characters of an answer


class RunManifest(msgspec.Struct, frozen=True):
    """A run, as everybody who joins it is told of it."""

    run: str  # its name and key, as on every message
    order: LaunchSpec
    topic: str  # the id of the topic that its segments are in
    marks: list[tuple[int, int, list[int]]]  # by partition, where they begin
    since: list[tuple[str, int]]  # where the run begins in the topics of one partition
    time_s: float  # the wall clock when order.clock_s was the run's
    generation: int = 1  # how often the run was begun or gone on with: commands for an earlier one are stale

    @classmethod
    def of(cls, plan: Plan, directory: RunDirectory) -> RunManifest:
        """For a new run, which begins now."""
        connection = KafkaConnection(plan.config.kafka, wire_name(directory))
        marks = marks_at_end(connection, count_partitions(connection))
        order = LaunchSpec.of(plan, directory, references.main_script()).stamped()
        rows = [(number, low, done) for number, (low, done) in marks.items()]
        with open_consumer(connection) as consumer:
            since = [(name, get_watermarks(consumer, connection.topic(name))[1]) for name in (PROGRESS, MODEL_UPDATES)]
        return cls(connection.run, order, topic_id(connection), rows, since, time.time())

    def connection(self, config: KafkaConfig) -> KafkaConnection:
        """For whoever joins the run."""
        topic = config.prefix + EXPERIENCES
        since = [(topic, number, low) for number, low, _ in self.marks]
        since += [(config.prefix + name, 0, offset) for name, offset in self.since]
        return KafkaConnection(config, self.run, tuple(since))

    def updated(self, plan: Plan, directory: RunDirectory) -> RunManifest:
        """The same run with what may have changed since: steps, addresses, the checkpoint to go on from."""
        order = LaunchSpec.of(plan, directory, references.main_script()).stamped()
        return msgspec.structs.replace(self, order=order, time_s=time.time(), generation=self.generation + 1)

    def launch_spec_now(self) -> LaunchSpec:
        """The order with the run's clock as it is now, on whichever host."""
        passed_s = max(0.0, time.time() - self.time_s)
        return msgspec.structs.replace(self.order, clock_s=self.order.clock_s + passed_s)

    def read_positions(
        self, plan: Plan, directory: RunDirectory, connection: KafkaConnection
    ) -> tuple[Marks, dict[int, int]]:
        """Where the learner reads on, and whose lives had begun by then: where the plan's checkpoint was, or where the run
        begins. In a topic that was made anew since, or is another one, all that there is of the run."""
        topic = topic_id(connection)
        known: dict[str, Any] = {"topic": self.topic, "marks": self.marks}
        if plan.resume is not None:
            saved = Checkpoints(directory.checkpoints, run=directory.key).at(plan.resume).state.get("channel", known)
            known = saved if saved["topic"] == topic else known
        if known["topic"] != topic:
            return {number: (0, []) for number in range(count_partitions(connection))}, {}
        lives = {int(actor): int(life) for actor, life in known.get("lives", ())}
        return {int(number): (int(low), list(done)) for number, low, done in known["marks"]}, lives

    def post(self, board: KafkaBoard) -> None:
        """Let everybody know."""
        board.post(COMMANDS, make_command(MANIFEST, "steppe", run=self.order.run, charter=msgspec.to_builtins(self)))


def wire_name(directory: RunDirectory) -> str:
    """What messages call a run: one of the same name that was there before had another key."""
    return f"{directory.id}~{directory.key[:8]}"


def find_manifest(config: KafkaConfig, run: str, since: int = 0) -> RunManifest | None:
    """The newest charter of a run from that offset on, by its name, or by its name and key; Unreachable when no broker
    answers."""
    connection = KafkaConnection(config, run)
    if connection.topic(COMMANDS) not in connection.fetch_metadata().topics:
        with open_consumer(connection) as consumer:
            require_allowed(consumer, connection.topic(COMMANDS))
        return None

    def wanted(message: Message) -> bool:
        told = decode_headers(message).get("run", b"").decode(errors="replace")
        return run in (told, told.partition("~")[0]) and _manifest_in(message) is not None

    found, _ = find_newest(connection, connection.topic(COMMANDS), 0, wanted, since=since)
    return None if found is None else _manifest_in(found)


def newest_control_command(connection: KafkaConnection, since: int = 0) -> str | None:
    """The newest of WORDS and CHARTER that a run was told from that offset on."""
    run = connection.run.encode()

    def word(message: Message) -> str | None:
        if decode_headers(message).get("run") != run or is_published(message):
            return None
        try:
            told = str(validate_record(COMMANDS, message.value())["command"])
        except DamagedFile:
            return None
        return told if told in (MANIFEST, *CONTROL_COMMANDS) else None

    found, _ = find_newest(
        connection, connection.topic(COMMANDS), 0, lambda message: word(message) is not None, since=since
    )
    return None if found is None else word(found)


def is_published(message: Message) -> bool:
    """Whether a command is on Kafka only to be seen: the service that published it carries it out."""
    return decode_headers(message).get("origin") == PUBLISHED_ORIGIN.encode()


def _manifest_in(message: Message) -> RunManifest | None:
    """The charter of the run that a message is for; None where it has none that is valid."""
    if b'"command":"charter"' not in (message.value() or b"")[:200]:
        return None
    try:
        return parse_manifest(
            validate_record(COMMANDS, message.value()), decode_headers(message).get("run", b"").decode()
        )
    except (DamagedFile, UnicodeDecodeError):
        return None


def parse_manifest(record: Mapping[str, Any], run: str) -> RunManifest:
    """The charter in a command; DamagedFile where it is none of this run."""
    try:
        charter = msgspec.convert(record.get("charter"), RunManifest)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        raise DamagedFile(f"its charter is not valid: {error}"[:300]) from None
    if charter.run != run:
        raise DamagedFile("its charter is that of another run")
    return charter


def make_command(word: str, issuer: str, **more: Any) -> dict[str, Any]:
    """A command as it goes over a Board."""
    now = time.time()
    about = {"command": word, "id": uuid.uuid4().hex, "issuer": issuer, "time_s": now, "expires_s": now + COMMAND_TTL_S}
    return {**about, **more}


def stale_reason(record: Mapping[str, Any], run: str, generation: int, now_s: float) -> str | None:
    """Why a command is not for a run as it is now; None when it is."""
    expires_s = record.get("expires_s")
    if isinstance(expires_s, int | float) and now_s > expires_s:
        return "it has expired"
    if record.get("run", run) != run:
        return f"it is for the run {record['run']!r}, not for this one"
    if record.get("generation", generation) != generation:
        return f"it is for generation {record['generation']!r} of this run, which is at {generation}"
    return None


class CommandValidator:
    """Which commands are still good: each once, in time, for this run as it is now, and with values that can be taken over."""

    def __init__(self, charter: RunManifest, agent: AgentConfig, words: tuple[str, ...] = CONTROL_COMMANDS) -> None:
        self._agent, self._words = agent, words
        self._run, self.generation = charter.order.run, charter.generation
        self._known: OrderedDict[str, None] = OrderedDict()

    def refusal(self, record: Mapping[str, Any], now_s: float) -> str | None:
        """Why a command is not to be carried out; None when it is, and from then on it is known."""
        number = str(record.get("id"))
        if number in self._known:
            return "it was carried out before"
        self._known[number] = None
        while len(self._known) > MAX_REMEMBERED_IDS:
            self._known.popitem(last=False)
        reason = stale_reason(record, self._run, self.generation, now_s)
        if reason is not None:
            return reason
        if record.get("command") == START:
            return "the run is under way already"
        if record.get("command") == SET:
            return self._check_values(record.get("values"))
        if record.get("command") == SCALE and SCALE not in self._words:
            return "nobody supervises this run: start and stop actors where they run"
        return None if record.get("command") in self._words else "nobody knows this command"

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
    """What the event log says of a command: carried out, or why not."""
    about = {name: record.get(name) for name in ("id", "command", "issuer")}
    return {**about, "obeyed": reason is None, "message": reason and reason[:_MAX_REASON_CHARS]}


def with_live_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A command as roles take it: what is set takes effect at once."""
    more = {"live": sorted(record["values"])} if record.get("command") == SET else {}
    return {**record, **more}


class CommandReceiver:
    """What the roles of a process are told that nobody supervises; `tell` hears what became of each command, and `refuse` gets
    the records that are none."""

    def __init__(
        self,
        charter: RunManifest,
        agent: AgentConfig,
        tell: Callable[[dict[str, Any]], object],
        refuse: OnRefused = lambda message, reason: None,
    ) -> None:
        self._run, self._tell, self._validator = charter.run, tell, CommandValidator(charter, agent)
        self._refuse = refuse
        self.asked = dict.fromkeys(ROLE_KINDS, RUN)
        self.first_live_offset = 0  # the offset of the first command that was given while this process was there
        self._settings: list[tuple[int, dict[str, Any]]] = []

    def since(self, number: int) -> list[tuple[int, dict[str, Any]]]:
        """What was set, for the learner, which tells itself what it took over."""
        return [one for one in self._settings if one[0] > number]

    def take(self, message: Message) -> None:
        """Carry out what is for this run and still good. What is older than this process is known to have been told."""
        if decode_headers(message).get("run") != self._run.encode() or is_published(message):
            return
        old = message.offset() < self.first_live_offset
        try:
            record = validate_record(COMMANDS, message.value())
            if record["command"] == MANIFEST:
                self._validator.generation = parse_manifest(record, self._run).generation
                self.asked |= dict.fromkeys(ROLE_KINDS, RUN)
        except DamagedFile as error:
            if not old:
                self._refuse(message, str(error))
            return
        if record["command"] in (MANIFEST, MEMBERSHIP):
            return
        reason = self._validator.refusal(record, message.timestamp()[1] / 1000 if old else time.time())
        if reason is None:
            self._execute(record, message.offset() + 1)
        if not old and (reason is not None or record["command"] != SET):
            self._tell(command_result(record, reason))

    def _execute(self, record: dict[str, Any], number: int) -> None:
        word = record["command"]
        if word == SET:
            self._settings.append((number, with_live_names(record)))
        elif word == "finish":
            self.asked |= {"actor": STOP, "worker": STOP, "learner": STOP, "manager": FINISH}
        elif word == "pause":
            self.asked |= dict.fromkeys(("actor", "learner"), PAUSE)
        else:
            self.asked |= dict.fromkeys(ROLE_KINDS, STOP if word == "stop" else RUN)

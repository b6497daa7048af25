"""Validation of records from outside, before they are stored or acted on: size, JSON, depth, numbers, text, schema.

An invalid record raises DamagedFile with the reason. A valid one can be stored, displayed and computed with.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.reports import SCHEMA, ActorReport, EvaluationReport, EventReport, Report, TrainingReport
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVALUATIONS, EVENTS, TRAINING

MAX_RECORD_BYTES = 1 << 20
MAX_COMMAND_BYTES = 64 << 10  # except for a manifest
MAX_DEPTH = 16  # nested lists and dictionaries
_INT64_BOUND = 2**63
_MAX_TIME_S = 1e11
_MAX_REASON_CHARS = 300
_MANIFEST_COMMAND = "charter"

_Word = Annotated[str, Meta(max_length=64)]
_Name = Annotated[str, Meta(max_length=200)]
_Count = Annotated[int, Meta(ge=0)]


class CommandRecord(msgspec.Struct, kw_only=True):
    """Fields that every record on commands.control has; manifests and plans have more."""

    command: _Word
    id: Annotated[str, Meta(min_length=1, max_length=128)]
    issuer: _Name = ""
    time_s: float = 0.0
    expires_s: float | None = None
    run: _Name | None = None
    generation: int | None = None
    values: dict[str, Any] = {}
    live: list[str] = []
    actors: int | None = None


class _Metric(msgspec.Struct):
    env_steps: int
    values: dict[str, float]


class _Span(msgspec.Struct):
    phase: _Name
    start_s: float
    end_s: float


class _CommandResult(msgspec.Struct):
    id: str | None
    command: str | None
    obeyed: bool
    message: str | None = None
    live: list[str] = []
    version: int | None = None


class _Checkpoint(msgspec.Struct):
    new_bytes: int | float = 0
    size_bytes: int | float = 0
    write_s: float = 0.0


class _Resume(msgspec.Struct):
    env_steps: int = 0
    damaged: list[str] = []


_REPORT_TYPES: dict[str, type[Report]] = {
    TRAINING: TrainingReport,
    ACTORS: ActorReport,
    EVALUATIONS: EvaluationReport,
    EVENTS: EventReport,
}
_EVENT_DETAILS: dict[str, type[msgspec.Struct]] = {
    "metric": _Metric,
    "span": _Span,
    "command": _CommandResult,
    "checkpoint": _Checkpoint,
    "resume": _Resume,
}


def parse_record(data: bytes | None, max_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any]:
    """Parse a JSON object, limited in size and depth, with 64-bit integers and valid Unicode; DamagedFile otherwise."""
    data = data or b""
    if len(data) > max_bytes:
        raise DamagedFile(f"it has {len(data)} bytes, and at most {max_bytes} are allowed")
    try:
        record = json.loads(data)
    except RecursionError:
        raise DamagedFile(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise DamagedFile("it is not JSON") from None
    if not isinstance(record, dict):
        raise DamagedFile("it is not a JSON object")
    _require_bounded(record)
    return record


def validate_record(
    topic: str, data: bytes | None, run: str | None = None, num_actors: int | None = None
) -> dict[str, Any]:
    """Parse a record of `topic` and validate it against its schema and, where given, the run and the number of actors.

    `topic` is the name without a prefix. Raises DamagedFile.
    """
    record = parse_record(data)
    try:
        if topic == COMMANDS:
            _require_command(record, data or b"")
        elif topic in _REPORT_TYPES:
            _require_report(_REPORT_TYPES[topic], record, run, num_actors)
    except msgspec.ValidationError as error:
        raise DamagedFile(_truncate(f"it does not match the schema of {topic}: {error}")) from None
    return record


def _require_command(record: dict[str, Any], data: bytes) -> None:
    command = msgspec.convert(record, CommandRecord)
    if command.command != _MANIFEST_COMMAND and len(data) > MAX_COMMAND_BYTES:
        raise DamagedFile(f"a command has {len(data)} bytes, and at most {MAX_COMMAND_BYTES} are allowed")
    _require_time(command.time_s)
    if command.expires_s is not None:
        _require_time(command.expires_s)


def _require_report(kind: type[Report], record: dict[str, Any], run: str | None, num_actors: int | None) -> None:
    report = msgspec.convert(record, kind, str_keys=True)
    if run is not None and report.run != run:
        raise DamagedFile(_truncate(f"its header names the run {run!r}, and its contents {report.run!r}"))
    if not 1 <= report.schema <= SCHEMA:
        raise DamagedFile(f"its schema is {report.schema}, and {SCHEMA} is the newest known here")
    _require_time(report.time_s)
    if isinstance(report, ActorReport) and not 0 <= report.actor < (_INT64_BOUND if num_actors is None else num_actors):
        raise DamagedFile(f"its actor is {report.actor}, and this run has {num_actors}")
    if isinstance(report, EventReport):
        _require_event(report)


def _require_event(report: EventReport) -> None:
    if not (report.role.isascii() and report.role.isprintable() and len(report.role) <= 100):
        raise DamagedFile("its role is not a name")
    if report.kind in _EVENT_DETAILS:
        msgspec.convert(report.details, _EVENT_DETAILS[report.kind])


def _require_time(time_s: float) -> None:
    if not (math.isfinite(time_s) and 0.0 <= time_s <= _MAX_TIME_S):
        raise DamagedFile(f"its time {time_s:g} is out of range")


def _require_bounded(record: dict[str, Any]) -> None:
    """Check depth, integers and text, without recursion."""
    waiting: list[tuple[Any, int]] = [(record, 1)]
    while waiting:
        value, depth = waiting.pop()
        kind = type(value)
        if kind is dict or kind is list:
            if depth > MAX_DEPTH:
                raise DamagedFile(f"it is nested deeper than {MAX_DEPTH} levels")
            inner = [*value, *value.values()] if kind is dict else value
            waiting += [(one, depth + 1) for one in inner]
        elif kind is str:
            if not value.isascii():
                _require_unicode(value)
        elif kind is int and not -_INT64_BOUND <= value < _INT64_BOUND:
            raise DamagedFile("it has an integer of more than 64 bits")


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DamagedFile("it has text that is not valid Unicode") from None


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 1] + "…"

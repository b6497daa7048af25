"""Validates records that arrive from outside, before they are stored or acted on: size, JSON, depth, numbers, text, schema.

Whatever is wrong with a record, `checked` raises DamagedFile with the reason. What passes can be stored, shown and computed with.
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

MOST_BYTES = 1 << 20  # of a record
MOST_COMMAND_BYTES = 64 << 10  # of a command other than a charter
MOST_DEPTH = 16  # lists and dictionaries inside each other
_MOST_INT = 2**63
_MOST_TIME_S = 1e11
_REASON = 300  # characters
_CHARTER = "charter"

_Word = Annotated[str, Meta(max_length=64)]
_Name = Annotated[str, Meta(max_length=200)]
_Count = Annotated[int, Meta(ge=0)]


class CommandRecord(msgspec.Struct, kw_only=True):
    """What every record on commands.control has; charters and plans have more."""

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


class _Answer(msgspec.Struct):
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


_KINDS: dict[str, type[Report]] = {
    TRAINING: TrainingReport,
    ACTORS: ActorReport,
    EVALUATIONS: EvaluationReport,
    EVENTS: EventReport,
}
_DETAILS: dict[str, type[msgspec.Struct]] = {
    "metric": _Metric,
    "span": _Span,
    "command": _Answer,
    "checkpoint": _Checkpoint,
    "resume": _Resume,
}


def parsed(data: bytes | None, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in `data`, bounded in size and depth, with 64-bit integers and valid Unicode."""
    data = data or b""
    if len(data) > most_bytes:
        raise DamagedFile(f"it has {len(data)} bytes, and at most {most_bytes} are allowed")
    try:
        record = json.loads(data)
    except RecursionError:
        raise DamagedFile(f"it is nested deeper than {MOST_DEPTH} levels") from None
    except ValueError:
        raise DamagedFile("it is not JSON") from None
    if not isinstance(record, dict):
        raise DamagedFile("it is not a JSON object")
    _require_bounded(record)
    return record


def checked(topic: str, data: bytes | None, run: str | None = None, num_actors: int | None = None) -> dict[str, Any]:
    """The record of `topic` in `data`: of its schema and, where they are given, of this run and one of so many actors.

    `topic` is the name without a prefix.
    """
    record = parsed(data)
    try:
        if topic == COMMANDS:
            _require_command(record, data or b"")
        elif topic in _KINDS:
            _require_report(_KINDS[topic], record, run, num_actors)
    except msgspec.ValidationError as error:
        raise DamagedFile(_cut(f"it does not match the schema of {topic}: {error}")) from None
    return record


def _require_command(record: dict[str, Any], data: bytes) -> None:
    command = msgspec.convert(record, CommandRecord)
    if command.command != _CHARTER and len(data) > MOST_COMMAND_BYTES:
        raise DamagedFile(f"a command has {len(data)} bytes, and at most {MOST_COMMAND_BYTES} are allowed")
    _require_time(command.time_s)
    if command.expires_s is not None:
        _require_time(command.expires_s)


def _require_report(kind: type[Report], record: dict[str, Any], run: str | None, num_actors: int | None) -> None:
    report = msgspec.convert(record, kind, str_keys=True)
    if run is not None and report.run != run:
        raise DamagedFile(_cut(f"its header names the run {run!r}, and its contents {report.run!r}"))
    if not 1 <= report.schema <= SCHEMA:
        raise DamagedFile(f"its schema is {report.schema}, and {SCHEMA} is the newest known here")
    _require_time(report.time_s)
    if isinstance(report, ActorReport) and not 0 <= report.actor < (_MOST_INT if num_actors is None else num_actors):
        raise DamagedFile(f"its actor is {report.actor}, and this run has {num_actors}")
    if isinstance(report, EventReport):
        _require_event(report)


def _require_event(report: EventReport) -> None:
    if not (report.role.isascii() and report.role.isprintable() and len(report.role) <= 100):
        raise DamagedFile("its role is not a name")
    if report.kind in _DETAILS:
        msgspec.convert(report.details, _DETAILS[report.kind])


def _require_time(time_s: float) -> None:
    if not (math.isfinite(time_s) and 0.0 <= time_s <= _MOST_TIME_S):
        raise DamagedFile(f"its time {time_s:g} is out of range")


def _require_bounded(record: dict[str, Any]) -> None:
    """Depth, integers and text, without recursion."""
    waiting: list[tuple[Any, int]] = [(record, 1)]
    while waiting:
        value, depth = waiting.pop()
        kind = type(value)
        if kind is dict or kind is list:
            if depth > MOST_DEPTH:
                raise DamagedFile(f"it is nested deeper than {MOST_DEPTH} levels")
            inner = [*value, *value.values()] if kind is dict else value
            waiting += [(one, depth + 1) for one in inner]
        elif kind is str:
            if not value.isascii():
                _require_unicode(value)
        elif kind is int and not -_MOST_INT <= value < _MOST_INT:
            raise DamagedFile("it has an integer of more than 64 bits")


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DamagedFile("it has text that is not valid Unicode") from None


def _cut(text: str) -> str:
    return text if len(text) <= _REASON else text[: _REASON - 1] + "…"

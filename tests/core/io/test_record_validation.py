"""Records from outside: what the roles write passes unchanged, and everything else is refused with a reason."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVALUATIONS, EVENTS, TOPICS, TRAINING
from steppe.core.io.record_validation import MAX_DEPTH, MAX_RECORD_BYTES, parse_record, validate_record

pytestmark = pytest.mark.unit

GOOD = {
    TRAINING: TrainingReport(
        run="demo", version=3, updates=4, env_steps=5, train_s=1.5, stats={"loss": float("nan")}, lags={0: 7, 12: 1}
    ).record(),
    ACTORS: ActorReport(
        run="demo", actor=1, epoch=0, version=-1, sequence=2, env_steps=9, episodes=[(1.5, 20)]
    ).record(),
    EVALUATIONS: EvaluationReport(
        run="demo", version=1, updates=1, env_steps=1, train_s=0.0, returns=[1.0, float("inf")], lengths=[1, 2],
        return_mean=1.0, return_std=0.0, duration_s=0.1, weights_sha256="ab",
    ).record(),
    EVENTS: EventReport(run="demo", kind="fault", role="actor-1", details={"deep": {"er": [1, {"x": "ü"}]}}).record(),
    COMMANDS: {"command": "set", "id": "4f", "issuer": "me", "values": {"learning_rate": 1e-4}, "expires_s": time.time()},
}  # fmt: skip


def event(kind, **details):
    return {**GOOD[EVENTS], "kind": kind, "details": details}


def text(record):
    return json.dumps(record).encode()


@pytest.mark.parametrize("topic", TOPICS)
def test_records_written_by_roles_are_valid(topic):
    found = validate_record(topic, text(GOOD[topic]), "demo", 2)
    assert repr(found) == repr(json.loads(text(GOOD[topic])))


def test_fields_from_a_newer_version_pass():
    assert validate_record(TRAINING, text({**GOOD[TRAINING], "new": [1]}), "demo")["new"] == [1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b"9" * 5_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 5_000, "nested deeper"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested deeper"),
        (b'{"a": 1e3, "b": 9223372036854775808}', "64 bits"),
        (b'{"a": "\\ud800"}', "Unicode"),
        (b'{"\\ud800": 1}', "Unicode"),
        (b'{"a": "' + b"x" * MAX_RECORD_BYTES + b'"}', "bytes"),
    ],
)  # fmt: skip
def test_no_record_at_all(data, words):
    with pytest.raises(DamagedFile, match=words):
        parse_record(data)


@pytest.mark.parametrize(
    ("topic", "record", "words"),
    [
        *((topic, {}, "schema of") for topic in TOPICS),
        (TRAINING, {**GOOD[TRAINING], "version": "3"}, "schema of"),
        (TRAINING, {**GOOD[TRAINING], "lags": {"x": 1}}, "schema of"),
        (TRAINING, {**GOOD[TRAINING], "run": "other"}, "names the run"),
        (TRAINING, {**GOOD[TRAINING], "schema": 99}, "schema is 99"),
        (TRAINING, {**GOOD[TRAINING], "time_s": float("nan")}, "out of range"),
        (TRAINING, {**GOOD[TRAINING], "time_s": 1e300}, "out of range"),
        (ACTORS, {**GOOD[ACTORS], "actor": 2}, "actor is 2"),
        (ACTORS, {**GOOD[ACTORS], "actor": -1}, "actor is -1"),
        (EVENTS, {**GOOD[EVENTS], "role": "actor-²"}, "role"),
        (EVENTS, {**GOOD[EVENTS], "details": []}, "schema of"),
        (EVENTS, event("metric"), "schema of"),
        (EVENTS, event("metric", env_steps=1, values={"a": "b"}), "schema of"),
        (EVENTS, event("span", phase="learn"), "schema of"),
        (EVENTS, event("command", id="x", command="set", obeyed="yes"), "schema of"),
        (EVENTS, event("checkpoint", write_s="soon"), "schema of"),
        (EVENTS, event("resume", env_steps=None), "schema of"),
        (COMMANDS, {"command": "stop"}, "schema of"),
        (COMMANDS, {"command": "stop", "id": ""}, "schema of"),
        (COMMANDS, {"command": "scale", "id": "1", "actors": "many"}, "schema of"),
        (COMMANDS, {"command": "set", "id": "1", "values": [1]}, "schema of"),
        (COMMANDS, {"command": "stop", "id": "1", "expires_s": float("inf")}, "out of range"),
        (COMMANDS, {"command": "stop", "id": "1", "more": "x" * 70_000}, "a command has"),
    ],
)
def test_records_of_no_schema(topic, record, words):
    with pytest.raises(DamagedFile, match=words):
        validate_record(topic, text(record), "demo", 2)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(topic=st.sampled_from(TOPICS), changes=st.dictionaries(st.text(), values, max_size=3), data=st.data())
def test_any_input_is_accepted_or_refused(topic, changes, data):
    """Nothing but DamagedFile, and what passes can be written down again."""
    names = data.draw(st.lists(st.sampled_from(sorted(GOOD[topic])), max_size=2))
    record = {**GOOD[topic], **changes, **{name: data.draw(values) for name in names}}
    sent = text(record)
    for cut in (sent, sent[: data.draw(st.integers(0, len(sent)))]):
        with contextlib.suppress(DamagedFile):
            json.dumps(validate_record(topic, cut, "demo", 2), ensure_ascii=False).encode()

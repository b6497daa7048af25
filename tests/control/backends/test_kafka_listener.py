"""The command `start` on commands.control: `steppe serve --kafka` executes it once for its own runs, unless it has expired."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager

import pytest

from steppe.control.backends import kafka_listener
from steppe.control.backends.kafka_listener import StartCommandListener
from steppe.control.factory import make_local_service
from steppe.control.periodic import PeriodicTask
from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.manifest import PUBLISHED_ORIGIN, make_command, wire_name
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection, ensure_topics
from tests.support.kafka import PATIENCE_S, dead_letters
from tests.support.service import LONG, Served, in_state, make, run_of, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
SMALL = {**LONG, "actors": 1}


@pytest.fixture(scope="session")
def brokers(kafka):
    return str(kafka)


@contextmanager
def board_of(served: Served, run: str):
    """Yield a board of an external client that addresses the run by any of its names."""
    config = KafkaConfig(address=served.options[1], prefix=served.environ["STEPPE_KAFKA__PREFIX"], partitions=2)
    board = KafkaBoard(KafkaConnection(config, run), "test")
    try:
        yield board
    finally:
        board.close()


def name_in_messages(served: Served, run: str) -> str:
    """Return the name of the run in messages."""
    return wire_name(RunDirectory(served.root / "runs" / run))


def answers(served: Served, api, run: str, command: dict) -> list[tuple[str, bool, str | None]]:
    """Return the results of a command with their sender, which must be the same on Kafka and in the run's event log."""
    with board_of(served, name_in_messages(served, run)) as board:
        published = [record for _, record in board.read(EVENTS)]
    kept = api.get(f"/api/v1/runs/{run}/events", params={"limit": 1000}).json()["events"]
    found = [
        [(one["role"], one["details"]["obeyed"], one["details"]["message"]) for one in events
         if one["kind"] == "command" and one["details"]["id"] == command["id"]]
        for events in (published, kept)
    ]  # fmt: skip
    return found[0] if sorted(found[0], key=str) == sorted(found[1], key=str) else []


def post(served: Served, run: str, command: dict) -> dict:
    with board_of(served, run) as board:
        assert board.post(COMMANDS, command)
    return command


def audited(api, run: str) -> list[str]:
    entries = api.get("/api/v1/audit", params={"limit": 1000}).json()["entries"]
    return [entry["outcome"] for entry in entries if entry["run"] == run and entry["who"] == "kafka:test"]


@pytest.mark.long
@pytest.mark.slow
def test_start_works_for_new_and_stopped_runs_and_while_the_service_was_down(served):
    with served.client() as api:
        run, wire = start_and_stop(served, api)
    served.kill()
    store = RunDirectory(served.root / "runs" / run).store
    post(served, wire, make_command("stop", "test"))
    until(lambda: store.status().state == "STOPPED", "the run's supervisor has stopped it")
    for command in (
        again := make_command("start", "test"),
        {**make_command("start", "test"), "expires_s": time.time()},
    ):
        post(served, wire, command)
    served.start()
    with served.client() as api:
        until(lambda: answers(served, api, run, again) == [("service", True, None)], "the run continues")
        until(
            lambda: answers(served, api, run, command) == [("service", False, "it has expired")],
            "the expired command is refused",
        )
        assert run_of(api, run)["state"] == "RUNNING"


def start_and_stop(served, api):
    """Start a new run, stop it, and start it again by commands only; return its name and its name in messages."""
    run = make(api, SMALL, start=False)
    huge = make(api, SMALL, start=False, envs=4096, agent={"segment_steps": 4096})
    assert run_of(api, run)["state"] == "PENDING"
    doomed = post(served, huge, make_command("start", "test"))
    first = post(served, run, make_command("start", "test"))  # only the name of a run that was never started is known
    in_state(api, run, "RUNNING")
    until(lambda: answers(served, api, run, first) == [("service", True, None)], "the command is answered once")
    wire = name_in_messages(served, run)
    early = post(served, wire, make_command("start", "test"))
    until(lambda: len(answers(served, api, run, early)) == 2, "the service and the run's supervisor answer")
    assert {(sender, obeyed) for sender, obeyed, _ in answers(served, api, run, early)} == {
        ("service", False),
        ("supervisor", False),
    }
    assert all("already" in message_part for _, _, message_part in answers(served, api, run, early))
    post(served, wire, make_command("stop", "test"))
    in_state(api, run, "STOPPED")

    bad = {
        "it has expired": {**make_command("start", "test"), "expires_s": time.time() - 1.0},
        "it is for the run 'another'": make_command("start", "test", run="another"),
        "it is for generation 2 of this run, which is at 1": make_command("start", "test", generation=2),
    }
    for command in bad.values():
        post(served, wire, command)
    for message_part, command in bad.items():
        ((sender, obeyed, message),) = until(lambda command=command: answers(served, api, run, command), message_part)
        assert (sender, obeyed, message_part in message) == ("service", False, True), message
    post(served, wire, first)
    until(lambda: len(answers(served, api, run, first)) == 2, "the repeated one is answered")
    assert answers(served, api, run, first)[1] == ("service", False, "it was executed before")
    for strange in ("nobody", f"{run}~00000000"):
        post(served, strange, make_command("start", "test"))
        until(
            lambda strange=strange: audited(api, strange) == ["refused: this service has no such run over Kafka"],
            strange,
        )
    ((sender, obeyed, message),) = until(
        lambda: answers(served, api, huge, doomed), "the command that failed is answered"
    )
    assert (sender, obeyed, "kafka.max_message_mb" in message) == ("service", False, True), message
    assert run_of(api, run)["state"] == "STOPPED", "none of them had an effect"

    again = post(served, wire, make_command("start", "test", generation=1))
    until(lambda: answers(served, api, run, again) == [("service", True, None)], "the run continues")
    assert run_of(api, run)["state"] == "RUNNING"
    assert audited(api, wire).count("done") == 1
    return run, wire


@pytest.fixture
def connection(kafka):
    """A connection to new topics."""
    config = KafkaConfig(address=str(kafka), prefix=f"t{uuid.uuid4().hex[:8]}.", partitions=2)
    ensure_topics(KafkaConnection(config, ""))
    return KafkaConnection(config, "")


@pytest.fixture
def new_service(connection, tmp_path, monkeypatch):
    """Yield the listener of a new service, a function that sends `start`, and the list of runs whose commands were received."""
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))
    config = connection.config
    service, names = make_local_service(kafka=config), []
    monkeypatch.setattr(service.database, "audit", lambda sender, door, what, run, outcome: names.append(run))

    def send_start(run, origin="test"):
        board = KafkaBoard(KafkaConnection(config, run), origin)
        assert board.post(COMMANDS, make_command("start", "test"))
        board.close()

    listener = StartCommandListener(service, config)
    yield listener, send_start, names
    listener.stop()
    service.close()


def test_a_command_from_just_before_the_start_of_a_service_is_received(new_service):
    listener, send_start, names = new_service
    send_start("early")
    until(lambda: listener.poll() or names == ["early"], "the first command is received")


@pytest.fixture
def an_hour_later(monkeypatch):
    """Make a service that takes commands that are sent now for an hour old."""
    monkeypatch.setattr(kafka_listener, "MAX_CLOCK_SKEW_S", -3600.0)


def test_a_command_from_long_before_the_start_of_a_service_is_ignored(an_hour_later, new_service):
    listener, send_start, names = new_service
    send_start("an hour ago")
    listener.poll()
    send_start("now")
    until(lambda: listener.poll() or names, "the second command is received")
    assert names == ["now"]


def test_commands_that_a_service_published_are_skipped_by_others(new_service):
    """Other services on the same broker skip it."""
    listener, send_start, names = new_service
    send_start("published", PUBLISHED_ORIGIN)
    send_start("command")
    until(lambda: listener.poll() or names, "the second command is received")
    assert names == ["command"]


@pytest.mark.regression
def test_invalid_commands_are_parked_and_the_next_one_is_received(connection, new_service):
    """A deeply nested record once ended the listener's thread, and no later `start` was executed."""
    listener, send_start, names = new_service
    listener.poll()
    bad = [b"[" * 5_000, b'{"command":' * 20_000, b"{}", b'{"command": "start"}', b"\xff", b""]
    producer = connection.producer()
    for value in bad:
        producer.produce(connection.topic(COMMANDS), value, b"key", 0, headers=[("run", b"demo")])
    assert producer.flush(PATIENCE_S) == 0
    send_start("after it")
    until(lambda: listener.poll() or "after it" in names, "the next command is received")
    until(lambda: listener.poll() or len(dead_letters(connection)) >= len(bad), "all of them are parked")
    parked = dead_letters(connection)
    assert [message.value() for message in parked] == [value[:4096] for value in bad]


def test_a_task_that_raises_any_exception_is_retried():
    attempts = []

    def fail():
        attempts.append(1)
        raise RecursionError

    task = PeriodicTask("test", 0.001, fail)
    task.start()
    until(lambda: len(attempts) > 1, "the task is retried")
    task.stop()


def test_a_task_that_was_never_started_can_be_stopped():
    done = []
    task = PeriodicTask("test", 0.001, lambda: done.append(1))
    task.stop()
    assert done == []

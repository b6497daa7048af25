"""`start` on commands.control, carried out by `steppe serve --kafka` for its own runs: each once, in time, and answered."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager

import pytest

from steppe.control.backends import kafka_listener as hearing_module
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
def speaking(served: Served, run: str):
    """To the run by whatever name, from outside of the service."""
    config = KafkaConfig(address=served.options[1], prefix=served.environ["STEPPE_KAFKA__PREFIX"], partitions=2)
    board = KafkaBoard(KafkaConnection(config, run), "test")
    try:
        yield board
    finally:
        board.close()


def named(served: Served, run: str) -> str:
    """As messages call it."""
    return wire_name(RunDirectory(served.root / "runs" / run))


def answers(served: Served, api, run: str, asked: dict) -> list[tuple[str, bool, str | None]]:
    """Who said what became of a command, the same on Kafka and in the run's own log."""
    with speaking(served, named(served, run)) as board:
        told = [record for _, record in board.read(EVENTS)]
    kept = api.get(f"/api/v1/runs/{run}/events", params={"limit": 1000}).json()["events"]
    found = [
        [(one["role"], one["details"]["obeyed"], one["details"]["message"]) for one in events
         if one["kind"] == "command" and one["details"]["id"] == asked["id"]]
        for events in (told, kept)
    ]  # fmt: skip
    return found[0] if sorted(found[0], key=str) == sorted(found[1], key=str) else []


def post(served: Served, run: str, asked: dict) -> dict:
    with speaking(served, run) as board:
        assert board.post(COMMANDS, asked)
    return asked


def audited(api, run: str) -> list[str]:
    entries = api.get("/api/v1/audit", params={"limit": 1000}).json()["entries"]
    return [entry["outcome"] for entry in entries if entry["run"] == run and entry["who"] == "kafka:test"]


@pytest.mark.slow
def test_a_run_that_waits_one_that_was_stopped_and_what_is_asked_while_no_service_is_up(served):
    with served.client() as api:
        run, wire = begin_and_stop(served, api)
    served.kill()
    store = RunDirectory(served.root / "runs" / run).store
    post(served, wire, make_command("stop", "test"))
    until(lambda: store.status().state == "STOPPED", "its own supervisor has stopped it")
    for asked in (again := make_command("start", "test"), {**make_command("start", "test"), "expires_s": time.time()}):
        post(served, wire, asked)
    served.start()
    with served.client() as api:
        until(lambda: answers(served, api, run, again) == [("service", True, None)], "it goes on")
        until(lambda: answers(served, api, run, asked) == [("service", False, "it has expired")], "the other is late")
        assert run_of(api, run)["state"] == "RUNNING"


def begin_and_stop(served, api):
    """Start a run that waits, stop it, and start it again, by commands alone; its two names."""
    run = make(api, SMALL, start=False)
    huge = make(api, SMALL, start=False, envs=4096, agent={"segment_steps": 4096})
    assert run_of(api, run)["state"] == "PENDING"
    doomed = post(served, huge, make_command("start", "test"))
    first = post(
        served, run, make_command("start", "test")
    )  # of a run that nobody has begun, no more than the name is known
    in_state(api, run, "RUNNING")
    until(lambda: answers(served, api, run, first) == [("service", True, None)], "it is answered once")
    wire = named(served, run)
    early = post(served, wire, make_command("start", "test"))
    until(lambda: len(answers(served, api, run, early)) == 2, "the service and the run's supervisor answer")
    assert {(who, obeyed) for who, obeyed, _ in answers(served, api, run, early)} == {
        ("service", False),
        ("supervisor", False),
    }
    assert all("already" in words for _, _, words in answers(served, api, run, early))
    post(served, wire, make_command("stop", "test"))
    in_state(api, run, "STOPPED")

    bad = {
        "it has expired": {**make_command("start", "test"), "expires_s": time.time() - 1.0},
        "it is for the run 'another'": make_command("start", "test", run="another"),
        "it is for generation 2 of this run, which is at 1": make_command("start", "test", generation=2),
    }
    for asked in bad.values():
        post(served, wire, asked)
    for words, asked in bad.items():
        ((who, obeyed, message),) = until(lambda asked=asked: answers(served, api, run, asked), words)
        assert (who, obeyed, words in message) == ("service", False, True), message
    post(served, wire, first)
    until(lambda: len(answers(served, api, run, first)) == 2, "the repeated one is answered")
    assert answers(served, api, run, first)[1] == ("service", False, "it was carried out before")
    for strange in ("nobody", f"{run}~00000000"):
        post(served, strange, make_command("start", "test"))
        until(
            lambda strange=strange: audited(api, strange) == ["refused: there is no such run over Kafka here"], strange
        )
    ((who, obeyed, message),) = until(
        lambda: answers(served, api, huge, doomed), "the one that could not begin is answered"
    )
    assert (who, obeyed, "kafka.max_message_mb" in message) == ("service", False, True), message
    assert run_of(api, run)["state"] == "STOPPED", "none of them has changed anything"

    again = post(served, wire, make_command("start", "test", generation=1))
    until(lambda: answers(served, api, run, again) == [("service", True, None)], "it goes on")
    assert run_of(api, run)["state"] == "RUNNING"
    assert audited(api, wire).count("done") == 1
    return run, wire


@pytest.fixture
def connection(kafka):
    """To topics that nobody has written to."""
    config = KafkaConfig(address=str(kafka), prefix=f"t{uuid.uuid4().hex[:8]}.", partitions=2)
    ensure_topics(KafkaConnection(config, ""))
    return KafkaConnection(config, "")


@pytest.fixture
def fresh(connection, tmp_path, monkeypatch):
    """What hears for a service that is new, a way to ask for a run, and whose names were heard."""
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))
    config = connection.config
    service, names = make_local_service(kafka=config), []
    monkeypatch.setattr(service.database, "audit", lambda who, door, what, run, outcome: names.append(run))

    def ask(run, origin="test"):
        board = KafkaBoard(KafkaConnection(config, run), origin)
        assert board.post(COMMANDS, make_command("start", "test"))
        board.close()

    hearing = StartCommandListener(service, config)
    yield hearing, ask, names
    hearing.stop()
    service.close()


def test_what_is_asked_before_a_new_service_has_found_its_brokers_is_heard(fresh):
    hearing, ask, names = fresh
    ask("early")
    until(lambda: hearing.poll() or names == ["early"], "the first command is heard")


@pytest.fixture
def an_hour_later(monkeypatch):
    """A service that is made then takes what is asked now for an hour old."""
    monkeypatch.setattr(hearing_module, "MAX_CLOCK_SKEW_S", -3600.0)


def test_what_was_asked_long_before_a_new_service_is_not_heard(an_hour_later, fresh):
    hearing, ask, names = fresh
    ask("an hour ago")
    hearing.poll()
    ask("now")
    until(lambda: hearing.poll() or names, "the second command is heard")
    assert names == ["now"]


def test_what_a_service_has_published_is_carried_out_by_itself_alone(fresh):
    """By the service that published it, and by no other on the same broker."""
    hearing, ask, names = fresh
    ask("published", PUBLISHED_ORIGIN)
    ask("asked")
    until(lambda: hearing.poll() or names, "the second command is heard")
    assert names == ["asked"]


@pytest.mark.regression
def test_what_is_no_command_is_parked_and_the_next_is_heard(connection, fresh):
    """A record that is nested too deep once ended the thread that hears, and no `start` was carried out any more."""
    hearing, ask, names = fresh
    hearing.poll()
    bad = [b"[" * 5_000, b'{"command":' * 20_000, b"{}", b'{"command": "start"}', b"\xff", b""]
    producer = connection.producer()
    for value in bad:
        producer.produce(connection.topic(COMMANDS), value, b"key", 0, headers=[("run", b"demo")])
    assert producer.flush(PATIENCE_S) == 0
    ask("after it")
    until(lambda: hearing.poll() or "after it" in names, "the command behind them is heard")
    until(lambda: hearing.poll() or len(dead_letters(connection)) >= len(bad), "all of them are parked")
    parked = dead_letters(connection)
    assert [message.value() for message in parked] == [value[:4096] for value in bad]


def test_work_that_fails_in_any_way_is_tried_again():
    tried = []

    def work():
        tried.append(1)
        raise RecursionError

    repeating = PeriodicTask("test", 0.001, work)
    repeating.start()
    until(lambda: len(tried) > 1, "it is tried again")
    repeating.stop()


def test_what_was_never_started_can_be_stopped():
    done = []
    repeating = PeriodicTask("test", 0.001, lambda: done.append(1))
    repeating.stop()
    assert done == []

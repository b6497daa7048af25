"""Mirroring a run's reports from a real broker into its directory: completely, and once, also after kills of the mirror."""

from __future__ import annotations

import json

import pytest

from steppe.control.backends.kafka_mirror import CURSOR_FILE, KafkaMirror
from steppe.core.config.run import resolve_config
from steppe.core.contracts.reports import ActorReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVALUATIONS, EVENTS, TRAINING
from steppe.core.io.atomic_files import write_json
from steppe.envs import probe
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.runtimes.kafka.manifest import RunManifest, make_command, wire_name
from steppe.runtimes.plan import make_plan
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.client import KafkaConnection, decode_headers, ensure_topics
from tests.support.kafka import PATIENCE_S, dead_letters, settings, wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def config(kafka):
    return settings(kafka)


@pytest.fixture
def directory_of_service(tmp_path):
    """The service's directory of the run, still without reports."""
    made = resolve_config(("test", {"env": "CartPole-v1", "runtime": "kafka", "run_dir": tmp_path / "demo"})).config
    directory = RunDirectory.create(made, {})
    yield directory
    directory.release()
    directory.store.close()


def announce_run(config, path) -> KafkaBoard:
    """Publish a new run of that name as its learner does; return the board of its roles."""
    given = {"env": "CartPole-v1", "runtime": "kafka", "mode": "async", "actors": 2, "run_dir": path}
    made = resolve_config(("test", given)).config.model_copy(update={"kafka": config})
    ensure_topics(KafkaConnection(config, "demo"))
    directory = RunDirectory.create(made, {}, {"id": "demo"})
    manifest = RunManifest.of(make_plan(made, probe(made.env, made.environment)), directory)
    directory.release()
    directory.store.close()
    board = KafkaBoard(KafkaConnection(config, wire_name(directory)))
    manifest.post(board)
    return board


@pytest.fixture
def found(config, tmp_path):
    boards = []

    def found(name="elsewhere"):
        boards.append(announce_run(config, tmp_path / name))
        return boards[-1]

    yield found
    for board in boards:
        board.close()


@pytest.fixture
def make_mirror(config, directory_of_service):
    made = []

    def make():
        made.append(KafkaMirror(directory_of_service, config))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def numbered_record(topic, n):
    """Return a record of the topic with a number in it."""
    counts = {"version": n, "env_steps": n}
    reports = {
        TRAINING: lambda: TrainingReport(run="demo", updates=0, train_s=0.0, stats={"loss": float("nan")}, **counts),
        ACTORS: lambda: ActorReport(run="demo", actor=1, epoch=0, sequence=0, **counts),
        EVENTS: lambda: EventReport(run="demo", kind="note", details=counts),
    }
    return reports[topic]().record()


def num_refused(directory_of_service):
    """Return the number of refused records in the run's events."""
    warnings = [event for _, event in directory_of_service.store.read(EVENTS) if event["kind"] == "warning"]
    return sum(count for event in warnings for count in event["details"]["refused"].values())


def numbers(directory_of_service, topic):
    return [(record.get("details") or record)["version"] for _, record in directory_of_service.store.read(topic)]


def test_the_mirror_waits_for_the_run_and_copies_its_records_in_order(config, directory_of_service, make_mirror, found):
    mirror = make_mirror()
    mirror.poll()  # there are no topics yet
    assert mirror.manifest is None
    board, other_run = found(), KafkaBoard(KafkaConnection(config, "other~12345678"))
    for n in range(5):
        board.post(TRAINING, numbered_record(TRAINING, n))
        other_run.post(TRAINING, numbered_record(TRAINING, -1))
        board.post(EVENTS, numbered_record(EVENTS, n))
    other_run.close()
    mirror.poll()
    assert numbers(directory_of_service, TRAINING) == numbers(directory_of_service, EVENTS) == [0, 1, 2, 3, 4]
    mirror.poll()
    board.post(ACTORS, numbered_record(ACTORS, 7))
    board.post(TRAINING, numbered_record(TRAINING, 5))
    mirror.poll()
    assert numbers(directory_of_service, TRAINING) == [0, 1, 2, 3, 4, 5]
    assert numbers(directory_of_service, ACTORS) == [7]


@pytest.mark.slow
def test_a_mirror_killed_before_it_saved_its_offsets_copies_nothing_twice(directory_of_service, make_mirror, found):
    board, mirror = found(), make_mirror()
    board.post(TRAINING, numbered_record(TRAINING, 0))
    mirror.poll()
    before = (directory_of_service.path / CURSOR_FILE).read_bytes()
    board.post(TRAINING, numbered_record(TRAINING, 1))
    board.post(EVENTS, numbered_record(EVENTS, 1))
    mirror.poll()
    (directory_of_service.path / CURSOR_FILE).write_bytes(before)
    board.post(TRAINING, numbered_record(TRAINING, 2))
    make_mirror().poll()
    assert numbers(directory_of_service, TRAINING) == [0, 1, 2]
    assert numbers(directory_of_service, EVENTS) == [1]


@pytest.mark.slow
def test_a_restarted_run_is_mirrored(directory_of_service, make_mirror, found):
    mirror = make_mirror()
    found().post(TRAINING, numbered_record(TRAINING, 0))
    mirror.poll()
    found("again").post(TRAINING, numbered_record(TRAINING, 1))
    mirror.poll()
    assert numbers(directory_of_service, TRAINING) == [0, 1]


def test_offsets_beyond_recreated_topics_are_ignored(directory_of_service, make_mirror, found):
    write_json(directory_of_service.path / CURSOR_FILE, {TRAINING: 1_000})
    found().post(TRAINING, numbered_record(TRAINING, 0))
    make_mirror().poll()
    assert numbers(directory_of_service, TRAINING) == [0]


def test_invalid_records_are_parked_and_skipped(config, directory_of_service, make_mirror, found):
    """Invalid records with the run's header on every topic: valid ones are still read, and each invalid one is parked once."""
    board, mirror = found(), make_mirror()
    board.post(TRAINING, numbered_record(TRAINING, 1))
    mirror.poll()
    bad = {
        TRAINING: [b"{}", b"[" * 5_000, json.dumps({**numbered_record(TRAINING, 1), "run": "other"}).encode()],
        ACTORS: [b"{}", json.dumps({**numbered_record(ACTORS, 1), "actor": 2}).encode()],
        EVALUATIONS: [b"{}", b"x" * 900_000],
        EVENTS: [b"{}", json.dumps({**numbered_record(EVENTS, 1), "kind": "metric"}).encode()],
        COMMANDS: [b"{}", b"[" * 5_000, json.dumps({"command": "charter", "id": "1", "charter": {}}).encode()],
    }
    connection = mirror.manifest.connection(config)
    producer = connection.producer()
    for topic, values in bad.items():
        for value in values:
            about = [("run", connection.run.encode())]
            producer.produce(connection.topic(topic), value, b"key", 0, headers=about)
    assert producer.flush(PATIENCE_S) == 0
    board.post(TRAINING, numbered_record(TRAINING, 2))
    board.post(COMMANDS, make_command("pause", "test"))
    for _ in range(3):
        mirror.poll()
    assert numbers(directory_of_service, TRAINING) == [1, 2]
    assert mirror.newest_command == "pause"
    view = RunView(directory_of_service)
    view.refresh()
    assert view.version == 2
    expected = sorted(topic for topic, values in bad.items() if topic != COMMANDS for _ in values)
    wait_until(
        lambda: mirror.poll() or len(dead_letters(connection)) >= len(expected), "all invalid records are parked"
    )
    parked = dead_letters(connection)
    assert sorted(decode_headers(message)["topic"].decode() for message in parked) == expected
    assert max(len(message.value()) for message in parked) == 4096
    assert all(decode_headers(message)["reason"] for message in parked)
    wait_until(
        lambda: mirror.poll() or num_refused(directory_of_service) >= len(parked), "all parked records are counted"
    )
    assert num_refused(directory_of_service) == len(parked)

"""What roles report on a real broker, copied into a run's directory: everything of the run, once, whatever becomes of the copier."""

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
def here(tmp_path):
    """The directory of the service, which has the run's name and knows nothing of it."""
    made = resolve_config(("test", {"env": "CartPole-v1", "runtime": "kafka", "run_dir": tmp_path / "demo"})).config
    directory = RunDirectory.create(made, {})
    yield directory
    directory.release()
    directory.store.close()


def founded(config, path) -> KafkaBoard:
    """A new run of that name, as its learner announces it; where its roles speak."""
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
        boards.append(founded(config, tmp_path / name))
        return boards[-1]

    yield found
    for board in boards:
        board.close()


@pytest.fixture
def follow(config, here):
    made = []

    def follow():
        made.append(KafkaMirror(here, config))
        return made[-1]

    yield follow
    for one in made:
        one.stop()


def said(topic, n):
    """A record of the topic with a number in it."""
    counts = {"version": n, "env_steps": n}
    reports = {
        TRAINING: lambda: TrainingReport(run="demo", updates=0, train_s=0.0, stats={"loss": float("nan")}, **counts),
        ACTORS: lambda: ActorReport(run="demo", actor=1, epoch=0, sequence=0, **counts),
        EVENTS: lambda: EventReport(run="demo", kind="note", details=counts),
    }
    return reports[topic]().record()


def told(here):
    """How many records were refused, as the run's events say."""
    warnings = [event for _, event in here.store.read(EVENTS) if event["kind"] == "warning"]
    return sum(count for event in warnings for count in event["details"]["refused"].values())


def numbers(here, topic):
    return [(record.get("details") or record)["version"] for _, record in here.store.read(topic)]


def test_it_waits_for_a_run_and_copies_all_of_it_in_order(config, here, follow, found):
    following = follow()
    following.look()  # there are no topics yet
    assert following.manifest is None
    board, stranger = found(), KafkaBoard(KafkaConnection(config, "other~12345678"))
    for n in range(5):
        board.post(TRAINING, said(TRAINING, n))
        stranger.post(TRAINING, said(TRAINING, -1))
        board.post(EVENTS, said(EVENTS, n))
    stranger.close()
    following.look()
    assert numbers(here, TRAINING) == numbers(here, EVENTS) == [0, 1, 2, 3, 4]
    following.look()
    board.post(ACTORS, said(ACTORS, 7))
    board.post(TRAINING, said(TRAINING, 5))
    following.look()
    assert numbers(here, TRAINING) == [0, 1, 2, 3, 4, 5]
    assert numbers(here, ACTORS) == [7]


@pytest.mark.slow
def test_one_that_was_killed_before_it_said_how_far_it_was_copies_nothing_twice(here, follow, found):
    board, following = found(), follow()
    board.post(TRAINING, said(TRAINING, 0))
    following.look()
    before = (here.path / CURSOR_FILE).read_bytes()
    board.post(TRAINING, said(TRAINING, 1))
    board.post(EVENTS, said(EVENTS, 1))
    following.look()
    (here.path / CURSOR_FILE).write_bytes(before)
    board.post(TRAINING, said(TRAINING, 2))
    follow().look()
    assert numbers(here, TRAINING) == [0, 1, 2]
    assert numbers(here, EVENTS) == [1]


@pytest.mark.slow
def test_a_run_that_was_begun_anew_is_followed(here, follow, found):
    following = follow()
    found().post(TRAINING, said(TRAINING, 0))
    following.look()
    found("again").post(TRAINING, said(TRAINING, 1))
    following.look()
    assert numbers(here, TRAINING) == [0, 1]


def test_places_in_topics_that_were_made_anew_are_not_taken_for_old_ones(here, follow, found):
    write_json(here.path / CURSOR_FILE, {TRAINING: 1_000})
    found().post(TRAINING, said(TRAINING, 0))
    follow().look()
    assert numbers(here, TRAINING) == [0]


def test_what_is_no_record_is_parked_and_passed_over(config, here, follow, found):
    """On every topic, with the run's own header: the picture of the run can still be drawn, and each is parked once."""
    board, following = found(), follow()
    board.post(TRAINING, said(TRAINING, 1))
    following.look()
    bad = {
        TRAINING: [b"{}", b"[" * 5_000, json.dumps({**said(TRAINING, 1), "run": "other"}).encode()],
        ACTORS: [b"{}", json.dumps({**said(ACTORS, 1), "actor": 2}).encode()],
        EVALUATIONS: [b"{}", b"x" * 900_000],
        EVENTS: [b"{}", json.dumps({**said(EVENTS, 1), "kind": "metric"}).encode()],
        COMMANDS: [b"{}", b"[" * 5_000, json.dumps({"command": "charter", "id": "1", "charter": {}}).encode()],
    }
    connection = following.manifest.connection(config)
    producer = connection.producer()
    for topic, values in bad.items():
        for value in values:
            about = [("run", connection.run.encode())]
            producer.produce(connection.topic(topic), value, b"key", 0, headers=about)
    assert producer.flush(PATIENCE_S) == 0
    board.post(TRAINING, said(TRAINING, 2))
    board.post(COMMANDS, make_command("pause", "test"))
    for _ in range(3):
        following.look()
    assert numbers(here, TRAINING) == [1, 2]
    assert following.newest_command == "pause"
    view = RunView(here)
    view.refresh()
    assert view.version == 2
    expected = sorted(topic for topic, values in bad.items() if topic != COMMANDS for _ in values)
    wait_until(lambda: following.look() or len(dead_letters(connection)) >= len(expected), "what is parked")
    parked = dead_letters(connection)
    assert sorted(decode_headers(message)["topic"].decode() for message in parked) == expected
    assert max(len(message.value()) for message in parked) == 4096
    assert all(decode_headers(message)["reason"] for message in parked)
    wait_until(lambda: following.look() or told(here) >= len(parked), "the sum of what is parked")
    assert told(here) == len(parked)

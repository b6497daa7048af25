"""What roles report on a real broker, copied into a run's directory: everything of the run, once, whatever becomes of the copier."""

from __future__ import annotations

import pytest

from steppe.control.following import CURSORS, Following
from steppe.core.config import resolve
from steppe.core.durable import write_json
from steppe.core.links import ACTORS, EVENTS, TRAINING
from steppe.envs import probe
from steppe.records.directory import RunDirectory
from steppe.runtimes.kafka_charter import Charter, wire_name
from steppe.runtimes.plan import make_plan
from steppe.transport.kafka import Connection, ensure_topics
from steppe.transport.kafka_board import KafkaBoard
from tests.support.kafka import settings

pytestmark = pytest.mark.integration


@pytest.fixture
def config(kafka):
    return settings(kafka)


@pytest.fixture
def here(tmp_path):
    """The directory of the service, which has the run's name and knows nothing of it."""
    made = resolve(("test", {"env": "CartPole-v1", "runtime": "kafka", "run_dir": tmp_path / "demo"})).config
    directory = RunDirectory.create(made, {})
    yield directory
    directory.release()
    directory.store.close()


def founded(config, path) -> KafkaBoard:
    """A new run of that name, as its learner announces it; where its roles speak."""
    given = {"env": "CartPole-v1", "runtime": "kafka", "mode": "async", "actors": 2, "run_dir": path}
    made = resolve(("test", given)).config.model_copy(update={"kafka": config})
    ensure_topics(Connection(config, "demo"))
    directory = RunDirectory.create(made, {}, {"id": "demo"})
    charter = Charter.of(make_plan(made, probe(made.env, made.environment)), directory)
    directory.release()
    directory.store.close()
    board = KafkaBoard(Connection(config, wire_name(directory)))
    charter.post(board)
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
        made.append(Following(here, config))
        return made[-1]

    yield follow
    for one in made:
        one._leave()  # none of them was started


def numbers(here, topic):
    return [record["n"] for _, record in here.store.read(topic)]


def test_it_waits_for_a_run_and_copies_all_of_it_in_order(config, here, follow, found):
    following = follow()
    following.look()  # there are no topics yet
    assert following.charter is None
    board, stranger = found(), KafkaBoard(Connection(config, "other~12345678"))
    for n in range(5):
        board.post(TRAINING, {"n": n})
        stranger.post(TRAINING, {"n": -1})
        board.post(EVENTS, {"n": n, "value": float("nan")})
    stranger.close()
    following.look()
    assert numbers(here, TRAINING) == numbers(here, EVENTS) == [0, 1, 2, 3, 4]
    following.look()
    board.post(ACTORS, {"n": 7})
    board.post(TRAINING, {"n": 5})
    following.look()
    assert numbers(here, TRAINING) == [0, 1, 2, 3, 4, 5]
    assert numbers(here, ACTORS) == [7]


@pytest.mark.slow
def test_one_that_was_killed_before_it_said_how_far_it_was_copies_nothing_twice(here, follow, found):
    board, following = found(), follow()
    board.post(TRAINING, {"n": 0})
    following.look()
    before = (here.path / CURSORS).read_bytes()
    board.post(TRAINING, {"n": 1})
    board.post(EVENTS, {"n": 1})
    following.look()
    (here.path / CURSORS).write_bytes(before)
    board.post(TRAINING, {"n": 2})
    follow().look()
    assert numbers(here, TRAINING) == [0, 1, 2]
    assert numbers(here, EVENTS) == [1]


@pytest.mark.slow
def test_a_run_that_was_begun_anew_is_followed(here, follow, found):
    following = follow()
    found().post(TRAINING, {"n": 0})
    following.look()
    found("again").post(TRAINING, {"n": 1})
    following.look()
    assert numbers(here, TRAINING) == [0, 1]


def test_places_in_topics_that_were_made_anew_are_not_taken_for_old_ones(here, follow, found):
    write_json(here.path / CURSORS, {TRAINING: 1_000})
    found().post(TRAINING, {"n": 0})
    follow().look()
    assert numbers(here, TRAINING) == [0]

"""What is asked of runs over Kafka, and what came of it, as somebody sees it who reads the topics alone."""

from __future__ import annotations

import time
import uuid

import pytest

import steppe.control.backends.publisher
from steppe.control import models, process_host
from steppe.control.backends.publisher import NOT_STARTED, CommandPublisher
from steppe.control.commands import to_command
from steppe.control.database import new_operation
from steppe.control.factory import make_local_service
from steppe.core.config.run import KafkaConfig, resolve_config
from steppe.core.contracts.errors import Conflict, Unreachable
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.records.run_directory import RunDirectory
from steppe.records.store import NO_OWNER, PENDING
from steppe.transport.kafka.client import KafkaConnection, ensure_topics
from tests.support.kafka import Topics
from tests.support.service import LONG, finished, in_state, make, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
SMALL = {**LONG, "actors": 1}
NOWHERE = KafkaConfig(address="127.0.0.1:9")


@pytest.fixture(scope="session")
def brokers(kafka):
    return str(kafka)


@pytest.mark.slow
def test_every_command_and_its_answer_are_seen_and_nothing_is_done_twice(served, api):
    run = make(api, SMALL, start=False)
    path, directory = f"/api/v1/runs/{run}", RunDirectory(served.root / "runs" / run)
    config = KafkaConfig(address=served.options[1], prefix=served.environ["STEPPE_KAFKA__PREFIX"], partitions=2)
    topics, asked = Topics(config, directory), {}

    def ask(word, answer):
        asked[word] = finished(api, answer)
        assert asked[word]["state"] == "succeeded", asked[word]

    ask("start", api.post(f"{path}/start"))
    in_state(api, run, "RUNNING")
    ask("set", api.patch(f"{path}/hyperparameters", json={"values": {"learning_rate": 0.01}}))
    ask("scale", api.put(f"{path}/actors", json={"actors": 2}))
    for word, state in (("pause", "PAUSED"), ("resume", "RUNNING"), ("stop", "STOPPED")):
        ask(word, api.post(f"{path}/{word}"))
        in_state(api, run, state)

    for word, operation in asked.items():
        until(lambda one=operation: topics.answers(one["id"]), f"{word} is answered")
        assert [obeyed for obeyed, _ in topics.answers(operation["id"])] == [True], word
    told = topics.commands()
    assert [(record["command"], record["id"]) for record in told] == [(word, asked[word]["id"]) for word in asked]
    assert all(record["issuer"] == "token:admin" and record["run"] == run for record in told)
    assert all(record["expires_s"] > record["time_s"] for record in told)
    assert [record["generation"] for record in told] == [0, 1, 1, 1, 1, 1]
    carried_out = [record["command"] for _, record in directory.store.read(COMMANDS)]
    assert carried_out == ["set", "scale", "pause", "resume", "stop"], "what is published is not taken from Kafka too"
    assert directory.store.status().state == "STOPPED"
    topics.close()


@pytest.fixture
def directory(tmp_path):
    """A run over Kafka that waits to be started."""
    found = RunDirectory.create(resolve_config(("test", {"env": "CartPole-v1", "runtime": "kafka"})).config, {})
    found.store.set_status(PENDING, "created", "waits to be started", owner=NO_OWNER)
    found.release()
    return found


@pytest.fixture
def config(kafka):
    found = KafkaConfig(address=str(kafka), prefix=f"t{uuid.uuid4().hex[:8]}.", partitions=2)
    ensure_topics(KafkaConnection(found, ""))
    return found


@pytest.fixture
def begin():
    """A service with a publisher to those brokers; called again, the one before is as good as killed."""
    lives = []

    def begun(config):
        service = make_local_service()
        service.commands.publisher = CommandPublisher(service, config)
        lives.append(service)
        return service, service.commands.publisher

    yield begun
    for service in lives:
        service.close()


@pytest.fixture
def topics(config, directory):
    made = Topics(config, directory)
    yield made
    made.close()


def test_without_brokers_a_command_is_refused_and_nothing_has_changed(begin, directory):
    service, _ = begin(NOWHERE)
    run = directory.path.name
    with pytest.raises(Unreachable, match="start was not published, and nothing has changed: no Kafka broker answers"):
        service.start_run(run, "test")
    assert (service.database.operations(), service.database.pending_answers(), service.database.desired_state(run)) == (
        [],
        [],
        (None, 1),
    )
    assert (directory.store.status().state, directory.store.read(COMMANDS)) == (PENDING, [])
    service.backend.kafka = NOWHERE
    with pytest.raises(Unreachable, match="nothing has changed"):
        service.create_run(models.RunRequest(env="CartPole-v1"), "test")
    assert [found.id for found in service.list_runs().runs] == [run], "a run that cannot be started is not made"


def test_a_run_is_stopped_without_brokers_and_that_is_published_when_one_answers(begin, directory, config, topics):
    service, publisher = begin(NOWHERE)
    done = service.stop_run(directory.path.name, "test")
    assert (done.state, directory.store.status().state) == ("succeeded", "STOPPED")
    with pytest.raises(Unreachable):
        publisher.poll()
    assert topics.commands() == []
    service, publisher = begin(config)
    publisher.poll()
    assert [(record["command"], record["id"]) for record in topics.commands()] == [("stop", done.id)]
    assert topics.answers(done.id) == [(True, None)]
    publisher.poll()
    assert (len(topics.commands()), len(topics.answers(done.id)), service.database.pending_answers()) == (1, 1, [])


@pytest.mark.regression
def test_a_command_that_waits_is_published_before_the_next_one(begin, directory, config, topics):
    service, _ = begin(NOWHERE)
    stopped = service.stop_run(directory.path.name, "test")
    _, publisher = begin(config)
    now = time.time()
    start = {"id": "next", "command": "start", "issuer": "test", "time_s": now, "expires_s": now + 3600.0}
    publisher.publish(directory, start)
    assert [record["id"] for record in topics.commands()] == [stopped.id, "next"]


def test_a_service_that_is_killed_before_the_answer_gives_it_when_it_is_back(begin, directory, config, topics):
    service, _ = begin(config)
    done = service.stop_run(directory.path.name, "test")
    assert (len(topics.commands()), topics.answers(done.id)) == (1, [])
    _, publisher = begin(config)
    publisher.poll()
    assert (len(topics.commands()), topics.answers(done.id)) == (1, [(True, None)])


@pytest.mark.regression
def test_a_look_while_a_command_is_being_published_does_not_publish_it_again(
    begin, directory, config, topics, monkeypatch
):
    service, publisher = begin(config)
    find = steppe.control.backends.publisher.find_manifest

    def meanwhile(*given):
        monkeypatch.setattr(steppe.control.backends.publisher, "find_manifest", find)
        publisher.poll()  # as the publisher's own thread may do now
        return find(*given)

    monkeypatch.setattr(steppe.control.backends.publisher, "find_manifest", meanwhile)
    done = service.stop_run(directory.path.name, "test")
    assert [record["id"] for record in topics.commands()] == [done.id]


def test_one_that_is_killed_before_it_begins_answers_that_when_the_command_has_expired(
    begin, directory, config, topics
):
    _, publisher = begin(config)
    command = to_command(new_operation("pause", directory.path.name, "test"))
    publisher.publish(directory, command)
    service, publisher = begin(config)
    publisher.poll()
    assert topics.answers(command["id"]) == [], "another service may be about to begin it"
    [due] = service.database.pending_answers()
    service.database.save_pending_answer(due._replace(command={**command, "expires_s": time.time() - 1.0}))
    publisher.poll()
    assert topics.answers(command["id"]) == [(False, NOT_STARTED)]


def test_what_cannot_be_begun_is_answered_with_the_reason(begin, directory, config, topics, monkeypatch):
    service, _ = begin(config)

    def refuse(*_):
        raise Conflict("somebody else starts it")

    monkeypatch.setattr(process_host, "start_run_process", refuse)
    with pytest.raises(Conflict):
        service.start_run(directory.path.name, "test")
    [record] = topics.commands()
    assert topics.answers(record["id"]) == [(False, "somebody else starts it")]
    assert service.database.pending_answers() == []


def test_what_the_run_has_answered_is_not_answered_again(begin, directory, config, topics):
    service, publisher = begin(config)
    done = service.stop_run(directory.path.name, "test")
    details = {"id": done.id, "command": "stop", "obeyed": True, "message": None}
    event = EventReport(run=directory.id, kind="command", role="supervisor", details=details)
    directory.store.post(EVENTS, event.record())  # which the run's supervisor copies to Kafka
    publisher.poll()
    assert (topics.answers(done.id), service.database.pending_answers()) == ([], [])

"""Commands to runs over Kafka and their results, as a consumer of the topics sees them."""

from __future__ import annotations

import time
import uuid

import anyio
import anyio.to_thread
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
from tests.control.test_mcp import call, connected
from tests.support.kafka import Topics
from tests.support.service import LONG, finished, in_state, make, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
SMALL = {**LONG, "actors": 1}
NOWHERE = KafkaConfig(address="127.0.0.1:9")


@pytest.fixture(scope="session")
def brokers(kafka):
    return str(kafka)


async def request_by_mcp(served, api, run):
    """Request every command again by MCP tools; return each tool with its finished operation, in order."""
    requested = []

    async def ask(client, tool, **arguments):
        answer = await call(client, tool, run=run, **arguments)
        identity = (answer.get("operation") or answer)["id"]
        done = await anyio.to_thread.run_sync(lambda: until(lambda: settled(api, identity), f"{tool} is done"))
        requested.append((tool, done))

    async with connected(served, "http", "control") as client:
        await ask(client, "start_run")
        await anyio.to_thread.run_sync(lambda: in_state(api, run, "RUNNING"))
        await ask(client, "set_hyperparameters", values={"learning_rate": 0.02})
        await ask(client, "scale_actors", count=1)
        await ask(client, "pause_run")
        await ask(client, "resume_run")
        await ask(client, "stop_run", confirm=run)
    return requested


def settled(api, identity):
    found = api.get(f"/api/v1/operations/{identity}").json()
    return found if found["state"] != "pending" else None


@pytest.mark.slow
def test_every_command_and_its_result_are_published_and_executed_once(served, api):
    """By REST, which the page uses too (tests/control/http/page/test_story.py), then by MCP."""
    run = make(api, SMALL, start=False)
    path, directory = f"/api/v1/runs/{run}", RunDirectory(served.root / "runs" / run)
    config = KafkaConfig(address=served.options[1], prefix=served.environ["STEPPE_KAFKA__PREFIX"], partitions=2)
    topics, requested = Topics(config, directory), {}

    def ask(kind, answer):
        requested[kind] = finished(api, answer)
        assert requested[kind]["state"] == "succeeded", requested[kind]

    ask("start", api.post(f"{path}/start"))
    in_state(api, run, "RUNNING")
    ask("set", api.patch(f"{path}/hyperparameters", json={"values": {"learning_rate": 0.01}}))
    ask("scale", api.put(f"{path}/actors", json={"actors": 2}))
    for kind, state in (("pause", "PAUSED"), ("resume", "RUNNING"), ("stop", "STOPPED")):
        ask(kind, api.post(f"{path}/{kind}"))
        in_state(api, run, state)

    for kind, operation in requested.items():
        until(lambda one=operation: topics.answers(one["id"]), f"{kind} is answered")
        assert [obeyed for obeyed, _ in topics.answers(operation["id"])] == [True], kind
    commands = topics.commands()
    assert [(record["command"], record["id"]) for record in commands] == [
        (kind, requested[kind]["id"]) for kind in requested
    ]
    assert all(record["issuer"] == "token:admin" and record["run"] == run for record in commands)
    assert all(record["expires_s"] > record["time_s"] for record in commands)
    assert [record["generation"] for record in commands] == [0, 1, 1, 1, 1, 1]
    executed = [record["command"] for _, record in directory.store.read(COMMANDS)]
    assert executed == ["set", "scale", "pause", "resume", "stop"], "published commands are not also read from Kafka"
    assert directory.store.status().state == "STOPPED"

    by_mcp = anyio.run(request_by_mcp, served, api, run)
    assert [done["state"] for _, done in by_mcp] == ["succeeded"] * len(requested), by_mcp
    for tool, done in by_mcp:
        until(lambda one=done: topics.answers(one["id"]), f"{tool} is answered")
        assert [obeyed for obeyed, _ in topics.answers(done["id"])] == [True], tool
    more = topics.commands()[len(commands) :]
    kinds = ["start", "set", "scale", "pause", "resume", "stop"]
    assert [(record["command"], record["id"]) for record in more] == [
        (kind, done["id"]) for kind, (_, done) in zip(kinds, by_mcp, strict=True)
    ]
    assert all(record["issuer"] == "token:control" and record["run"] == run for record in more)
    assert all(record["expires_s"] > record["time_s"] for record in more)
    assert directory.store.status().state == "STOPPED"
    topics.close()


@pytest.fixture
def directory(tmp_path):
    """A run over Kafka that is not started yet."""
    found = RunDirectory.create(resolve_config(("test", {"env": "CartPole-v1", "runtime": "kafka"})).config, {})
    found.store.set_status(PENDING, "created", "not started yet", owner=NO_OWNER)
    found.release()
    return found


@pytest.fixture
def config(kafka):
    found = KafkaConfig(address=str(kafka), prefix=f"t{uuid.uuid4().hex[:8]}.", partitions=2)
    ensure_topics(KafkaConnection(found, ""))
    return found


@pytest.fixture
def make_service():
    """Make a service with a publisher to these brokers; a second call stands for a restart after a kill."""
    services = []

    def make(config):
        service = make_local_service()
        service.commands.publisher = CommandPublisher(service, config)
        services.append(service)
        return service, service.commands.publisher

    yield make
    for service in services:
        service.close()


@pytest.fixture
def topics(config, directory):
    made = Topics(config, directory)
    yield made
    made.close()


def test_without_brokers_a_command_is_refused_and_nothing_changes(make_service, directory):
    service, _ = make_service(NOWHERE)
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
    assert [found.id for found in service.list_runs().runs] == [run], "a run that cannot be started is not created"


def test_a_stop_without_brokers_is_executed_and_published_when_a_broker_answers(
    make_service, directory, config, topics
):
    service, publisher = make_service(NOWHERE)
    done = service.stop_run(directory.path.name, "test")
    assert (done.state, directory.store.status().state) == ("succeeded", "STOPPED")
    with pytest.raises(Unreachable):
        publisher.poll()
    assert topics.commands() == []
    service, publisher = make_service(config)
    publisher.poll()
    assert [(record["command"], record["id"]) for record in topics.commands()] == [("stop", done.id)]
    assert topics.answers(done.id) == [(True, None)]
    publisher.poll()
    assert (len(topics.commands()), len(topics.answers(done.id)), service.database.pending_answers()) == (1, 1, [])


@pytest.mark.regression
def test_a_waiting_command_is_published_before_the_next_one(make_service, directory, config, topics):
    service, _ = make_service(NOWHERE)
    stopped = service.stop_run(directory.path.name, "test")
    _, publisher = make_service(config)
    now = time.time()
    start = {"id": "next", "command": "start", "issuer": "test", "time_s": now, "expires_s": now + 3600.0}
    publisher.publish(directory, start)
    assert [record["id"] for record in topics.commands()] == [stopped.id, "next"]


def test_a_service_killed_before_the_answer_sends_it_after_its_restart(make_service, directory, config, topics):
    service, _ = make_service(config)
    done = service.stop_run(directory.path.name, "test")
    assert (len(topics.commands()), topics.answers(done.id)) == (1, [])
    _, publisher = make_service(config)
    publisher.poll()
    assert (len(topics.commands()), topics.answers(done.id)) == (1, [(True, None)])


@pytest.mark.regression
def test_a_poll_during_publication_does_not_publish_a_command_twice(
    make_service, directory, config, topics, monkeypatch
):
    service, publisher = make_service(config)
    find = steppe.control.backends.publisher.find_manifest

    def meanwhile(*given):
        monkeypatch.setattr(steppe.control.backends.publisher, "find_manifest", find)
        publisher.poll()  # as the publisher's own thread may do at this moment
        return find(*given)

    monkeypatch.setattr(steppe.control.backends.publisher, "find_manifest", meanwhile)
    done = service.stop_run(directory.path.name, "test")
    assert [record["id"] for record in topics.commands()] == [done.id]


def test_a_service_killed_before_execution_answers_when_the_command_has_expired(
    make_service, directory, config, topics
):
    _, publisher = make_service(config)
    command = to_command(new_operation("pause", directory.path.name, "test"))
    publisher.publish(directory, command)
    service, publisher = make_service(config)
    publisher.poll()
    assert topics.answers(command["id"]) == [], "another service may be about to execute it"
    [due] = service.database.pending_answers()
    service.database.save_pending_answer(due._replace(command={**command, "expires_s": time.time() - 1.0}))
    publisher.poll()
    assert topics.answers(command["id"]) == [(False, NOT_STARTED)]


def test_a_command_that_cannot_be_executed_is_answered_with_the_reason(
    make_service, directory, config, topics, monkeypatch
):
    service, _ = make_service(config)

    def refuse(*_):
        raise Conflict("another process starts it")

    monkeypatch.setattr(process_host, "start_run_process", refuse)
    with pytest.raises(Conflict):
        service.start_run(directory.path.name, "test")
    [record] = topics.commands()
    assert topics.answers(record["id"]) == [(False, "another process starts it")]
    assert service.database.pending_answers() == []


def test_a_command_that_the_run_answered_is_not_answered_again(make_service, directory, config, topics):
    service, publisher = make_service(config)
    done = service.stop_run(directory.path.name, "test")
    details = {"id": done.id, "command": "stop", "obeyed": True, "message": None}
    event = EventReport(run=directory.id, kind="command", role="supervisor", details=details)
    directory.store.post(EVENTS, event.record())  # which the run's supervisor copies to Kafka
    publisher.poll()
    assert (topics.answers(done.id), service.database.pending_answers()) == ([], [])

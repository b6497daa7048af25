"""The service of a cluster's run: pods through a fake Orchestrator, and commands to roles over a real Kafka broker.

The tests act as the learner.
"""

from __future__ import annotations

import contextlib
import tomllib

import pytest

from steppe.control.backends.orchestrator import ACTOR, LEARNER, RoleStatus, RunSpec
from steppe.control.backends.publisher import CommandPublisher
from steppe.control.factory import make_kubernetes_service
from steppe.core.config.run import KafkaConfig, resolve_config
from steppe.core.contracts.errors import ConfigError, Conflict, SteppeError, Unreachable, UsageError
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import COMMANDS, EVENTS
from steppe.envs import probe
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.manifest import PUBLISHED_ORIGIN, RunManifest, wire_name
from steppe.runtimes.plan import make_plan
from steppe.transport.kafka.board import KafkaBoard, decode_record
from steppe.transport.kafka.client import (
    KafkaConnection,
    decode_headers,
    ensure_topics,
    get_watermarks,
    open_consumer,
    read_range,
)
from tests.support.kafka import settings
from tests.support.service import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
SETTINGS = 'env = "CartPole-v1"\nmode = "async"\nactors = 4\n'


class Pods:
    """A fake Orchestrator whose pods are ready immediately."""

    lost_reason = None

    def __init__(self):
        self.replicas = {ACTOR: 1, LEARNER: 1}
        self.settings, self.version, self.rolled = SETTINGS, 1, []

    def desired(self, role):
        return self.replicas[role]

    def scale(self, role, count):
        self.replicas[role] = count

    def observed(self, role, digest):
        return RoleStatus(ready=self.replicas[role], exit_code=0)

    def run_spec(self):
        return RunSpec("demo", self.settings, str(self.version))

    def set_run_spec(self, run, settings, version):
        assert version == str(self.version)
        self.settings, self.version = settings, self.version + 1

    def restart(self, role, digest):
        self.rolled.append(role)

    def close(self):
        pass


class Roles:
    """Reads and writes topics as the learner does."""

    def __init__(self, config, path):
        given = {"env": "CartPole-v1", "runtime": "kafka", "mode": "async", "actors": 4, "run_dir": path}
        made = resolve_config(("test", given)).config.model_copy(update={"kafka": config})
        self._connection = KafkaConnection(config, "demo")
        ensure_topics(self._connection)
        directory = RunDirectory.create(made, {}, {"id": "demo"})
        manifest = RunManifest.of(make_plan(made, probe(made.env, made.environment)), directory)
        directory.release()
        directory.store.close()
        self.board = KafkaBoard(KafkaConnection(config, wire_name(directory)))
        manifest.post(self.board)

    def commands(self, *, published):
        """Return the commands in the topic: those that the service executes itself, or those for the roles."""
        topic = self._connection.topic(COMMANDS)
        with open_consumer(self._connection) as consumer:
            messages = read_range(consumer, topic, 0, *get_watermarks(consumer, topic))
        chosen = [one for one in messages if (decode_headers(one)["origin"] == PUBLISHED_ORIGIN.encode()) is published]
        return [record for one in chosen if (record := decode_record(one))["command"] != "charter"]

    def answers(self):
        return [record["details"] for _, record in self.board.read(EVENTS) if record["kind"] == "command"]

    def acknowledge_next(self, kind):
        """Wait for the newest command, and report it as executed."""
        record = until(
            lambda: (commands := self.commands(published=False)) and commands[-1]["command"] == kind and commands[-1],
            kind,
        )
        details = {"id": record["id"], "command": kind, "obeyed": True, "message": None}
        if kind == "set":
            details |= {"values": record["values"], "live": record["live"], "version": 7}
        self.board.post(EVENTS, EventReport(run="demo", kind="command", role="learner", details=details).record())
        return record


@contextlib.contextmanager
def serving(pods, config):
    service = make_kubernetes_service(pods, kafka=config)
    if config is not None:
        service.commands.publisher = CommandPublisher(service, config)
    try:
        yield service
    finally:
        service.close()


def finished(service, operation):
    def poll():
        service.reconcile()
        found = service.get_operation(operation.id)
        return found if found.state != "pending" else None

    done = until(poll, f"{operation.kind} is finished")
    assert done.state == "succeeded", done
    return done


def state(service):
    service.reconcile()
    return service.get_run("demo").state


@pytest.fixture
def config(kafka):
    return settings(kafka)


@pytest.fixture
def roles(config, tmp_path):
    made = Roles(config, tmp_path / "learner")
    yield made
    made.board.close()


def test_live_hyperparameters_are_sent_over_kafka_and_others_replace_the_learner(config, roles):
    pods = Pods()
    with serving(pods, config) as service:
        until(lambda: state(service) == "RUNNING", "the run is running")

        requested = service.set_hyperparameters("demo", {"learning_rate": 0.0125}, "test")
        record = roles.acknowledge_next("set")
        assert (record["id"], record["values"], record["generation"]) == (
            requested.operation.id,
            {"learning_rate": 0.0125},
            1,
        )
        assert record["expires_s"] > record["time_s"]
        assert finished(service, requested.operation).message == "in effect from version 7"
        assert [effect.effect for effect in requested.effects] == ["takes effect with the next update"]
        assert pods.rolled == [], "the learner is not replaced"
        assert tomllib.loads(pods.settings)["agent"]["learning_rate"] == 0.0125, "a new learner starts with it"

        for kind, ask, after in (("pause", service.pause_run, "PAUSED"), ("resume", service.resume_run, "RUNNING")):
            operation = ask("demo", "test")
            assert roles.acknowledge_next(kind)["id"] == operation.id
            finished(service, operation)
            until(lambda after=after: state(service) == after, f"the run is {after}")
        assert pods.rolled == []
        assert pods.replicas == {ACTOR: 1, LEARNER: 1}

        change = service.set_hyperparameters("demo", {"learning_rate": 0.02, "max_grad_norm": 0.25}, "test")
        assert [effect.effect for effect in change.effects] == ["takes effect on restart"] * 2
        assert pods.rolled == [LEARNER]
        assert tomllib.loads(pods.settings)["agent"]["learning_rate"] == 0.02
        assert [record["command"] for record in roles.commands(published=False)] == ["set", "pause", "resume"]


def test_commands_that_the_cluster_executes_are_published_with_their_outcome(config, roles):
    with serving(Pods(), config) as service:
        until(lambda: state(service) == "RUNNING", "the run is running")
        done = [
            finished(service, service.scale_actors("demo", 3, "test")),
            finished(service, service.set_hyperparameters("demo", {"max_grad_norm": 0.25}, "test").operation),
            finished(service, service.stop_run("demo", "test")),
            finished(service, service.start_run("demo", "test")),
        ]
        service.commands.publisher.poll()
        commands = roles.commands(published=True)
        assert [(record["id"], record["command"]) for record in commands] == [(one.id, one.kind) for one in done]
        assert [record.get("actors") for record in commands] == [3, None, None, None]
        assert all(record["generation"] == 1 and record["issuer"] == "test" for record in commands)
        assert [(answer["id"], answer["obeyed"]) for answer in roles.answers()] == [(one.id, True) for one in done]


@pytest.mark.regression
def test_hyperparameters_that_the_environment_does_not_support_are_refused(config, roles):
    """CartPole has no continuous actions with bounds, so a learner with that setting would not start."""
    pods = Pods()
    with serving(pods, config) as service:
        until(lambda: state(service) == "RUNNING", "the run is running")

        def refused(values):
            try:
                service.set_hyperparameters("demo", values, "test", dry_run=True)
            except SteppeError as error:
                return str(error)
            raise AssertionError("accepted")

        message = "bounds_coef is for continuous actions, and CartPole-v1 has others: leave it out"
        until(lambda: refused({"bounds_coef": 0.5}) == message, "the service knows the run's environment")
        before = pods.settings
        for values in ({"bounds_coef": 0.5}, {"bounds_coef": 0.5, "max_grad_norm": 0.25}):
            with pytest.raises(ConfigError, match="bounds_coef is for continuous actions"):
                service.set_hyperparameters("demo", values, "test")
        assert (pods.settings, pods.rolled, roles.commands(published=False)) == (before, [], [])


@pytest.mark.regression
@pytest.mark.parametrize(
    ("brokers", "error", "message"),
    [
        (
            None,
            UsageError,
            "without Kafka the service does not know the environment of demo: start the service with --kafka",
        ),
        ("127.0.0.1:9", Conflict, "the learner of demo has not reported its environment yet: retry"),
    ],
)
def test_hyperparameters_are_refused_if_the_environment_must_be_known_and_is_not(brokers, error, message):
    pods = Pods()
    with serving(pods, None if brokers is None else KafkaConfig(address=brokers)) as service:
        until(lambda: state(service) == "RUNNING", "the run is running")
        before = pods.settings
        for dry_run in (True, False):
            for values in ({"bounds_coef": 0.5}, {"bounds_coef": 0.5, "max_grad_norm": 0.25}, {"policies": "own"}):
                with pytest.raises(
                    error, match=f"{next(iter(values))}: only some environments support it, and {message}"
                ):
                    service.set_hyperparameters("demo", values, "test", dry_run=dry_run)
        assert (pods.settings, pods.rolled, service.database.operations()) == (before, [], [])
        for values in ({"bounds_coef": 0.0}, {"bounds_coef": 0.0, "gamma": 0.5}):  # right in every environment
            assert service.set_hyperparameters("demo", values, "test", dry_run=True).effects


def test_an_operation_names_what_confirms_it(config, roles):
    """Pods show that a learner was replaced; the learner reports changed hyperparameters."""
    with serving(Pods(), config) as service:
        until(lambda: state(service) == "RUNNING", "the run is running")
        requested = [
            service.set_hyperparameters("demo", {"learning_rate": 0.01}, "test").operation,
            service.pause_run("demo", "test"),
            service.set_hyperparameters("demo", {"max_grad_norm": 0.25}, "test").operation,
            service.scale_actors("demo", 2, "test"),
        ]
        found = [service.get_operation(one.id) for one in requested]
        assert [one.settled_by for one in found] == ["run", "run", "cluster", "cluster"]
        assert [one.state for one in found] == ["pending", "pending", "succeeded", "succeeded"]


def test_a_run_that_was_stopped_while_paused_runs_after_it_is_started(config, roles):
    with serving(Pods(), config) as service:
        until(lambda: state(service) == "RUNNING", "the run is running")
        operation = service.pause_run("demo", "test")
        roles.acknowledge_next("pause")
        finished(service, operation)
        finished(service, service.stop_run("demo", "test"))
        until(lambda: state(service) == "STOPPED", "the service has read the state of the cluster")
        finished(service, service.start_run("demo", "test"))
        roles.acknowledge_next("resume")
        until(lambda: state(service) == "RUNNING", "the run is running again")


def test_without_brokers_nothing_changes(tmp_path):
    pods = Pods()
    with serving(pods, None) as service:
        with pytest.raises(UsageError, match="--kafka HOST:PORT"):
            service.pause_run("demo", "test")
        service.reconcile()
        assert (
            service.set_hyperparameters("demo", {"learning_rate": 0.01}, "test")
            .effects[0]
            .effect.endswith("on restart")
        )
        assert pods.rolled == [LEARNER], "the learner cannot receive commands"
    with serving(pods, KafkaConfig(address="127.0.0.1:9")) as service:
        until(lambda: state(service) == "RUNNING", "the run is running")
        before = (
            pods.version,
            dict(pods.replicas),
            service.database.desired_state("demo"),
            len(service.database.operations()),
        )
        for ask in (
            lambda: service.pause_run("demo", "test"),
            lambda: service.scale_actors("demo", 3, "test"),
            lambda: service.set_hyperparameters("demo", {"learning_rate": 0.02}, "test"),
            lambda: service.set_hyperparameters("demo", {"max_grad_norm": 0.2}, "test"),
        ):
            with pytest.raises(Unreachable, match="no Kafka broker answers"):
                ask()
        after = (
            pods.version,
            dict(pods.replicas),
            service.database.desired_state("demo"),
            len(service.database.operations()),
        )
        assert before == after

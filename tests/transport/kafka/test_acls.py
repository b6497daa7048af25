"""What docs/kafka.md says that each role must be allowed: enough for a run, on a broker that lets nobody do anything else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import KafkaError

from steppe.control.factory import make_external_service
from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.reports import EventReport, TrainingReport
from steppe.core.contracts.transport import EVALUATIONS, EVENTS
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.kafka.manifest import find_manifest, make_command
from steppe.transport.kafka.board import KafkaBoard
from steppe.transport.kafka.channel import ReadProgress
from steppe.transport.kafka.client import (
    DEAD_LETTERS,
    EXPERIENCES,
    MODEL_UPDATES,
    PROGRESS,
    KafkaConnection,
    ensure_topics,
    get_watermarks,
    import_kafka,
)
from steppe.transport.kafka.dev_broker import DevBroker, _free_port
from tests.support.kafka import PATIENCE_S, own_broker, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
STEPPE = Path(sys.executable).with_name("steppe")
PAGE = Path(__file__).parents[3] / "docs" / "kafka.md"
VERBS = {"read", "write", "describe", "describe_configs"}
PASSWORD = "a secret of this test"
MINE, THEIRS = "mine.", "theirs."
ROWS = {"actor": "actor", "learner": "learner", "manager": "manager", "controller": "who controls"}  # principal → row
ALL, REST = "trainer", "`steppe train`, `steppe serve`"  # who has the rights of every row, and of this one
PUBLISHING = ("transactional id", "steppe/", "write")
LACKING = {  # principal → the role it is, what it lacks of that role's row, and what it hears of
    "mute": ("actor", ("topic", EXPERIENCES, "write"), MINE + EXPERIENCES),
    "blind": ("actor", ("topic", MODEL_UPDATES, "read"), MINE + MODEL_UPDATES),
    "silent": ("actor", ("topic", "metrics.actors", "write"), MINE + "metrics.actors"),
    "unsigned": ("learner", PUBLISHING, "weights could not be published"),
    "ungrouped": ("learner", ("group", "steppe-", "read"), "Group authorization failed"),
    "unprinted": ("learner", ("topic", MODEL_UPDATES, "write"), "weights could not be published"),
}
WRITERS = {
    EXPERIENCES: {"actor", "learner"},
    PROGRESS: {"learner"},
    DEAD_LETTERS: {"actor", "learner", "manager", "controller"},
    MODEL_UPDATES: {"learner"},
    "commands.control": {"learner", "controller"},
    "metrics.training": {"learner"},
    "metrics.actors": {"actor"},
    "metrics.evaluations": {"manager"},
    "events": {"actor", "learner", "manager"},
}
SMALL = (
    "CartPole-v1", "-s", "mode=async", "-s", "actors=4", "-s", "envs=2", "-s", "hidden=[8]",
    "-s", "segment_steps=16", "-s", "epochs=1", "-s", "minibatch_size=16", "-s", "evaluation.episodes=2",
    "-s", "evaluation.every_steps=1000", "-s", "kafka.partitions=2",
)  # fmt: skip
LONG = (*SMALL, "-s", "steps=100000000")


@dataclass(frozen=True)
class Strict(DevBroker):
    """Whoever comes says who he is, and may do what he was allowed. The broker's own door is another."""

    def settings(self, port):
        plain = super().settings(port)
        controller = str(plain["listeners"]).rpartition(",")[2]
        internal = f"INTERNAL://{self.host}:{_free_port()}"
        return plain | {
            "listeners": f"CLIENT://{self.host}:{port},{internal},{controller}",
            "advertised.listeners": f"CLIENT://{self.host}:{port},{internal}",
            "listener.security.protocol.map": "CLIENT:SASL_PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "INTERNAL",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.client.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS;User:admin",
        }

    def format_arguments(self):
        names = (*ROWS, *LACKING, ALL, "stranger", "admin")
        users = [f"SCRAM-SHA-512=[name={name},password={PASSWORD}]" for name in names]
        return [*super().format_arguments(), *(word for user in users for word in ("--add-scram", user))]


def documented(row):
    """(kind of resource, its name or how it begins, operation) of one row of the page's table."""
    ((topics, besides),) = re.findall(rf"^\| {row} \|([^|]*)\|([^|]*)\|$", PAGE.read_text(), re.MULTILINE)
    for clause in topics.split(";"):
        verbs, names = VERBS & set(re.findall(r"\w+", clause.partition("`")[0])), re.findall(r"`([^`]+)`", clause)
        meant = [topic for topic in WRITERS for name in names if fnmatch(topic, name)]
        assert len(meant) >= len(names), f"{clause}: there is no such topic"
        yield from (("topic", topic, verb) for topic in meant for verb in verbs)
    for kind, name, verbs in re.findall(r"(transactional id|group) `([^`]+)…` \(([^)]*)\)", besides):
        yield from ((kind, name, verb) for verb in verbs.split(", "))


def binding(user, kind, name, verb):
    admin = import_kafka().admin
    kinds = {
        "topic": admin.ResourceType.TOPIC,
        "group": admin.ResourceType.GROUP,
        "transactional id": admin.ResourceType.TRANSACTIONAL_ID,
    }
    literal = (MINE + name, admin.ResourcePatternType.LITERAL)
    where = literal if kind == "topic" else (name, admin.ResourcePatternType.PREFIXED)
    allowed = (admin.AclOperation[verb.upper()], admin.AclPermissionType.ALLOW)
    return admin.AclBinding(kinds[kind], *where, f"User:{user}", "*", *allowed)


def bindings():
    for user, row in (*ROWS.items(), (ALL, REST)):
        yield from (binding(name, *rule) for name in (user, ALL) for rule in documented(row))
    for user, (role, lack, _) in LACKING.items():
        rules = list(documented(ROWS[role]))
        assert lack in rules
        yield from (binding(user, *rule) for rule in rules if rule != lack)


def known_as(address, user, prefix=MINE):
    return KafkaConfig(address=address, security="sasl", username=user, partitions=2, prefix=prefix)


@pytest.fixture(scope="module")
def strict(kafka, tmp_path_factory):
    usual = own_broker(tmp_path_factory.mktemp("strict"))
    broker = Strict(usual.home, usual.jars)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPPE_KAFKA_PASSWORD", PASSWORD)
        try:
            address = broker.up(0).address
            for prefix in (MINE, THEIRS):
                ensure_topics(KafkaConnection(known_as(address, "admin", prefix), ""))
            admin = KafkaConnection(known_as(address, "admin"), "").admin()
            for answer in admin.create_acls(list(dict.fromkeys(bindings())), request_timeout=30).values():
                answer.result()
            yield address
        finally:
            broker.down()


def as_role(user, role, address, run, *more):
    """The words of a command."""
    words = ["role", role, *more, "--kafka", address, "--run", run, "-s", f"kafka.prefix={MINE}"]
    return [*words, "-s", "kafka.security=sasl", "-s", f"kafka.username={user}"]


@contextmanager
def coming(host, user, role, address, run, runs, *more):
    """A role while it runs, which is a fork of `host`."""
    runs.mkdir()
    words = as_role(user, role, address, run, *more)
    process = host.start(words, {**os.environ, "STEPPE_RUNS": str(runs)}, runs.parent, runs)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def spoil(connection):
    """Put something into experiences that is no segment."""
    producer = connection.producer()
    about = [("run", connection.run.encode()), ("kind", b"segment")]
    producer.produce(connection.topic(EXPERIENCES), b"not a segment", b"key", 0, headers=about)
    assert producer.flush(PATIENCE_S) == 0


@pytest.mark.slow
def test_what_is_documented_is_enough_for_a_run_and_to_control_it(strict, torch_host, tmp_path, monkeypatch):
    config = known_as(strict, "admin")
    with ExitStack() as stack:
        started = {}
        for role in ("learner", "actor", "manager"):
            words = LONG if role == "learner" else ()
            started[role] = stack.enter_context(coming(torch_host, role, role, strict, "run", tmp_path / role, *words))
        wait_until(lambda: find_manifest(config, "run"), "a charter")
        connection = KafkaConnection(config, find_manifest(config, "run").run)
        spoil(connection)
        board = stack.enter_context(closing(KafkaBoard(connection)))
        wait_until(lambda: board.read(EVALUATIONS), "an evaluation")
        wait_until(lambda: dead(connection), "what is no segment was put aside")
        monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "controller"))
        service = stack.enter_context(closing(make_external_service("run", known_as(strict, "controller"))))
        wait_until(lambda: service.reconcile() or state(service) == "RUNNING", "it runs")
        asked = service.stop_run("run", "test")
        wait_until(lambda: service.reconcile() or service.get_operation(asked.id).state == "succeeded", "it is stopped")
        for role, process in started.items():
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, f"{role}: {errors}"


def dead(connection):
    with closing(connection.consumer()) as consumer:
        return get_watermarks(consumer, connection.topic(DEAD_LETTERS))[1] > 0


def state(service):
    runs = service.list_runs().runs
    return runs[0].state if runs else None


@pytest.mark.slow
def test_all_of_it_is_enough_to_train(strict, tmp_path):
    done = subprocess.run(
        [STEPPE, "train", *SMALL, "--steps", "500", "--runtime", "kafka", "--kafka", strict, "--name", "whole", "--json",
         "-s", f"kafka.prefix={MINE}", "-s", "kafka.security=sasl", "-s", f"kafka.username={ALL}"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "SUCCEEDED"
    events = RunDirectory(tmp_path / "runs" / "whole").store.read(EVENTS)
    assert [event for _, event in events if event["kind"] == "warning"] == []


@pytest.mark.slow
def test_who_lacks_something_ends_with_one_sentence(strict, torch_host, tmp_path):
    with coming(torch_host, "learner", "learner", strict, "other", tmp_path / "learner", *LONG):
        wait_until(lambda: find_manifest(known_as(strict, "admin"), "other"), "a charter")
        for number, user in enumerate(["stranger", *LACKING]):
            role, _, named = LACKING.get(user, ("actor", None, MINE + "commands.control"))
            run, more = ("other", ("--index", str(number))) if role == "actor" else (user, LONG)
            words = as_role(user, role, strict, run, *more)
            (tmp_path / user).mkdir()
            environ = {**os.environ, "STEPPE_RUNS": str(tmp_path / user / "runs")}
            done = torch_host.run(words, environ, tmp_path / user, tmp_path / user)
            assert done.returncode == 1, (user, done.stderr)
            last = done.stderr.strip().splitlines()[-1]
            assert last.startswith("steppe: "), (user, done.stderr)
            for part in (named, "authorization failed", "docs/kafka.md"):
                assert part in last, (user, done.stderr)


@pytest.mark.slow
def test_nothing_else_is_allowed(strict):
    topics = [prefix + name for prefix in (MINE, THEIRS) for name in WRITERS]
    for user in (*ROWS, "stranger"):
        connection = KafkaConnection(known_as(strict, user), "run")
        rules = set(documented(ROWS[user])) if user in ROWS else set()
        assert readable(connection, topics) == {
            MINE + name for kind, name, verb in rules if (kind, verb) == ("topic", "read")
        }
        assert writable(connection, topics) == {MINE + name for name, users in WRITERS.items() if user in users}, user
        assert may_publish(connection) == (user == "learner"), user
        assert not may_create(connection), user


@pytest.mark.slow
def test_forgeries_are_refused_by_the_brokers(strict):
    """Well-formed lies that no reader can see through, by principals that may not write where they would work."""
    run = "forged~12345678"
    own = [("run", run.encode())]
    begin = [("kind", b"begin"), *own, ("actor", b"\0" * 8)]
    training = TrainingReport(run="forged", version=9, updates=9, env_steps=9, train_s=1.0, final=True).record()
    stop = json.dumps(make_command("stop", "test")).encode()
    forged = [
        ("actor", "commands.control", stop, own),
        ("manager", "commands.control", stop, own),
        ("actor", "metrics.training", json.dumps(training).encode(), own),
        ("actor", MODEL_UPDATES, b"", [*own, ("press", b"0" * 32)]),
        ("controller", EXPERIENCES, None, begin),
        ("manager", PROGRESS, msgspec.msgpack.encode(ReadProgress(0, incarnation=9)), own),
        ("stranger", EVENTS, json.dumps(EventReport(run="forged", kind="note").record()).encode(), own),
    ]
    denied = import_kafka().KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert {(user, topic): outcome(strict, run, user, topic, *rest) for user, topic, *rest in forged} == {
        (user, topic): denied for user, topic, *_ in forged
    }
    assert outcome(strict, run, "controller", "commands.control", stop, own) is None, "it is the right that is missing"


def outcome(strict, run, user, topic, value, headers):
    """The code of the error with which brokers refuse a record; None where they take it."""
    connection, found = KafkaConnection(known_as(strict, user), run), []
    producer = connection.producer(**{"enable.idempotence": False})
    told = lambda error, message: found.append(error and error.code())  # noqa: E731
    producer.produce(connection.topic(topic), value, connection.key(0), 0, on_delivery=told, headers=headers)
    assert producer.flush(PATIENCE_S) == 0
    [code] = found
    return code


def readable(connection, topics):
    """Those that it may know of, and whose first message, or end, comes."""
    kafka = import_kafka()
    good, bad = (None, KafkaError._PARTITION_EOF), KafkaError.TOPIC_AUTHORIZATION_FAILED
    with closing(connection.consumer()) as consumer:
        about = {topic: consumer.list_topics(topic, PATIENCE_S).topics[topic].error for topic in topics}
        verdicts = {topic: error.code() for topic, error in about.items() if error is not None}
        known = [topic for topic in topics if topic not in verdicts]
        consumer.assign([kafka.TopicPartition(topic, 0, kafka.OFFSET_BEGINNING) for topic in known])
        deadline = time.monotonic() + PATIENCE_S
        while len(verdicts) < len(topics):
            assert time.monotonic() < deadline, set(topics) - set(verdicts)
            message = consumer.poll(1.0)
            if message is not None and message.topic() in known:
                verdicts[message.topic()] = message.error() and message.error().code()
    assert set(verdicts.values()) <= {*good, bad}
    return {topic for topic, verdict in verdicts.items() if verdict in good}


def writable(connection, topics):
    """Those that take a message, which is nobody's."""
    found, producer = {}, connection.producer(**{"enable.idempotence": False})
    for topic in topics:
        producer.produce(
            topic, b"nothing", b"key", 0, on_delivery=lambda error, message: found.update({message.topic(): error})
        )
    assert producer.flush(PATIENCE_S) == 0
    refused = {topic: error.code() for topic, error in found.items() if error is not None}
    assert set(refused.values()) <= {import_kafka().KafkaError.TOPIC_AUTHORIZATION_FAILED}
    return set(found) - set(refused)


def may_publish(connection):
    """Whether it can take the place of a run's learner."""
    named = {"transactional.id": f"steppe/{MINE}nobody/learner", "message.timeout.ms": 30_000}
    producer = connection.producer(**named)
    refused = refusal(lambda: producer.init_transactions(PATIENCE_S))
    assert refused in (None, import_kafka().KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    return refused is None


def may_create(connection):
    admin = connection.admin()
    (made,) = admin.create_topics([import_kafka().admin.NewTopic(f"{MINE}more", 1, 1)]).values()
    refused = refusal(lambda: made.result(PATIENCE_S))
    assert refused in (None, import_kafka().KafkaError.TOPIC_AUTHORIZATION_FAILED)
    return refused is None


def refusal(act):
    """The code of the broker's answer; None when it is done."""
    try:
        act()
    except import_kafka().KafkaException as error:
        return error.args[0].code()
    return None

"""The `kafka` runtime with a real broker: the same weights as inline, through kills, stops and roles that come alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.transport import ACTORS, COMMANDS, EVENTS, TOPICS, TRAINING
from steppe.records.checkpoints import Checkpoints
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from tests.support.cases import rest_slow
from tests.support.chaos_envs import PACE
from tests.support.commands import PATIENCE_S, family, free_port, opened, status, trained, under_way, wait_until
from tests.support.kafka import own_broker, settings
from tests.support.kafka_runs import PPO, SMALL, STEPPE, alone, connection_to, described, on, reports, told, words

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

DQN = {
    "algo": "dqn", "env": "steppe/Identity-v0", "segment_steps": 16, "batch_size": 32, "learning_starts": 200,
    "samples_per_insert": 8.0, "prioritized": True, "n_step": 3,
}  # fmt: skip
FIGURES = ("weights_sha256", "env_steps", "updates", "version", "eval_return_mean", "eval_return_std", "eval_episodes")
PACED = {"environment.wrappers": ["tests.support.chaos_envs:Paced"], "environment.vector": "loop"}
await_records = partial(wait_until, every_s=0.5)  # on Kafka, whose records are all read for each answer


def figures(result):
    return {name: result.summary[name] for name in FIGURES}


def run(tmp_path, name, **given):
    result = run_experiment(resolve_config(("call", {**SMALL, "seed": 7, "run_dir": tmp_path / name, **given})))
    assert result.state == "SUCCEEDED", result.message
    return result


@pytest.mark.parametrize(
    "case",
    rest_slow(
        {**PPO, "flow.ahead": 1}, {**PPO, "flow.ahead": 0, "kafka.compression": "zstd"}, {**DQN, "flow.ahead": 1}
    ),
    ids=["ppo", "ppo, strictly on-policy, zstd", "dqn"],
)
def test_sync_is_the_same_as_inline(case, kafka, tmp_path):
    plain = {key: value for key, value in case.items() if not key.startswith("kafka.")}
    inline = run(tmp_path, "one", mode="sync", actors=2, runtime="inline", **plain)
    beside = run(tmp_path, "two", mode="sync", actors=2, **on(kafka, **case))
    assert figures(beside) == figures(inline)


@pytest.mark.slow
def test_single_is_the_same_as_inline(kafka, tmp_path):
    inline = run(tmp_path, "one", mode="single", runtime="inline", **PPO)
    assert figures(run(tmp_path, "two", mode="single", **on(kafka, **PPO))) == figures(inline)


@pytest.mark.slow
def test_async_learns_from_what_comes(kafka, tmp_path):
    result = run(tmp_path, "run", mode="async", actors=2, **on(kafka, **PPO))
    assert result.env_steps >= 1500
    assert result.updates > 0
    assert result.summary["eval_episodes"] == 5


def expected(tmp_path, given):
    plain = {key: value for key, value in given.items() if not key.startswith("kafka.") and key != "runtime"}
    return run(tmp_path, "expected", **{**plain, "runtime": "inline"})


def role_of(process, place):
    """The process that writes this place's log."""
    for pid in family(process.pid):
        try:
            log = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:
            continue
        if Path(log).name == f"{place}.log":
            return pid
    return None


@pytest.mark.slow
def test_killed_roles_cost_nothing(kafka, tmp_path, monkeypatch):
    """Sync: whatever is killed, the weights at the end are those of a run where nothing was."""
    line, given = words(kafka, steps=4000, restarts=3, **PACED)
    monkeypatch.setenv(PACE, "0.004")  # of a step: the run lasts 8 s and more, so that all are killed on its way

    def kinds():
        return [event["kind"] for _, event in opened().store.read(EVENTS)]

    with under_way([STEPPE, "train", *line, "--json"]) as process:
        wait_until(lambda: trained() and Checkpoints(opened().checkpoints).latest() is not None, process)
        for victim in ("manager", "actor-1"):
            os.kill(role_of(process, victim), signal.SIGKILL)
        wait_until(lambda: kinds().count("restart") == 2, process)
        os.kill(role_of(process, "learner"), signal.SIGKILL)
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    monkeypatch.delenv(PACE)
    assert json.loads(out)["weights_sha256"] == expected(tmp_path, given).summary["weights_sha256"]
    assert "resume" in kinds()
    members = [event["details"] for _, event in opened().store.read(EVENTS) if event["kind"] == "member"]
    assert {(one["actor"], one["replaced"]) for one in members} >= {(0, False), (1, False), (1, True)}


@pytest.mark.slow
def test_stopped_and_resumed(kafka, tmp_path):
    """With a buffer that learns from what it held: what the checkpoint has of it, and what was in the topic behind that."""
    line, given = words(kafka, DQN, steps=8000)
    with under_way([STEPPE, "train", *line]) as process:
        wait_until(trained, process)
        subprocess.run([STEPPE, "stop", "run", "--wait"], check=True, timeout=PATIENCE_S, capture_output=True)
        process.communicate(timeout=PATIENCE_S)
    assert status().state == "STOPPED"
    result = resume("run")
    assert result.summary["weights_sha256"] == expected(tmp_path, given).summary["weights_sha256"]


@pytest.mark.slow
def test_everything_killed_and_resumed_at_brokers_that_know_nothing(kafka, tmp_path):
    """The checkpoint says where each actor goes on when the topics do not: here they are other topics."""
    line, given = words(kafka, steps=8000)
    with under_way([STEPPE, "train", *line]) as process:
        wait_until(lambda: trained() and Checkpoints(opened().checkpoints).latest() is not None, process)
        os.kill(process.pid, signal.SIGKILL)  # what it had started ends with it
        process.communicate(timeout=PATIENCE_S)
    record = json.loads((opened().path / "run.json").read_text())
    record["config"]["kafka.prefix"] = settings(kafka).prefix
    (opened().path / "run.json").write_text(json.dumps(record))
    result = resume("run")
    assert result.state == "SUCCEEDED", result.message
    assert result.summary["weights_sha256"] == expected(tmp_path, given).summary["weights_sha256"]


@pytest.mark.slow
def test_roles_that_come_alone_in_any_order(kafka, torch_host, tmp_path, monkeypatch):
    """Actors first, each with a directory of its own, as on other machines; then the manager, then the learner."""
    given = {**SMALL, **PPO, "mode": "sync", "actors": 2, "seed": 7}
    prefix = settings(kafka).prefix
    about = {key: value for key, value in given.items() if key != "env"} | {"kafka.partitions": 2}
    lines = {
        "actor-a": alone("actor", kafka, prefix),
        "actor-b": alone("actor", kafka, prefix),
        "manager": alone("manager", kafka, prefix),
        "learner": [*alone("learner", kafka, prefix, "CartPole-v1"), *described(about)],
    }
    with ExitStack() as stack:
        processes = {}
        for name, line in lines.items():
            monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / name))
            processes[name] = stack.enter_context(under_way(line, torch_host))
        for name, process in processes.items():
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, f"{name}: {errors}"
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "learner"))
    saved = Checkpoints(opened().checkpoints).latest()
    assert saved.weights.sha256() == expected(tmp_path, given).summary["weights_sha256"]
    assert not (tmp_path / "actor-a" / "run" / "checkpoints" / "00000001").exists()


@pytest.mark.long
@pytest.mark.slow
def test_rounds_go_on_without_a_member_that_is_gone_and_with_the_next(kafka, torch_host, tmp_path, monkeypatch):
    """Nobody starts the killed actor again: the other goes on alone, until somebody takes the place."""
    given = {**SMALL, **PPO, "steps": 10**8, "mode": "sync", "actors": 2, "kafka.replan_s": 4, "kafka.partitions": 2}
    given |= PACED
    monkeypatch.setenv(PACE, "0.002")  # of a step, so that they use little of the processor
    prefix = settings(kafka).prefix

    def plans():
        found = told(connection_to(kafka, prefix), EVENTS)
        return [event["details"] for event in found if event["kind"] == "plan"]

    with ExitStack() as stack:

        def start(name, line):
            monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / name))
            return stack.enter_context(under_way(line, torch_host))

        first = [start(f"actor-{index}", alone("actor", kafka, prefix, "--index", str(index))) for index in (0, 1)]
        learner = start("learner", alone("learner", kafka, prefix, "CartPole-v1", *described(given)))
        await_records(lambda: reports(kafka, prefix) and reports(kafka, prefix)[-1]["version"] > 2, learner)
        refused = start("learner", alone("learner", kafka, prefix))  # a second learner of the same directory
        _, errors = refused.communicate(timeout=PATIENCE_S)
        assert refused.returncode == 4
        assert "is in use by process" in errors
        first[1].kill()
        await_records(plans, learner)
        assert plans()[0]["members"] == [0]
        steps = reports(kafka, prefix)[-1]["env_steps"]
        await_records(lambda: reports(kafka, prefix)[-1]["env_steps"] > steps + 1000, learner)
        start("again", alone("actor", kafka, prefix, "--index", "1"))
        await_records(lambda: len(plans()) == 2, learner)
        joined = plans()[1]
        assert joined["members"] == [0, 1]
        connection = connection_to(kafka, prefix)

        def at_work():
            return {report["actor"] for report in told(connection, ACTORS) if report["version"] > joined["version"] + 2}

        await_records(lambda: at_work() == {0, 1}, learner)
        commands = [record for record in told(connection, COMMANDS) if record["command"] == "plan"]
        assert [record["members"] for record in commands] == [[0, 1], [0], [0, 1]]
        assert not reports(kafka, prefix)[-1]["dropped"]
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(PATIENCE_S) == 0
        assert Checkpoints(tmp_path / "learner" / "run" / "checkpoints").latest() is not None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may hide a directory")
def test_a_second_learner_elsewhere_ends_the_first(kafka, tmp_path, monkeypatch):
    """Of two learners of one run only the later can publish; the earlier one says why it ends."""
    given = {**SMALL, **PPO, "steps": 10**8, "mode": "async", "actors": 1, "kafka.partitions": 2}
    prefix, hidden = settings(kafka).prefix, f'mount -t tmpfs none {tmp_path / "first"} && exec "$@"'
    lines = {
        "first": alone("learner", kafka, prefix, "CartPole-v1", *described(given)),
        "actor": alone("actor", kafka, prefix),
        "second": ["unshare", "-m", "sh", "-c", hidden, "sh", *alone("learner", kafka, prefix)],
    }
    with ExitStack() as stack:
        processes = {}
        for name, line in lines.items():
            await_records(lambda: not processes or reports(kafka, prefix), processes.get("first"))
            monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / name))
            processes[name] = stack.enter_context(under_way(line))
        _, errors = processes["first"].communicate(timeout=PATIENCE_S)
        assert processes["first"].returncode != 0
        assert "another learner has taken over" in errors
        assert processes["second"].poll() is None


@pytest.mark.slow
def test_a_topic_that_is_deleted_ends_the_run_and_a_fresh_one_goes_on(kafka, tmp_path):
    line, given = words(kafka, steps=10**8, mode="async")
    with under_way([STEPPE, "train", *line]) as process:
        wait_until(lambda: trained() and Checkpoints(opened().checkpoints).latest() is not None, process)
        connection = connection_to(kafka, given["kafka.prefix"])
        admin = connection.admin()
        for answer in admin.delete_topics([connection.topic("experiences")]).values():
            answer.result()
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert connection.topic("experiences") in errors
    assert (status().state, connection.topic("experiences") in status().message) == ("FAILED", True)
    steps = opened().store.read(TRAINING)[-1][1]["env_steps"]
    result = resume("run", steps=steps + 1000)
    assert result.state == "SUCCEEDED", result.message
    assert result.env_steps >= steps + 1000


@pytest.mark.slow
def test_messages_that_are_none_of_ours_do_not_matter(kafka, tmp_path):
    """Of a schema from the future, or nobody's, on every topic that the run reads."""
    line, given = words(kafka, steps=10**8, mode="async")
    with under_way([STEPPE, "train", *line]) as process:
        wait_until(trained, process)
        connection = connection_to(kafka, given["kafka.prefix"])
        about = [
            ("run", connection.run.encode()),
            ("kind", b"segment"),
            ("actor", bytes(8)),
            ("life", b"\xff" * 7 + b"\x00"),
        ]
        producer = connection.producer()
        for topic in ("experiences", "model_updates", "experiences.progress", *TOPICS):
            for value in (b"not a record", b"[]", b"\x00\xff", b"{}", b"[" * 5_000):
                producer.produce(
                    connection.topic(topic), value, b"key", 0, headers=[*about, ("schema", b"\x63" + bytes(7))]
                )
        assert producer.flush(PATIENCE_S) == 0
        wait_until(lambda: newest_report()["dropped"].get("rejected", 0) >= 3, process)
        steps = newest_report()["env_steps"]
        wait_until(lambda: newest_report()["env_steps"] > steps + 500, process)
        flow = newest_report()["stats"]
        assert flow["kafka/segments"] > 3
        assert flow["kafka/bytes"] > flow["kafka/segments"] * 4 * 32 * 4 * 4, (
            "an observation has four numbers of four bytes"
        )
        assert flow["kafka/lag"] >= 0
        assert flow["kafka/age_s"] >= 0
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert status().state == "STOPPED", errors
    warned = [event["details"]["message"] for _, event in opened().store.read(EVENTS) if event["kind"] == "warning"]
    assert any("refused and parked in" in words for words in warned)


def newest_report():
    return opened().store.read(TRAINING)[-1][1]


@pytest.mark.slow
def test_no_broker_is_one_sentence(tmp_path):
    done = subprocess.run(
        [STEPPE, "train", "CartPole-v1", "--runtime", "kafka", "--kafka", "127.0.0.1:9"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "no Kafka broker answers at 127.0.0.1:9" in done.stderr
    assert "steppe kafka up" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.regression
def test_a_broker_that_is_away_ends_nobody(kafka, torch_host, tmp_path, monkeypatch):
    """Roles that are started while it is away wait for it; those at work when it is killed, and a run of `steppe train`, go on
    after its restart."""
    broker, prefix, port = own_broker(tmp_path / "broker"), "away.", free_port()
    address = f"{broker.host}:{port}"
    given = {**SMALL, **PPO, **PACED, "steps": 1500, "mode": "sync", "actors": 1, "seed": 7, "kafka.partitions": 2}
    line, wanted = words(address, **PACED)
    monkeypatch.setenv(PACE, "0.01")  # of a step: the broker is killed on the way of both
    try:
        with ExitStack() as stack:
            processes = {}
            for name, more in (("actor", []), ("manager", []), ("learner", ["CartPole-v1", *described(given)])):
                monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / name))
                processes[name] = stack.enter_context(under_way(alone(name, address, prefix, *more), torch_host))
            broker.up(port)
            monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "whole"))
            whole = processes["whole"] = stack.enter_context(under_way([STEPPE, "train", *line]))
            learner = processes["learner"]
            wait_until(lambda: (tmp_path / "learner" / "run" / "run.json").exists(), learner)
            await_records(lambda: reports(address, prefix), learner)
            wait_until(trained, whole)
            broker.kill()
            broker.up(port)
            for name, process in processes.items():
                _, errors = process.communicate(timeout=PATIENCE_S)
                assert process.returncode == 0, f"{name}: {errors}"
    finally:
        broker.down()
    monkeypatch.delenv(PACE)
    for name, about in (("learner", given), ("whole", wanted)):
        monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / name))
        saved = Checkpoints(opened().checkpoints).latest()
        assert saved.weights.sha256() == expected(tmp_path / name, about).summary["weights_sha256"]

"""Commands over Kafka: each carried out once, by who it is for, and answered; a changed hyperparameter has its effect."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager

import pytest

from steppe.core.contracts.transport import ACTORS, COMMANDS, EVENTS, TRAINING
from steppe.records.checkpoints import Checkpoints
from steppe.runtimes.kafka.manifest import make_command
from steppe.transport.kafka.board import KafkaBoard
from tests.support.commands import PATIENCE_S, opened, status, trained, under_way, wait_until
from tests.support.kafka import settings
from tests.support.kafka_runs import PPO, SMALL, STEPPE, alone, answers, connection_to, described, told, words

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@contextmanager
def speaking(kafka, prefix):
    board = KafkaBoard(connection_to(kafka, prefix), "test")
    try:
        yield board
    finally:
        board.close()


def bad_commands():
    """Reason → a command that is ignored for it."""
    return {
        "it has expired": {**make_command("set", "test", values={"learning_rate": 1.0}), "expires_s": 1.0},
        "hidden cannot change": make_command("set", "test", values={"hidden": [3]}),
        "agent.learning_rate": make_command("set", "test", values={"learning_rate": -1.0}),
        "it sets nothing": make_command("set", "test"),
        "this command is unknown": make_command("explode", "test"),
        "it is for the run 'another'": make_command("stop", "test", run="another"),
        "it is for generation 99": make_command("stop", "test", generation=99),
    }


def require_refused(answers):
    for reason, record in bad_commands().items():
        found = [one for one in answers if one["command"] == record["command"] and reason in str(one.get("message"))]
        assert len(found) == 1, (reason, answers)
        assert not found[0]["obeyed"]


@pytest.mark.slow
def test_a_supervised_run(kafka):
    line, given = words(kafka, steps=10**8, mode="async", actors=1, **{"flow.max_actors": 3})
    bad, change = bad_commands(), make_command("set", "test", values={"learning_rate": 1e-5, "entropy_coef": 0.125})
    with under_way([STEPPE, "train", *line]) as process:
        wait_until(trained, process)
        with speaking(kafka, given["kafka.prefix"]) as board:
            for record in (change, change, *bad.values()):
                board.post(COMMANDS, record)
            wait_until(lambda: len(answers()) == 2 + len(bad), process)
            (taken,) = [one for one in answers() if one["obeyed"]]
            assert (taken["role"], taken["values"]) == ("learner", change["values"])
            assert taken["version"] >= 0
            assert taken["updates"] > 0
            require_refused(answers())
            assert "it was executed before" in [one.get("message") for one in answers()]
            wait_until(lambda: len(rates(taken)) > 2, process)
            assert rates(taken) == pytest.approx([1e-5] * len(rates(taken)))
            require_scaled(board, process)
            for word, state in (("pause", "PAUSED"), ("resume", "RUNNING"), ("stop", "STOPPED")):
                board.post(COMMANDS, make_command(word, "test"))
                wait_until(lambda state=state: status().state == state)
        process.communicate(timeout=PATIENCE_S)
        done = [one["command"] for one in answers() if one["obeyed"] and one["role"] == "supervisor"]
        assert done == ["scale", "scale", "pause", "resume", "stop"]


def require_scaled(board, process):
    """From one actor to three and back; then what is repeated, late, another's, or too much changes nothing."""
    more, fewer = make_command("scale", "test", actors=3), make_command("scale", "test", actors=1)
    for asked in (more, fewer):
        board.post(COMMANDS, asked)
        wait_until(lambda asked=asked: len(running_actors()) == asked["actors"], process)
        assert [one["obeyed"] for one in replies(asked)] == [True]
    begun = opened().store.newest(ACTORS)
    refused = {
        "it was executed before": more,
        "it has expired": {**make_command("scale", "test", actors=2), "expires_s": 1.0},
        "it is for the run 'another'": make_command("scale", "test", actors=2, run="another"),
        "must be from 0 to 3": make_command("scale", "test", actors=4),
        "the run is under way already": make_command("start", "test"),
    }
    for reason, asked in refused.items():
        board.post(COMMANDS, asked)
        wait_until(lambda asked=asked, reason=reason: reason in str(replies(asked)[-1:]), process)
        assert not replies(asked)[-1]["obeyed"]
    reported = lambda: [report for _, report in opened().store.read(ACTORS, begun)]  # noqa: E731
    wait_until(lambda: len(reported()) > 2, process)
    assert {report["actor"] for report in reported() if report["state"] == "running"} == {0}


def replies(asked):
    return [one for one in answers() if one["id"] == asked["id"]]


def rates(taken):
    """What the learner learned with, well after it took the change over."""
    reports = [report for _, report in opened().store.read(TRAINING) if report["updates"] > taken["updates"]]
    return [report["stats"].get("learning_rate") for report in reports[2:]]


def running_actors():
    """Those whose newest report, no longer ago than some heartbeats, says that they run."""
    newest = {report["actor"]: report for _, report in opened().store.read(ACTORS)}
    return [actor for actor, report in newest.items() if report["state"] == "running" and _recent(report)]


def _recent(report):
    return time.time() - report["time_s"] < 10.0


@pytest.mark.slow
def test_roles_that_nobody_supervises(kafka, torch_host, tmp_path, monkeypatch):
    """Each role answers for itself; the learner says what it took over, and from which version on."""
    given = {**SMALL, **PPO, "steps": 10**8, "mode": "async", "actors": 1, "kafka.partitions": 2}
    prefix, bad = settings(kafka).prefix, bad_commands()
    with ExitStack() as stack:
        processes = {}
        for name, more in (("learner", ["CartPole-v1", *described(given)]), ("actor", [])):
            monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / name))
            processes[name] = stack.enter_context(under_way(alone(name, kafka, prefix, *more), torch_host))
        learner = processes["learner"]
        wait_until(lambda: (tmp_path / "learner" / "run" / "run.json").exists(), learner)
        wait_until(lambda: connection_to(kafka, prefix) is not None, learner)
        connection = connection_to(kafka, prefix)
        events = lambda: told(connection, EVENTS)  # noqa: E731
        wait_until(lambda: told(connection, TRAINING) and told(connection, ACTORS), learner)
        with speaking(kafka, prefix) as board:
            change = make_command("set", "test", values={"learning_rate": 1e-5})
            for record in (change, change, make_command("scale", "test", actors=3), *bad.values()):
                board.post(COMMANDS, record)
            for role in processes:
                wait_until(lambda role=role: len(by(role, events())) >= len(bad) + 2, processes[role])
            wait_until(lambda: any(one["obeyed"] for one in by("learner", events())), learner)
            (taken,) = [one for one in by("learner", events()) if one["obeyed"]]
            assert (taken["values"], taken["live"]) == (change["values"], ["learning_rate"])
            assert taken["version"] >= 0
            for role in ("learner", "actor-0"):
                require_refused(by(role, events()))
                reasons = [str(one.get("message")) for one in by(role, events())]
                assert "it was executed before" in reasons
                assert any("no supervisor" in reason for reason in reasons)
            board.post(COMMANDS, make_command("pause", "test"))
            wait_until(lambda: obeyed("pause", events()) == {"learner", "actor-0"}, learner)
            wait_until(lambda: told(connection, ACTORS)[-1]["state"] == "paused", learner)
            board.post(COMMANDS, make_command("resume", "test"))
            steps = told(connection, TRAINING)[-1]["env_steps"]
            wait_until(lambda: told(connection, TRAINING)[-1]["env_steps"] > steps, learner)
            board.post(COMMANDS, make_command("stop", "test"))
        for name, process in processes.items():
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, f"{name}: {errors}"
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "learner"))
    assert Checkpoints(opened().checkpoints).latest() is not None


def by(role, events):
    return [one for one in answers(events) if one["role"].startswith(role)]


def obeyed(word, events):
    return {one["role"] for one in answers(events) if one["command"] == word and one["obeyed"]}

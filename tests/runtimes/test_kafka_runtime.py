"""The `kafka` runtime with a real broker: the same weights as inline, through kills, stops and roles that come alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from command_kit import PATIENCE_S, family, opened, status, trained, under_way, wait_until
from kafka_kit import settings

from steppe.core.config import resolve
from steppe.core.links import COMMANDS, EVENTS, TRAINING
from steppe.loops.main import run_experiment
from steppe.loops.resuming import resume
from steppe.records.checkpoints import Checkpoints
from steppe.runtimes.kafka_charter import command, find_charter, wire_name
from steppe.transport.kafka import Connection
from steppe.transport.kafka_board import KafkaBoard

pytestmark = pytest.mark.integration

STEPPE = Path(sys.executable).with_name("steppe")
SMALL = {"steps": 1500, "envs": 4, "hidden": (16, 16), "evaluation.episodes": 5, "evaluation.every_steps": 400}
PPO = {"algo": "ppo", "env": "CartPole-v1", "segment_steps": 32, "minibatch_size": 64, "epochs": 2}
DQN = {
    "algo": "dqn", "env": "steppe/Identity-v0", "segment_steps": 16, "batch_size": 32, "learning_starts": 200,
    "samples_per_insert": 8.0, "prioritized": True, "n_step": 3,
}  # fmt: skip
FIGURES = ("weights_sha256", "env_steps", "updates", "version", "eval_return_mean", "eval_return_std", "eval_episodes")


def figures(result):
    return {name: result.summary[name] for name in FIGURES}


def on(kafka, **more):
    found = settings(kafka)
    return {"runtime": "kafka", "kafka.address": kafka, "kafka.prefix": found.prefix, "kafka.partitions": 2, **more}


def run(tmp_path, name, **given):
    result = run_experiment(resolve(("call", {**SMALL, "seed": 7, "run_dir": tmp_path / name, **given})))
    assert result.state == "SUCCEEDED", result.message
    return result


@pytest.mark.parametrize(
    "case",
    [{**PPO, "flow.ahead": 1}, {**PPO, "flow.ahead": 0, "kafka.compression": "zstd"}, {**DQN, "flow.ahead": 1}],
    ids=["ppo", "ppo, strictly on-policy, zstd", "dqn"],
)
def test_sync_is_the_same_as_inline(case, kafka, tmp_path):
    plain = {key: value for key, value in case.items() if not key.startswith("kafka.")}
    inline = run(tmp_path, "one", mode="sync", actors=2, runtime="inline", **plain)
    beside = run(tmp_path, "two", mode="sync", actors=2, **on(kafka, **case))
    assert figures(beside) == figures(inline)


def test_single_is_the_same_as_inline(kafka, tmp_path):
    inline = run(tmp_path, "one", mode="single", runtime="inline", **PPO)
    assert figures(run(tmp_path, "two", mode="single", **on(kafka, **PPO))) == figures(inline)


def test_async_learns_from_what_comes(kafka, tmp_path):
    result = run(tmp_path, "run", mode="async", actors=2, **on(kafka, **PPO))
    assert result.env_steps >= 1500
    assert result.updates > 0
    assert result.summary["eval_episodes"] == 5


def words(kafka, **more):
    given = on(kafka, **{**SMALL, **PPO, "mode": "sync", "actors": 2, "seed": 7, "checkpoint.every_s": 0.2, **more})
    pairs = {key: value for key, value in given.items() if key not in ("env", "runtime", "kafka.address")}
    named = [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in pairs.items()]
    sets = [word for pair in named for word in ("-s", pair)]
    return ["CartPole-v1", "--runtime", "kafka", "--kafka", kafka, "--name", "run", *sets], given


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


@pytest.mark.parametrize("victim", ["actor-1", "learner", "manager"])
def test_a_killed_role_costs_nothing(victim, kafka, tmp_path):
    """Sync: whatever is killed, the weights at the end are those of a run where nothing was."""
    line, given = words(kafka, steps=6000, restarts=3)
    with under_way([STEPPE, "train", *line, "--json"]) as process:
        wait_until(lambda: trained() and Checkpoints(opened().checkpoints).latest() is not None, process)
        os.kill(role_of(process, victim), signal.SIGKILL)
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
    assert json.loads(out)["weights_sha256"] == expected(tmp_path, given).summary["weights_sha256"]
    kinds = [event["kind"] for _, event in opened().store.read(EVENTS)]
    assert ("resume" if victim == "learner" else "restart") in kinds


def test_stopped_and_resumed(kafka, tmp_path):
    line, given = words(kafka, steps=8000)
    with under_way([STEPPE, "train", *line]) as process:
        wait_until(trained, process)
        subprocess.run([STEPPE, "stop", "run", "--wait"], check=True, timeout=PATIENCE_S, capture_output=True)
        process.communicate(timeout=PATIENCE_S)
    assert status().state == "STOPPED"
    result = resume("run")
    assert result.summary["weights_sha256"] == expected(tmp_path, given).summary["weights_sha256"]


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


def alone(kind, kafka, prefix, *more):
    return [STEPPE, "role", kind, *more, "--kafka", kafka, "--run", "run", "-s", f"kafka.prefix={prefix}"]


def described(given):
    pairs = [f"{key}={json.dumps(value)}" for key, value in given.items() if key != "kafka.address"]
    return [word for pair in pairs for word in ("-s", pair.replace('"', ""))]


def test_roles_that_come_alone_in_any_order(kafka, tmp_path, monkeypatch):
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
            processes[name] = stack.enter_context(under_way(line))
        for name, process in processes.items():
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, f"{name}: {errors}"
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "learner"))
    saved = Checkpoints(opened().checkpoints).latest()
    assert saved.weights.sha256() == expected(tmp_path, given).summary["weights_sha256"]
    assert not (tmp_path / "actor-a" / "run" / "checkpoints" / "00000001").exists()


def test_a_second_learner_of_the_same_directory_is_refused(kafka, tmp_path, monkeypatch):
    """On another machine it would fence the first: test_kafka_transport.py."""
    given = {**SMALL, **PPO, "steps": 10**8, "mode": "async", "actors": 1, "kafka.partitions": 2}
    prefix = settings(kafka).prefix
    about = {key: value for key, value in given.items() if key != "env"}
    with under_way([*alone("learner", kafka, prefix, "CartPole-v1"), *described(about)]) as first:
        config = settings(kafka).model_copy(update={"prefix": prefix})
        wait_until(lambda: (tmp_path / "runs" / "run" / "run.json").exists() and _reports(config), first)
        done = subprocess.run(
            alone("learner", kafka, prefix), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 4
        assert "is in use by process" in done.stderr
        first.send_signal(signal.SIGTERM)
        assert first.wait(PATIENCE_S) == 0
        assert Checkpoints(opened().checkpoints).latest() is not None


def _reports(config):
    charter = find_charter(config, "run")
    if charter is None:
        return []
    board = KafkaBoard(Connection(config, charter.run))
    try:
        return board.read(TRAINING)
    finally:
        board.close()


def test_commands_are_carried_out_once_and_told(kafka, tmp_path):
    line, given = words(kafka, steps=10**8, mode="async")
    with under_way([STEPPE, "train", *line]) as process:
        wait_until(trained, process)
        connection = Connection(
            settings(kafka).model_copy(update={"prefix": given["kafka.prefix"]}), wire_name(opened())
        )
        board = KafkaBoard(connection)
        change = command("set", "test", values={"learning_rate": 1e-5, "entropy_coef": 0.125})
        stale = {**command("set", "test", values={"learning_rate": 1.0}), "expires_s": 1.0}
        wrong = command("set", "test", values={"hidden": [3]})
        for record in (change, change, stale, wrong):
            board.post(COMMANDS, record)

        def answers():
            found = [event["details"] for _, event in opened().store.read(EVENTS) if event["kind"] == "command"]
            return [one for one in found if one["command"] == "set"]

        wait_until(lambda: len(answers()) == 4, process)
        (first,) = [one for one in answers() if one["obeyed"]]
        refused = " ".join(one["message"] for one in answers() if not one["obeyed"])
        assert first["values"] == change["values"]
        assert first["version"] >= 0
        assert first["updates"] > 0
        assert "it was carried out before" in refused
        assert "it has expired" in refused
        assert "hidden cannot change" in refused

        def rates():
            reports = [report for _, report in opened().store.read(TRAINING) if report["updates"] > first["updates"]]
            return [report["stats"].get("learning_rate") for report in reports[2:]]

        wait_until(lambda: len(rates()) > 2, process)
        assert rates() == pytest.approx([1e-5] * len(rates()))
        for word, state in (("pause", "PAUSED"), ("resume", "RUNNING"), ("stop", "STOPPED")):
            board.post(COMMANDS, command(word, "test"))
            wait_until(lambda state=state: status().state == state)
        board.close()
        process.communicate(timeout=PATIENCE_S)


def test_no_broker_is_one_sentence(tmp_path):
    done = subprocess.run(
        [STEPPE, "train", "CartPole-v1", "--runtime", "kafka", "--kafka", "127.0.0.1:9"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "no Kafka broker answers at 127.0.0.1:9" in done.stderr
    assert "steppe kafka up" in done.stderr
    assert "Traceback" not in done.stderr

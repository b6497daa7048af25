"""`steppe ctl`: every operation is a command, and commands control a run from its creation to its end."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from steppe.cli.commands import ctl
from steppe.cli.main import app
from steppe.control import models, process_host
from steppe.control.service import Service, operations
from steppe.core.contracts.errors import ConfigError, Conflict, RunNotFound, SteppeError
from steppe.records.run_directory import RunDirectory
from steppe.records.view import ENDED
from tests.support.service import clean_up, until

REQUEST = [
    "CartPole-v1",
    "-s",
    "mode=async",
    "-s",
    "actors=2",
    "-s",
    "envs=8",
    "-s",
    "steps=500_000_000",
    "-s",
    "name=demo",
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))
    yield tmp_path / "runs"
    for record in (tmp_path / "runs").glob("*/run.json"):
        store = RunDirectory(record.parent).store
        process_host.kill_run_processes(store.status())
        until(lambda found=store: found.status().state in (*ENDED, "PENDING"), "the run has ended")
    clean_up(tmp_path / "runs")


def ctl_output(*words: str) -> str:
    done = CliRunner().invoke(app, ["ctl", *words])
    if isinstance(done.exception, SteppeError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def ctl_json(*words: str) -> dict[str, Any]:
    return dict(json.loads(ctl_output(*words, "--json")))


@pytest.mark.unit
def test_every_operation_is_a_command_with_all_of_its_arguments() -> None:
    group = typer.main.get_command(ctl.app)
    commands = {name.replace("-", "_"): group.get_command(None, name) for name in group.list_commands(None)}
    assert commands.keys() == operations().keys()
    for name, command in commands.items():
        method = getattr(Service, name)
        arguments = set(inspect.signature(method).parameters) - {"self", "issuer"}
        if "request" in arguments:
            arguments = arguments - {"request"} | {"env", "settings"}
        given = {parameter.name for parameter in command.params}
        assert arguments <= given, name
        assert "as_json" in given, name
        answer = typing.get_type_hints(method)["return"]
        assert ("wait" in given) == (
            answer in (models.Operation, models.Effects) and "issuer" in method.__annotations__
        ), name
        assert ("follow" in given) == ("after" in arguments), name


@pytest.mark.unit
def test_commands_send_the_given_settings_and_raise_the_errors_of_the_service(runs: Path) -> None:
    created = ctl_json("create-run", *REQUEST, "-s", "start=false", "-s", "clip=0.1", "-s", "evaluation.episodes=3")
    assert (created["id"], created["state"], created["config"]["actors"]) == ("demo", "PENDING", 2)
    assert (created["config"]["agent.clip"], created["config"]["evaluation.episodes"]) == (0.1, 3)
    assert "demo" in ctl_output("list-runs")
    assert ctl_json("set-hyperparameters", "demo", "clip=0.3", "--dry-run")["operation"] is None
    changed = ctl_json(
        "set-hyperparameters", "demo", "clip=0.3", "--if-generation", str(created["generation"]), "--wait"
    )
    assert changed["operation"]["message"] == "takes effect on restart"
    for words, error in {
        ("set-hyperparameters", "demo", "clip=0.3", "--if-generation", "1"): SteppeError,
        ("set-hyperparameters", "demo", "clip=high"): ConfigError,
        ("create-run", "nothing"): ConfigError,
        ("create-run", "CartPole-v1", "-s", "device=cuda"): ConfigError,
        ("create-run", "CartPole-v1", "-s", "runtime=kafka"): ConfigError,
        ("pause-run", "demo"): Conflict,
        ("get-run", "../demo"): RunNotFound,
    }.items():
        with pytest.raises(error):
            ctl_output(*words)
    ctl_json("delete-run", "demo")
    entries = [
        (entry["who"][:4], entry["operation"], entry["outcome"][:7]) for entry in ctl_json("get-audit")["entries"]
    ]
    assert ("cli:", "delete_run", "done") in entries
    assert ("cli:", "pause_run", "refused") in entries


@pytest.mark.slow
@pytest.mark.integration
def test_commands_control_a_run_from_start_to_stop(runs: Path) -> None:
    ctl_output("create-run", *REQUEST, "-s", "start=false")
    assert ctl_json("start-run", "demo", "--wait")["state"] == "succeeded"
    until(lambda: ctl_json("get-learner", "demo")["updates"] > 0, "the learner updates")
    assert ctl_json("scale-actors", "demo", "1", "--wait")["state"] == "succeeded"
    assert ctl_json("get-actors", "demo")["ready"] == 1
    changed = ctl_json("set-hyperparameters", "demo", "learning_rate=1e-9", "--wait")
    assert "in effect from version" in changed["operation"]["message"]
    assert ctl_json("pause-run", "demo", "--wait")["state"] == "succeeded"
    assert ctl_json("get-run", "demo")["state"] == "PAUSED"
    assert ctl_json("stop-run", "demo", "--wait")["state"] == "succeeded"
    assert "ended STOPPED" in ctl_output("get-logs", "demo", "--follow"), "the last line is printed"
    events = [json.loads(line) for line in ctl_output("get-events", "demo", "--follow", "--json").splitlines()]
    words = [event["details"].get("command") for found in events for event in found["events"]]
    assert [word for word in words if word] == ["scale", "set", "pause", "stop"]
    assert ctl_json("get-metrics", "demo", "--series", "loss/learning_rate")["series"][0]["points"]
    assert ctl_json("list-checkpoints", "demo")["checkpoints"]

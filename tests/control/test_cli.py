"""`steppe ctl`: a door like the others. Every operation is a command, and a run can be led through its life by it."""

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

MADE = [
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
    "name=led",
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))
    yield tmp_path / "runs"
    for record in (tmp_path / "runs").glob("*/run.json"):
        store = RunDirectory(record.parent).store
        process_host.kill_run_processes(store.status())
        until(lambda found=store: found.status().state in (*ENDED, "PENDING"), "the run is gone")
    clean_up(tmp_path / "runs")


def say(*words: str) -> str:
    done = CliRunner().invoke(app, ["ctl", *words])
    if isinstance(done.exception, SteppeError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def told(*words: str) -> dict[str, Any]:
    return dict(json.loads(say(*words, "--json")))


@pytest.mark.unit
def test_every_operation_is_a_command_with_all_that_it_takes() -> None:
    group = typer.main.get_command(ctl.app)
    commands = {name.replace("-", "_"): group.get_command(None, name) for name in group.list_commands(None)}
    assert commands.keys() == operations().keys()
    for name, command in commands.items():
        method = getattr(Service, name)
        takes = set(inspect.signature(method).parameters) - {"self", "issuer"}
        if "request" in takes:
            takes = takes - {"request"} | {"env", "settings"}
        given = {parameter.name for parameter in command.params}
        assert takes <= given, name
        assert "as_json" in given, name
        answer = typing.get_type_hints(method)["return"]
        assert ("wait" in given) == (
            answer in (models.Operation, models.Effects) and "issuer" in method.__annotations__
        ), name
        assert ("follow" in given) == ("after" in takes), name


@pytest.mark.unit
def test_a_request_is_what_was_typed(runs: Path) -> None:
    made = told("create-run", *MADE, "-s", "start=false", "-s", "clip=0.1", "-s", "evaluation.episodes=3")
    assert (made["id"], made["state"], made["config"]["actors"]) == ("led", "PENDING", 2)
    assert (made["config"]["agent.clip"], made["config"]["evaluation.episodes"]) == (0.1, 3)
    assert "led" in say("list-runs")
    assert told("set-hyperparameters", "led", "clip=0.3", "--dry-run")["operation"] is None
    changed = told("set-hyperparameters", "led", "clip=0.3", "--if-generation", str(made["generation"]), "--wait")
    assert changed["operation"]["message"] == "takes effect on restart"
    for words, error in {
        ("set-hyperparameters", "led", "clip=0.3", "--if-generation", "1"): SteppeError,
        ("set-hyperparameters", "led", "clip=high"): ConfigError,
        ("create-run", "nothing"): ConfigError,
        ("create-run", "CartPole-v1", "-s", "device=cuda"): ConfigError,
        ("create-run", "CartPole-v1", "-s", "runtime=kafka"): ConfigError,
        ("pause-run", "led"): Conflict,
        ("get-run", "../led"): RunNotFound,
    }.items():
        with pytest.raises(error):
            say(*words)
    told("delete-run", "led")
    entries = [(entry["who"][:4], entry["operation"], entry["outcome"][:7]) for entry in told("get-audit")["entries"]]
    assert ("cli:", "delete_run", "done") in entries
    assert ("cli:", "pause_run", "refused") in entries


@pytest.mark.slow
@pytest.mark.integration
def test_a_run_is_led_through_its_life(runs: Path) -> None:
    say("create-run", *MADE, "-s", "start=false")
    assert told("start-run", "led", "--wait")["state"] == "succeeded"
    until(lambda: told("get-learner", "led")["updates"] > 0, "it learns")
    assert told("scale-actors", "led", "1", "--wait")["state"] == "succeeded"
    assert told("get-actors", "led")["ready"] == 1
    changed = told("set-hyperparameters", "led", "learning_rate=1e-9", "--wait")
    assert "taken over at version" in changed["operation"]["message"]
    assert told("pause-run", "led", "--wait")["state"] == "succeeded"
    assert told("get-run", "led")["state"] == "PAUSED"
    assert told("stop-run", "led", "--wait")["state"] == "succeeded"
    assert "ended STOPPED" in say("get-logs", "led", "--follow"), "to its last line"
    events = [json.loads(line) for line in say("get-events", "led", "--follow", "--json").splitlines()]
    words = [event["details"].get("command") for found in events for event in found["events"]]
    assert [word for word in words if word] == ["scale", "set", "pause", "stop"]
    assert told("get-metrics", "led", "--series", "loss/learning_rate")["series"][0]["points"]
    assert told("list-checkpoints", "led")["checkpoints"]

"""A whole run in which one actor sends actions out of range: its segments are refused and counted, and the run ends well."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from steppe.cli.main import app
from steppe.core.config import resolve
from steppe.core.links import EVENTS
from steppe.loops.main import run_experiment
from steppe.records.directory import RunDirectory
from steppe.records.view import RunView
from tests.support.kafka_runs import on

pytestmark = pytest.mark.integration

RUN = {
    "env": "steppe/Identity-v0", "algo": "tests.support.bad_policies:OutOfRange", "mode": "sync", "actors": 2, "envs": 2,
    "segment_steps": 16, "hidden": (8,), "epochs": 1, "steps": 640, "seed": 0, "evaluation.episodes": 2,
}  # fmt: skip
ROUNDS = 640 // (16 * 2)  # only the steps of the first actor count


def require_refusals(result) -> None:
    """Half of all segments were refused, and everyone who looks at the run is told so."""
    assert (result.state, result.reason) == ("SUCCEEDED", "steps_done"), result.message
    assert result.summary["env_steps"] == 640
    assert result.summary["refused_segments"] == ROUNDS
    directory = RunDirectory.open(result.path)
    view = RunView(directory)
    view.refresh()
    assert view.training.dropped["refused"] == ROUNDS
    assert sum(view.training.lags.values()) == 2 * ROUNDS
    warnings = [record for _, record in directory.store.read(EVENTS) if record["kind"] == "warning"]
    refusals = [record["details"] for record in warnings if "refused" in record["details"]]
    assert refusals
    assert all(found["actor"] == 1 for found in refusals)
    assert "'action' is 10000000" in refusals[0]["message"]
    told = CliRunner().invoke(app, ["doctor", str(result.path), "--json"])
    found = json.loads(told.stdout)
    assert found["rule"] == "refused"
    assert "50 % of the segments were refused" in found["sentence"]


def test_an_actor_in_a_process_that_sends_actions_out_of_range_is_refused(tmp_path) -> None:
    settings = {**RUN, "runtime": "processes", "run_dir": tmp_path / "run"}
    require_refusals(run_experiment(resolve(("call", settings))))


@pytest.mark.slow
def test_an_actor_over_kafka_that_sends_actions_out_of_range_is_refused(kafka, tmp_path) -> None:
    settings = on(kafka, **RUN, run_dir=tmp_path / "run")
    require_refusals(run_experiment(resolve(("call", settings))))

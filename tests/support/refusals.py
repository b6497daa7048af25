"""A run in which one actor sends actions out of range, for every runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from steppe.cli.main import app
from steppe.core.config.run import resolve_config
from steppe.core.contracts.transport import EVENTS
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.training.train import run_experiment

RUN = {
    "env": "steppe/Identity-v0", "algo": "tests.support.bad_policies:OutOfRange", "mode": "sync", "actors": 2, "envs": 2,
    "segment_steps": 16, "hidden": (8,), "epochs": 1, "steps": 640, "seed": 0, "evaluation.episodes": 2,
}  # fmt: skip
ROUNDS = 640 // (16 * 2)  # only the steps of the first actor count


def require_refusals(run_dir: Path, **layer: Any) -> None:
    """Run it: half of all segments are refused, and everyone who looks at the run is told so."""
    result = run_experiment(resolve_config(("call", RUN | layer | {"run_dir": run_dir})))
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
    doctor_output = CliRunner().invoke(app, ["doctor", str(result.path), "--json"])
    found = json.loads(doctor_output.stdout)
    assert found["rule"] == "refused"
    assert "50 % of the segments were refused" in found["sentence"]

"""A run during the start of its roles, which can take long on a busy machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import steppe
from steppe.records import store
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.plan import Plan
from steppe.training import experiment
from tests.support.service import until

pytestmark = pytest.mark.unit


def test_heartbeats_are_sent_while_roles_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    launch, heard = experiment.launch, []

    def launch_slowly(plan: Plan, directory: RunDirectory, *parts: Any, **more: Any) -> Any:
        status = directory.store.status()
        until(lambda: (directory.store.status().heartbeat_s or 0.0) > (status.heartbeat_s or 0.0), "a heartbeat")
        heard.append(status.state)
        return launch(plan, directory, *parts, **more)

    monkeypatch.setattr(store, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(experiment, "launch", launch_slowly)
    result = steppe.train("FrozenLake-v1", algo="q-learning", runtime="inline", steps=64, run_dir=tmp_path / "run")
    assert result.state == "SUCCEEDED"
    assert heard == ["STARTING"]

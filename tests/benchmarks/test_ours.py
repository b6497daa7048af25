"""Steppe's side of benchmarks: a real run of `steppe train` as a case, a workload, and a whole benchmark from the
command line.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from suite import measuring
from suite.measuring import measure
from suite.ours import time_to_target, train, workload

pytestmark = pytest.mark.integration

BENCHMARKS = Path(measuring.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(measuring, "QUIET_CORES", math.inf)


@pytest.mark.slow
def test_a_run_is_measured_with_settings_and_phases():
    words = ("CartPole-v1", "--steps", "4096", "--envs", "8", "-s", "epochs=3", "-s", "hidden=[16]")
    cases = [
        train("speed", *words),
        train("never", *words, "--target-return", "10000", figures=time_to_target),
        train("broken", "CartPole-v1", "--algo", "nothing"),
    ]
    rows = measure(cases, 1)
    speed = rows["speed"].runs[0].reading
    assert speed.value == speed.extra["env_steps"] / speed.extra["train_s"]
    assert speed.extra["env_steps"] >= 4096
    wanted = {"envs": 8, "epochs": 3, "actors": 1, "runtime": "processes", "threads": 1}
    assert wanted.items() <= dict(speed.settings).items()
    assert speed.settings["network"].startswith("16")
    assert speed.shares.keys() == {"actor", "learner", "manager"}
    assert all(sum(phases.values()) == pytest.approx(1.0) for phases in speed.shares.values())
    assert rows["never"].median == math.inf
    assert "there is no algorithm 'nothing'" in rows["broken"].error


def test_published_weights_reach_every_reader():
    words = ("--nbytes", "100000", "--readers", "2", "--times", "5", "--pause-s", "0")
    reading = measure([workload("w", "publishing", *words)], 1)["w"].runs[0].reading
    assert 0 < reading.extra["single_ms"] <= reading.value <= reading.extra["worst_ms"]
    assert reading.settings["nbytes"] == 100_000


@pytest.mark.slow
def test_a_benchmark_writes_its_report_to_the_given_directory(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "weights.py"), "--quick", "--part", "visible", "--into", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads((tmp_path / "weights.json").read_text())
    claim = report["parts"]["visible"]["claims"][0]
    assert claim["measured"] == report["parts"]["visible"]["rows"][0]["median"]
    assert claim["met"] == (claim["measured"] <= 4)
    assert "5 MB of weights" in done.stdout
    assert (tmp_path / "weights-visible.svg").exists()
    assert "## Publish" in (tmp_path / "weights.md").read_text()

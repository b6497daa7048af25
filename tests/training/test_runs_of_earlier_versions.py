"""Runs of earlier versions are opened, evaluated and resumed by this one (scripts/write_run_fixtures.py made them)."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import steppe
from steppe.records.run_directory import RunDirectory
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration

FIXTURES = Path(__file__).parents[1] / "fixtures"
KNOWN = {
    (folder.name, algo): facts
    for folder in sorted(FIXTURES.glob("runs-*"))
    for algo, facts in sorted(
        json.loads((folder / "known.json").read_text()).items(), key=lambda item: item[0] != "ppo"
    )
}


@pytest.fixture
def run(version: str, algo: str, tmp_path: Path) -> Path:
    with tarfile.open(FIXTURES / version / f"{algo}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / algo


def test_there_is_a_run_of_every_algorithm_of_the_first_version() -> None:
    names = "a2c a3c dhc dqn ppo r2d2 double-q expected-sarsa n-step-q q-lambda q-learning sarsa"
    assert {algo for version, algo in KNOWN if version == "runs-0.1"} == set(names.split())


@pytest.mark.parametrize(("version", "algo"), rest_slow(*KNOWN))
def test_an_earlier_run_is_evaluated_with_its_final_weights(version: str, algo: str, run: Path) -> None:
    judged = steppe.evaluate(run, episodes=2)
    assert judged["weights_sha256"] == KNOWN[version, algo]["weights_sha256"]
    assert np.isfinite(judged["return_mean"])
    assert RunDirectory.open(run).store.status().state == "SUCCEEDED"


@pytest.mark.parametrize(("version", "algo"), rest_slow(*KNOWN))
def test_an_earlier_run_can_be_resumed(version: str, algo: str, run: Path) -> None:
    before = KNOWN[version, algo]
    result = steppe.resume(run, steps=before["env_steps"] + 128)
    assert result.state == "SUCCEEDED"
    assert result.env_steps >= before["env_steps"] + 128
    assert result.weights_sha256 != before["weights_sha256"]

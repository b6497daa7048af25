"""Recorded faults: numbered, complete, never overwritten."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import DamagedFile, RunNotFound
from steppe.records.faults import Faults
from steppe.records.run_directory import RunDirectory

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path):
    resolved = resolve_config(("flag", {"env": "CartPole-v1", "run_dir": tmp_path / "runs" / "bad"}))
    directory = RunDirectory.create(resolved.config, resolved.sources)
    directory.release()
    return directory


def test_numbers_grow_and_the_newest_is_loaded(run):
    faults = Faults(run)
    with pytest.raises(RunNotFound, match="bad has no recorded fault"):
        faults.load()
    told = [faults.save({"actor": actor, "actions": np.arange(3)}) for actor in range(3)]
    assert [each["recording"] for each in told] == ["faults/001.bin", "faults/002.bin", "faults/003.bin"]
    assert told[1]["reproduce"] == "steppe reproduce bad --fault 2"
    path, newest = faults.load()
    assert (path.name, newest["actor"]) == ("003.bin", 2)
    assert faults.load(1)[1]["actions"].tolist() == [0, 1, 2]
    assert [path.name for path in sorted(run.faults.iterdir())] == ["001.bin", "002.bin", "003.bin"]


def test_concurrent_writers_never_overwrite_each_other(run, monkeypatch):
    """Each believes that number 1 is free."""
    monkeypatch.setattr(Faults, "numbers", lambda self: [])
    names = [f"part-{index}" for index in range(20)]
    faults = Faults(run)
    for name in names:
        faults.save({"who": name})
    monkeypatch.undo()
    assert faults.numbers() == list(range(1, 21))
    assert {faults.load(number)[1]["who"] for number in faults.numbers()} == set(names)


def test_a_newer_schema_is_refused(run):
    from steppe.core.io import codec

    Faults(run).save({"actor": 0})
    (run.faults / "001.bin").write_bytes(codec.pack({"schema": 2, "actor": 0}))
    with pytest.raises(DamagedFile, match="not a fault that this version"):
        Faults(run).load()

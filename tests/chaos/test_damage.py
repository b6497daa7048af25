"""Checkpoints that came to harm: named, passed over for the one before, and the run still ends as it would have."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from steppe.core.contracts.errors import UsageError
from steppe.core.io import atomic_files
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.training.resume import resume
from tests.support.chaos import events, pace, settings, train, twin

pytestmark = pytest.mark.integration

STEPS = 1600
FLIPS = 10


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """(a run that was stopped on its way and has several checkpoints, the hash it would have ended with)"""
    root = tmp_path_factory.mktemp("damage")
    expected = twin("dqn", STEPS, root / "twin")

    def enough(view):
        return view.env_steps > 0 and len(list((root / "begun").glob("checkpoints/[0-9]*"))) >= 3

    with pace(0.001):
        layer = settings("dqn", STEPS, root / "begun", runtime="inline", name="begun")
        result = train({**layer, "checkpoint.every_s": 0.1}, [enough])
    assert result.state == "STOPPED"
    assert 0 < result.env_steps < STEPS
    return root / "begun", expected


@pytest.fixture
def copy(begun, tmp_path):
    shutil.copytree(begun[0], tmp_path / "begun")
    return tmp_path / "begun"


def newest(path):
    return max(path.glob("checkpoints/[0-9]*"))


def require_passed_over(path, expected, words, before=1):
    """Resume, and see that the newest `before` checkpoints were named with these words and the one before them used."""
    numbers = sorted(int(found.name) for found in path.glob("checkpoints/[0-9]*"))
    warnings = []
    result = resume(path, observers=[lambda view: warnings.append(view.warning)])
    assert result.state == "SUCCEEDED", result.message
    assert result.weights_sha256 == expected
    (told,) = [event["details"] for event in events(path, "resume") if event["role"] == "supervisor"]
    assert told["checkpoint"] == numbers[-1 - before]
    assert len(told["damaged"]) == before
    assert words in told["damaged"][0]
    assert any(warning and "skipped a checkpoint" in warning for warning in warnings)


def test_undamaged(begun, copy):
    assert resume(copy).weights_sha256 == begun[1]


@pytest.mark.parametrize("flip", range(FLIPS))
def test_any_byte(flip, begun, copy):
    """Positions are spread over all files of the checkpoint as if they were one."""
    files = sorted(newest(copy).iterdir())
    total = sum(file.stat().st_size for file in files)
    position = int((flip + random.Random(flip).random()) / FLIPS * total)
    for file in files:
        size = file.stat().st_size
        if position < size:
            break
        position -= size
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << random.Random(flip).randrange(8)
    file.write_bytes(data)
    require_passed_over(copy, begun[1], str(file))


@pytest.mark.parametrize("name", ["weights.safetensors", "state.bin", "counters.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_truncated_or_missing(name, harm, begun, copy):
    file = newest(copy) / name
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    require_passed_over(copy, begun[1], str(file))


def test_from_another_run(begun, copy, tmp_path):
    """Another run of the very same name, with a newer checkpoint."""
    other = settings("dqn", 400, tmp_path / "other", runtime="inline", seed=4, name="begun")
    assert train(other).state == "SUCCEEDED"
    shutil.copytree(newest(tmp_path / "other"), copy / "checkpoints" / "00009999")
    require_passed_over(copy, begun[1], "is a checkpoint of another run")


@pytest.mark.parametrize("what", ["manifest", "counters", "state"])
def test_from_a_newer_version(what, begun, copy, monkeypatch):
    path = newest(copy)
    files = atomic_files.read_bundle(path)
    shutil.rmtree(path)
    if what == "manifest":
        monkeypatch.setattr(atomic_files, "FORMAT", 2)
    elif what == "counters":
        files["counters.json"] = json.dumps({**json.loads(files["counters.json"]), "format": 2}).encode()
    else:
        files["state.bin"] = files["state.bin"][:4] + (2).to_bytes(4, "little") + files["state.bin"][8:]
    atomic_files.write_bundle(path, files)
    monkeypatch.undo()
    require_passed_over(copy, begun[1], "format 2, newer than 1")


def test_several_at_once(begun, copy):
    for path in sorted(copy.glob("checkpoints/[0-9]*"))[-2:]:
        (path / "state.bin").unlink()
    require_passed_over(copy, begun[1], "state.bin is missing", before=2)


def test_all_of_them(begun, copy):
    """Nothing to go on from: the run begins anew, says so, and ends as it would have."""
    paths = sorted(copy.glob("checkpoints/[0-9]*"))
    for path in paths:
        (path / "manifest.json").unlink()
    result = resume(copy)
    assert result.weights_sha256 == begun[1]
    (told,) = [event["details"] for event in events(copy, "resume") if event["role"] == "supervisor"]
    assert told["checkpoint"] is None
    assert all(path.name in " ".join(told["damaged"]) for path in paths)


def test_what_is_listed_says_the_same(copy):
    (newest(copy) / "state.bin").unlink()
    found = RunDirectory.open(copy)
    *check_rows, last = [info for info in Checkpoints(found.checkpoints, run=found.key).list() if not info.best]
    assert all(info.damage is None for info in check_rows)
    assert "state.bin is missing" in last.damage


def test_the_curves_tell_where_a_run_went_back(begun, copy):
    for path in sorted(copy.glob("checkpoints/[0-9]*"))[1:]:
        (path / "state.bin").unlink()
    resume(copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    (at,) = [index for index, line in enumerate(lines) if line["kind"] == "resume"]
    steps = [line.get("env_steps", 0) for line in lines if line["kind"] == "training"]
    back = lines[at]["details"]["env_steps"]
    before = [line["env_steps"] for line in lines[:at] if line["kind"] == "training"]
    after = [line["env_steps"] for line in lines[at:] if line["kind"] == "training"]
    assert max(before) > back
    assert min(after) >= back
    assert steps[-1] == STEPS
    numbers = [line["number"] for line in lines]
    assert len(set(numbers)) == len(numbers)
    view = RunView(RunDirectory.open(copy))
    view.refresh()
    assert view.env_steps == STEPS


def test_a_run_that_is_complete_is_not_resumed(begun, copy):
    resume(copy)
    with pytest.raises(UsageError, match="complete"):
        resume(copy)

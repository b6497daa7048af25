"""Groups of seeds: members side by side, one that fails, Ctrl-C, a killed parent, and resuming as a whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import steppe
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import (
    ConfigError,
    Conflict,
    DamagedFile,
    FactoryError,
    RunExists,
    RunFailed,
    UsageError,
)
from steppe.core.contracts.transport import COMMANDS
from steppe.records.run_directory import list_runs
from steppe.training.seeds.group import SeedGroup, parse_seeds, run_group, runs_at_once

STEPPE = Path(sys.executable).with_name("steppe")
PATIENCE_S = 300.0  # only bounds how long a failure takes
TABLE = {"env": "steppe/Identity-v0", "algo": "q-learning", "runtime": "inline"}
ENDLESS = ["train", TABLE["env"], "--algo", TABLE["algo"], "--runtime", "inline", "--steps", str(10**9), "--name", "g"]


def resolved(**settings):
    return resolve_config(("call", TABLE | {"steps": 64, "name": "g"} | settings))


def wait_until(true):
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def live_seeds():
    group = SeedGroup.find("g")
    runs = {} if group is None else group.existing()
    return {seed for seed, run in runs.items() if run.store.status().state == "RUNNING"}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("seeds", "expected"), [("3", [5, 6, 7]), (2, [5, 6]), ("1,7, 42", [1, 7, 42]), ("7,", [7]), ([3, 1], [3, 1])]
)
def test_seeds_are_a_number_or_a_list(seeds, expected):
    assert parse_seeds(seeds, 5) == expected


@pytest.mark.unit
@pytest.mark.parametrize("seeds", ["", "a", "1,b", "0", 0, [], [1, 1], [-1]])
def test_other_seeds_are_refused(seeds):
    with pytest.raises(ConfigError, match="seed"):
        parse_seeds(seeds)


@pytest.mark.unit
def test_as_many_runs_at_once_as_cores_and_memory_allow():
    plenty = 2**40
    assert runs_at_once(resolved(), 4, plenty) == 4
    assert (
        runs_at_once(resolved(runtime="processes", actors=3, mode="sync"), 8, plenty) == 2
    )  # a core for the learner too
    network = {"algo": "ppo", "env": "CartPole-v1", "flow.threads": 2}
    assert runs_at_once(resolved(**network), 8, plenty) == 4
    assert runs_at_once(resolved(), 64, 2**30) == 2  # of 350 MB each, in 80 % of 1 GiB
    assert runs_at_once(resolved(runtime="processes"), 1, 2**20) == 1


@pytest.mark.unit
def test_a_taken_directory_is_refused_and_nothing_is_written(tmp_path):
    taken = tmp_path / "runs" / "g-seed-2"
    taken.mkdir(parents=True)
    (taken / "run.json").write_text("{}")
    with pytest.raises(RunExists, match="g-seed-2"):
        SeedGroup.create(resolved(), [1, 2])
    assert SeedGroup.find("g") is None


@pytest.mark.unit
def test_what_other_processes_cannot_import_is_refused():
    with pytest.raises(FactoryError, match="top level"):
        steppe.train(lambda: None, algo="q-learning", runtime="inline", seeds=2)


@pytest.mark.unit
def test_callbacks_are_refused():
    with pytest.raises(UsageError, match="one seed at a time"):
        steppe.train(TABLE["env"], seeds=2, callbacks=[print])


@pytest.mark.unit
def test_a_damaged_or_newer_manifest_is_named():
    group = SeedGroup.create(resolved(), [1])
    path = group.path / "group.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(DamagedFile, match="format 99"):
        SeedGroup.open("g")
    path.write_text("{")
    with pytest.raises(DamagedFile, match=r"group\.json"):
        SeedGroup.open("g")


@pytest.mark.integration
def test_a_failed_seed_is_named_the_others_go_on_and_resume_completes_the_group(steppe, tmp_path):
    in_the_way = tmp_path / "runs" / "g-seed-1"
    in_the_way.parent.mkdir()
    in_the_way.write_text("a file, where the run's directory should be")
    words = ["train", TABLE["env"], "--algo", TABLE["algo"], "--runtime", "inline", "--steps", "64", "--name", "g"]
    done = steppe(*words, "--seeds", "1,7", "--json")
    assert done.returncode == 1, done.stderr
    assert "seed 1 failed: cannot create the run directory" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["failed_seeds"] == [1]
    assert [run["state"] for run in summary["runs"]] == ["FAILED", "SUCCEEDED"]

    in_the_way.unlink()
    done = steppe("resume", "g", "--json")
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["seed"], run["state"], run["summary"]["seed"]) for run in runs] == [
        (1, "SUCCEEDED", 1),
        (7, "SUCCEEDED", 7),
    ]
    assert {run.id for run in list_runs(tmp_path / "runs")} == {"g-seed-1", "g-seed-7"}
    assert steppe("stop", "g").returncode == Conflict.exit_code


@pytest.mark.integration
def test_a_group_from_python():
    result = steppe.train(**TABLE, steps=64, seeds=[3], name="g")
    assert list(result.returns) == [3]
    assert result.failed == []
    result.raise_for_fault()


@pytest.mark.unit
def test_the_fault_of_a_group_names_its_seeds(tmp_path):
    from steppe.training.seeds.group import GroupResult, MemberResult

    runs = [MemberResult(1, tmp_path, "SUCCEEDED"), MemberResult(7, tmp_path, "FAILED", "error", "it broke")]
    with pytest.raises(RunFailed, match=r"1 of 2 runs .* seed 7: it broke"):
        GroupResult("g", tmp_path, runs).raise_for_fault()


@pytest.mark.integration
def test_ctrl_c_stops_all_members_in_order(tmp_path):
    parent = subprocess.Popen([STEPPE, *ENDLESS, "--seeds", "2", "--jobs", "2"], cwd=tmp_path, stderr=subprocess.PIPE)
    wait_until(lambda: live_seeds() == {0, 1} or parent.poll() is not None)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == 130, errors
    results = SeedGroup.open("g").results()
    assert [(result.state, result.reason) for result in results] == [("STOPPED", "interrupted")] * 2


@pytest.mark.integration
def test_after_its_parent_was_killed_a_group_is_resumed_with_the_run_that_is_still_going_on(tmp_path):
    parent = subprocess.Popen(
        [STEPPE, *ENDLESS, "--seeds", "2", "--jobs", "1"], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: live_seeds() == {0} or parent.poll() is not None)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    group = SeedGroup.open("g")
    first = group.existing()[0].store.status().pid
    order: list[int] = []

    def stop_each(_group, views):
        for seed, view in views.items():
            if seed not in order and view.state == "RUNNING":
                order.append(seed)
                view.directory.store.post(
                    COMMANDS, {"command": "stop", "id": f"{seed}", "issuer": "test", "time_s": 0.0}
                )

    result = run_group(group, jobs=1, observers=[stop_each])
    assert order == [0, 1]
    assert [run.state for run in result.runs] == ["STOPPED", "STOPPED"]
    assert group.existing()[0].store.status().pid == first

"""Run directories: created once, written by one process at a time, found by name or path."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError, Conflict, DamagedFile, RunExists, RunNotFound, UsageError
from steppe.records.run_directory import RunDirectory, list_runs

pytestmark = pytest.mark.integration

HOLDER = """
import sys
from pathlib import Path
from steppe.records.run_directory import RunDirectory
directory = RunDirectory(Path(sys.argv[1]))
directory.acquire()
print("held", flush=True)
sys.stdin.read()
"""
CREATOR = """
import sys
from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import SteppeError
from steppe.records.run_directory import RunDirectory
sys.stdin.readline()
made = resolve_config(("flag", {"env": "CartPole-v1", "name": "same", "seed": int(sys.argv[1])}))
try:
    directory = RunDirectory.create(made.config, made.sources)
except SteppeError as error:
    print(type(error).__name__)
else:
    print("made")
sys.stdout.flush()
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def create(**keys) -> RunDirectory:
    made = resolve_config(("flag", {"env": "CartPole-v1", **keys}))
    return RunDirectory.create(made.config, made.sources)


def everything(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in path.rglob("*")}


def test_a_run_is_recorded_completely(root):
    made = resolve_config(("file.toml", {"env": "CartPole-v1", "learning_rate": 0.01}), ("flag", {"seed": 7}))
    directory = RunDirectory.create(made.config, made.sources)
    record = json.loads((directory.path / "run.json").read_text())
    assert record["seed"] == 7
    assert record["config"]["agent.learning_rate"] == 0.01
    assert record["sources"]["agent.learning_rate"] == "file.toml"
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"numpy", "torch", "gymnasium", "steppe"} <= record["versions"].keys()
    assert record["hardware"]["cores"] == os.cpu_count()
    assert record["command"] == sys.argv
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", record["created"])
    again = RunDirectory.open(directory.id)
    assert again.config() == made.config
    assert again.sources == made.sources
    assert again.store.status().state == "PENDING"


def test_names_are_readable_and_differ(root):
    ids = {create(algo="dqn").id for _ in range(5)}
    assert len(ids) == 5
    assert all(re.fullmatch(r"cartpole-v1-dqn-\d{8}-\d{4}-[a-z0-9]{4}", run) for run in ids)
    assert create(env="my.module:make_World").id.startswith("make-world-ppo-")


def test_a_named_run_and_a_chosen_directory(root, tmp_path):
    assert create(name="first").path == root / "first"
    elsewhere = create(run_dir=tmp_path / "deep" / "er")
    assert (elsewhere.path, elsewhere.id) == (tmp_path / "deep" / "er", "er")
    assert RunDirectory.open(tmp_path / "deep" / "er").id == "er"
    assert create(run_dir=tmp_path / "there", name="called").id == "called"


def test_without_a_root_runs_are_kept_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("STEPPE_RUNS")
    monkeypatch.chdir(tmp_path)
    assert create(name="x").path.resolve() == tmp_path / "runs" / "x"
    assert RunDirectory.open("x").id == "x"


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "x" * 101, "spa ce"])
def test_a_name_may_not_be_a_path(root, name):
    with pytest.raises(ConfigError, match="name="):
        create(name=name)
    assert not root.exists()


def test_a_directory_that_holds_a_run_is_refused_and_left_alone(root):
    path = create(name="taken", seed=1).path
    before = everything(root)
    with pytest.raises(RunExists, match="already contains a run"):
        create(name="taken", seed=2)
    with pytest.raises(RunExists):
        create(run_dir=path)
    assert everything(root) == before
    assert issubclass(RunExists, UsageError)
    assert RunExists.exit_code == 2


def test_a_directory_with_other_things_may_become_a_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    create(run_dir=tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep me"


def test_a_directory_that_cannot_be_created_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot create the run directory"):
        create(run_dir=tmp_path / "file" / "run")


def test_only_one_of_two_processes_can_create_a_run(root):
    command = [sys.executable, "-c", CREATOR]
    creators = [
        subprocess.Popen([*command, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for seed in (1, 2, 3)
    ]
    for creator in creators:
        creator.stdin.write("go\n")
        creator.stdin.flush()
    answers = [creator.stdout.readline().strip() for creator in creators]
    for creator in creators:
        creator.communicate("end\n")
    assert sorted(answers)[-1] == "made"
    assert set(answers[:]) - {"made"} <= {"Conflict", "RunExists"}
    assert answers.count("made") == 1
    winner = answers.index("made") + 1
    assert RunDirectory.open("same").config().seed == winner


def test_a_run_created_by_another_process_during_the_wait_for_the_lock_is_kept(root, monkeypatch):
    real = RunDirectory.acquire

    def late(directory):
        monkeypatch.setattr(RunDirectory, "acquire", real)
        create(name="same", seed=1).release()
        real(directory)

    monkeypatch.setattr(RunDirectory, "acquire", late)
    with pytest.raises(RunExists):
        create(name="same", seed=2)
    assert RunDirectory.open("same").config().seed == 1
    RunDirectory.open("same").acquire()  # the losing process has released it


def test_a_second_process_cannot_write_until_the_first_has_ended(root):
    directory = create(name="one")
    directory.release()
    command = [sys.executable, "-c", HOLDER, str(directory.path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(Conflict, match=f"process {holder.pid}"):
        directory.acquire()
    assert RunDirectory.open("one").config().env == "CartPole-v1"  # anyone may read
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    directory.acquire()
    directory.acquire()  # this process holds it already


def test_the_creating_process_holds_the_run(root):
    directory = create(name="held")
    with pytest.raises(Conflict, match=str(os.getpid())):
        RunDirectory.open("held").acquire()
    directory.release()
    directory.release()
    RunDirectory.open("held").acquire()


def test_the_error_for_an_unknown_run_suggests_the_nearest_name(root):
    with pytest.raises(RunNotFound, match="contains no runs yet"):
        RunDirectory.open("cartpole")
    create(name="cartpole-best")
    with pytest.raises(RunNotFound, match="Did you mean 'cartpole-best'"):
        RunDirectory.open("cartpole-bst")
    (root / "empty").mkdir()
    with pytest.raises(RunNotFound, match=r"no run\.json"):
        RunDirectory.open(root / "empty")


def test_summaries_are_stored(root):
    directory = create()
    assert directory.summary() is None
    directory.write_summary({"a": 1.5, "b": math.nan, "c": {"d": [math.inf, None]}})
    assert directory.summary() == {"a": 1.5, "b": None, "c": {"d": [None, None]}}


def test_runs_are_listed_newest_first_including_damaged_ones(root):
    assert list_runs() == []
    for name in ("one", "two", "three"):
        directory = create(name=name, algo="dqn")
        directory.store.set_status("SUCCEEDED", "steps_done")
        record = json.loads((directory.path / "run.json").read_text())
        record["created_s"] = len(name) * 1000.0
        (directory.path / "run.json").write_text(json.dumps(record))
    directory.write_summary({"env_steps": 5})
    (root / "one" / "run.json").write_text("{")
    (root / "not a run").mkdir()
    infos = list_runs()
    assert [info.id for info in infos] == ["one", "three", "two"]  # the damaged one has the time of its file
    assert "run.json" in infos[0].damage
    assert (infos[1].status.state, infos[1].env, infos[1].algo) == ("SUCCEEDED", "CartPole-v1", "dqn")
    assert infos[1].summary == {"env_steps": 5}
    assert infos[2].damage is None


@pytest.mark.parametrize("text", ["", "[]", '{"config": 3}', '{"config": {}, "format": 99}'])
def test_a_damaged_record_is_named(root, text):
    directory = create(name="x")
    directory.path.joinpath("run.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"run\.json"):
        RunDirectory.open("x").config()

"""`steppe train --profile`, from the command line: files on both runtimes, after Ctrl-C, and after a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from steppe.core.contracts.transport import TRAINING
from steppe.records.profiling.sampler import read_stacks
from tests.support.cases import rest_slow
from tests.support.commands import opened, trained, wait_until

pytestmark = pytest.mark.integration

STEPPE = Path(sys.executable).with_name("steppe")
WORDS = ("train", "CartPole-v1", "--steps", "8_000", "--seed", "3", "--name", "pole")
ROLES = {
    "inline": ["actor-0", "learner", "manager"],
    "processes": ["actor-0", "actor-1", "learner", "manager"],
}
FLAGS = {
    "inline": ("--runtime", "inline"),
    "processes": ("--mode", "sync", "--actors", "2"),
}


@pytest.fixture
def cli_host(torch_host):
    return torch_host


def profile_of(tmp_path, name="pole"):
    return tmp_path / "runs" / name / "profile"


def seconds_at_work(directory, role):
    return sum(seconds for stack, seconds in read_stacks(directory / f"{role}.txt").items() if len(stack) > 1)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", rest_slow("processes", "inline"))
def test_every_role_has_a_flame_graph_and_weights_are_unchanged(steppe, tmp_path, runtime):
    done = steppe(*WORDS, *FLAGS[runtime], "--profile")
    assert done.returncode == 0, done.stderr
    directory = profile_of(tmp_path)
    names = sorted(path.name for path in directory.iterdir())
    assert names == sorted([f"{role}.{kind}" for role in ROLES[runtime] for kind in ("svg", "txt")] + ["phases.md"])
    assert f"profile     {directory}".replace(str(tmp_path) + "/", "") in done.stdout
    for role in ROLES[runtime]:
        ElementTree.parse(directory / f"{role}.svg")
    assert any("learn" in label for stack in read_stacks(directory / "learner.txt") for label in stack)
    assert not any("PPO.learn" in label for stack in read_stacks(directory / "actor-0.txt") for label in stack)
    table = (directory / "phases.md").read_text()
    for role, phase in [("actor-0", "env"), ("learner", "learn"), ("manager", "evaluate")]:
        assert f"| {role} | {phase} | " in table
    plain = steppe(*WORDS[:-1], "plain", *FLAGS[runtime], "--runtime", "inline", "--json")  # the same on every runtime
    plain = json.loads(plain.stdout)
    with (tmp_path / "runs" / "pole" / "summary.json").open() as summary:
        profiled = json.load(summary)
    assert profiled["profile"] == os.path.join("runs", "pole", "profile")
    assert plain["profile"] is None
    assert not profile_of(tmp_path, "plain").exists()
    assert profiled["weights_sha256"] == plain["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_profile_survives_ctrl_c_and_resume_adds_to_it(steppe, tmp_path, runtime):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}
    words = ["train", "CartPole-v1", "--steps", "100_000_000", "--name", "pole", "--profile", *FLAGS[runtime]]
    run = subprocess.Popen([STEPPE, *words], cwd=tmp_path, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_until(learned, run)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, errors
    directory = profile_of(tmp_path)
    before = {role: seconds_at_work(directory, role) for role in ("actor-0", "learner")}
    assert min(before.values()) > 0
    drawn = (directory / "learner.svg").read_text()
    steps = json.loads(steppe("watch", "pole", "--json").stdout.splitlines()[-1])["env_steps"]
    done = steppe("resume", "pole", "--steps", str(steps + 10_000))
    assert done.returncode == 0, done.stderr
    for role, seconds in before.items():
        assert seconds_at_work(directory, role) > seconds
    assert (directory / "learner.svg").read_text() != drawn


def learned():
    """Whether the run of this name has made an update."""
    return trained("pole") and opened("pole").store.read(TRAINING)[-1][1]["phases"]["learn"] > 0

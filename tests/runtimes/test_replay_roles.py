"""Replay in roles of its own on real processes: the weights of one process with as many buffers, and a killed one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError
from steppe.records.checkpoints import Checkpoints
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from tests.support.chaos_envs import PACE
from tests.support.commands import PATIENCE_S, family, opened, parents, status, trained, under_way, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPPE = Path(sys.executable).with_name("steppe")
SMALL = {"mode": "sync", "actors": 2, "envs": 4, "hidden": (16,), "seed": 7, "evaluation.episodes": 3}
DQN = {
    **SMALL, "algo": "dqn", "env": "steppe/Identity-v0", "segment_steps": 16, "batch_size": 32, "learning_starts": 200,
    "samples_per_insert": 8.0, "prioritized": True, "n_step": 3, "steps": 1500, "buffer_size": 700,
}  # fmt: skip
DHC = {
    "mode": "sync", "actors": 1, "envs": 2, "seed": 7, "evaluation.episodes": 2, "algo": "dhc", "env": "steppe/Pathfinding-v0",
    "environment.kwargs": {"num_agents": 2, "size": 5, "density": 0.2, "max_steps": 16, "view": 5}, "channels": 8,
    "segment_steps": 8, "batch_size": 4, "sequence_length": 4, "learning_starts": 100, "steps": 600, "buffer_size": 1200,
}  # fmt: skip
FIGURES = ("state", "weights_sha256", "env_steps", "updates", "version")


@pytest.mark.slow
@pytest.mark.parametrize("case", [DQN, DHC], ids=["dqn", "dhc"])
def test_the_weights_of_one_process(case, tmp_path):
    found = {}
    for runtime in ("inline", "processes"):
        settings = {**case, "flow.replay_roles": 2, "runtime": runtime, "run_dir": tmp_path / runtime}
        summary = run_experiment(resolve_config(("call", settings))).summary
        found[runtime] = {name: summary[name] for name in FIGURES}
    assert found["inline"] == found["processes"]
    assert found["inline"]["updates"] > 10


def replay_of(process):
    """place → pid of the replay roles, by the logs they write."""
    found = {}
    for pid in family(process.pid):
        try:
            log = Path(os.readlink(f"/proc/{pid}/fd/2"))
        except OSError:
            continue
        if log.name.startswith("replay-"):
            found[log.stem] = pid
    return found


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_replay_role_ends_the_run_which_resumes_exactly(monkeypatch, tmp_path):
    given = {**DQN, "flow.replay_roles": 2, "checkpoint.every_s": 0.1}
    given |= {"environment.wrappers": ["tests.support.chaos_envs:Paced"], "environment.vector": "loop"}
    words = [word for key, value in given.items() if key != "env" for word in ("-s", f"{key}={json.dumps(value)}")]
    monkeypatch.setenv(PACE, "0.01")  # of a step: it lasts seven seconds, and is killed at its first checkpoint
    with under_way([STEPPE, "train", DQN["env"], "--runtime", "processes", "--name", "run", *words]) as process:
        wait_until(trained, process)
        wait_until(lambda: Checkpoints(opened().checkpoints).latest() is not None, process)
        replay = replay_of(process)
        assert sorted(replay) == ["replay-0", "replay-1"]
        members = family(process.pid)
        os.kill(replay["replay-1"], signal.SIGKILL)
        out, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, out
        assert re.search("replay-1 (was killed by SIGKILL|is gone)", errors), errors
        wait_until(lambda: not set(members) & set(parents()))
    assert (status().state, status().reason) == ("FAILED", "role_died")
    monkeypatch.delenv(PACE)
    resumed = resume("run")
    assert resumed.state == "SUCCEEDED", resumed.message
    calm = run_experiment(resolve_config(("call", {**given, "runtime": "inline", "run_dir": tmp_path / "calm"})))
    assert resumed.weights_sha256 == calm.weights_sha256


def test_what_it_does_not_go_with():
    for settings, words in (
        ({"algo": "ppo", "env": "CartPole-v1"}, "flow.replay_roles is for agents that learn from replay, not ppo"),
        ({**DQN, "runtime": "mpi"}, "flow.replay_roles is for runtimes processes and ray, not 'mpi'"),
        ({**DQN, "buffer_size": 1}, "flow.replay_roles=2 is more than buffer_size"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            resolve_config(("call", {**settings, "flow.replay_roles": 2}))

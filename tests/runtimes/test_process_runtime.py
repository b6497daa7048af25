"""Role processes: how they find the user's script, directory and variables, and which handles a run leaves open."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from steppe.algorithms import make_agent
from steppe.core.config.run import resolve_config
from steppe.envs import probe
from steppe.envs.toy.builtin import CountingEnv
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import POLICY
from steppe.runtimes.inline import launch as inline
from steppe.runtimes.plan import make_plan
from steppe.runtimes.processes import launch as processes
from steppe.training.train import run_experiment

pytestmark = pytest.mark.integration

SMALL = {
    "mode": "sync", "actors": 2, "envs": 2, "segment_steps": 8, "hidden": (8,), "epochs": 1, "steps": 64,
    "evaluation.episodes": 2,
}  # fmt: skip


def run(tmp_path, name="run", **settings):
    layer = {**SMALL, "env": "steppe/Counting-v0", "runtime": "processes", "run_dir": tmp_path / name, **settings}
    return run_experiment(resolve_config(("call", layer)))


@pytest.mark.parametrize("runtime", [inline, processes], ids=["inline", "processes"])
def test_actors_have_different_random_streams(runtime, tmp_path):
    """Environments and actions of two actors have separate streams; the caller reads instead of the learner."""
    layer = {**SMALL, "env": "steppe/Counting-v0", "mode": "async", "run_dir": tmp_path / "run"}
    config = resolve_config(("call", layer)).config
    plan = make_plan(config, probe(config.env, config.environment))
    plan = replace(plan, roles=plan.roles[:2])
    directory = RunDirectory.create(plan.config, {})
    handle = runtime.launch(plan, directory)
    try:
        agent = make_agent("ppo", plan.config.agent, plan.spec, seed=0)
        handle.weights.publish(POLICY, agent.weights())
        found = {}
        while len(found) < 2:
            handle.wait_for_segment(1.0)
            while (segment := handle.channel.poll()) is not None:
                found.setdefault(segment.header.actor, (segment["obs"][:-1, :, 0].copy(), segment["action"].copy()))
                handle.channel.release(segment)
    finally:
        handle.close(timeout_s=120.0)
        directory.release()
    identities = np.concatenate([obs[0] for obs, _ in found.values()])
    assert len(set(identities.tolist())) == 4
    assert all((obs == obs[0]).all() for obs, _ in found.values())
    assert not np.array_equal(found[0][1], found[1][1])


def test_runs_close_all_handles(tmp_path):
    run(tmp_path, "first")  # starts the fork server, which stays
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for name in ("second", "third", "fourth"):
        run(tmp_path, name)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


class LocalEnv(CountingEnv):
    """Records its directory and its environment variables."""

    def __init__(self, out):
        super().__init__()
        Path(out, f"{os.getpid()}.json").write_text(json.dumps([os.getcwd(), os.environ.get("MY_SETTING")]))


def test_roles_have_the_current_directory_and_variables(tmp_path, monkeypatch):
    """Also if the fork server, which does not see changes, was started long before."""
    run(tmp_path, "first")
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SETTING", "changed")
    result = run(
        Path(),
        "relative",
        env="tests.runtimes.test_process_runtime:LocalEnv",
        **{"environment.kwargs": {"out": str(out)}},
    )
    assert result.state == "SUCCEEDED", result.message
    told = [json.loads(path.read_text()) for path in out.iterdir()]
    assert len(told) == 4  # this process, two actors, the manager
    assert told == [[str(tmp_path), "changed"]] * 4


SCRIPT = """
import gymnasium as gym
from steppe.core.config.run import resolve_config
from steppe.envs.toy.builtin import CountingEnv
from steppe.training.train import train
print("before")

class Mine(CountingEnv):
    pass

def make():
    return Mine()

result = train(make, actors=2, envs=2, steps=64, segment_steps=8, hidden=(8,), run_dir="run", **{{"evaluation.episodes": 2}})
print(result.state)
"""


def test_a_script_without_a_main_guard_trains(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format())
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["before", "SUCCEEDED"], done.stderr
    assert "before" in (tmp_path / "run" / "logs" / "actor-0.log").read_text()


def test_a_script_with_a_lambda_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.format().replace("train(make,", "train(lambda: Mine(),"))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the environment is '<lambda>', which another process cannot import" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


REGISTERING = """
import gymnasium as gym
gym.register("Registered-v0", entry_point="steppe.envs.toy.builtin:CountingEnv", max_episode_steps=20)
"""


def test_gymnasium_ids_of_a_module_are_registered_in_every_process(tmp_path, monkeypatch):
    """`module:Id` tells the other processes which module to import first; they search where this one does."""
    (tmp_path / "registering.py").write_text(REGISTERING)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        result = run(tmp_path, env="registering:Registered-v0")
    finally:
        gym.registry.pop("Registered-v0")
    assert result.state == "SUCCEEDED", result.message

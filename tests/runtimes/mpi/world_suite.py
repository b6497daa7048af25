"""Run under mpiexec by test_runtime.py: many small runs in one world, whose ranks import torch only once.

mpiexec -n 4 python world_suite.py DIRECTORY: the suite of runtimes; hashes beside those of `inline`, unequal work, waiting, resuming;
hyperparameters that are set while a run goes on; an actor whose actions are out of range.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.transport import ACTORS, TRAINING
from steppe.envs.toy.builtin import CountingEnv, IdentityEnv
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.mpi import launch as mpi
from steppe.testing.runtime import RuntimeConformance
from steppe.training.resume import resume
from steppe.training.train import run_experiment
from tests.determinism.test_dhc_runs import SMALL as DHC
from tests.support.loop_statistics import ELSEWHERE, require_right_statistics
from tests.support.refusals import require_refusals
from tests.support.tuning import MATRIX, require_tuned

pytestmark = pytest.mark.integration

SMALL = {"mode": "sync", "actors": 2, "envs": 4, "hidden": (16, 16), "seed": 7, "evaluation.episodes": 3}
PPO = {**SMALL, "algo": "ppo", "env": "CartPole-v1", "segment_steps": 32, "minibatch_size": 64, "steps": 3000}
A2C = {**SMALL, "algo": "a2c", "mode": "workers", "env": "CartPole-v1", "segment_steps": 16, "steps": 3000}
CASES = {"ppo": PPO, "a2c": A2C, "dhc": DHC}  # replay of transitions and sequences is in MATRIX
ASLEEP = {"env": "steppe/Sleep-v0", "environment.kwargs": {"delay_s": 0.02}, "envs": 1, "steps": 320}
ASLEEP = {**PPO, **ASLEEP, "segment_steps": 16, "minibatch_size": 16, "evaluation.episodes": 1}
TUNED = [case for case in MATRIX if case[0] != "single"]  # for that mode there are too many ranks here
FIGURES = ("state", "reason", "weights_sha256", "env_steps", "updates", "version", "eval_return_mean", "eval_episodes")


class TestWorld(RuntimeConformance):
    runtime = "mpi"

    def launch(self, plan, directory):
        return mpi.launch(plan, directory)


class SlowForOne(CountingEnv):
    """Slow where the actor is the one whose log this process writes."""

    def step(self, action):
        if "actor-0" in os.readlink("/proc/self/fd/1"):
            time.sleep(0.001)
        return super().step(action)


class Stuck(IdentityEnv):
    """Never comes back from its 20th step, where a manager or an actor plays in it."""

    steps = 0

    def step(self, action):
        self.steps += 1
        while self.steps == 20:
            time.sleep(0.01)
        return super().step(action)


def train(directory, observers=(), **settings):
    result = run_experiment(
        resolve_config(("call", {"runtime": "mpi", "run_dir": directory, **settings})), observers=observers
    )
    return {name: result.summary[name] for name in FIGURES}


def runs(directory):
    found = {}
    for name, case in CASES.items():
        for runtime in ("inline", "mpi"):
            found[f"{name} {runtime}"] = train(directory / f"{name}-{runtime}", **case, runtime=runtime)
    free = {**A2C, "algo": "a3c", "steps": 6000}
    found["a3c"] = train(directory / "a3c", **free)
    found["stopped"] = train(directory / "halves", [lambda view: view.env_steps > 0], **{**PPO, "steps": 10**9})
    steps = found["stopped"]["env_steps"] + 1000
    again = resume(directory / "halves", steps=steps)
    found["resumed"] = {name: again.summary[name] for name in FIGURES}
    found["whole"] = train(directory / "whole", **{**PPO, "steps": steps}, runtime="inline")
    uneven = {**PPO, "env": "__main__:SlowForOne", "mode": "async", "flow.max_lag": 10**6, "steps": 20_000}
    found["uneven"] = train(directory / "uneven", **uneven)
    found["uneven"]["actors"] = {one["actor"]: one["env_steps"] for one in reports(directory / "uneven", ACTORS)}
    found["asleep"] = train(directory / "asleep", **ASLEEP)
    found["asleep"]["learner"] = [(one["env_steps"], one["cpu_s"]) for one in reports(directory / "asleep", TRAINING)]
    return found


def reports(directory, topic):
    return [record for _, record in RunDirectory.open(directory).store.read(topic)]


def tune(directory):
    """All live hyperparameters in one command, in every mode that has as many roles as this world has ranks."""
    for mode, kind in TUNED:
        require_tuned(kind, directory / f"{mode}-{kind}", runtime="mpi", mode=mode)


if __name__ == "__main__":
    mpi.join()
    if wrong := pytest.main(["-q", "-p", "no:xdist", "--assert=plain", __file__]):
        sys.exit(wrong)
    told = runs(Path(sys.argv[1]))
    tune(Path(sys.argv[1]))
    require_refusals(Path(sys.argv[1]) / "refused", runtime="mpi")
    for kind, algo in ELSEWHERE:
        require_right_statistics(kind, algo, "mpi")
    print(json.dumps(told), flush=True)

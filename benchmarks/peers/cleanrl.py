"""CleanRL: its `ppo.py`, run unchanged from the package, on CartPole.

The script times itself from its first step and prints what it reached; `protocol.py` has the command line.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import time
import warnings
from importlib.metadata import distribution
from typing import Any

from protocol import Request, Result, run

# isort: split
import torch

# The script's own defaults but for twice as many environments, which is faster.
SETTINGS = {
    "num-envs": 8,
    "num-steps": 128,
    "num-minibatches": 4,
    "update-epochs": 4,
    "learning-rate": 2.5e-4,
    "gamma": 0.99,
    "gae-lambda": 0.95,
    "ent-coef": 0.01,
}


def ppo_cartpole(request: Request) -> Result:
    settings = request.settings(SETTINGS)
    steps = request.steps or 65_536
    words = ["--env-id", "CartPole-v1", "--seed", str(request.seed), "--total-timesteps", str(steps), "--cuda", "False"]
    for key, value in settings.items():
        words += [f"--{key}", str(value)]
    sys.argv[1:] = words
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.redirect_stdout(sys.stderr):
        os.chdir(elsewhere)  # it writes its event files under the working directory
        left = runpy.run_path(str(distribution("cleanrl").locate_file("cleanrl/ppo.py")), run_name="__main__")
        seconds = time.time() - left["start_time"]
    return Result(left["global_step"], seconds, report(settings))


def report(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "envs": settings["num-envs"],
        "rollout": settings["num-steps"],
        "epochs": settings["update-epochs"],
        "minibatch": settings["num-envs"] * settings["num-steps"] // settings["num-minibatches"],
        "network": "64-64 Tanh for the policy, 64-64 Tanh apart for the value",
        "threads": torch.get_num_threads(),
    } | {key.replace("-", "_"): settings[key] for key in ("learning-rate", "gamma", "gae-lambda", "ent-coef")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Gym 0.23 tells of its age at every call
    packages = {"torch": "torch", "cleanrl": "cleanrl", "gym": "gym", "numpy": "numpy"}
    run("cleanrl", packages, {"ppo-cartpole": ppo_cartpole})

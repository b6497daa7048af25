"""PufferLib: its PPO on CartPole, stepped as Gymnasium environments or as PufferLib's own C version.

The first run builds PufferLib from its source package (a minute, and a C++ compiler; see pufferlib_build/). Timing starts
after one rollout and its update, when workers are up. `protocol.py` has the command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from protocol import HERE, Request, Result, run

BUILD = Path(HERE) / "pufferlib_build"
# Its own for the C version: config/ocean/cartpole.ini over config/default.ini, the recurrent layer left out.
NATIVE = {
    "envs": 4096,
    "workers": 0,
    "horizon": 64,
    "minibatch": 32_768,
    "epochs": 1,
    "hidden": 128,
    "recurrent": False,
    "optimizer": "muon",
    "learning_rate": 0.05,
    "gamma": 0.95,
    "gae_lambda": 0.9,
}
# config/default.ini, the network of its classic-control environments, and enough of them to fill one minibatch.
GYMNASIUM = NATIVE | {"envs": 128, "minibatch": 8192, "hidden": 64, "learning_rate": 0.015, "gamma": 0.995}


def build() -> None:
    """Build and install PufferLib in this environment unless it is there."""
    try:
        version("pufferlib")
    except PackageNotFoundError:
        install = "install --no-deps --no-build-isolation --no-cache-dir --no-binary pufferlib --require-hashes --quiet"
        command = [sys.executable, "-m", "pip", *install.split(), "--requirement", str(BUILD / "source.lock")]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(BUILD)}, stdout=sys.stderr)


def native(request: Request) -> Result:
    from pufferlib.ocean import env_creator

    settings = request.settings(NATIVE)
    parts = max(settings["workers"], 1)
    return train("puffer_cartpole", env_creator("puffer_cartpole"), settings, request, parts, settings["envs"] // parts)


def gymnasium_cartpole(request: Request) -> Result:
    settings = request.settings(GYMNASIUM)
    return train("default", plain_cartpole, settings, request, settings["envs"], None)


def plain_cartpole(buf: Any = None, seed: int = 0) -> Any:
    import gymnasium
    from pufferlib import EpisodeStats
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(EpisodeStats(gymnasium.make("CartPole-v1")), buf=buf, seed=seed)


def train(
    config_name: str, creator: Any, settings: dict[str, Any], request: Request, parts: int, envs_per_part: int | None
) -> Result:
    """Train on `parts` environments of PufferLib's, each holding `envs_per_part` CartPoles (None: it is one)."""
    from pufferlib import vector
    from pufferlib.models import Default, LSTMWrapper

    steps = request.steps or (4_000_000 if envs_per_part else 131_072)
    serial = envs_per_part is None or settings["recurrent"]
    backend = "Multiprocessing" if settings["workers"] else "Serial" if serial else "PufferEnv"
    inside = {} if envs_per_part is None else {"num_envs": envs_per_part}
    workers = {"num_workers": settings["workers"]} if settings["workers"] else {}
    envs = vector.make(creator, env_kwargs=inside, backend=backend, num_envs=parts, seed=request.seed, **workers)
    policy = Default(envs.driver_env, hidden_size=settings["hidden"])
    if settings["recurrent"]:
        policy = LSTMWrapper(envs.driver_env, policy, settings["hidden"], settings["hidden"])
    rollout = settings["envs"] * settings["horizon"]
    learner = learner_for(config(config_name, settings, steps + rollout, request.seed), envs, policy)
    learner.evaluate()
    learner.train()
    untimed, began = learner.global_step, time.perf_counter()
    while learner.global_step < untimed + steps:
        learner.evaluate()
        logs = learner.train()
    seconds = time.perf_counter() - began
    learner.utilization.stop()
    envs.close()
    extra = {"episode_length": (logs or {}).get("environment/episode_length"), "untimed_steps": untimed}
    return Result(learner.global_step - untimed, seconds, report(settings, backend, policy), extra)


def config(name: str, settings: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """PufferLib's configuration of that name; it reads the command line, so that is emptied first."""
    from pufferlib import pufferl

    sys.argv[1:] = []
    return {
        **pufferl.load_config(name)["train"],
        "env": name,
        "device": "cpu",
        "seed": seed,
        "total_timesteps": steps,
        "bptt_horizon": settings["horizon"],
        "minibatch_size": settings["minibatch"],
        "update_epochs": settings["epochs"],
        "use_rnn": settings["recurrent"],
    } | {key: settings[key] for key in ("optimizer", "learning_rate", "gamma", "gae_lambda")}


def learner_for(configuration: dict[str, Any], envs: Any, policy: Any) -> Any:
    """PufferLib's learner without its dashboard, which would be drawn four times a second."""
    from pufferlib import pufferl

    class Undrawn(pufferl.PuffeRL):
        def print_dashboard(self, *args: Any, **kwargs: Any) -> None:
            pass

    return Undrawn(configuration, envs, policy)


def report(settings: dict[str, Any], backend: str, policy: Any) -> dict[str, Any]:
    import torch

    wide = settings["hidden"]
    torso = f"4-{wide} GELU" + (f"-LSTM {wide}" if settings["recurrent"] else "")
    return {
        "envs": settings["envs"],
        "vec": backend,
        "workers": settings["workers"],
        "rollout": settings["horizon"],
        "epochs": settings["epochs"],
        "minibatch": settings["minibatch"],
        "network": f"{torso}, shared, then linear heads of 2 and 1 ({sum(p.numel() for p in policy.parameters())} parameters)",
        "threads": torch.get_num_threads(),
        "updates_per_rollout": settings["epochs"] * settings["envs"] * settings["horizon"] // settings["minibatch"],
    } | {key: settings[key] for key in ("optimizer", "learning_rate", "gamma", "gae_lambda", "recurrent")}


if __name__ == "__main__":
    build()
    import torch

    torch.set_num_threads(1)
    packages = {"torch": "torch", "pufferlib": "pufferlib", "gymnasium": "gymnasium", "numpy": "numpy"}
    with tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)  # importing PufferLib leaves a link in the working directory
        run("pufferlib", packages, {"ppo-cartpole": gymnasium_cartpole, "ppo-cartpole-native": native})

"""Sample Factory: asynchronous PPO on CartPole, an environment that sleeps, and how long it takes to start.

Timing starts after the third update, when every process is up. `protocol.py` has the command line.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from protocol import Request, Result, process_start, run

# isort: split
import gymnasium as gym
import torch
from first_step import NOTE, FirstStep, read_note
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from slow_env import SLEEP_S, SlowEnv

# What its documentation runs CartPole with, on two workers and one policy worker; the rest are its defaults.
SETTINGS = {
    "num_workers": 2,
    "num_envs_per_worker": 20,
    "worker_num_splits": 2,
    "policy_workers_per_policy": 1,
    "rollout": 32,
    "batch_size": 512,
    "num_epochs": 1,
    "num_batches_per_epoch": 1,
    "encoder_mlp_layers": [512, 512],
    "async_rl": True,
    "learning_rate": 1e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "reward_scale": 0.1,
}
WARM_UPDATES = 3


class Clock(AlgoObserver):
    """Notes time and environment steps at every update."""

    def __init__(self) -> None:
        self.updates: list[tuple[float, int]] = []

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        self.updates.append((time.perf_counter(), runner.env_steps.get(0, 0)))


def make_cartpole(
    full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None
) -> gym.Env:
    return gym.make("CartPole-v1", render_mode=render_mode)


def make_slow(full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gym.Env:
    return SlowEnv(render_mode)


def make_noting(full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gym.Env:
    return FirstStep(gym.make("CartPole-v1", render_mode=render_mode))


def ppo_cartpole(request: Request) -> Result:
    return train(make_cartpole, request.settings(SETTINGS), request.steps or 120_000, request.seed)


def slow_env(request: Request) -> Result:
    settings = request.settings(SETTINGS | {"num_workers": 16, "num_envs_per_worker": 2, "reward_scale": 1.0})
    result = train(make_slow, settings, request.steps or 16_384, request.seed)
    ideal = settings["num_workers"] / SLEEP_S
    result.extra |= {"ideal_steps_per_s": ideal, "share_of_ideal": result.steps / result.seconds / ideal}
    return result


def startup(request: Request) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[NOTE] = os.path.join(scratch, "first_step")
        result = train(make_noting, request.settings(SETTINGS), request.steps or 4096, request.seed)
        result.extra["first_step_s"] = read_note() - process_start()
    return result


def train(make_env: Any, settings: dict[str, Any], steps: int, seed: int) -> Result:
    """Train for `steps` past the warm-up and time them by the learner's own count."""
    register_env("measured", make_env)
    warm = (WARM_UPDATES + 2) * settings["batch_size"]
    with tempfile.TemporaryDirectory() as scratch:
        _, runner = make_runner(configuration(settings, warm + steps, seed, scratch))
        clock = Clock()
        runner.register_observer(clock)
        status = runner.init()
        if status == ExperimentStatus.SUCCESS:
            status = runner.run()
    if status != ExperimentStatus.SUCCESS or len(clock.updates) <= WARM_UPDATES:
        raise SystemExit(f"Sample Factory ended with status {status} after {len(clock.updates)} updates")
    (began, before), (ended, after) = clock.updates[WARM_UPDATES], clock.updates[-1]
    returns = runner.policy_avg_stats.get("reward", [[]])[0]
    extra = {"untimed_steps": before, "return": float(sum(returns) / len(returns)) if returns else None}
    return Result(after - before, ended - began, report(settings), extra)


def configuration(settings: dict[str, Any], steps: int, seed: int, scratch: str) -> Any:
    words = ["--algo=APPO", "--env=measured", "--experiment=measured", f"--train_dir={scratch}", f"--seed={seed}"]
    words += [
        "--device=cpu",
        "--use_rnn=False",
        "--recurrence=1",
        "--with_vtrace=False",
        f"--train_for_env_steps={steps}",
    ]
    for key, value in settings.items():
        words += [f"--{key}", *map(str, value)] if isinstance(value, list) else [f"--{key}={value}"]
    parser, _ = parse_sf_args(words)
    return parse_full_cfg(parser, words)


def report(settings: dict[str, Any]) -> dict[str, Any]:
    layers = "-".join(map(str, settings["encoder_mlp_layers"]))
    return {
        "envs": settings["num_workers"] * settings["num_envs_per_worker"],
        "workers": settings["num_workers"],
        "rollout": settings["rollout"],
        "epochs": settings["num_epochs"],
        "minibatch": settings["batch_size"],
        "network": f"{layers} ELU, shared, then linear heads",
        "threads": torch.get_num_threads(),
    } | {
        key: settings[key]
        for key in settings
        if key not in ("rollout", "num_epochs", "batch_size", "encoder_mlp_layers")
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    packages = {"torch": "torch", "sample_factory": "sample-factory", "gymnasium": "gymnasium", "numpy": "numpy"}
    run("sample_factory", packages, {"ppo-cartpole": ppo_cartpole, "slow-env": slow_env, "startup": startup})

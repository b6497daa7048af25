"""RLlib: PPO and IMPALA on CartPole, how long PPO takes to start, and its replay buffers of single steps.

Timing starts after the first training iteration, when every process is up. `protocol.py` has the command line,
`replaying.py` what buffers are asked to do.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from protocol import Request, Result, process_start, run

# isort: split
import gymnasium as gym
import numpy as np
import ray
import torch
from first_step import NOTE, FirstStep, read_note
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.policy.sample_batch import SampleBatch
from ray.rllib.utils.replay_buffers import PrioritizedReplayBuffer, ReplayBuffer
from ray.tune.registry import register_env
from replaying import tasks

# PPO's epochs, batch and network are RLlib's own defaults; larger minibatches and vector environments are faster here.
PPO = {
    "num_env_runners": 2,
    "num_envs_per_env_runner": 16,
    "train_batch_size": 4000,
    "minibatch_size": 1000,
    "num_epochs": 10,
    "learning_rate": 3e-4,
    "gamma": 0.99,
}
IMPALA = {
    "num_env_runners": 1,
    "num_envs_per_env_runner": 16,
    "train_batch_size": 500,
    "rollout_fragment_length": 50,
    "num_learners": 1,
    "learning_rate": 5e-4,
    "gamma": 0.99,
}


LOGICAL_CPUS = 8  # Ray counts one for each actor, and waits for ever where there are too few


def ppo_cartpole(request: Request) -> Result:
    settings = request.settings(PPO)
    return train(ppo(settings, request.seed), request.steps or 30_000, ppo_report(settings))


def impala_cartpole(request: Request) -> Result:
    settings = request.settings(IMPALA)
    config = configured(IMPALAConfig(), settings, request.seed).reporting(min_time_s_per_iteration=1)
    config = config.env_runners(rollout_fragment_length=settings["rollout_fragment_length"])
    config = config.learners(num_learners=settings["num_learners"])
    report = shared_report(settings) | {"rollout": settings["rollout_fragment_length"], "epochs": 1}
    report |= {"minibatch": settings["train_batch_size"]}
    return train(config, request.steps or 30_000, report)


def startup(request: Request) -> Result:
    settings = request.settings(PPO)
    register_env("noting", lambda _: FirstStep(gym.make("CartPole-v1")))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[NOTE] = os.path.join(scratch, "first_step")
        config = ppo(settings, request.seed).environment("noting")
        result = train(config, request.steps or 1, ppo_report(settings))
        result.extra["first_step_s"] = read_note() - process_start()
    return result


def ppo(settings: dict[str, Any], seed: int) -> AlgorithmConfig:
    own = {"minibatch_size": settings["minibatch_size"], "num_epochs": settings["num_epochs"]}
    return configured(PPOConfig(), settings, seed).training(**own)


def configured(config: AlgorithmConfig, settings: dict[str, Any], seed: int) -> AlgorithmConfig:
    """What both algorithms share: the environment, who steps it, and the batch."""
    where = {key: settings[key] for key in ("num_env_runners", "num_envs_per_env_runner")}
    batch = {"train_batch_size_per_learner": settings["train_batch_size"]}
    return (
        config.environment("CartPole-v1")
        .env_runners(**where)
        .training(lr=settings["learning_rate"], gamma=settings["gamma"], **batch)
        .debugging(seed=seed, log_level="ERROR")
    )


def train(config: AlgorithmConfig, steps: int, report: dict[str, Any]) -> Result:
    """Train for `steps` past the first iteration, by RLlib's own count of sampled steps."""
    ray.init(num_cpus=LOGICAL_CPUS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    algorithm = config.build_algo()
    untimed = 0
    while untimed == 0:  # IMPALA's first iterations may end before a sample has come
        untimed, _ = iterate(algorithm)
    done, began = untimed, time.perf_counter()
    while done < untimed + steps:
        done, mean = iterate(algorithm)
    seconds = time.perf_counter() - began
    algorithm.stop()
    ray.shutdown()
    return Result(done - untimed, seconds, report, {"untimed_steps": untimed, "return": mean})


def iterate(algorithm: Algorithm) -> tuple[int, float | None]:
    runners = algorithm.train()["env_runners"]
    return int(runners.get("num_env_steps_sampled_lifetime", 0)), runners.get("episode_return_mean")


def ppo_report(settings: dict[str, Any]) -> dict[str, Any]:
    envs = max(settings["num_env_runners"], 1) * settings["num_envs_per_env_runner"]
    own = {"epochs": settings["num_epochs"], "minibatch": settings["minibatch_size"]}
    network = {"network": "256-256 Tanh for the policy, 256-256 Tanh apart for the value"}
    return shared_report(settings) | own | network | {"rollout": settings["train_batch_size"] // envs}


def shared_report(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "envs": max(settings["num_env_runners"], 1) * settings["num_envs_per_env_runner"],
        "env_runners": settings["num_env_runners"],
        "network": "256-256 Tanh, shared, then linear heads",
        "threads": torch.get_num_threads(),
    } | {key: settings[key] for key in ("train_batch_size", "learning_rate", "gamma")}


class RLlib:
    """Sample batches go in, are kept step by step, and come out joined."""

    def __init__(self, buffer: Any, batch: int, about: str, **options: float) -> None:
        self.buffer, self.batch, self.about, self.options = buffer, batch, about, options

    def prepare(self, columns: dict[str, np.ndarray]) -> SampleBatch:
        names = {"obs": "obs", "action": "actions", "reward": "rewards", "next_obs": "new_obs", "done": "terminateds"}
        return SampleBatch({names[name]: rows for name, rows in columns.items()})

    def add(self, block: SampleBatch) -> None:
        self.buffer.add(block)

    def sample(self) -> SampleBatch:
        return self.buffer.sample(self.batch, **self.options)

    def update(self, batch: SampleBatch, priorities: np.ndarray) -> None:
        self.buffer.update_priorities(batch["batch_indexes"], priorities)


def prioritized(settings: dict[str, Any]) -> RLlib:
    buffer = PrioritizedReplayBuffer(settings["capacity"], storage_unit="timesteps", alpha=0.6)
    return RLlib(buffer, settings["batch"], "PrioritizedReplayBuffer of timesteps", beta=0.4)


def uniform(settings: dict[str, Any]) -> RLlib:
    buffer = ReplayBuffer(settings["capacity"], storage_unit="timesteps")
    return RLlib(buffer, settings["batch"], "ReplayBuffer of timesteps")


if __name__ == "__main__":
    torch.set_num_threads(1)
    packages = {"torch": "torch", "rllib": "ray", "gymnasium": "gymnasium", "numpy": "numpy"}
    training = {"ppo-cartpole": ppo_cartpole, "impala-cartpole": impala_cartpole, "startup": startup}
    run("rllib", packages, {**training, **tasks(prioritized, uniform)})

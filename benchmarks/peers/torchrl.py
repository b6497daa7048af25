"""TorchRL: PPO on CartPole from its collector, advantage and loss, with the training loop that its guides write out; and
its replay buffers.

Timing starts after the first batch and its updates. `protocol.py` has the command line, `replaying.py` what buffers are
asked to do.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from protocol import Request, Result, run

# isort: split
import numpy as np
import torch
from replaying import tasks
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import GymEnv, SerialEnv, set_gym_backend
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

SETTINGS = {
    "num_envs": 8,
    "rollout": 256,
    "minibatch": 1024,
    "epochs": 10,
    "hidden": [64, 64],
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip": 0.2,
    "ent_coef": 0.0,
}


class Learner:
    """Actor and critic apart, the clipped loss, and the epochs over one batch."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        net = {"in_features": 4, "num_cells": settings["hidden"], "activation_class": nn.Tanh}
        logits = TensorDictModule(MLP(out_features=2, **net), in_keys=["observation"], out_keys=["logits"])
        chooser = {"distribution_class": torch.distributions.Categorical, "return_log_prob": True}
        self.actor = ProbabilisticActor(logits, in_keys=["logits"], **chooser)
        critic = ValueOperator(MLP(out_features=1, **net), in_keys=["observation"])
        self.advantage = GAE(gamma=settings["gamma"], lmbda=settings["gae_lambda"], value_network=critic)
        weights = {"entropy_coeff": settings["ent_coef"], "critic_coeff": 0.5, "clip_epsilon": settings["clip"]}
        self.loss = ClipPPOLoss(self.actor, critic, loss_critic_type="l2", normalize_advantage=True, **weights)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=settings["learning_rate"])

    def update(self, batch: TensorDict) -> None:
        with torch.no_grad():
            self.advantage(batch)
        flat = batch.reshape(-1)
        for _ in range(self.settings["epochs"]):
            for chosen in torch.randperm(len(flat)).split(self.settings["minibatch"]):
                losses = self.loss(flat[chosen])
                sum(
                    losses[key] for key in ("loss_objective", "loss_critic", "loss_entropy") if key in losses
                ).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()


def ppo_cartpole(request: Request) -> Result:
    settings = request.settings(SETTINGS)
    torch.manual_seed(request.seed)
    per_batch = settings["num_envs"] * settings["rollout"]
    with set_gym_backend("gymnasium"):
        envs = SerialEnv(settings["num_envs"], lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    envs.set_seed(request.seed)
    learner = Learner(settings)
    steps = request.steps or 20_480
    lengths = {"frames_per_batch": per_batch, "total_frames": steps + per_batch}
    collector = Collector(envs, learner.actor, auto_register_policy_transforms=False, **lengths)
    done, began, collected, waited = -per_batch, 0.0, 0.0, time.perf_counter()
    for batch in collector:
        collected += time.perf_counter() - waited
        learner.update(batch)
        done += batch.numel()
        waited = time.perf_counter()
        if done == 0:
            began, collected = waited, 0.0
    seconds = waited - began
    collector.shutdown()
    return Result(done, seconds, report(settings), {"collection_s": collected, "untimed_steps": per_batch})


def report(settings: dict[str, Any]) -> dict[str, Any]:
    layers = "-".join(map(str, settings["hidden"]))
    return {
        "envs": settings["num_envs"],
        "rollout": settings["rollout"],
        "epochs": settings["epochs"],
        "minibatch": settings["minibatch"],
        "network": f"{layers} Tanh for the policy, {layers} Tanh apart for the value",
        "threads": torch.get_num_threads(),
    } | {key: settings[key] for key in ("learning_rate", "gamma", "gae_lambda", "clip", "ent_coef")}


class TorchRL:
    """Tensors that share the columns' memory go in and tensors come out."""

    def __init__(self, buffer: Any, about: str) -> None:
        self.buffer, self.about = buffer, about

    def prepare(self, columns: dict[str, np.ndarray]) -> TensorDict:
        tensors = {name: torch.from_numpy(rows) for name, rows in columns.items()}
        return TensorDict(tensors, batch_size=[len(columns["done"])])

    def add(self, block: TensorDict) -> None:
        self.buffer.extend(block)

    def sample(self) -> TensorDict:
        return self.buffer.sample()

    def update(self, batch: TensorDict, priorities: np.ndarray) -> None:
        self.buffer.update_priority(batch["index"], torch.from_numpy(priorities).float())

    def save(self, path: Path) -> None:
        self.buffer.dumps(path / "buffer")

    def load(self, path: Path) -> None:
        self.buffer.loads(path / "buffer")


def prioritized(settings: dict[str, Any]) -> TorchRL:
    storage = LazyTensorStorage(settings["capacity"])
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage, batch_size=settings["batch"])
    return TorchRL(buffer, "TensorDictPrioritizedReplayBuffer on LazyTensorStorage")


def uniform(settings: dict[str, Any]) -> TorchRL:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(settings["capacity"]), batch_size=settings["batch"])
    return TorchRL(buffer, "TensorDictReplayBuffer on LazyTensorStorage")


if __name__ == "__main__":
    torch.set_num_threads(1)
    packages = {"torch": "torch", "torchrl": "torchrl", "tensordict": "tensordict", "gymnasium": "gymnasium"}
    run("torchrl", packages, {"ppo-cartpole": ppo_cartpole, **tasks(prioritized, uniform, uniform)})

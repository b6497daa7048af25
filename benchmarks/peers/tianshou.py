"""Tianshou: PPO on CartPole through its procedural interface, without test episodes; and its replay buffers.

The trainer's own training time is taken: collection and updates. `protocol.py` has the command line, `replaying.py` what
buffers are asked to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol import Request, Result, run

# isort: split
import gymnasium as gym
import numpy as np
import torch
from replaying import tasks
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import (
    Batch,
    Collector,
    CollectStats,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    VectorReplayBuffer,
)
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from tianshou.utils.space_info import SpaceInfo

# Its own test on CartPole has these, but minibatches of 64.
SETTINGS = {
    "num_envs": 20,
    "collect_steps": 2000,
    "batch_size": 512,
    "repetitions": 10,
    "hidden": [64, 64],
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "eps_clip": 0.2,
    "ent_coef": 0.0,
}


def ppo_cartpole(request: Request) -> Result:
    settings = request.settings(SETTINGS)
    np.random.seed(request.seed)
    torch.manual_seed(request.seed)
    envs = DummyVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(settings["num_envs"])])
    envs.seed(request.seed)
    algorithm = ppo(settings)
    buffer = VectorReplayBuffer(10 * settings["collect_steps"], settings["num_envs"])
    collector = Collector[CollectStats](algorithm, envs, buffer)
    info = algorithm.run_training(
        OnPolicyTrainerParams(
            training_collector=collector,
            test_collector=None,
            test_in_training=False,
            max_epochs=1,
            epoch_num_steps=request.steps or 40_000,
            collection_step_num_env_steps=settings["collect_steps"],
            update_step_num_repetitions=settings["repetitions"],
            batch_size=settings["batch_size"],
            show_progress=False,
            verbose=False,
        )
    )
    extra = {"update_s": info.timing.train_time_update}
    return Result(collector.collect_step, info.timing.train_time, report(settings), extra)


def ppo(settings: dict[str, Any]) -> PPO:
    """Actor and critic on one torso, as its CartPole test has it."""
    spaces = SpaceInfo.from_env(gym.make("CartPole-v1"))
    torso = Net(state_shape=spaces.observation_info.obs_shape, hidden_sizes=settings["hidden"])
    actor = DiscreteActor(preprocess_net=torso, action_shape=spaces.action_info.action_shape)
    policy = DiscreteActorPolicy(
        actor=actor, dist_fn=torch.distributions.Categorical, action_space=gym.spaces.Discrete(2)
    )
    own = {key: settings[key] for key in ("gamma", "gae_lambda", "eps_clip", "ent_coef")}
    optim = AdamOptimizerFactory(lr=settings["learning_rate"])
    return PPO(policy=policy, critic=DiscreteCritic(preprocess_net=torso), optim=optim, max_grad_norm=0.5, **own)


def report(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "envs": settings["num_envs"],
        "rollout": settings["collect_steps"] // settings["num_envs"],
        "epochs": settings["repetitions"],
        "minibatch": settings["batch_size"],
        "network": "-".join(map(str, settings["hidden"])) + " ReLU, shared, then linear heads",
        "threads": torch.get_num_threads(),
    } | {key: settings[key] for key in ("learning_rate", "gamma", "gae_lambda", "eps_clip", "ent_coef")}


class Vector:
    """A row of a block for each of its buffers, as from as many environments."""

    def __init__(self, buffer: Any, batch: int, about: str) -> None:
        self.buffer, self.batch, self.about = buffer, batch, about

    def prepare(self, columns: dict[str, np.ndarray]) -> Batch:
        done = columns["done"]
        return Batch(
            obs=columns["obs"],
            act=columns["action"],
            rew=columns["reward"],
            terminated=done,
            truncated=np.zeros_like(done),
            obs_next=columns["next_obs"],
            info=Batch(),
        )

    def add(self, block: Batch) -> None:
        self.buffer.add(block)

    def sample(self) -> tuple[Batch, np.ndarray]:
        return self.buffer.sample(self.batch)

    def update(self, batch: tuple[Batch, np.ndarray], priorities: np.ndarray) -> None:
        self.buffer.update_weight(batch[1], priorities)

    def save(self, path: Path) -> None:
        self.buffer.save_hdf5(str(path / "buffer.hdf5"))

    def load(self, path: Path) -> None:
        self.buffer = type(self.buffer).load_hdf5(str(path / "buffer.hdf5"))


class Uniform(Vector):
    """Draws from one buffer of the same content: from a vector of them it draws from each in turn, which is slower."""

    def __init__(self, settings: dict[str, Any], about: str) -> None:
        super().__init__(VectorReplayBuffer(settings["capacity"], settings["block"]), settings["batch"], about)
        self.whole: ReplayBuffer | None = None

    def sample(self) -> tuple[Batch, np.ndarray]:
        if self.whole is None:
            names = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")
            self.whole = ReplayBuffer.from_data(*(self.buffer._meta[name] for name in names))
        return self.whole.sample(self.batch)


class Single(Vector):
    """One environment's rows in their order, which is what it can stack frames from."""

    def prepare(self, columns: dict[str, np.ndarray]) -> list[Batch]:
        rows = super().prepare(columns)
        return [rows[number] for number in range(len(columns["done"]))]

    def add(self, block: list[Batch]) -> None:
        for row in block:
            self.buffer.add(row)


def prioritized(settings: dict[str, Any]) -> Vector:
    buffer = PrioritizedVectorReplayBuffer(settings["capacity"], settings["block"], alpha=0.6, beta=0.4)
    return Vector(buffer, settings["batch"], "PrioritizedVectorReplayBuffer, a buffer per row of a block")


def uniform(settings: dict[str, Any]) -> Vector:
    return Uniform(settings, "added to a VectorReplayBuffer, a buffer per row of a block; drawn from one ReplayBuffer")


def images(settings: dict[str, Any]) -> Single:
    return Single(ReplayBuffer(settings["capacity"]), settings["batch"], "ReplayBuffer, stacks as they are")


def stacking(settings: dict[str, Any]) -> Single:
    buffer = ReplayBuffer(settings["capacity"], stack_num=4, ignore_obs_next=True, save_only_last_obs=True)
    return Single(buffer, settings["batch"], "ReplayBuffer, frames stacked as they are drawn (its Atari examples' way)")


if __name__ == "__main__":
    torch.set_num_threads(1)
    packages = {"torch": "torch", "tianshou": "tianshou", "gymnasium": "gymnasium", "numpy": "numpy"}
    found = tasks(prioritized, uniform, images)
    found["replay-images-stacking"] = tasks(images=stacking)["replay-images"]
    run("tianshou", packages, {"ppo-cartpole": ppo_cartpole, **found})

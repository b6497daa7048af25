"""Tianshou: PPO on CartPole through its procedural interface, without test episodes.

The trainer's own training time is taken: collection and updates. `protocol.py` has the command line.
"""

from __future__ import annotations

from typing import Any

from protocol import Request, Result, run

# isort: split
import gymnasium as gym
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    packages = {"torch": "torch", "tianshou": "tianshou", "gymnasium": "gymnasium", "numpy": "numpy"}
    run("tianshou", packages, {"ppo-cartpole": ppo_cartpole})

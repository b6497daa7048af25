"""Stable-Baselines3: PPO and DQN on CartPole, Pong and an environment that sleeps, with its own or the RL zoo's settings;
and its replay buffer.

Timing starts with the first rollout and, for DQN, once learning has started. `protocol.py` has the command line,
`replaying.py` what buffers are asked to do.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from protocol import Request, Result, run

# isort: split
import gymnasium as gym
import numpy as np
import torch
from replaying import SIDE, STACK, tasks
from slow_env import SLEEP_S, SlowEnv
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack

PPO_DEFAULT = {
    "n_envs": 8,
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "ent_coef": 0.0,
    "schedule": "constant",
}
PPO_ZOO = PPO_DEFAULT | {
    "n_steps": 32,
    "batch_size": 256,
    "n_epochs": 20,
    "learning_rate": 1e-3,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "schedule": "linear",
}
# SB3's epochs and network, its 2048 steps per rollout shared by the 8 environments, and minibatches that waste less.
PPO_FAST = PPO_DEFAULT | {"n_steps": 256, "batch_size": 1024}
PPO_PRESETS = {"default": PPO_DEFAULT, "fast": PPO_FAST, "zoo": PPO_ZOO}
PPO_ATARI = PPO_DEFAULT | {
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 4,
    "learning_rate": 2.5e-4,
    "clip_range": 0.1,
    "ent_coef": 0.01,
    "schedule": "linear",
}
DQN_ZOO = {
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1000,
    "gamma": 0.99,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
}
# The zoo trains one environment, one update per 4 steps; with 8 environments 4 vector steps take 8 updates.
DQN_ATARI = {
    "learning_rate": 1e-4,
    "batch_size": 32,
    "buffer_size": 10_000,
    "learning_starts": 1000,
    "gamma": 0.99,
    "target_update_interval": 1000,
    "train_freq": 4,
    "gradient_steps": 8,
    "exploration_fraction": 0.1,
    "exploration_final_eps": 0.01,
}
SOLVED_RETURN = 475.0
EVALUATION_EPISODES = 20


class Clock(BaseCallback):
    """Times learning from the first rollout at or after `from_step`, and the share of it that is collection."""

    def __init__(self, from_step: int = 0) -> None:
        super().__init__()
        self.from_step = from_step
        self.began: float | None = None
        self.began_steps = 0
        self.collection_s = 0.0
        self._rollout_began = 0.0

    def _on_rollout_start(self) -> None:
        self._rollout_began = time.perf_counter()
        if self.began is None and self.num_timesteps >= self.from_step:
            self.began, self.began_steps = self._rollout_began, self.num_timesteps

    def _on_rollout_end(self) -> None:
        if self.began is not None:
            self.collection_s += time.perf_counter() - self._rollout_began

    def _on_step(self) -> bool:
        return True


class UntilSolved(BaseCallback):
    """Evaluates between rollouts with its own clock stopped, and ends training at the first return of 475 or more."""

    def __init__(self, env: VecEnv, every_steps: int) -> None:
        super().__init__()
        self.env = env
        self.every_steps = every_steps
        self.began = 0.0
        self.evaluation_s = 0.0
        self.train_s = 0.0
        self.returns: list[float] = []
        self._evaluated_at = 0

    @property
    def reached(self) -> bool:
        return bool(self.returns) and self.returns[-1] >= SOLVED_RETURN

    def _on_training_start(self) -> None:
        self.began = time.perf_counter()

    def _on_rollout_start(self) -> None:
        if self.num_timesteps - self._evaluated_at >= self.every_steps:
            self.evaluate()

    def _on_step(self) -> bool:
        return not self.reached

    def evaluate(self) -> None:
        """Score the policy as it is now; what this takes is kept out of `train_s`."""
        stopped = time.perf_counter()
        self.train_s = stopped - self.began - self.evaluation_s
        mean, _ = evaluate_policy(self.model, self.env, EVALUATION_EPISODES, deterministic=True)
        self.returns.append(float(mean))
        self._evaluated_at = self.num_timesteps
        self.evaluation_s += time.perf_counter() - stopped


def ppo(policy: str, env: VecEnv, settings: dict[str, Any], seed: int) -> PPO:
    """SB3's PPO with `settings`; the schedule "linear" lets the learning rate and the clip range fall to zero."""
    own = {key: value for key, value in settings.items() if key in PPO_DEFAULT and key not in ("n_envs", "schedule")}
    if settings["schedule"] == "linear":
        own |= {key: _falling(own[key]) for key in ("learning_rate", "clip_range")}
    return PPO(policy, env, seed=seed, device="cpu", **own)


def ppo_cartpole(request: Request) -> Result:
    model, settings = ppo_on_cartpole(request, {"preset": "fast"})
    return measure(model, request.steps or 65_536, ppo_report(settings, "DummyVecEnv") | {"preset": settings["preset"]})


def ppo_cartpole_solve(request: Request) -> Result:
    model, settings = ppo_on_cartpole(request, {"preset": "zoo", "eval_every": 2048})
    report = ppo_report(settings, "DummyVecEnv") | {key: settings[key] for key in ("preset", "eval_every")}
    return solve(model, request, settings["eval_every"], report)


def ppo_on_cartpole(request: Request, task: dict[str, Any]) -> tuple[PPO, dict[str, Any]]:
    """PPO on CartPole with the preset that the request names, or else that of `task`."""
    settings = request.settings(PPO_PRESETS[request.overrides.get("preset", task["preset"])] | task)
    env = make_vec_env("CartPole-v1", settings["n_envs"], seed=request.seed)
    return ppo("MlpPolicy", env, settings, request.seed), settings


def ppo_pong(request: Request) -> Result:
    settings = request.settings(PPO_ATARI | {"vec": "dummy"})
    model = ppo("CnnPolicy", pong(settings, request.seed), settings, request.seed)
    report = ppo_report(settings, settings["vec"]) | {"network": "NatureCNN, 512"}
    return measure(model, request.steps or 8192, report)


def dqn_cartpole_zoo(request: Request) -> Result:
    model, report = dqn_cartpole(request, request.settings(DQN_ZOO))
    return measure(model, request.steps or 10_000, report, from_step=model.learning_starts)


def dqn_cartpole_solve(request: Request) -> Result:
    settings = request.settings({"eval_every": 1024} | DQN_ZOO)
    model, report = dqn_cartpole(request, settings)
    return solve(model, request, settings["eval_every"], report | {"eval_every": settings["eval_every"]})


def dqn_cartpole(request: Request, settings: dict[str, Any]) -> tuple[DQN, dict[str, Any]]:
    own = {key: value for key, value in settings.items() if key in DQN_ZOO}
    env = make_vec_env("CartPole-v1", 1, seed=request.seed)
    model = DQN("MlpPolicy", env, seed=request.seed, device="cpu", policy_kwargs={"net_arch": [256, 256]}, **own)
    return model, dqn_report(settings, 1, "4-256-256-2, ReLU")


def dqn_pong(request: Request) -> Result:
    settings = request.settings(DQN_ATARI | {"n_envs": 8, "vec": "dummy"})
    own = {key: value for key, value in settings.items() if key in DQN_ATARI}
    model = DQN("CnnPolicy", pong(settings, request.seed), seed=request.seed, device="cpu", **own)
    report = dqn_report(settings, settings["n_envs"], "NatureCNN, 512") | {"vec": settings["vec"]}
    return measure(model, request.steps or 4096, report, from_step=settings["learning_starts"])


def pong(settings: dict[str, Any], seed: int) -> VecEnv:
    """Pong behind SB3's AtariWrapper (no-ops, frame skip 4, 84 × 84 grey, clipped reward), four frames stacked."""
    import ale_py

    gym.register_envs(ale_py)
    vec = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[settings["vec"]]
    return VecFrameStack(make_atari_env("ale_py:PongNoFrameskip-v4", settings["n_envs"], seed, vec_env_cls=vec), 4)


def slow_env(request: Request) -> Result:
    settings = request.settings(PPO_FAST | {"n_envs": 16, "n_steps": 128})
    env = make_vec_env(SlowEnv, settings["n_envs"], seed=request.seed, vec_env_cls=SubprocVecEnv)
    model = ppo("MlpPolicy", env, settings, request.seed)
    result = measure(model, request.steps or 16_384, ppo_report(settings, "SubprocVecEnv"))
    env.close()
    ideal = settings["n_envs"] / SLEEP_S
    result.extra["ideal_steps_per_s"] = ideal
    result.extra["share_of_ideal"] = result.steps / result.seconds / ideal
    result.extra["collection_share_of_ideal"] = result.steps / result.extra["collection_s"] / ideal
    return result


def measure(model: BaseAlgorithm, steps: int, report: dict[str, Any], from_step: int = 0) -> Result:
    """Train for `steps` beyond `from_step`, and time what comes after it."""
    clock = Clock(from_step)
    model.learn(from_step + steps, callback=clock)
    assert clock.began is not None
    seconds = time.perf_counter() - clock.began
    done = model.num_timesteps - clock.began_steps
    return Result(done, seconds, report, {"collection_s": clock.collection_s, "untimed_steps": clock.began_steps})


def solve(model: BaseAlgorithm, request: Request, eval_every: int, report: dict[str, Any]) -> Result:
    """Train until an evaluation reaches 475 or the steps are used up."""
    env = make_vec_env("CartPole-v1", EVALUATION_EPISODES, seed=request.seed + 10_000)
    watch = UntilSolved(env, eval_every)
    model.learn(request.steps or 100_000, callback=CallbackList([watch]))
    if not watch.reached:
        watch.evaluate()
    extra = {"train_s": watch.train_s, "reached": watch.reached, "env_steps": watch._evaluated_at}
    extra |= {"returns": watch.returns, "evaluation_s": watch.evaluation_s}
    return Result(watch._evaluated_at, watch.train_s, report, extra)


def ppo_report(settings: dict[str, Any], vec: str) -> dict[str, Any]:
    return {
        "envs": settings["n_envs"],
        "vec": vec,
        "rollout": settings["n_steps"],
        "epochs": settings["n_epochs"],
        "minibatch": settings["batch_size"],
        "network": "64-64 Tanh for the policy, 64-64 Tanh apart for the value",
        "threads": torch.get_num_threads(),
        "updates_per_rollout": settings["n_epochs"]
        * settings["n_envs"]
        * settings["n_steps"]
        // settings["batch_size"],
    } | {key: settings[key] for key in ("learning_rate", "gamma", "gae_lambda", "clip_range", "ent_coef", "schedule")}


def dqn_report(settings: dict[str, Any], envs: int, network: str) -> dict[str, Any]:
    report = {"envs": envs, "epochs": None, "minibatch": settings["batch_size"], "rollout": settings["train_freq"]}
    own = {key: settings[key] for key in DQN_ZOO if key not in ("batch_size", "train_freq")}
    return report | {"network": network, "threads": torch.get_num_threads()} | own


def _falling(start: float):
    return lambda remaining: remaining * start


class StableBaselines3:
    """A block is one step of as many environments as it has rows; batches come out as tensors."""

    def __init__(self, settings: dict[str, Any], space: gym.spaces.Box, envs: int, about: str) -> None:
        self.batch, self.about, self.envs = settings["batch"], about, envs
        self.buffer = ReplayBuffer(
            settings["capacity"],
            space,
            gym.spaces.Discrete(6),
            "cpu",
            n_envs=envs,
            handle_timeout_termination=False,
        )

    def prepare(self, columns: dict[str, np.ndarray]) -> list[tuple[Any, ...]]:
        names = ("obs", "next_obs", "action", "reward", "done")
        steps = range(0, len(columns["done"]), self.envs)
        return [(*(columns[name][at : at + self.envs] for name in names), [{}] * self.envs) for at in steps]

    def add(self, block: list[tuple[Any, ...]]) -> None:
        for step in block:
            self.buffer.add(*step)

    def sample(self) -> Any:
        return self.buffer.sample(self.batch)

    def save(self, path: Path) -> None:
        save_to_pkl(path / "buffer.pkl", self.buffer)

    def load(self, path: Path) -> None:
        self.buffer = load_from_pkl(path / "buffer.pkl")


def uniform(settings: dict[str, Any]) -> StableBaselines3:
    space = gym.spaces.Box(-np.inf, np.inf, (8,), np.float32)
    return StableBaselines3(settings, space, settings["block"], "ReplayBuffer, as many environments as rows in a block")


def images(settings: dict[str, Any]) -> StableBaselines3:
    space = gym.spaces.Box(0, 255, (STACK, SIDE, SIDE), np.uint8)
    return StableBaselines3(settings, space, 1, "ReplayBuffer, stacks as they are")


TASKS = {
    "ppo-cartpole": ppo_cartpole,
    "ppo-cartpole-solve": ppo_cartpole_solve,
    "ppo-pong": ppo_pong,
    "dqn-cartpole-zoo": dqn_cartpole_zoo,
    "dqn-cartpole-solve": dqn_cartpole_solve,
    "dqn-pong": dqn_pong,
    "slow-env": slow_env,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    packages = {"torch": "torch", "sb3": "stable-baselines3", "gymnasium": "gymnasium", "ale-py": "ale-py"}
    run("sb3", packages, {**TASKS, **tasks(uniform=uniform, images=images)})

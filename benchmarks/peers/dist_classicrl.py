"""dist_classicrl: its Q-learning from batches of arrays, and on its TicTacToe in one process and in two.

It asks for Python 3.13 but uses nothing of it: the first run installs it beside its requirements all the same. Timing is
without set-up; its parallel runtime starts its processes inside `train`, so there they count. `protocol.py` has the command
line.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from protocol import HERE, Request, Result, run

SOURCE = Path(HERE) / "dist_classicrl_build" / "source.lock"
BATCH = {"batch": 1024, "states": 19_683, "actions": 9}
GAME = {"agents": 16, "processes": 1, "learning_rate": 0.1, "epsilon": 0.1}


def install() -> None:
    """Install it in this environment unless it is there."""
    try:
        version("dist_classicrl")
    except PackageNotFoundError:
        words = "install --no-deps --ignore-requires-python --require-hashes --quiet --requirement"
        subprocess.run([sys.executable, "-m", "pip", *words.split(), str(SOURCE)], check=True, stdout=sys.stderr)


def learn(request: Request) -> Result:
    """`learn` on batches of random rows."""
    import numpy as np
    from dist_classicrl.algorithms.base_algorithms.q_learning_optimal import OptimalQLearningBase

    settings = request.settings(BATCH)
    batch, states, actions = (settings[name] for name in ("batch", "states", "actions"))
    stream = np.random.default_rng(request.seed)
    columns = (
        stream.integers(0, states, batch, np.int32), stream.integers(0, actions, batch, np.int32),
        stream.random(batch, np.float32), stream.integers(0, states, batch, np.int32), stream.random(batch) < 0.2,
    )  # fmt: skip
    learner = OptimalQLearningBase(states, actions, seed=request.seed)
    times = -(-(request.steps or 200_000) // batch)
    learner.learn(*columns, 0.1)
    began = time.perf_counter()
    for _ in range(times):
        learner.learn(*columns, 0.1)
    return Result(times * batch, time.perf_counter() - began, settings)


def tictactoe(request: Request) -> Result:
    """Training against its random opponent, as its own throughput benchmark does it, with constant rates."""
    from dist_classicrl.algorithms.base_algorithms.q_learning_optimal import OptimalQLearningBase
    from dist_classicrl.algorithms.runtime.parallel_runtime import ParallelQLearning
    from dist_classicrl.algorithms.runtime.single_thread_runtime import SingleThreadQLearning
    from dist_classicrl.schedules.constant_schedule import ConstantSchedule

    settings = request.settings(GAME)
    agents, processes = settings["agents"], settings["processes"]
    envs = [games(agents) for _ in range(processes)]
    kind, env = (SingleThreadQLearning, envs[0]) if processes == 1 else (ParallelQLearning, envs)
    rates = (ConstantSchedule(settings["learning_rate"]), ConstantSchedule(settings["epsilon"]))
    trainer = kind(OptimalQLearningBase(19_683, 9, seed=request.seed), *rates)
    steps = -(-(request.steps or 48_000) // agents)
    trainer.init_training()
    began = time.perf_counter()
    trainer.run_steps(steps, env, None)
    seconds = time.perf_counter() - began
    trainer.close_training()
    return Result(steps // processes * processes * agents, seconds, settings)


def games(count: int) -> Any:
    """As many of its games as one vector environment."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    return SyncVectorEnv([one_game] * count, autoreset_mode=AutoresetMode.SAME_STEP)


def one_game() -> Any:
    """Its game with numbered boards; a function of the module, since its processes send environments back."""
    from dist_classicrl.environments.tiktaktoe_mod import TicTacToeEnv
    from dist_classicrl.wrappers.flatten_multidiscrete_wrapper import FlattenMultiDiscreteObservationsWrapper

    return FlattenMultiDiscreteObservationsWrapper(TicTacToeEnv())


if __name__ == "__main__":
    install()
    packages = {"dist_classicrl": "dist_classicrl", "gymnasium": "gymnasium", "numpy": "numpy"}
    run("dist_classicrl", packages, {"learn": learn, "tictactoe": tictactoe})

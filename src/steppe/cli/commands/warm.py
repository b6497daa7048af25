"""`steppe warm`: compiles all numba kernels and caches them on disk, by short training runs of every kind.

The kernels are called through real runs because numba caches a kernel per argument types.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steppe.cli.commands.doctor import numba_cache
from steppe.cli.options import AsJson
from steppe.cli.output import emit
from steppe.core.contracts.errors import UsageError

PACKAGE = Path(__file__).resolve().parents[2]
SHORT = {"runtime": "inline", "evaluation.episodes": 1, "evaluation.every_steps": 1_000_000}
VECTORS, NUMBERS, IMAGES, GAME = "CartPole-v1", "Pendulum-v1", "steppe/ImageIdentity-v0", "steppe/TicTacToe-v0"
CUES = "steppe/Recall-v0"
REPLAY = {"algo": "dqn", "learning_starts": 64, "samples_per_insert": 1.0, "steps": 600}
RUNS: dict[str, Mapping[str, Any]] = {
    "ppo": {"env": VECTORS, "steps": 1},
    "a2c": {"env": VECTORS, "algo": "a2c", "steps": 1},
    "a3c": {"env": VECTORS, "algo": "a3c", "steps": 600},
    "ppo, continuous actions": {"env": NUMBERS, "steps": 1},
    "ppo, images": {"env": IMAGES, "steps": 1, "segment_steps": 16, "hidden": (16,)},
    "ppo, recurrent": {"env": CUES, "steps": 1, "recurrent": True},
    "ppo, recurrent, gru": {"env": NUMBERS, "steps": 1, "recurrent": True, "cell": "gru", "segment_steps": 16},
    "dqn": {"env": VECTORS, **REPLAY},
    "dqn, prioritized replay": {"env": VECTORS, **REPLAY, "prioritized": True},
    "dqn, images": {"env": IMAGES, **REPLAY, "hidden": (16,)},
    "r2d2": {"env": CUES, **REPLAY, "algo": "r2d2"},
    "r2d2, gru": {"env": CUES, **REPLAY, "algo": "r2d2", "cell": "gru"},
    "workers": {"env": GAME, "algo": "q-learning", "mode": "workers", "steps": 1},
}


def warm(as_json: AsJson = False) -> None:
    """Compile all numba kernels now instead of in the first runs.

    Runs a short training of every kind; a second call finds everything compiled. The cache is in the package's directory, in your
    user cache directory if the package is read-only, or in NUMBA_CACHE_DIR if it is set.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    cache = numba_cache()
    if cache.status == "broken":
        raise UsageError(f"compiled kernels cannot be cached: {cache.details}; {cache.advice}")
    delete_stale_kernels(PACKAGE)
    started = time.monotonic()
    with ProcessPoolExecutor(len(PARALLEL_GROUPS), get_context("spawn")) as pool:
        compiled = sum(pool.map(warm_group, PARALLEL_GROUPS))
    seconds = time.monotonic() - started
    if as_json:
        emit({"compiled": compiled, "seconds": seconds})
    else:
        print(f"{compiled} kernels compiled in {seconds:.1f} s." if compiled else "All kernels were already compiled.")


def delete_stale_kernels(package: Path) -> int:
    """Delete cached kernels that are older than the newest kernel source file; return the number of deleted files.

    Numba recompiles a kernel when its own file changes, but not when a kernel that it calls changes in another file.
    """
    newest = max(path.stat().st_mtime for path in package.rglob("*.py") if "numba" in path.read_text())
    stale = [path for path in package.rglob("__pycache__/*.nb[ic]") if path.stat().st_mtime < newest]
    with contextlib.suppress(PermissionError):  # in a read-only package numba does not use this cache
        for path in stale:
            path.unlink(missing_ok=True)
    return len(stale)


def warm_group(names: Sequence[str]) -> int:
    """Run these trainings one after the other in this process; return the number of kernels compiled."""
    before = 0
    for name in names:
        started = time.monotonic()
        OTHERS[name]() if name in OTHERS else _run({**SHORT, **RUNS[name]})
        compiled = num_compiled()
        line = f"{name}: {compiled - before} kernels compiled, {time.monotonic() - started:.1f} s"
        print(line, file=sys.stderr, flush=True)
        before = compiled
    return before


def num_compiled() -> int:
    """Return the number of this package's kernels that this process compiled, called kernels included."""
    modules = [module for name, module in sys.modules.items() if name.startswith("steppe.")]
    kernels = {id(value): value for module in modules for value in vars(module).values() if hasattr(value, "py_func")}
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in kernels.values())


def _run(settings: Mapping[str, Any]) -> None:
    from steppe.core.config.run import resolve_config
    from steppe.training.train import run_experiment

    with tempfile.TemporaryDirectory(prefix="steppe-warm-") as directory:
        run_experiment(resolve_config(("call", {**settings, "run_dir": Path(directory) / "run"}))).raise_for_fault()


def _tables() -> None:
    """Compile every tabular algorithm: per step, with and without action masks, and in batches."""
    import numpy as np

    from steppe.algorithms.tabular.double_q import DoubleQLearning
    from steppe.algorithms.tabular.multistep import NStepQLearning, QLambda
    from steppe.algorithms.tabular.q_learning import OptimalQLearning
    from steppe.algorithms.tabular.sarsa import SARSA, ExpectedSARSA
    from steppe.envs.tictactoe.env import TicTacToeEnv
    from steppe.envs.toy.bandit import TwoArmedBanditEnv

    numbers, rewards, dones = np.zeros(2, np.int64), np.zeros(2), np.zeros(2, np.bool_)
    kinds: tuple[Any, ...] = (OptimalQLearning, SARSA, ExpectedSARSA, DoubleQLearning, NStepQLearning, QLambda)
    for kind in kinds:
        for env in (TwoArmedBanditEnv(), TicTacToeEnv(opponent="random")):
            agent = kind(env.observation_space_size, env.action_space_size)
            agent.train_episode(env)
            agent.select_actions(numbers)
            following = {"next_actions": numbers} if kind is SARSA else {}
            agent.learn(numbers, numbers, rewards, numbers, dones, **following)


def _games() -> None:
    """Compile the game trainer and the vectorized TicTacToe environment."""
    import numpy as np

    from steppe.algorithms.tabular.q_learning import OptimalQLearning
    from steppe.envs.tictactoe.env import tictactoe
    from steppe.envs.tictactoe.vector import TicTacToeVectorEnv
    from steppe.roles.tabular.game_trainer import GameTrainer

    game = tictactoe()
    for opponent in ("random", "self"):
        agent = OptimalQLearning(game.num_states, game.num_actions)
        GameTrainer(agent, game, opponent, num_games=2).run(2)
    env = TicTacToeVectorEnv(2)
    env.reset(seed=0)
    env.step(np.zeros(2, np.int64))


def _downscaling() -> None:
    """Compile the downscaling of Atari screens."""
    import numpy as np

    from steppe.envs.wrappers.downscale import AreaDownscaler

    screen = np.zeros((210, 160), np.uint8)
    AreaDownscaler(screen.shape, (84, 84))(screen, screen)


def _pathfinding() -> None:
    """Compile the pathfinding environment."""
    import numpy as np

    from steppe.envs.pathfinding.worlds import PathfindingWorlds

    worlds = PathfindingWorlds(1, 2)
    worlds.reset(0)
    worlds.step(np.zeros((1, 2), np.int64))


def _parameter_server() -> None:
    """Compile aggregation, optimizers and differential privacy of the parameter server."""
    import numpy as np

    from steppe.params.aggregation import METHODS, Aggregation
    from steppe.params.kernels import all_finite, copy_finite, noisy_sum, normal_numbers
    from steppe.params.optimizers import DEFAULTS, Optimizer, OptimizerState
    from steppe.params.privacy import clip_scales

    updates, values = np.zeros((3, 2), np.float32), np.zeros(2, np.float32)
    for method in METHODS:
        Aggregation(method).combine(updates)
    sent, noise = np.frombuffer(bytes(8), np.float32), np.empty(2)  # read-only, as received in a message
    for row in (updates[0], sent):
        for kind in DEFAULTS:
            OptimizerState(Optimizer(kind), 2).step(values, row, np.empty_like(values))
        copy_finite(row, values)
        all_finite(row)
    normal_numbers(np.frombuffer(bytes(16), np.uint64), 1.0, noise)
    noisy_sum(updates, clip_scales(updates, 1.0), noise, 0, 1.0, values)


OTHERS = {
    "tables": _tables,
    "games": _games,
    "screens": _downscaling,
    "worlds": _pathfinding,
    "parameter server": _parameter_server,
}
# Compiled in parallel processes. Trainings that share kernels are in one group, or both would compile them. The first group
# does not import torch.
PARALLEL_GROUPS = ((*OTHERS, "workers"), tuple(name for name in RUNS if name != "workers"))

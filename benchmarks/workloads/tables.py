"""Tabular learning by itself, run by classic.py: batches, games, quality, overhead, start. Prints one JSON object.

`bare-…` are the loops that somebody would write by hand with numba for nothing but this task: what is lost to them is what
our checks, schedules and exactness cost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = {"taxi": (500, 6), "tictactoe": (19_683, 9)}
RATE, GAMMA = 0.1, 0.99


def batches(given: argparse.Namespace) -> dict[str, Any]:
    """Updates per second of `learn` on arrays of `--batch` random rows."""
    from steppe.classic import OptimalQLearning

    rows, shape = random_rows(given.size, given.batch)
    agent = OptimalQLearning(*shape, learning_rate=RATE, discount_factor=GAMMA)
    return {**rate_of(lambda: agent.learn(*rows), given.steps, given.batch), "settings": _sizes(given, shape)}


def bare_batches(given: argparse.Namespace) -> dict[str, Any]:
    """The same by the bare loop: no checks, no masks."""
    import numpy as np
    from bare import learn

    rows, shape = random_rows(given.size, given.batch)
    table = np.zeros(shape, np.float32)
    return {
        **rate_of(lambda: learn(table, *rows, RATE, GAMMA), given.steps, given.batch),
        "settings": _sizes(given, shape),
    }


def random_rows(size: str, count: int) -> tuple[tuple[Any, ...], tuple[int, int]]:
    """Columns of a batch, and the shape of its table."""
    import numpy as np

    states, actions = SIZES[size]
    stream = np.random.default_rng(0)
    columns = (
        stream.integers(0, states, count), stream.integers(0, actions, count), stream.random(count),
        stream.integers(0, states, count), stream.random(count) < 0.2,
    )  # fmt: skip
    return columns, (states, actions)


def rate_of(call: Callable[[], Any], steps: int, per_call: int) -> dict[str, Any]:
    """How many steps a second, with the first call left out: it may compile."""
    call()
    times = -(-steps // per_call)
    began = time.perf_counter()
    for _ in range(times):
        call()
    seconds = time.perf_counter() - began
    return {"value": times * per_call / seconds, "seconds": seconds}


def games(given: argparse.Namespace) -> dict[str, Any]:
    """Environment steps per second of a GameTrainer, the choice and the update included."""
    from steppe.classic import ConstantSchedule, GameTrainer, OptimalQLearning, tictactoe

    game = tictactoe()
    agent = OptimalQLearning(game.num_states, game.num_actions, RATE, epsilon=ConstantSchedule(given.epsilon), seed=0)
    trainer = GameTrainer(agent, game, given.opponent, num_games=given.games, block_steps=given.block, seed=0)
    trainer.run(given.games * 512)  # past the first games, which all begin alike
    began = time.perf_counter()
    tally = trainer.run(given.steps)
    seconds = time.perf_counter() - began
    return {"value": tally.num_steps / seconds, "seconds": seconds, "settings": _games(given)}


def bare_games(given: argparse.Namespace) -> dict[str, Any]:
    """The same by the bare loop: one rate, a random opponent, nothing counted."""
    import numpy as np
    from bare import play

    from steppe.classic import tictactoe

    game = tictactoe()
    table, states = np.zeros((game.num_states, game.num_actions), np.float32), np.zeros(given.games, np.int64)
    tables = (game.placed, game.legal.astype(np.int64), game.mover, game.outcome.astype(np.int64))
    call = (table, *tables, states)
    play(*call, 512, RATE, given.epsilon, GAMMA, np.uint64(1))
    times = -(-given.steps // given.games)
    began = time.perf_counter()
    play(*call, times, RATE, given.epsilon, GAMMA, np.uint64(2))
    seconds = time.perf_counter() - began
    return {"value": times * given.games / seconds, "seconds": seconds, "settings": _games(given)}


def processes(given: argparse.Namespace) -> dict[str, Any]:
    """Environment steps per second of ParallelQLearning, by the run's own clock: from the first step to the last merge."""
    from steppe.classic import ConstantSchedule, OptimalQLearning, ParallelQLearning

    rates = {"learning_rate": RATE, "epsilon": ConstantSchedule(given.epsilon), "seed": 0}
    trainer = ParallelQLearning(OptimalQLearning, num_processes=given.processes, **rates)
    began = time.perf_counter()
    trainer.train("steppe/TicTacToe-v0", steps=given.steps)
    seconds = time.perf_counter() - began
    settings = {"processes": given.processes, "opponent": "random", "epsilon": given.epsilon}
    return {"value": trainer.result.steps_per_s, "seconds": seconds, "settings": settings}


def quality(given: argparse.Namespace) -> dict[str, Any]:
    """Train for `--seconds`, then judge the play exactly over the game tree.

    The value is the mean return against a random opponent over both seats; `worst` is the least that any play of anybody
    can bring it to.
    """
    import numpy as np

    from steppe.classic import GameTrainer, OptimalQLearning, exact_return, tictactoe, worst_return

    game = tictactoe()
    trainer = GameTrainer(agent := _learner(given, OptimalQLearning), game, given.opponent, seed=given.seed)
    began = time.perf_counter()
    trainer.run(given.steps)
    seconds = time.perf_counter() - began
    score = float(np.mean(exact_return(game, agent, "random")))
    return {
        "value": score, "worst": min(worst_return(game, agent)), "train_s": seconds,
        "settings": {"opponent": given.opponent, "env_steps": agent.step_count, "seed": given.seed},
    }  # fmt: skip


def _learner(given: argparse.Namespace, kind: Any) -> Any:
    """Against chance values must be averaged, by a rate that falls; what is certain is learned by large ones."""
    from steppe.classic import ConstantSchedule, ExponentialSchedule

    rate: Any = ConstantSchedule(0.5)
    if given.opponent == "random":
        rate = ExponentialSchedule.over(0.5, 0.005, given.steps)
    epsilon = ConstantSchedule(0.5 if given.opponent == "random" else 1.0)
    return kind(*SIZES["tictactoe"], learning_rate=rate, discount_factor=1.0, epsilon=epsilon, seed=given.seed)


def overhead(given: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per step of `train_episode` in a plain Python environment, over those of the environment's own steps."""
    from steppe import classic

    env = _corridor()
    agent = getattr(classic, given.algorithm)(env.observation_space.n, env.action_space.n)
    agent.train_episode(env)
    times = max(1, given.steps // env.length)
    own, with_agent = [], []
    for _ in range(5):  # in turn, so that both meet the same machine
        own.append(_timed(lambda: _walk(env), times))
        with_agent.append(_timed(lambda: agent.train_episode(env), times))
    scale = 1e6 / (times * env.length)
    return {
        "value": scale * (min(with_agent) - min(own)), "own_us": scale * min(own), "whole_us": scale * min(with_agent),
        "settings": {"algorithm": given.algorithm, "steps": 5 * times * env.length},
    }  # fmt: skip


def _timed(call: Callable[[], Any], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - began


def _walk(env: Any) -> None:
    """An episode with nobody to choose or to learn."""
    env.reset()
    step, ended = env.step, False
    while not ended:
        _, _, terminated, truncated, _ = step(1)
        ended = terminated or truncated


def _corridor() -> Any:
    import gymnasium as gym

    class Corridor(gym.Env[int, int]):
        """Thirty-two states in a ring; an episode is cut after a thousand steps."""

        length = 1000
        observation_space, action_space = gym.spaces.Discrete(32), gym.spaces.Discrete(4)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            super().reset(seed=seed)
            self.state = self.elapsed = 0
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            self.state = (self.state + action) % 32
            self.elapsed += 1
            return self.state, 1.0 if self.state == 0 else 0.0, False, self.elapsed >= self.length, {}

    return Corridor()


def first(given: argparse.Namespace) -> dict[str, Any]:
    """The machine's clock when the first step was learned; the reader knows when the process began."""
    from steppe.classic import OptimalQLearning, TicTacToeEnv

    env = TicTacToeEnv(opponent="random")
    agent = OptimalQLearning(env.observation_space_size, env.action_space_size)
    agent.train_episode(env)
    assert agent.step_count > 0
    return {"value": time.monotonic(), "torch": int("torch" in sys.modules), "settings": {}}


def _sizes(given: argparse.Namespace, shape: tuple[int, int]) -> dict[str, Any]:
    return {"batch": given.batch, "states": shape[0], "actions": shape[1]}


def _games(given: argparse.Namespace) -> dict[str, Any]:
    return {"opponent": given.opponent, "games": given.games, "steps_per_call": given.block, "epsilon": given.epsilon}


TASKS = {
    "batches": batches, "bare-batches": bare_batches, "games": games, "bare-games": bare_games, "processes": processes,
    "quality": quality, "overhead": overhead, "first": first,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="tictactoe")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--opponent", default="random")
    parser.add_argument("--games", type=int, default=1024)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--algorithm", default="OptimalQLearning")
    given = parser.parse_args()
    print(json.dumps(TASKS[given.task](given)))


if __name__ == "__main__":
    main()

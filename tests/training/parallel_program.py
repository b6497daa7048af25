"""Train a table with two processes and print it: test_tabular_runtimes.py runs several of these at once."""

from __future__ import annotations

import json
import sys

from steppe.classic import LinearSchedule, OptimalQLearning, ParallelQLearning
from tests.support.tabular_envs import maze

if __name__ == "__main__":
    steps = 40_000
    runtime = ParallelQLearning(
        OptimalQLearning, num_processes=2, discount_factor=float(sys.argv[1]), epsilon=1.0, epsilon_decay=1.0,
        learning_rate=LinearSchedule(0.05, 0.0, steps), seed=5,
    )  # fmt: skip
    runtime.train(maze, steps, steps_per_sync=200)
    print(json.dumps(runtime.q_table.tolist()))

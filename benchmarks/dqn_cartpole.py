"""DQN on CartPole-v1: speed at the RL zoo's settings, and wall time to a return of 475."""

from __future__ import annotations

import math
import statistics

from suite.claims import Claim, ratio
from suite.measuring import Row
from suite.ours import learning_steps_per_s as rate
from suite.ours import time_to_target, train
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

ONE, EIGHT, SB3 = "Steppe, one env", "Steppe, 8 envs", "Stable-Baselines3"
# 256 steps, then 128 updates of 64: 32 samples per step.
ZOO = ("--algo", "dqn", "-s", "samples_per_insert=32", "-s", "batch_size=64", "-s", "hidden=[256, 256]")
ZOO += ("-s", "learning_rate=2.3e-3", "-s", "double=false", "-s", "n_step=1", "-s", "target_every=10")
ZOO += ("-s", "exploration_fraction=0.16")
# The same number of steps and evaluations as Stable-Baselines3: exploration ends after a share of the steps.
SOLVE = ("--target-return", "475", "--steps", "100000", "-s", "evaluation.every_steps=1024")
SEEDS = 5


def zoo(effort: Effort) -> Part:
    steps = str(effort.of(20_000, 4_000))
    rows = effort.measure(
        [
            train(ONE, "CartPole-v1", "--steps", steps, "--envs", "1", "-s", "segment_steps=256", *ZOO, figures=rate),
            train(EIGHT, "CartPole-v1", "--steps", steps, "--envs", "8", "-s", "segment_steps=32", *ZOO, figures=rate),
            peer(SB3, "sb3", "dqn-cartpole-zoo", steps=effort.of(8_000, 1_024)),
        ]
    )
    return Part(
        "At the zoo's settings",
        "Network 256 × 256, 128 updates of 64 every 256 steps. The zoo steps one environment; the second row has the same "
        "256 steps from 8. Steps before the first update are left out on both sides.",
        "steps/s",
        rows,
        [
            Claim("DQN CartPole, zoo's settings, one env / Stable-Baselines3", 3, ratio(rows, ONE, SB3)),
            Claim("DQN CartPole, zoo's settings, 8 envs / Stable-Baselines3", 3, ratio(rows, EIGHT, SB3)),
        ],
        columns={"whole_steps_per_s": "whole run, steps/s"},
    )


def solve(effort: Effort) -> Part:
    ours = "Steppe, its defaults"
    cases = [
        train(ours, "CartPole-v1", "--algo", "dqn", *SOLVE, figures=time_to_target),
        peer(SB3, "sb3", "dqn-cartpole-solve", value="train_s"),
    ]
    rows = effort.measure(cases, rounds=effort.of(SEEDS, 1))
    return Part(
        "Time to 475, a seed per round",
        "Training time without evaluations; the whole process, from its start to its end, is beside it.",
        "s",
        rows,
        [
            Claim("DQN, training time to 475 / Stable-Baselines3", 1, ratio(rows, ours, SB3), at_least=False),
            Claim(
                "DQN, wall time of the process to 475 / Stable-Baselines3",
                1,
                whole(rows[ours], rows[SB3]),
                at_least=False,
            ),
        ],
        columns={"wall_s": "whole process, s"},
    )


def whole(*rows: Row) -> float | None:
    """Ratio of median process times, ours over theirs; a process that never reached 475 counts as infinite."""
    if any(row.error or not row.runs for row in rows):
        return None
    ours, theirs = (
        statistics.median(run.wall_s if run.reading.extra["reached"] else math.inf for run in row.runs) for row in rows
    )
    return ours / theirs if math.isfinite(ours) else None


PARTS = {"zoo": zoo, "solve": solve}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

"""Training time to an evaluation of CartPole-v1 over 20 episodes with a mean return of 475 or more."""

from __future__ import annotations

from suite.claims import Claim, ratio_to_smallest
from suite.ours import time_to_target, train
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

STEPPE, ZOO, LARGE = "Steppe", "Stable-Baselines3, the zoo's settings", "Stable-Baselines3, large minibatches"
SEEDS = 10


def ppo(effort: Effort) -> Part:
    seeds = effort.of(SEEDS, 2)
    cases = [
        train(STEPPE, "CartPole-v1", "--algo", "ppo", "--target-return", "475", figures=time_to_target),
        peer(ZOO, "sb3", "ppo-cartpole-solve", value="train_s", settings=["preset=zoo"]),
        peer(LARGE, "sb3", "ppo-cartpole-solve", value="train_s", settings=["preset=fast"]),
    ]
    rows = effort.measure(cases, rounds=seeds)
    reached = sum(bool(run.reading.extra["reached"]) for run in rows[STEPPE].runs)
    return Part(
        "PPO, a seed per round",
        "The clock runs while training does: from the first environment step to the publication of the weights that the "
        "evaluation then found good enough. Evaluations themselves are left out on every side.",
        "s",
        rows,
        [
            Claim(
                "time to 475 / Stable-Baselines3's faster median",
                0.15,
                ratio_to_smallest(rows, STEPPE, ZOO, LARGE),
                at_least=False,
            ),
            Claim(f"seeds that reached 475, of {seeds}", seeds, reached, unit="seeds"),
        ],
        columns={"wall_s": "whole process, s"},
    )


PARTS = {"ppo": ppo}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

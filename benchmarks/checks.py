"""Validation of arrays: its share of the time of the work that it protects."""

from __future__ import annotations

from suite.claims import Claim
from suite.measuring import Case
from suite.ours import workload
from suite.report import Part
from suite.running import Effort, benchmark

MOST = 1.0  # percent
RUNS = {"dqn": "DQN, CartPole", "ppo": "PPO, CartPole"}
CALLS = {
    "dqn": ("DQN, learn_from_batch of {} transitions", (32, 256, 4096)),
    "ppo": ("PPO, learn_from_batch of {} steps in 8 environments", (1024, 8192)),
    "replay": ("ReplayBufferPool, add_experiences of {}", (64, 1024)),
}


def training(effort: Effort) -> Part:
    steps = str(effort.of(200_000, 20_000))
    rows = effort.measure([workload(label, "checking", "train", algo, steps) for algo, label in RUNS.items()])
    return Part(
        "Training",
        "A run of `steppe train` with default settings and all roles in one process. The learner checks every segment that "
        "comes in (shape, dtype, range of actions, finite numbers), the actor what its environments said. A check counts with its median time, the run with its processor time.",
        "% of processor time",
        rows,
        [
            Claim(f"checks in a training run, {label}", MOST, rows[label].median, "%", at_least=False)
            for label in RUNS.values()
        ],
        columns={
            "learner_percent": "learner, %",
            "actor_percent": "actor, %",
            "segments": "segments",
            "check_us": "µs a segment, learner",
        },
    )


def calls(effort: Effort) -> Part:
    rounds = str(effort.of(200, 10))
    cases: list[Case] = [
        workload(words.format(f"{rows:,}"), "checking", "call", name, str(rows), rounds)
        for name, (words, sizes) in CALLS.items()
        for rows in sizes
    ]
    return Part(
        "Calls by hand",
        "Public calls with arrays of the caller's. The checks cost microseconds that hardly depend on the number of rows, so "
        "small batches show the largest share. Of `learn_from_batch` of DQN the conversion of the dictionary counts as a "
        "check; of a pool everything but writing the rows.",
        "% of the call",
        effort.measure(cases),
        columns={"call_us": "call, µs", "check_us": "checks, µs"},
    )


PARTS = {"training": training, "calls": calls}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

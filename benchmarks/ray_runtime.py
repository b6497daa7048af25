"""The runtime `ray`: PPO on CartPole compared with `processes` and RLlib, and 5 MB of weights to eight actors."""

from __future__ import annotations

from suite.claims import Claim, ratio
from suite.ours import train, workload
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

MEGABYTE, READERS = 1_000_000, 8
PROCESSES, RAY = "Steppe, processes", "Steppe, ray"
RLLIB = ("RLlib PPO", "RLlib IMPALA")


def cartpole(effort: Effort) -> Part:
    words = ("CartPole-v1", "--algo", "ppo", "--steps", str(effort.of(2_000_000, 400_000)))
    rows = effort.measure(
        [
            train(PROCESSES, *words, "--runtime", "processes"),
            train(RAY, *words, "--runtime", "ray"),
            peer(RLLIB[0], "rllib", "ppo-cartpole", steps=effort.of(30_000, 8_000)),
            peer(RLLIB[1], "rllib", "impala-cartpole", steps=effort.of(30_000, 8_000)),
        ]
    )
    return Part(
        "PPO on CartPole-v1",
        "Steppe with its defaults on both runtimes, a Ray cluster of its own on this machine; RLlib with its own settings on "
        "the same version of Ray. Set-up is not counted.",
        "steps/s",
        rows,
        [
            Claim("PPO CartPole on ray / on processes", 0.7, ratio(rows, RAY, PROCESSES)),
            Claim("PPO CartPole on ray / RLlib's PPO and IMPALA", 5, ratio(rows, RAY, *RLLIB)),
        ],
        columns={"return_mean": "return at the end"},
    )


def weights(effort: Effort) -> Part:
    own = "Steppe, ray"
    words = ("--nbytes", str(5 * MEGABYTE), "--readers", str(READERS), "--times", str(effort.of(100, 20)))
    rows = effort.measure([workload(own, "publishing_ray", *words)])
    return Part(
        "Publish → eight actors",
        f"A writer publishes 5 MB every 50 ms; {READERS} Ray actors take it from the object store, call `newer_than` and have "
        "their copy. A publication counts when the slowest has it.",
        "ms",
        rows,
        [Claim("5 MB of weights to 8 Ray actors, median", 50, rows[own].median, unit="ms", at_least=False)],
        columns={
            "single_ms": "one reader, ms",
            "worst_ms": "slowest publication, ms",
            "publish_ms": "publish itself, ms",
        },
    )


PARTS = {"cartpole": cartpole, "weights": weights}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

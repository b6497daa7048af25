"""Pixels: PPO and DQN on ALE Pong, 84 × 84 × 4, compared with Stable-Baselines3."""

from __future__ import annotations

from suite.claims import Claim, ratio
from suite.measuring import Case
from suite.ours import Figures, Finished, learning_steps_per_s, steps_per_s, train
from suite.peers import peer
from suite.report import Part, middle
from suite.running import Effort, benchmark

STEPPE = "Steppe"
HERE, THERE = "Stable-Baselines3, environments in its process", "Stable-Baselines3, a process per environment"
WAITING = ("wait", "blocked")
NAMED = ("env", "policy", "sample", "learn")  # environment, network and gather; not publishing and the rest
PPO = ("segment_steps=128", "epochs=4", "minibatch_size=256", "hidden=[512]", "learning_rate=2.5e-4")
PPO += ("clip=0.1", "entropy_coef=0.01", "anneal=true")
# 8 updates of 32 for every 32 steps, the same as for Stable-Baselines3.
DQN = ("segment_steps=4", "samples_per_insert=8", "batch_size=32", "buffer_size=10000", "learning_starts=1000")
DQN += ("target_every=1000", "hidden=[512]", "learning_rate=1e-4", "double=false")


def outside(run: Finished) -> Figures:
    """Steps per second, and the share of all roles' working time that is neither environment, nor network, nor gather."""
    training, actors = run.view.training, run.view.actors.values()
    assert training is not None
    spent = [phases for report in (training, *actors) for phases in report.phases.items()]
    worked = sum(seconds for phase, seconds in spent if phase not in WAITING)
    named = sum(seconds for phase, seconds in spent if phase in NAMED)
    rate = learning_steps_per_s if run.view.config.algo == "dqn" else steps_per_s
    return {**rate(run), "outside_percent": 100 * (worked - named) / worked}


def steppe(effort: Effort, algo: str, steps: int, pairs: tuple[str, ...]) -> Case:
    settings = [
        word for pair in (*pairs, "evaluation.every_steps=1000000000", "evaluation.episodes=1") for word in ("-s", pair)
    ]
    cut = ("-s", "evaluation.max_episode_steps=100")
    words = ("--algo", algo, "--envs", "8", "--steps", str(effort.of(steps, 2_048)), *settings, *cut)
    return train(STEPPE, "ALE/Pong-v5", *words, figures=outside)


def part(effort: Effort, algo: str, ours: Case, task: str, steps: int) -> Part:
    theirs = [
        peer(label, "sb3", task, steps=effort.of(steps, 1_024), settings=[f"vec={vec}"])
        for label, vec in ((HERE, "dummy"), (THERE, "subproc"))
    ]
    rows = effort.measure([ours, *theirs])
    outside_percent = middle(rows[STEPPE].record(), "outside_percent")
    return Part(
        f"{algo} on Pong",
        "8 environments, frame skip 4, 84 × 84 grey, four frames stacked; the same network, rollout, epochs and batches on "
        "both sides. A step is an agent's step: four frames. DQN's steps before the first update are left out.",
        "steps/s",
        rows,
        [
            Claim(f"{algo} on Pong / Stable-Baselines3", 1.2, ratio(rows, STEPPE, HERE, THERE)),
            Claim(
                f"{algo} on Pong, time outside environment, network and gather",
                10,
                outside_percent,
                unit="%",
                at_least=False,
            ),
        ],
        columns={"outside_percent": "outside, %"},
    )


def ppo(effort: Effort) -> Part:
    return part(effort, "PPO", steppe(effort, "ppo", 16_384, PPO), "ppo-pong", 8_192)


def dqn(effort: Effort) -> Part:
    return part(effort, "DQN", steppe(effort, "dqn", 8_192, DQN), "dqn-pong", 4_096)


PARTS = {"ppo": ppo, "dqn": dqn}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

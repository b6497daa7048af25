"""PPO on CartPole-v1: environment steps per second, learning included.

Each side trains as its own documentation says unless a part says otherwise; set-up is not counted.
"""

from __future__ import annotations

from suite.claims import Claim, ratio
from suite.measuring import Case
from suite.ours import train
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

STEPPE = "Steppe"
SB3, SAMPLE_FACTORY = "Stable-Baselines3", "Sample Factory"
PUFFER_GYM, PUFFER_C = "PufferLib, Gymnasium env", "PufferLib, its C env"
UNIT = "steps/s"
# The native PufferLib task: 4,096 environments, one pass over each rollout.
PUFFER_SETTINGS = ("--envs", "4096", "-s", "epochs=1", "-s", "hidden=[128]", "-s", "segment_steps=64")
PUFFER_SETTINGS += ("-s", "minibatch_size=32768")
SB3_SETTINGS = ("--envs", "8", "-s", "segment_steps=2048", "-s", "epochs=10", "-s", "minibatch_size=64")
SB3_SETTINGS += ("-s", "hidden=[64, 64]", "-s", "learning_rate=3e-4")


def steppe(effort: Effort, *words: str, steps: int = 2_000_000) -> Case:
    """A run of ours that lasts some seconds."""
    return train(STEPPE, "CartPole-v1", "--algo", "ppo", "--steps", str(effort.of(steps)), *words)


def sb3(effort: Effort) -> Case:
    return peer(SB3, "sb3", "ppo-cartpole", steps=effort.of(81_920, 16_384))


def sample_factory(effort: Effort) -> Case:
    return peer(SAMPLE_FACTORY, "sample_factory", "ppo-cartpole", steps=effort.of(120_000, 20_000))


def puffer_gym(effort: Effort) -> Case:
    return peer(PUFFER_GYM, "pufferlib", "ppo-cartpole", steps=effort.of(100_000, 20_000))


def puffer_c(effort: Effort) -> Case:
    return peer(PUFFER_C, "pufferlib", "ppo-cartpole-native", steps=effort.of(4_000_000, 600_000))


def defaults(effort: Effort) -> Part:
    rows = effort.measure(
        [
            steppe(effort),
            sb3(effort),
            peer("CleanRL", "cleanrl", "ppo-cartpole", steps=effort.of(60_000, 10_000)),
            sample_factory(effort),
            peer("Tianshou", "tianshou", "ppo-cartpole", steps=effort.of(30_000, 8_000)),
            peer("TorchRL", "torchrl", "ppo-cartpole", steps=effort.of(30_000, 8_000)),
            peer("RLlib PPO", "rllib", "ppo-cartpole", steps=effort.of(30_000, 8_000)),
            peer("RLlib IMPALA", "rllib", "impala-cartpole", steps=effort.of(30_000, 8_000)),
            puffer_gym(effort),
            puffer_c(effort),
        ]
    )
    return Part(
        "Each with its own settings",
        "Steppe with the defaults that also reach a return of 475 (see the time to solve), on Gymnasium's vector CartPole.",
        UNIT,
        rows,
        [Claim("PPO CartPole, our defaults / Stable-Baselines3", 25, ratio(rows, STEPPE, SB3))],
        columns={"return_mean": "return at the end"},
    )


def pufferlib(effort: Effort) -> Part:
    rows = effort.measure([steppe(effort, *PUFFER_SETTINGS, steps=8_000_000), puffer_c(effort)])
    return Part(
        "At PufferLib's settings",
        "PufferLib steps its own C version of CartPole; Steppe steps Gymnasium's NumPy one, with PufferLib's number of "
        "environments, epochs, rollout, minibatch and network width.",
        UNIT,
        rows,
        [Claim("PPO CartPole, PufferLib's settings / PufferLib with its C env", 1.0, ratio(rows, STEPPE, PUFFER_C))],
    )


def stable_baselines3(effort: Effort) -> Part:
    rows = effort.measure([steppe(effort, *SB3_SETTINGS, steps=327_680), sb3(effort)])
    return Part(
        "At Stable-Baselines3's settings",
        "8 environments, rollouts of 2,048 steps, 10 epochs, minibatches of 64, two layers of 64 for both sides.",
        UNIT,
        rows,
        [Claim("PPO CartPole, SB3's settings / Stable-Baselines3", 3, ratio(rows, STEPPE, SB3))],
    )


def plain(effort: Effort) -> Part:
    own = steppe(effort, "-s", "environment.vector=loop", steps=800_000)
    rows = effort.measure([own, sb3(effort), sample_factory(effort), puffer_gym(effort)])
    best = ratio(rows, STEPPE, SB3, SAMPLE_FACTORY, PUFFER_GYM)
    return Part(
        "CartPole as plain Python environments",
        "Every side steps single Gymnasium environments; the vector version is not used (`-s environment.vector=loop`).",
        UNIT,
        rows,
        [Claim("PPO CartPole, plain Python environments / best of SB3, Sample Factory, PufferLib", 5, best)],
    )


PARTS = {"defaults": defaults, "pufferlib": pufferlib, "sb3": stable_baselines3, "plain": plain}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

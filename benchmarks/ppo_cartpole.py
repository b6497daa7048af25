"""PPO on CartPole-v1: environment steps per second, learning included.

Each side trains as its own documentation says unless a part says otherwise; set-up is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from suite.claims import Claim, ratio, same_settings
from suite.measuring import Case, Row
from suite.ours import train
from suite.peers import peer
from suite.report import Part
from suite.running import Effort, benchmark

STEPPE, SAMPLE_FACTORY = "Steppe", "Sample Factory"
SB3, SB3_LARGE = "Stable-Baselines3, its defaults", "Stable-Baselines3, large minibatches"
PUFFER_GYM, PUFFER_C = "PufferLib, Gymnasium env", "PufferLib, its C env"
PUFFER_ALONE = "PufferLib, Gymnasium env, without workers"
UNIT = "steps/s"
# The native PufferLib task: 4,096 environments, one pass over each rollout.
PUFFER_SETTINGS = ("--envs", "4096", "-s", "epochs=1", "-s", "hidden=[128]", "-s", "segment_steps=64")
PUFFER_SETTINGS += ("-s", "minibatch_size=32768")
SB3_DEFAULT = (2048, 64)  # steps per rollout, rows per minibatch
SB3_FAST = (256, 1024)


def steppe(effort: Effort, *words: str, label: str = STEPPE, steps: int = 2_000_000) -> Case:
    """A run of Steppe that takes some seconds."""
    return train(label, "CartPole-v1", "--algo", "ppo", "--steps", str(effort.of(steps)), *words)


def sb3(effort: Effort) -> list[Case]:
    """Stable-Baselines3 with its defaults, and with its fastest minibatch size."""
    return [
        peer(SB3, "sb3", "ppo-cartpole", steps=effort.of(49_152, 16_384), settings=["preset=default"]),
        peer(SB3_LARGE, "sb3", "ppo-cartpole", steps=effort.of(81_920, 16_384), settings=["preset=fast"]),
    ]


def sample_factory(effort: Effort) -> Case:
    return peer(SAMPLE_FACTORY, "sample_factory", "ppo-cartpole", steps=effort.of(120_000, 20_000))


def puffer_gym(effort: Effort) -> list[Case]:
    """With two workers (its default) and in one process; both with one pass over each rollout."""
    steps = effort.of(100_000, 20_000)
    return [
        peer(PUFFER_GYM, "pufferlib", "ppo-cartpole", steps=steps, settings=["workers=2"]),
        peer(PUFFER_ALONE, "pufferlib", "ppo-cartpole", steps=steps, settings=["workers=0"]),
    ]


def puffer_c(effort: Effort) -> Case:
    return peer(PUFFER_C, "pufferlib", "ppo-cartpole-native", steps=effort.of(4_000_000, 600_000))


def defaults(effort: Effort) -> Part:
    rows = effort.measure(
        [
            steppe(effort),
            *sb3(effort),
            peer("CleanRL", "cleanrl", "ppo-cartpole", steps=effort.of(60_000, 10_000)),
            sample_factory(effort),
            peer("Tianshou", "tianshou", "ppo-cartpole", steps=effort.of(30_000, 8_000)),
            peer("TorchRL", "torchrl", "ppo-cartpole", steps=effort.of(30_000, 8_000)),
            peer("RLlib PPO", "rllib", "ppo-cartpole", steps=effort.of(30_000, 8_000)),
            peer("RLlib IMPALA", "rllib", "impala-cartpole", steps=effort.of(30_000, 8_000)),
            *puffer_gym(effort),
            puffer_c(effort),
        ]
    )
    return Part(
        "Each with its own settings",
        "Steppe with the defaults that also reach a return of 475 (see the time to solve), on Gymnasium's vector CartPole.",
        UNIT,
        rows,
        [Claim("PPO CartPole, our defaults / Stable-Baselines3", 25, ratio(rows, STEPPE, SB3, SB3_LARGE))],
        columns={"return_mean": "return at the end"},
    )


def pufferlib(effort: Effort) -> Part:
    rows = effort.measure([steppe(effort, *PUFFER_SETTINGS, steps=8_000_000), puffer_c(effort)])
    found = ratio(rows, STEPPE, PUFFER_C) if same_settings(rows, STEPPE, PUFFER_C) else None
    return Part(
        "At PufferLib's settings",
        "PufferLib steps its own C version of CartPole; Steppe steps Gymnasium's NumPy one, with PufferLib's number of "
        "environments, epochs, rollout, minibatch and network width.",
        UNIT,
        rows,
        [Claim("PPO CartPole, PufferLib's settings / PufferLib with its C env", 1.0, found)],
    )


def stable_baselines3(effort: Effort) -> Part:
    small, large = "Steppe, SB3's defaults", "Steppe, large minibatches"
    own = [
        steppe(effort, *like_sb3(*SB3_DEFAULT), label=small, steps=327_680),
        steppe(effort, *like_sb3(*SB3_FAST), label=large, steps=819_200),
    ]
    rows = effort.measure([*own, *sb3(effort)])
    return Part(
        "At Stable-Baselines3's settings",
        "8 environments, 10 epochs and two layers of 64 on both sides, with the same rollout and minibatch: SB3's defaults, "
        "and those with which it goes fastest.",
        UNIT,
        rows,
        [like_claim(rows, small, SB3, "SB3's defaults"), like_claim(rows, large, SB3_LARGE, "SB3's fastest settings")],
    )


def like_sb3(rollout: int, minibatch: int) -> tuple[str, ...]:
    """Settings that make a run of Steppe equal to one of theirs."""
    pairs = (f"segment_steps={rollout}", "epochs=10", f"minibatch_size={minibatch}", "hidden=[64, 64]")
    return ("--envs", "8", *(word for pair in (*pairs, "learning_rate=3e-4") for word in ("-s", pair)))


def like_claim(rows: Mapping[str, Row], ours: str, theirs: str, settings: str) -> Claim:
    """Claim of at least three times the speed; void if the settings differ."""
    found = ratio(rows, ours, theirs) if same_settings(rows, ours, theirs) else None
    return Claim(f"PPO CartPole, {settings} on both sides / Stable-Baselines3", 3, found)


def plain(effort: Effort) -> Part:
    loop = ("-s", "environment.vector=loop")
    two = "Steppe, 2 actors"
    alike = "Steppe, one pass over each rollout"
    like_puffer = (
        "--envs",
        "128",
        "-s",
        "segment_steps=64",
        "-s",
        "epochs=1",
        "-s",
        "minibatch_size=8192",
        "-s",
        "hidden=[64]",
    )
    own = [
        steppe(effort, *loop, steps=800_000),
        steppe(effort, *loop, "--actors", "2", "--envs", "16", label=two, steps=800_000),
        steppe(effort, *loop, *like_puffer, label=alike, steps=800_000),
    ]
    rows = effort.measure([*own, *sb3(effort), sample_factory(effort), *puffer_gym(effort)])
    best = ratio(rows, two, SB3, SB3_LARGE, SAMPLE_FACTORY, PUFFER_GYM)
    return Part(
        "CartPole as plain Python environments",
        "Every side steps single Gymnasium environments; the vector version is not used (`-s environment.vector=loop`). "
        "Steppe has one actor unless told otherwise; Sample Factory and PufferLib have two workers, and two actors are set "
        "beside them. It makes four passes over each rollout, and one where it is set beside PufferLib without workers.",
        UNIT,
        rows,
        [
            Claim("PPO CartPole, plain Python environments / best of SB3, Sample Factory, PufferLib", 5, best),
            Claim("the same / PufferLib without workers, at one pass each", 5, ratio(rows, alike, PUFFER_ALONE)),
        ],
    )


PARTS = {"defaults": defaults, "pufferlib": pufferlib, "sb3": stable_baselines3, "plain": plain}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

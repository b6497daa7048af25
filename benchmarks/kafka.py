"""The runtime `kafka` with a real broker on loopback: segments beside a bare client, weights, PPO, many slow actors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slow_env import ACTORS, SEGMENT, collection
from suite.claims import Claim, ratio
from suite.ours import train, workload
from suite.report import Part
from suite.running import Effort, benchmark

from steppe.transport.kafka_broker import Broker, fetch_jars

SIZES = {"64 KB": 64 << 10, "256 KB": 256 << 10, "1 MB": 1 << 20}
PROCESSES, KAFKA = "Steppe, processes", "Steppe, kafka"


@contextmanager
def broker() -> Iterator[str]:
    """The address of a broker for one part."""
    with tempfile.TemporaryDirectory(prefix="steppe-kafka-") as home:
        usual = Broker.usual()
        one = Broker(Path(home), fetch_jars(usual.jars), heap_mb=512)
        try:
            yield one.up(0).address
        finally:
            one.down()


def moving(effort: Effort) -> Part:
    total = effort.of(512 << 20, 64 << 20)
    with broker() as address:
        cases = []
        for name, size in SIZES.items():
            words = ("--kafka", address, "--nbytes", str(size), "--count", str(max(16, total // size)))
            cases += [workload(f"{who}, {name}", "moving_kafka", who, *words) for who in ("bare", "ours")]
        rows = effort.measure(cases)
    return Part(
        "Segments through the broker",
        "One process sends, one receives: segments through our channel, and the same messages by a bare confluent-kafka "
        "producer and consumer with the same settings and lz4. What ours makes of a segment and checks of it is counted.",
        "MB/s",
        rows,
        [
            Claim(f"segments of {name} / a bare client", 0.8, ratio(rows, f"ours, {name}", f"bare, {name}"))
            for name in SIZES
        ],
    )


def cartpole(effort: Effort) -> Part:
    steps = str(effort.of(2_000_000, 300_000))
    words = ("CartPole-v1", "--algo", "ppo", "--actors", "2", "--steps", steps)
    with broker() as address:
        rows = effort.measure(
            [
                train(PROCESSES, *words, "--runtime", "processes"),
                train(KAFKA, *words, "--runtime", "kafka", "--kafka", address),
            ]
        )
    return Part(
        "PPO on CartPole-v1, two actors",
        "Steppe with its defaults (`sync`) on both runtimes. Set-up is not counted.",
        "steps/s",
        rows,
        [Claim("PPO CartPole on kafka / on processes", 0.5, ratio(rows, KAFKA, PROCESSES))],
        columns={"return_mean": "return at the end"},
    )


def weights(effort: Effort) -> Part:
    label = "Steppe, kafka, 1 MB"
    with broker() as address:
        words = ("--kafka", address, "--nbytes", str(1 << 20), "--times", str(effort.of(200, 40)))
        rows = effort.measure([workload(label, "publishing_kafka", *words)])
    return Part(
        "Publish → an actor",
        "A transaction with 1 MB of weights and the offsets behind them, every 50 ms; another process has its copy.",
        "ms",
        rows,
        [Claim("1 MB of weights to an actor, median", 50, rows[label].median, unit="ms", at_least=False)],
        columns={"worst_ms": "slowest, ms"},
    )


def slow(effort: Effort) -> Part:
    steps = effort.of(10, 4) * SEGMENT
    label = f"Steppe, kafka, async, {ACTORS} actors"
    settings = ("-s", f"segment_steps={SEGMENT}", "-s", "flow.trace_spans=1000", "-s", "evaluation.every_steps=1000000")
    with broker() as address:
        case = train(
            label, "steppe/Sleep-v0", "--mode", "async", "--actors", str(ACTORS), "--envs", "1", "--steps",
            str(steps * ACTORS), "--runtime", "kafka", "--kafka", address, *settings, "-s", "evaluation.episodes=1",
            figures=collection,
        )  # fmt: skip
        rows = effort.measure([case])
    reached = rows[label].median
    percent = None if reached is None else reached / ACTORS  # 100 steps/s each
    return Part(
        "Collection by 16 actors of a 10 ms environment",
        "Ideal is 100 steps/s for each actor; what actors waited is counted.",
        "steps/s",
        rows,
        [Claim("10 ms environment over kafka, 16 actors, of the ideal", 90, percent, unit="%")],
        columns={"share_of_ideal": "share of ideal"},
    )


PARTS = {"moving": moving, "cartpole": cartpole, "weights": weights, "slow": slow}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

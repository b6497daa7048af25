"""The runtime `kafka` with a real broker on loopback: segments compared with a plain client, weights, PPO, many slow actors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from slow_env import ACTORS, SEGMENT, collection
from suite.claims import Claim, further, ratio
from suite.measuring import Case
from suite.ours import Figures, Finished, steps_per_s, train, workload
from suite.report import Part
from suite.running import Effort, benchmark

from steppe.transport.kafka.dev_broker import BrokerProcess, DevBroker, fetch_jars

SIZES = {"64 KB": 64 << 10, "256 KB": 256 << 10, "1 MB": 1 << 20}
PROCESSES, KAFKA, INLINE = "Steppe, processes", "Steppe, kafka", "Steppe, inline"


@contextmanager
def broker() -> Iterator[BrokerProcess]:
    """Start a broker for one part."""
    with tempfile.TemporaryDirectory(prefix="steppe-kafka-") as home:
        one = DevBroker(Path(home), fetch_jars(DevBroker.default().jars), heap_mb=512)
        try:
            yield one.up(0)
        finally:
            one.down()


def served(case: Case, by: BrokerProcess) -> Case:
    """Return the case with the broker's CPU time included."""
    path, tick_s = Path(f"/proc/{by.pid}/stat"), 1.0 / os.sysconf("SC_CLK_TCK")

    def cpu_s() -> float:
        words = path.read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) * tick_s

    return replace(case, aside_s=cpu_s)


def moving(effort: Effort) -> Part:
    total = effort.of(128 << 20, 16 << 20)
    with broker() as by:
        cases = []
        for name, size in SIZES.items():
            words = ("--kafka", by.address, "--nbytes", str(size), "--count", str(total // size))
            cases.append(served(workload(name, "moving_kafka", *words), by))
        rows = effort.measure(cases)
    return Part(
        "Segments through the broker",
        "One process sends, one receives: segments through our channel, and the same messages by a bare confluent-kafka "
        "producer and consumer with the same settings and lz4, three turns each within every run, of which the medians "
        "count. What ours makes of a segment and checks of it is counted.",
        "× bare",
        rows,
        [Claim(f"segments of {name} / a bare client", 0.8, rows[name].median) for name in SIZES],
        columns={"ours_mb_s": "ours, MB/s", "bare_mb_s": "bare, MB/s"},
    )


def with_hash(run: Finished) -> Figures:
    return {**steps_per_s(run), "weights": (run.summary["weights_sha256"] or "")[:12]}


def cartpole(effort: Effort) -> Part:
    steps = str(effort.of(2_000_000, 100_000))  # a broker needs seconds to warm up
    words = ("CartPole-v1", "--algo", "ppo", "--actors", "2", "--steps", steps)
    with broker() as by:
        kafka = train(KAFKA, *words, "--runtime", "kafka", "--kafka", by.address, figures=with_hash)
        others = [
            train(label, *words, "--runtime", label.split()[-1], figures=with_hash) for label in (PROCESSES, INLINE)
        ]
        rows = effort.measure([*others, served(kafka, by)])
    found = {label: [run.reading.extra["weights"] for run in row.runs] for label, row in rows.items()}
    same = None if any(row.error for row in rows.values()) else float(found[KAFKA] == found[INLINE])
    return Part(
        "PPO on CartPole-v1, two actors",
        "Steppe with its defaults (`sync`) on three runtimes. Set-up is not counted.",
        "steps/s",
        rows,
        [
            Claim("PPO CartPole on kafka / on processes", 0.5, ratio(rows, KAFKA, PROCESSES)),
            Claim("PPO CartPole on kafka: the weights of inline at the end, in every round", 1, same, unit=""),
        ],
        columns={"return_mean": "return at the end", "weights": "sha256 of the weights"},
    )


def weights(effort: Effort) -> Part:
    label = "Steppe, kafka, 1 MB"
    with broker() as by:
        words = ("--kafka", by.address, "--nbytes", str(1 << 20), "--times", str(effort.of(100, 40)))
        rows = effort.measure([served(workload(label, "publishing_kafka", *words), by)])
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
    with broker() as by:
        case = train(
            label, "steppe/Sleep-v0", "--mode", "async", "--actors", str(ACTORS), "--envs", "1", "--steps",
            str(steps * ACTORS), "--runtime", "kafka", "--kafka", by.address, *settings, "-s", "evaluation.episodes=1",
            figures=collection,
        )  # fmt: skip
        rows = effort.measure([served(case, by)])
    reached = further(rows, label, "share_of_ideal")
    return Part(
        "Collection by 16 actors of a 10 ms environment",
        "Ideal is 100 steps/s for each actor; what actors waited is counted.",
        "steps/s",
        rows,
        [
            Claim(
                "10 ms environment over kafka, 16 actors, of the ideal",
                90,
                None if reached is None else 100 * reached,
                unit="%",
            )
        ],
        columns={"share_of_ideal": "share of ideal"},
    )


PARTS = {"moving": moving, "cartpole": cartpole, "weights": weights, "slow": slow}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

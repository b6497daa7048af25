"""The parameter server: aggregation compared with memory bandwidth and NumPy, and pushes over the network."""

from __future__ import annotations

from suite.claims import Claim
from suite.ours import time_to_target, train, workload
from suite.report import Part
from suite.running import Effort, benchmark

UPDATES, PARAMETERS = 64, 2_000_000
AVERAGE = "average, share of memory bandwidth"
MEDIAN = "coordinate median, faster than np.median"
TRIMMED = "trimmed mean, faster than np.partition"
PRIVATE = "private mean, time over plain average"
WORKERS = 64
ONE = "20 MB pushed, speed over a bare socket's"
MANY = f"{WORKERS} workers pushing 1 MB, p99 over median"
SHARED = "20 MB pushed and applied, speed over memcpy's"
ASKED = "no newer version, µs until that is known"
A3C, A2C, PPO = "a3c, 4 workers", "a2c, 4 workers in rounds", "ppo, 1 actor and a learner"
METHODS = {AVERAGE: "average", MEDIAN: "median", TRIMMED: "trimmed_mean", PRIVATE: "privacy"}


def aggregation(effort: Effort) -> Part:
    words = ("--updates", str(UPDATES), "--parameters", str(effort.of(PARAMETERS, 100_000)))
    cases = [
        workload(label, "aggregating", "--method", method, *words, "--times", str(effort.of(5, 2)))
        for label, method in METHODS.items()
    ]
    rows = effort.measure(cases)
    asked = {AVERAGE: (0.5, True), MEDIAN: (5.0, True), TRIMMED: (5.0, True), PRIVATE: (5.0, False)}
    return Part(
        "Aggregation",
        f"{UPDATES} float32 updates of {PARAMETERS:,} parameters, one thread, ours and the other in turn in one process. "
        "Memory bandwidth is copying the same bytes, counted as read and written. The private mean clips every update, "
        "charges the ledger on disk and draws its noise from the operating system.",
        "×",
        rows,
        [
            Claim(f"{UPDATES} updates of 2 M parameters: {label}", limit, rows[label].median, at_least=at_least)
            for label, (limit, at_least) in asked.items()
        ],
        columns={"ours_ms": "ours, ms", "theirs_ms": "the other, ms"},
    )


def network(effort: Effort) -> Part:
    large = ("--nbytes", str(20_000_000), "--times", str(effort.of(30, 5)))
    small = ("--nbytes", str(1_000_000), "--workers", str(WORKERS), "--times", str(effort.of(20, 3)))
    rows = effort.measure([workload(ONE, "pushing", *large), workload(MANY, "pushing", *small)])
    return Part(
        "Pushing over gRPC",
        "Client and server in processes of their own on loopback; every push is checked and applied before it is answered. "
        "20 MB from one worker beside a bare TCP socket that sends the same bytes and waits for one back; then 1 MB from each "
        f"of {WORKERS} workers at once, again and again, none of which may fail.",
        "×",
        rows,
        [
            Claim(f"gRPC: {ONE}", 0.25, rows[ONE].median),
            Claim(f"gRPC: {MANY}", 5.0, rows[MANY].median, at_least=False),
        ],
        columns={
            "ours_mb_per_s": "gRPC, MB/s",
            "theirs_mb_per_s": "socket, MB/s",
            "median_ms": "median, ms",
            "p99_ms": "p99, ms",
        },
    )


def memory(effort: Effort) -> Part:
    times = ("--times", str(effort.of(100, 5)))
    cases = [workload(SHARED, "sharing", *times), workload(ASKED, "sharing", "--ask", "--nbytes", "4000", *times)]
    rows = effort.measure(cases)
    return Part(
        "Pushing through shared memory",
        "Client and server in processes of their own. 20 MB of gradients are copied, checked, applied with plain SGD as a new "
        "version and answered, beside `np.copyto` of the same bytes in the client; then a client asks for a newer version "
        "when there is none.",
        "× or µs",
        rows,
        [
            Claim(f"shared memory: {SHARED}", 0.3, rows[SHARED].median),
            Claim(f"shared memory: {ASKED}", 5.0, rows[ASKED].median, at_least=False),
        ],
        columns={"ours_ms": "push, ms", "theirs_ms": "copy, ms"},
    )


def a3c(effort: Effort) -> Part:
    """Workers that push gradients, and actors with one learner, trained to the same score."""
    asked = ("CartPole-v1", "--target-return", "475", "--steps", str(effort.of(3_000_000, 1_500_000)))
    cases = [
        train(A3C, *asked, "--algo", "a3c", "--actors", "4", figures=time_to_target),
        train(A2C, *asked, "--algo", "a2c", "--mode", "workers", "--actors", "4", figures=time_to_target),
        train(PPO, *asked, "--algo", "ppo", figures=time_to_target),
    ]
    seeds = effort.of(5, 1)
    rows = effort.measure(cases, rounds=seeds)
    reached = sum(bool(run.reading.extra["reached"]) for run in rows[A3C].runs)
    return Part(
        "A3C on CartPole, a seed per round",
        "Training time to an evaluation over 20 episodes with a mean return of 475 or more, four workers in processes of their "
        "own. PPO with one actor stands beside it for comparison: it uses every step several times.",
        "s",
        rows,
        [Claim(f"A3C with 4 workers: seeds that reached 475, of {seeds}", seeds, reached, unit="seeds")],
        columns={"wall_s": "whole process, s"},
    )


PARTS = {"aggregation": aggregation, "memory": memory, "network": network, "a3c": a3c}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

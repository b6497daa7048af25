"""The parameter server: combining updates beside memory bandwidth and NumPy, and pushing them over the network."""

from __future__ import annotations

from suite.claims import Claim
from suite.ours import workload
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


PARTS = {"aggregation": aggregation, "memory": memory, "network": network}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

"""The parameter server: combining 64 updates of 2 million parameters beside memory bandwidth and NumPy."""

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


PARTS = {"aggregation": aggregation}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

"""The control plane under load: how soon metric points reach 200 WebSocket clients, and what that costs a training run."""

from __future__ import annotations

from suite.claims import Claim, further
from suite.ours import workload
from suite.report import Part
from suite.running import Effort, benchmark

LOADED = "200 clients, 1,000 points/s"


def load(effort: Effort) -> Part:
    words = ("--seconds", str(effort.of(5, 2)), "--pairs", str(effort.of(3, 1)))
    rows = effort.measure([workload(LOADED, "serving", "--clients", "200", "--points", "1000", *words)])
    return Part(
        "Under load",
        "`steppe serve` with 200 WebSocket clients on the same machine, a run that reports 1,000 metric points a second and a run "
        "that trains (PPO on CartPole in one process). The delay is from a report's own time to its arrival at each client. "
        "Loaded and quiet spells take turns; in a quiet one the service is frozen, as if it were not there, and training is "
        "compared with the quiet spells around.",
        "ms, p99",
        rows,
        [
            Claim("points at 200 clients, p99 of the delay", 250, rows[LOADED].median, unit="ms", at_least=False),
            Claim("points that each client got a second", 990, further(rows, LOADED, "points_per_s"), unit="1/s"),
            Claim("training slowed", 3, further(rows, LOADED, "slowed_percent"), unit="%", at_least=False),
        ],
        columns={
            "median_ms": "median, ms",
            "slowed_percent": "training slowed, %",
            "points_per_s": "points/s at each client",
            "training_steps_per_s": "training, steps/s",
            "service_cores": "cores' worth of the service",
        },
    )


PARTS = {"load": load}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

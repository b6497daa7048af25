"""The control service under load: latency of points to 200 clients, slowdown of training, load time of the page, and latency of
health checks with many connections."""

from __future__ import annotations

from suite.claims import Claim, further
from suite.ours import workload
from suite.report import Part
from suite.running import Effort, benchmark

LOADED = "200 clients, 1,000 points/s"
LONG = "51 runs, 6 M points"
LASTING = "one run, on and on"
IDLE, SLOW = "1,100 idle connections", "1,010 slow connections"


def load(effort: Effort) -> Part:
    words = ("--seconds", str(effort.of(5, 2)), "--pairs", str(effort.of(3, 1)))
    rows = effort.measure([workload(LOADED, "serving", "--clients", "200", "--points", "1000", *words)])
    return Part(
        "Under load",
        "`steppe serve` with 200 WebSocket clients on the same machine, a run that reports 1,000 metric points a second and a run "
        "that trains (PPO on CartPole in one process). The delay is from a report's own time to its arrival at each client. "
        "Loaded and quiet spells take turns; in a quiet one the service is frozen, as if it were not there, and training is "
        "compared with the quiet spells around: it is slowed by the service, and by the clients too, which would be elsewhere. "
        "They are plain sockets of one process that read each text once for all.",
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
            "clients_cores": "of the 200 clients",
        },
    )


def page(effort: Effort) -> Part:
    words = ("--points", str(effort.of(1_000_000)), "--each", str(effort.of(100_000)))
    rows = effort.measure([workload(LONG, "paging", *words)])
    return Part(
        "Long histories on the page",
        "`steppe serve`, just started, with a run of 1,000,000 points and fifty of 100,000 each, and a fresh tab of Chromium. A page "
        "can be used when its heading is there and its keys are answered; it is whole when what it was opened for is drawn. Both are "
        "told by the tab's own clock, which begins with the navigation; nothing of the page is in its cache.",
        "ms until a run with 1 M points can be used",
        rows,
        [
            Claim("a run of 1 M points can be used", 1_000, rows[LONG].median, unit="ms", at_least=False),
            Claim("the list of 51 runs can be used", 1_000, further(rows, LONG, "list_ms"), unit="ms", at_least=False),
            Claim("a comparison of 8 can be used", 1_000, further(rows, LONG, "compare_ms"), unit="ms", at_least=False),
        ],
        columns={
            "run_whole_ms": "its curves drawn, first time",
            "again_whole_ms": "its curves drawn, again",
            "list_whole_ms": "list whole",
            "compare_whole_ms": "comparison drawn",
        },
    )


def memory(effort: Effort) -> Part:
    hours = effort.of(24, 2)
    rows = effort.measure([workload(LASTING, "lasting", "--hours", str(hours))], rounds=1)
    return Part(
        "Memory",
        f"`steppe serve` with a client while a run reports what would be 1,000 points a second for {hours} hours, without pause: what "
        "it takes at the end, beside what it took half-way. Beyond 20,000 points a curve is thinned out.",
        "MiB at the end",
        rows,
        [
            Claim(
                "memory grows from half-way to the end",
                5,
                further(rows, LASTING, "growth_percent"),
                unit="%",
                at_least=False,
            )
        ],
        columns={
            "first_mib": "MiB after an hour",
            "half_mib": "half-way",
            "most_mib": "the most",
            "growth_percent": "growth, %",
        },
    )


def crowd(effort: Effort) -> Part:
    cases = [
        workload(IDLE, "crowding", "--connections", str(effort.of(1_100, 200))),
        workload(SLOW, "crowding", "--slow", "--connections", str(effort.of(1_010, 200))),
    ]
    rows = effort.measure(cases)
    return Part(
        "Health in a crowd",
        "`steppe serve` with at most 1,024 open files, while one client opens connections and leaves them idle, or sends a part of a "
        "request on each. Between them and afterwards it asks for /healthz, each time on a new connection. Then all are closed, and "
        "the time until the list of runs is answered is taken.",
        "ms, the slowest answer of /healthz",
        rows,
        [
            Claim(f"health is answered, {label}", 1_000, rows[label].median, unit="ms", at_least=False)
            for label in (IDLE, SLOW)
        ],
        columns={"median_ms": "median, ms", "normal_ms": "service is normal again after, ms", "questions": "questions"},
    )


PARTS = {"load": load, "page": page, "memory": memory, "crowd": crowd}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

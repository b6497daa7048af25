"""The composition API in an environment that sleeps 5 ms in every step: how much faster four workers are than one."""

from __future__ import annotations

from suite.claims import Claim, ratio
from suite.measuring import Case
from suite.ours import workload
from suite.report import Part
from suite.running import Effort, benchmark

WORKERS, ASKED = 4, 3.5
WAYS = {"batches": "DistributedEnvironment.generate_batch_experiences", "loop": "MainLoop.run"}


def label(way: str, workers: int) -> str:
    return f"{WAYS[way]}, {workers} {'worker' if workers == 1 else 'workers'}"


def case(effort: Effort, way: str, workers: int) -> Case:
    return workload(label(way, workers), "composing", way, str(workers), str(effort.of(4096, 1024)))


def workers(effort: Effort) -> Part:
    rows = effort.measure([case(effort, way, count) for way in WAYS for count in (1, WORKERS)])
    return Part(
        "Four workers",
        "A 5 ms environment, PPO, one environment per worker, nothing said about where the workers live. The ideal is 200 "
        "steps/s for each worker.",
        "steps/s",
        rows,
        [
            Claim(f"5 ms environment, {name}: 4 workers / 1", ASKED, ratio(rows, label(way, WORKERS), label(way, 1)))
            for way, name in WAYS.items()
        ],
        columns={"share_of_ideal": "share of ideal"},
    )


PARTS = {"workers": workers}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

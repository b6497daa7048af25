"""Record the waiting times of runs with several numbers of actors, as test data for the autoscaling policy.

python scripts/record_loads.py > tests/control/recorded_loads.json
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import steppe
from steppe.control.autoscale.policy import LoadWindows
from steppe.records.view import RunView

SECONDS = 10.0
OBSERVATION_S = 1.5
SCENARIOS: dict[str, dict[str, Any]] = {
    # Many epochs per batch: the learner is slower than one actor.
    "slow learner": {"env": "CartPole-v1", "segment_steps": 128, "envs": 8, "epochs": 40, "minibatch_size": 64},
}


def record(settings: dict[str, Any], actors: int, home: Path) -> dict[str, Any]:
    """Train for a while; return the load of each observation, and steps per second."""
    windows, loads, until = LoadWindows(), [], time.monotonic() + SECONDS

    def observe(view: RunView) -> bool:
        load = windows.next(view, actors, least_s=OBSERVATION_S)
        if load is not None:
            loads.append(asdict(load))
        return time.monotonic() > until

    place = {"run_dir": str(home / f"{len(list(home.iterdir()))}"), "seed": 1, "steps": 10_000_000, "actors": actors}
    fixed = {"mode": "async", "runtime": "processes", "evaluation.every_steps": 10_000_000, "evaluation.episodes": 1}
    result = steppe.train(callbacks=[observe], **settings, **place, **fixed)
    return {"loads": loads[1:], "steps_per_s": result.summary["steps_per_s"]}


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as home:
        for scenario, settings in SCENARIOS.items():
            for actors in (1, 2, 4):
                print(scenario, actors, file=sys.stderr)
                found.setdefault(scenario, {})[actors] = record(settings, actors, Path(home))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Train one small run per algorithm and pack it into tests/fixtures/runs-VERSION. Later versions must open and resume these runs.

Run it once per released format, by the version that made the format, and never again: `python scripts/write_run_fixtures.py`.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import steppe
from steppe.core.config.algorithm_table import ALGORITHMS

VERSION = "0.1"
FOLDER = Path(__file__).parents[1] / "tests" / "fixtures" / f"runs-{VERSION}"
SMALL = {"runtime": "inline", "envs": 2, "segment_steps": 16, "evaluation.episodes": 2, "seed": 7}
NETWORK = {"hidden": (8,)}
REPLAY = {"buffer_size": 1024, "learning_starts": 64, "batch_size": 4}
PATHS = {
    "environment.kwargs": {"num_agents": 2, "size": 6},
    "channels": 8,
    "lesson_agents": [],
    "lesson_sizes": [],
    "environment.time_limit": 16,
}
# Greedy episodes of a barely trained table never end.
TABLE = ("CliffWalking-v1", {"evaluation.max_episode_steps": 200})
# Algorithm → environment and settings; the other algorithms are tabular.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", NETWORK),
    "a2c": ("Pendulum-v1", NETWORK),
    "a3c": ("CartPole-v1", NETWORK),
    "dqn": ("CartPole-v1", {**NETWORK, **REPLAY}),
    "r2d2": ("CartPole-v1", {**NETWORK, **REPLAY, "cell_size": 8}),
    "dhc": ("steppe/Pathfinding-v0", {**PATHS, **REPLAY}),
}
LEFT_OUT = {"tb", "lock", "recordings"}


def main() -> None:
    """Write the run of every algorithm and its expected results."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    known = {}
    for name in ALGORITHMS:
        environment, settings = RUNS.get(name, TABLE)
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / name
            result = steppe.train(environment, algo=name, steps=256, run_dir=str(run), **SMALL, **settings)
            known[name] = {"env_steps": result.env_steps, "weights_sha256": result.weights_sha256}
            forget_machine(run / "run.json")
            for left_out in LEFT_OUT:
                remove(run / left_out)
            with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as archive:
                archive.add(run, arcname=name, filter=nobody)
    (FOLDER / "known.json").write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


def forget_machine(path: Path) -> None:
    """Replace the description of the machine that trained the run."""
    text = json.loads(path.read_text())
    text["config"]["run_dir"] = f"runs/{path.parent.name}"
    text |= {"command": ["steppe", "train"], "cwd": "/home/user", "hardware": {}, "git": None}
    path.write_text(json.dumps(text, indent=2))


def remove(path: Path) -> None:
    """Remove a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the archive member without its owner."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()

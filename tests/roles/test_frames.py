"""The number of stack frames from the learner's loop to the optimizer's step, for each algorithm in a real run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import steppe
from steppe.algorithms.nn.optimizers import FlatAdam

pytestmark = pytest.mark.unit

MOST = 4
CARTPOLE: dict[str, Any] = {"env": "CartPole-v1", "envs": 2}
SEQUENCES: dict[str, Any] = {"sequence_length": 5, "burn_in": 2, "batch_size": 4, "learning_starts": 64}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {**CARTPOLE, "steps": 512},
    "a2c": {**CARTPOLE, "steps": 128},
    "dqn": {**CARTPOLE, "steps": 128, "learning_starts": 32, "batch_size": 8},
    "r2d2": {**CARTPOLE, "steps": 256, "hidden": (8,), "cell_size": 8, **SEQUENCES},
    "dhc": {
        "env": "steppe/Pathfinding-v0", "environment.kwargs": {"num_agents": 3, "size": 4, "max_steps": 16}, "envs": 3,
        "steps": 432, "channels": 8, "segment_steps": 8, **SEQUENCES,
    },
}  # fmt: skip


def frames(algo: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the functions on the stack at the first optimizer step of a run, from `Learner.step` inwards."""
    found: list[str] = []
    step = FlatAdam.step

    def noted(self: FlatAdam, *args: Any, **options: Any) -> float:
        if not found:
            frame, names = sys._getframe(1), ["FlatAdam.step"]
            while names[0] != "Learner.step":
                names.insert(0, frame.f_code.co_qualname)
                assert frame.f_back is not None, "the learner's loop is not on the stack"
                frame = frame.f_back
            found.extend(names)
        return step(self, *args, **options)

    monkeypatch.setattr(FlatAdam, "step", noted)
    settings = {"evaluation.episodes": 1, **RUNS[algo]}
    steppe.train(settings.pop("env"), algo=algo, runtime="inline", mode="sync", run_dir=run_dir, **settings)
    return found


@pytest.mark.parametrize("algo", RUNS)
def test_the_optimizer_is_at_most_four_frames_below_the_loop(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = frames(algo, tmp_path / "run", monkeypatch)
    assert found[0] == "Learner.step"
    assert found[-1] == "FlatAdam.step"
    assert len(found) <= MOST, " → ".join(found)


def test_the_documented_frames_are_the_real_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = " ".join((Path(__file__).parents[2] / "docs" / "architecture.md").read_text().split())
    assert " → ".join(frames("ppo", tmp_path / "run", monkeypatch)) in words

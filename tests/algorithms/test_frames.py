"""How deep the optimizer lies below the learner's loop, as docs/architecture.md says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import steppe
from steppe.algorithms.nn.flat_module import FlatAdam


@pytest.mark.unit
def test_the_documented_frames_are_those_between_loop_and_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    step = FlatAdam.step

    def noted(self: FlatAdam, *args: object, **options: object) -> object:
        frame, names = sys._getframe(1), ["FlatAdam.step"]
        while frame is not None and frame.f_code.co_name != "once":
            names.insert(0, frame.f_code.co_qualname)
            frame = frame.f_back  # type: ignore[assignment]
        seen[:] = seen or names
        return step(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(FlatAdam, "step", noted)
    steppe.train(
        "CartPole-v1", algo="ppo", runtime="inline", mode="sync", steps=1_024, envs=4, run_dir=tmp_path / "run"
    )
    words = " ".join((Path(__file__).parents[2] / "docs" / "architecture.md").read_text().split())
    assert " → ".join(seen) in words
    assert len(seen) == 6
    assert "six frames from the loop to the optimizer" in words

"""How many files lie between `steppe train` and the optimizer: what a reader opens who follows the calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import steppe
from steppe.algorithms.nn.optimizers import FlatAdam
from steppe.algorithms.ppo.ppo import PPO
from steppe.cli.main import app
from steppe.core.config.run import ResolvedConfig
from steppe.records.run_directory import RunDirectory
from steppe.roles.learner import Learner
from steppe.runtimes.plan import Plan

pytestmark = pytest.mark.integration

ROOT = Path(steppe.__file__).parent
MOST_FILES = 20
# The steps of the way: the configuration is resolved, the topology is planned, the run's directory made, the agent built, the learner built, and the
# optimizer takes its first step.
POINTS: tuple[tuple[type, str], ...] = (
    (ResolvedConfig, "__init__"),
    (Plan, "__init__"),
    (RunDirectory, "create"),
    (PPO, "__init__"),
    (Learner, "__init__"),
    (FlatAdam, "step"),
)


def files_on_stack() -> list[str]:
    """Return the files of Steppe whose functions are on the stack, outermost first."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            found.insert(0, path.relative_to(ROOT).as_posix())
        frame = frame.f_back  # type: ignore[assignment]
    return found


def test_the_way_from_the_command_to_the_optimizer_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 20 files from `steppe train` on runtime inline to the first step of the optimizer.

    A file counts if one of its functions is on the stack when one of POINTS is reached for the first time, or if it defines
    that function. So the callers are counted all the way from the command; functions that were called and have returned are
    not, nor is what is only imported. None of the files is of the composition API.
    """
    reached: dict[str, list[str]] = {}

    def watch(owner: type, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)
        key = f"{owner.__name__}.{name}"

        def record(*args: Any, **options: Any) -> Any:
            if key not in reached:
                home = Path(sys.modules[owner.__module__].__file__ or "").relative_to(ROOT).as_posix()
                reached[key] = [*files_on_stack(), home]
            return function(*args, **options)

        monkeypatch.setattr(owner, name, record)

    for owner, name in POINTS:
        watch(owner, name)
    flags = ["--runtime", "inline", "--steps", "256", "--envs", "2", "-s", "evaluation.episodes=1", "--json"]
    result = CliRunner().invoke(app, ["train", "CartPole-v1", *flags, "--run-dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert set(reached) == {f"{owner.__name__}.{name}" for owner, name in POINTS}
    files = list(dict.fromkeys(file for stack in reached.values() for file in stack))
    assert "cli/commands/train.py" in files
    assert "roles/learner.py" in files
    assert [file for file in files if file.startswith("compose/")] == []
    assert len(files) <= MOST_FILES, "\n".join(files)

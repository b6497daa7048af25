"""Fixtures: the command line in an empty directory without outside configuration."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.reports import ActorReport, EvaluationReport, EventReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, EVENTS, TRAINING
from steppe.records.run_directory import RunDirectory

STEPPE = Path(sys.executable).with_name("steppe")
Steppe = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[RunDirectory]:
    """Return a run of this process in state RUNNING, half finished, in `tmp_path`/runs/pole."""
    flags = {"env": "CartPole-v1", "actors": 2, "envs": 64, "mode": "async", "steps": 1_000_000, "target_return": 475}
    resolved = resolve_config(("flag", {**flags, "run_dir": str(tmp_path / "runs" / "pole")}))
    directory = RunDirectory.create(resolved.config, resolved.sources)
    directory.store.set_status("RUNNING")
    for report in _reports(directory.id):
        topic = {
            ActorReport: ACTORS,
            TrainingReport: TRAINING,
            EvaluationReport: EVALUATIONS,
            EventReport: EVENTS,
        }[type(report)]
        directory.store.post(topic, report.record())
    with beating(directory):
        yield directory


@contextmanager
def beating(directory: RunDirectory) -> Iterator[None]:
    """Keep the run's heartbeat alive while a command runs."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(1.0):
            directory.store.heartbeat()

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _reports(run: str):
    """Two actors whose returns grow by 10 a second, one evaluation, one restart; the newest time is now."""
    for second in range(1, 11):
        at = time.time() - 10 + second
        for actor in (0, 1):
            yield ActorReport(
                run=run, time_s=at, actor=actor, epoch=actor, version=4 * second, sequence=second,
                env_steps=25_000 * second, episodes=[(10.0 * second, 10 * second)] * 3,
                phases={"env": 0.5 * second, "policy": 0.3 * second, "blocked": 0.2 * second, "other": 0.0},
            )  # fmt: skip
        yield TrainingReport(
            run=run, time_s=at, version=4 * second, updates=128 * second, env_steps=50_000 * second, train_s=second,
            phases={"wait": 0.25, "sample": 0.0, "learn": 0.75, "publish": 0.0, "other": 0.0}, lags={0: 1, 2: 3},
            dropped={"lag": 5},
        )  # fmt: skip
    yield EvaluationReport(
        run=run, version=40, updates=1280, env_steps=500_000, train_s=10.0, returns=[90.0, 110.0], lengths=[90, 110],
        return_mean=100.0, return_std=10.0, duration_s=0.1, weights_sha256="0" * 64,
    )  # fmt: skip
    yield EventReport(run=run, kind="restart", role="actor-1", details={"signal": 9, "note": "two\nlines\x1b[31m"})

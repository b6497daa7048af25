"""Conformance suite for runtimes, to inherit: from `launch` to a closed handle without leaked resources.

class TestMine(RuntimeConformance):
    runtime = "mine"
    def launch(self, plan, directory): return my_runtime.launch(plan, directory)
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.reports import ActorReport, EvaluationReport, TrainingReport
from steppe.core.contracts.transport import ACTORS, EVALUATIONS, TRAINING
from steppe.envs import probe
from steppe.envs.toy.builtin import CountingEnv
from steppe.records.checkpoints import Checkpoints
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import FINISH, PAUSE, RUN, STOP
from steppe.runtimes.handle import Handle
from steppe.runtimes.plan import Plan, make_plan

PATIENCE_S = 120.0  # generous: only limits how long a broken runtime takes to fail
KINDS = ("actor", "learner", "manager")


class MeteredEnv(CountingEnv):
    """CountingEnv that counts its steps in a file per environment, which every process can read."""

    def __init__(self, meter: str) -> None:
        super().__init__()
        self.meter = Path(meter)
        self.row: np.ndarray | None = None

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.row is None:
            path = self.meter / f"{self.identity}-{id(self)}"
            path.write_bytes(bytes(8))
            with path.open("r+b") as file:
                self.row = np.frombuffer(mmap.mmap(file.fileno(), 8), np.int64)
        self.row += 1
        return super().step(action)


def metered(meter: Path) -> int:
    """Return the steps taken so far by every MeteredEnv on this meter."""
    return sum(int.from_bytes(path.read_bytes(), "little") for path in meter.iterdir())


class RuntimeConformance:
    """Inherit, set `runtime`, implement `launch`. Runs are small: 2 actors of 2 environments, segments of 8 steps."""

    runtime = "inline"
    settings: ClassVar[dict[str, Any]] = {
        "actors": 2,
        "envs": 2,
        "mode": "sync",
        "steps": 200,
        "segment_steps": 8,
        "minibatch_size": 16,
        "epochs": 1,
        "hidden": (8,),
        "evaluation.episodes": 3,
        "evaluation.every_steps": 10**9,
    }

    def launch(self, plan: Plan, directory: RunDirectory) -> Handle:
        """Launch the plan and return its handle."""
        raise NotImplementedError

    @pytest.fixture
    def meter(self, tmp_path: Path) -> Path:
        path = tmp_path / "meter"
        path.mkdir()
        return path

    @contextmanager
    def running(self, tmp_path: Path, env: str, **settings: Any) -> Iterator[tuple[Handle, RunDirectory, Plan]]:
        """Launch a run of `env`, and close it at the end in any case."""
        layer = {"env": env, "runtime": self.runtime, "run_dir": tmp_path / "run", **self.settings, **settings}
        resolved = resolve_config(("call", layer))
        plan = make_plan(resolved.config, probe(env, resolved.config.environment))
        directory = RunDirectory.create(plan.config, resolved.sources)
        handle = self.launch(plan, directory)
        try:
            yield handle, directory, plan
        finally:
            handle.close(timeout_s=30.0)
            directory.release()

    def test_a_run_ends_by_its_steps_and_is_judged(self, tmp_path: Path) -> None:
        with self.running(tmp_path, "CartPole-v1") as (handle, directory, _):
            advance(handle, lambda: handle.ended("learner"))
            assert handle.faults() == []
            handle.ask("manager", FINISH)
            advance(handle, lambda: handle.ended("manager"))
            handle.ask("actor", STOP)
            advance(handle, lambda: handle.ended("actor"))
            assert handle.faults() == []
        (*_, last) = [TrainingReport.read(record) for _, record in directory.store.read(TRAINING)]
        assert last.final
        assert 200 <= last.env_steps <= 200 + 2 * 2 * 8
        assert last.version == len(range(0, last.env_steps, 2 * 2 * 8)), "not one version a round"
        (verdict,) = [EvaluationReport.read(record) for _, record in directory.store.read(EVALUATIONS)]
        assert (verdict.final, len(verdict.returns)) == (True, 3)
        assert verdict.weights_sha256 == last.weights_sha256
        checkpoint = Checkpoints(directory.checkpoints).latest()
        assert checkpoint is not None
        assert checkpoint.weights.sha256() == last.weights_sha256
        reports = [ActorReport.read(record) for _, record in directory.store.read(ACTORS)]
        assert {report.actor for report in reports if report.state == "stopped"} == {0, 1}

    def test_stop_ends_everything_early(self, tmp_path: Path, meter: Path) -> None:
        with self._endless(tmp_path, meter) as (handle, directory, _):
            advance(handle, lambda: metered(meter) > 100)
            for kind in KINDS:
                assert not handle.ended(kind)
                handle.ask(kind, STOP)
            advance(handle, lambda: all(handle.ended(kind) for kind in KINDS))
            assert handle.faults() == []
        assert Checkpoints(directory.checkpoints).latest() is not None

    def test_closing_is_enough(self, tmp_path: Path, meter: Path) -> None:
        """No process, thread or file is left; the caller's test setup must check that around every test."""
        with self._endless(tmp_path, meter, mode="async") as (handle, _, _):
            advance(handle, lambda: metered(meter) > 0)
        taken = metered(meter)
        assert handle.faults() == []
        assert metered(meter) == taken

    def test_pause_and_resume(self, tmp_path: Path, meter: Path) -> None:
        with self._endless(tmp_path, meter, mode="async") as (handle, _, plan):
            advance(handle, lambda: metered(meter) > 0)
            for kind in ("actor", "learner"):
                handle.ask(kind, PAUSE)
            before = metered(meter)
            for _ in range(10):
                handle.advance(0.1)
            under_way = 2 * plan.segment.num_steps * plan.segment.num_envs  # one segment of each actor
            assert metered(meter) <= before + under_way, "actors went on while they were to rest"
            assert not handle.ended("learner")
            before = metered(meter)
            for kind in ("actor", "learner"):
                handle.ask(kind, RUN)
            advance(handle, lambda: metered(meter) > before + 2 * under_way)
            assert handle.faults() == []

    def test_a_failing_environment_is_told_in_full(self, tmp_path: Path) -> None:
        kwargs = {"environment.kwargs": {"at_step": 13}}
        with self.running(tmp_path, "steppe.envs.toy.builtin:FailingEnv", **kwargs) as (handle, _, _):
            advance(handle, lambda: bool(handle.faults()))
            fault = handle.faults()[0]
        assert fault.role in ("actor-0", "actor-1")
        assert fault.reason == "environment_fault"
        assert "this environment was made to fail" in fault.message
        assert "builtin.py" in fault.details["traceback"]
        assert {"seed", "step", "episode", "last_action", "env_index"} <= fault.details.keys()
        assert fault.details["last_action"] in (0, 1)

    def test_a_role_that_cannot_be_built_is_told(self, tmp_path: Path) -> None:
        settings = {"network": "steppe.testing.runtime:no_network"}
        try:
            with self.running(tmp_path, "CartPole-v1", **settings) as (handle, _, _):
                advance(handle, lambda: bool(handle.faults()))
                message = handle.faults()[0].message
        except ZeroDivisionError as error:  # a runtime that builds roles in this process may propagate it
            message = str(error)
        assert "there is no such network" in message

    def _endless(self, tmp_path: Path, meter: Path, **settings: Any) -> Any:
        env, kwargs = "steppe.testing.runtime:MeteredEnv", {"meter": str(meter)}
        return self.running(tmp_path, env, steps=10**9, **{"environment.kwargs": kwargs}, **settings)


def advance(handle: Handle, until: Callable[[], bool]) -> None:
    """Advance a run until a condition is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, f"nothing came of it within {PATIENCE_S:.0f} s: {handle.faults()}"
        handle.advance(0.05)


def no_network(*_: Any) -> None:
    """A network factory that fails."""
    raise ZeroDivisionError("there is no such network")

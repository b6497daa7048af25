"""All measurements are recorded when a run ends, however short it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import steppe
from steppe.control.curves import Curves
from steppe.core.config.run import RunConfig
from steppe.records.run_directory import RunDirectory
from steppe.roles.context import RUN
from steppe.training.supervisor import StopSignalHandler, Supervisor

SHORT = {"steps": 64, "envs": 2, "segment_steps": 16, "evaluation.episodes": 1, "actors": 2}


@pytest.mark.integration
@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_run_shorter_than_every_report_interval_has_curves(runtime: str) -> None:
    result = steppe.train("steppe/Identity-v0", runtime=runtime, **{"environment.time_limit": 8}, **SHORT)
    curves = Curves(RunDirectory(result.path).board)
    curves.refresh()
    for name in ("train/return_mean", "train/length_mean", "loss/entropy", "train/updates"):
        points, _ = curves.points(name, 0, 100)
        assert points, name
        assert points[-1][0] == 64
    lines = [json.loads(line) for line in (Path(result.path) / "metrics.jsonl").read_text().splitlines()]
    goodbyes = {line["actor"]: line for line in lines if line["kind"] == "actor" and line["state"] == "stopped"}
    assert sorted(goodbyes) == [0, 1]
    episodes = [episode for line in lines if line["kind"] == "actor" for episode in line["episodes"]]
    assert len(episodes) >= 8, "64 steps were learned from, eight episodes of eight; some may have been collected ahead"
    assert {length for _, length in episodes} == {8}


class SlowActors:
    """A handle whose learner has ended and whose actors need a few more steps: records the order of requests."""

    def __init__(self) -> None:
        self.asked = {"actor": RUN, "learner": RUN, "manager": RUN}
        self.turns = 3
        self.actors_were_there: bool | None = None

    def advance(self, timeout_s: float) -> None:
        self.turns -= self.asked["actor"] != RUN

    def ended(self, kind: str) -> bool:
        return {"actor": self.turns <= 0, "learner": True}.get(kind, self.asked["manager"] != RUN)

    def faults(self) -> list:
        return []

    def ask(self, kind: str, what: int) -> None:
        if kind == "manager" and self.actors_were_there is None:
            self.actors_were_there = not self.ended("actor")
        self.asked[kind] = what

    def close(self, timeout_s: float) -> None:
        pass


@pytest.mark.unit
@pytest.mark.parametrize("stopped", [False, True])
def test_the_manager_ends_after_the_actors(tmp_path: Path, stopped: bool) -> None:
    config = RunConfig(env="CartPole-v1", steps=1, run_dir=tmp_path / "run")
    directory, handle = RunDirectory.create(config, {}), SlowActors()
    supervisor = Supervisor(handle, directory, config, StopSignalHandler())
    if stopped:
        supervisor.stop("stop_requested")
    assert supervisor.run(()).state == ("STOPPED" if stopped else "SUCCEEDED")
    assert handle.actors_were_there is False, "they had said their last words"
    directory.release()

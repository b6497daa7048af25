"""Actors that come and go while a run goes on: the seats in the plan, the word that dismisses one, and real processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.transport import ACTORS, EVENTS
from steppe.envs import probe
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.handle import ScalableHandle
from steppe.runtimes.plan import Plan, make_plan
from steppe.runtimes.processes import launch as processes
from steppe.transport.shm import ShmControl

SMALL = {
    "env": "steppe/Counting-v0", "mode": "async", "actors": 1, "envs": 2, "segment_steps": 8, "hidden": (8,), "epochs": 1,
    "steps": 1_000_000_000, "flow.max_actors": 3, "flow.max_restarts": 0, "evaluation.every_steps": 1_000_000_000,
}  # fmt: skip


def planned(**settings: object) -> Plan:
    config = resolve_config(("call", {**SMALL, **settings})).config
    return make_plan(config, probe(config.env, config.environment))


@pytest.mark.unit
def test_there_is_a_worker_slot_for_every_possible_actor() -> None:
    plan = planned()
    assert [worker_slot for worker_slot in plan.worker_slots() if worker_slot.startswith("actor")] == [
        "actor-0",
        "actor-1",
        "actor-2",
    ]
    assert plan.num_writers == len(plan.readers) == 3
    assert plan.channel_bytes == 3 * planned(**{"flow.max_actors": 1}).channel_bytes
    assert plan.config.actors == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    "wrong", [{"flow.max_actors": 1, "actors": 2}, {"mode": "sync"}, {"runtime": "inline"}, {"flow.max_actors": 0}]
)
def test_invalid_max_actors_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="max_actors"):
        planned(**wrong)


@pytest.mark.unit
def test_dismissing_one_worker_slot_leaves_the_others_running(tmp_path: Path) -> None:
    control = ShmControl(tmp_path / "control", create=True, num_worker_slots=3)
    other = ShmControl(tmp_path / "control")
    control.dismiss(1)
    assert [other.dismissed(worker_slot) for worker_slot in range(3)] == [False, True, False]
    control.dismiss(1, dismissed=False)
    control.heartbeat(1)
    assert not any(other.dismissed(worker_slot) for worker_slot in range(3))


@pytest.mark.integration
def test_actors_come_go_and_come_back(tmp_path: Path) -> None:
    plan = planned(run_dir=tmp_path / "run")
    directory = RunDirectory.create(plan.config, {})
    handle = processes.launch(plan, directory)
    assert isinstance(handle, ScalableHandle)
    assert handle.max_actors == 3

    def reports() -> dict[int, tuple[str, int]]:
        return {one["actor"]: (one["state"], one["epoch"]) for _, one in directory.store.read(ACTORS)}

    def until(holds: Callable[[dict[int, tuple[str, int]]], bool]) -> None:
        deadline = time.monotonic() + 180
        while not holds(reports()):
            assert time.monotonic() < deadline, reports()
            handle.advance(0.1)
            assert handle.faults() == []

    try:
        until(lambda seen: seen == {0: ("running", 0)})
        handle.scale(3)
        until(lambda seen: seen == dict.fromkeys(range(3), ("running", 0)))
        handle.scale(0)
        until(lambda seen: seen == dict.fromkeys(range(3), ("stopped", 0)) and handle.ended("actor"))
        handle.scale(2)
        until(lambda seen: seen == {0: ("running", 1), 1: ("running", 1), 2: ("stopped", 0)})
    finally:
        handle.close(timeout_s=120.0)
        directory.release()
    assert [event for _, event in directory.store.read(EVENTS) if event["kind"] in ("restart", "fault")] == []

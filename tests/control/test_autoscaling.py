"""The autoscaling policy on constructed loads, on recorded runs, and on a live run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from steppe.control.autoscale.loop import AutoscaleLoop
from steppe.control.autoscale.policy import Autoscaler, RunLoad, ScalingPolicy, decide_scaling
from steppe.control.factory import make_local_service
from steppe.control.models import RunRequest
from tests.support.service import LONG, until

POLICY = ScalingPolicy(least=1, most=16, consecutive=3, cooldown_s=60.0)
REPORTS = Path(__file__).resolve().parents[2] / "benchmarks" / "reports"
RECORDED = json.loads((Path(__file__).parent / "recorded_loads.json").read_text())


@pytest.mark.unit
@pytest.mark.parametrize(
    ("load", "target", "reason"),
    [
        (RunLoad(4, waits=0.10, blocked=0.10), 4, "balanced"),
        (RunLoad(4, waits=0.40, blocked=0.0), 6, "starving"),  # 4 x 0.9 / 0.6
        (RunLoad(4, waits=0.95, blocked=0.0), 8, "starving"),  # 72 without the growth limit of 2
        (RunLoad(12, waits=0.60, blocked=0.0), 16, "starving"),  # 27 without the limit of 16
        (RunLoad(10, waits=0.0, blocked=0.64), 4, "flooded"),  # 10 x 0.36 / 0.9
        (RunLoad(10, waits=0.02, blocked=0.1, dropped=0.3), 7, "dropped"),
        (RunLoad(1, waits=0.0, blocked=0.99), 1, "flooded"),
        (RunLoad(6, waits=0.5, blocked=0.5), 6, "both"),
        (RunLoad(8, waits=0.0, blocked=0.0, samples_per_insert=2.0, configured_samples_per_insert=8.0), 2, "behind"),
    ],
)
def test_one_window_determines_target_and_reason(load, target, reason):
    decision = decide_scaling(load, POLICY)
    assert (decision.target, decision.reason) == (target, reason)
    assert str(target) in decision.message


@pytest.mark.unit
def test_nothing_changes_before_several_windows_agree_or_soon_after_a_change():
    scaler, starving = Autoscaler(POLICY), RunLoad(2, waits=0.6, blocked=0.0)
    acts = [scaler.decide(starving, 10.0 * window).act for window in range(3)]
    assert acts == [False, False, True]
    grown = replace(starving, actors=4)
    assert not any(scaler.decide(grown, 20.0 + 10.0 * window).act for window in range(1, 6))  # cooldown of 60 s
    assert [scaler.decide(grown, 90.0 + window).act for window in range(3)] == [False, False, True]


@pytest.mark.unit
def test_windows_that_disagree_change_nothing():
    scaler = Autoscaler(POLICY)
    up, down = RunLoad(4, waits=0.6, blocked=0.0), RunLoad(4, waits=0.0, blocked=0.6)
    assert not any(scaler.decide((up, down)[window % 2], 10.0 * window).act for window in range(40))


@pytest.mark.unit
def test_the_smallest_change_among_agreeing_windows_is_used():
    scaler = Autoscaler(POLICY)
    shares = (0.55, 0.3, 0.5)
    decisions = [scaler.decide(RunLoad(4, waits=waits, blocked=0.0), now_s) for now_s, waits in enumerate(shares)]
    assert decisions[-1].act
    assert decisions[-1].target == decide_scaling(RunLoad(4, waits=0.3, blocked=0.0), POLICY).target


def simulated(recorded: dict[int, list[RunLoad]], begin: int) -> list[int]:
    """Return the numbers of actors that the policy sets if it observes the recorded loads of each number."""
    scaler, path, now_s = Autoscaler(replace(POLICY, most=max(recorded))), [begin], 0.0
    for _ in range(10):
        near = min(recorded, key=lambda count: (abs(count - path[-1]), count))
        for load in (recorded[near] * 6)[:6]:
            now_s += 30.0
            decision = scaler.decide(replace(load, actors=path[-1]), now_s)
            if decision.act:
                path.append(decision.target)
                break
    return path


@pytest.mark.unit
def test_on_recorded_runs_of_a_slow_environment_the_fastest_number_is_reached():
    rows = json.loads((REPORTS / "scaling.json").read_text())["parts"]["actors"]["rows"]
    rates = {row["settings"]["actors"]: row["median"] for row in rows}
    recorded = {
        row["settings"]["actors"]: [
            RunLoad(1, waits=row["shares"]["learner"]["wait"], blocked=row["shares"]["actor"]["blocked"])
        ]
        for row in rows
    }
    assert simulated(recorded, 1) == [1, 2, 4, 8, 16, 32, 64]
    assert max(rates, key=lambda count: rates[count]) == 64


@pytest.mark.unit
@pytest.mark.parametrize("begin", [2, 4])
def test_on_recorded_runs_of_a_slow_learner_actors_are_removed_and_not_added_again(begin):
    recorded = {int(n): [RunLoad(**load) for load in found["loads"]] for n, found in RECORDED["slow learner"].items()}
    rates = {int(n): found["steps_per_s"] for n, found in RECORDED["slow learner"].items()}
    path = simulated(recorded, begin)
    assert path == sorted(path, reverse=True)
    assert path[-1] == 1
    assert rates[1] > 0.8 * rates[begin]  # little speed is lost with one process instead of several


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_live_run_gets_more_actors_and_its_event_log_has_the_reason(tmp_path):
    service = make_local_service()
    slow = LONG | {"env": "steppe/Sleep-v0", "actors": 1, "envs": 1, "agent": {"segment_steps": 32}}
    run = service.create_run(RunRequest(**slow), "test").id
    try:
        until(lambda: service.get_run(run).state == "RUNNING", "the run is under way")
        loop = AutoscaleLoop(service, "set", ScalingPolicy(most=4, consecutive=2, cooldown_s=0.0))
        seconds = iter(range(10_000))

        def grown():
            service.reconcile()
            loop.poll(float(next(seconds)))
            return service.get_actors(run).desired > 1

        until(grown, "there are more actors")
        notes = [event for event in service.get_events(run, limit=1_000).events if event.role == "autoscaler"]
        assert notes[-1].details["what"] == "set"
        assert "waits" in notes[-1].details["message"]
        assert notes[-1].details["wanted"] == service.get_actors(run).desired
    finally:
        service.stop_run(run, "test")
        until(lambda: service.reconcile() or service.get_run(run).state in ("STOPPED", "FAILED"), "the run has ended")
        service.close()

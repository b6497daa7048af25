"""Phases that add up to everything, and a clock that leaves evaluation out."""

from __future__ import annotations

import time

import pytest

from steppe.core.system.timing import PhaseTimer, RunClock

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self):
        self.now = 10.0

    def __call__(self):
        return self.now


def test_time_is_charged_to_the_phase_that_was_on():
    clock = Clock()
    phases = PhaseTimer("env", "policy", "other", clock=clock)
    clock.now += 1.0  # before the first switch: other
    phases.switch("env")
    clock.now += 2.0
    phases.switch("policy")
    clock.now += 4.0
    phases.switch("env")
    clock.now += 8.0
    phases.switch("other")
    assert phases.seconds == {"env": 10.0, "policy": 4.0, "other": 1.0}


def test_shares_add_up_and_include_the_phase_under_way():
    clock = Clock()
    phases = PhaseTimer("a", "b", clock=clock)
    phases.switch("a")
    clock.now += 3.0
    phases.switch("b")
    clock.now += 1.0
    assert phases.shares() == {"a": 0.75, "b": 0.25}
    clock.now += 2.0
    assert phases.shares() == {"a": 0.5, "b": 0.5}


def test_without_any_time_there_are_no_shares():
    assert PhaseTimer("a", "b", clock=Clock()).shares() == {"a": 0.0, "b": 0.0}


def test_an_unknown_phase_is_a_mistake():
    phases = PhaseTimer("a", clock=Clock())
    phases.switch("typo")
    with pytest.raises(KeyError):
        phases.switch("a")


def test_excluded_time_is_left_out():
    clock = RunClock()
    clock.exclude(1000.0)
    before, found, after = time.monotonic(), clock(), time.monotonic()
    assert before - 1000.0 <= found <= after - 1000.0

"""Alternation, medians, and the treatment of disturbed and failed runs; figures are calculated by hand."""

from __future__ import annotations

import math

import pytest
from suite import measuring
from suite.measuring import Case, Reading, Row, Run, measure, run_quietly

pytestmark = pytest.mark.integration

PRINT = "import sys, json; print('noise'); print(json.dumps({'value': %s}))"
BY_ROUND = PRINT % "[3.0, 10.0, 1.0, 4.0][int(sys.argv[1])]"


@pytest.fixture
def alone(monkeypatch):
    """Simulate an otherwise idle machine: other tests can run at the same time."""
    monkeypatch.setattr(measuring, "QUIET_CORES", math.inf)


def test_cases_alternate_and_warm_ups_are_discarded(tmp_path, python_case, alone):
    log = tmp_path / "log"
    note = f"open({str(log)!r}, 'a').write(%r + sys.argv[1] + ' '); "
    cases = [python_case(name, "import sys; " + note % name + PRINT % "1.0") for name in "ab"]
    rows = measure(cases, 3, warm_ups=1)
    assert log.read_text().split() == "a0 b0 a0 b0 a1 b1 a2 b2".split()
    assert [len(row.runs) for row in rows.values()] == [3, 3]


def test_median_and_spread(python_case, alone):
    row = measure([python_case("one", BY_ROUND)], 3)["one"]
    assert (row.median, min(row.values), max(row.values)) == (3.0, 1.0, 10.0)
    even = measure([python_case("one", BY_ROUND)], 4)["one"]
    assert even.median == 3.5
    record = even.record()
    assert (record["median"], record["low"], record["high"]) == (3.5, 1.0, 10.0)
    assert [run["value"] for run in record["runs"]] == [3.0, 10.0, 1.0, 4.0]


def test_the_typical_run_is_the_one_nearest_to_the_median():
    row = Row("one", [run(value=value) for value in (5.0, 1.0, 4.0)])
    assert row.typical is row.runs[2]


def test_an_unreached_target_is_slower_than_any_other(python_case):
    row = Row("one", [run(value=value) for value in (2.0, math.inf, math.inf)])
    assert row.median == math.inf
    assert row.record()["median"] is None
    assert row.record()["low"] == 2.0


def test_a_failed_case_is_not_repeated_and_does_not_stop_others(tmp_path, python_case, alone):
    log = tmp_path / "log"
    broken = f"open({str(log)!r}, 'a').write('x'); import sys; sys.exit('it is | broken')"
    rows = measure([python_case("broken", broken), python_case("well", PRINT % "2.0")], 3)
    assert rows["broken"].error == "ended with code 1: it is | broken"
    assert rows["broken"].median is None
    assert log.read_text() == "x"
    assert rows["well"].median == 2.0


def test_output_without_json_is_an_error(python_case, alone):
    row = measure([python_case("one", "print('hello')")], 1)["one"]
    assert "no JSON object on its last line: 'hello'" in row.error


def run(others: float = 0.0, value: float = 1.0) -> Run:
    return Run(0, Reading(value), wall_s=1.0, cpu_s=1.0, others_cores=others)


@pytest.mark.parametrize(
    ("loads", "attempts", "kept", "marked"),
    [
        ([0.2], 1, 0.2, False),
        ([0.21, 0.1], 2, 0.1, False),
        ([0.9, 0.5, 0.0], 3, 0.0, False),
        ([0.9, 0.3, 0.5], 3, 0.3, True),
    ],
)
def test_disturbed_runs_are_repeated_twice_at_most(monkeypatch, loads, attempts, kept, marked):
    left = [run(load) for load in loads]
    monkeypatch.setattr(measuring, "run_once", lambda case, number: left.pop(0))
    found = run_quietly(Case("one", lambda number: [], lambda done: Reading(1.0)), 0)
    assert (found.attempts, found.others_cores, found.marked) == (attempts, kept, marked)
    assert not left


def test_a_busy_neighbour_marks_the_run(python_case, burner):
    found = run_quietly(python_case("one", "import time; time.sleep(0.3); " + PRINT % "1.0"), 0)
    assert found.marked
    assert found.attempts == 3
    assert found.others_cores > 0.2


def test_every_side_gets_the_same_clean_environment(monkeypatch, python_case, alone):
    monkeypatch.setenv("STEPPE_SEED", "7")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    code = "import os, json; print(json.dumps({'value': 0, 'found': dict(os.environ), 'cwd': os.getcwd()}))"
    extra = measure([python_case("one", code)], 1)["one"].runs[0].reading.extra
    assert extra["found"]["OMP_NUM_THREADS"] == "1"
    assert extra["found"]["STEPPE_RUNS"] == extra["cwd"] + "/runs"
    assert not {"STEPPE_SEED", "PYTHONDONTWRITEBYTECODE"} & extra["found"].keys()

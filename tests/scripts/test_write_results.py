"""docs/results.md is what the reference results say; targets are judged by hand-made results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from steppe.records.results.reference_results import (
    ReferenceExperiment,
    Score,
    SeedResult,
    make_reference,
    read_reference,
    write_record,
)

pytestmark = pytest.mark.unit
SCRIPT = Path(__file__).parents[2] / "scripts" / "write_results.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("write_results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(targets, scores, *, score="final", optimum=None):
    experiment = ReferenceExperiment("one", "Pole", "ppo", 100, [1, 2, 3], targets=targets, score=score)
    results = [
        SeedResult(
            seed,
            100,
            Score(100, 10, value, 0.0),
            None,
            {} if optimum is None else {"return": value, "optimum": optimum},
            [(50, value / 2), (100, value)],
            [],
            1.0,
            1.0,
            seed * 1.0,
            "a",
            "c",
            {},
        )
        for seed, value in enumerate(scores, 1)
    ]
    return make_reference(experiment, results, {}, {})


def test_the_page_is_up_to_date(script):
    assert script.outdated(script.files()) == [], "run scripts/write_results.py"


def test_every_recorded_reference_is_the_result_of_a_row_of_the_table(script):
    experiments = script.read_experiments(script.REFERENCES / "experiments.toml")
    for path in script.REFERENCES.glob("*.json"):
        recorded, row = read_reference(path).experiment, experiments[path.stem]
        what = ("env", "algo", "steps", "score", "settings")
        assert [getattr(recorded, key) for key in what] == [getattr(row, key) for key in what], path.stem


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        ({"median": 20}, True),
        ({"median": 21}, False),
        ({"median": 20, "worst": 11}, False),
        ({"worst": 10}, True),
        ({}, None),
    ],
)
def test_targets_by_the_median_and_the_worst_seed(script, targets, met):
    assert script.meets_targets(reference(targets, [10.0, 20.0, 30.0])) is met


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        ({"relative_gap": 0.02}, True),
        ({"relative_gap": 0.01}, False),
        ({"absolute_gap": 0.2}, True),
        ({"absolute_gap": 0.1}, False),
    ],
)
def test_targets_by_the_distance_to_the_optimum(script, targets, met):
    """The median is -10.15 and the optimum -10."""
    assert script.meets_targets(reference(targets, [-10.0, -10.15, -11.0], score="exact", optimum=-10.0)) is met


def test_a_measured_row_and_its_plot(script, tmp_path):
    row = '[[experiment]]\nname = "one"\nenv = "Pole"\nalgo = "ppo"\nsteps = 100\nseeds = [1, 2, 3]\nasked = "≥ 15"\n'
    other = row.replace('"one"', '"two"')
    (tmp_path / "experiments.toml").write_text(row + other)
    write_record(tmp_path / "one.json", reference({"median": 15}, [10.0, 20.0, 30.0]))
    found = script.files(tmp_path)
    assert set(found) == {"results.md", "img/results/one.svg"}
    one, two = [line for line in found["results.md"].splitlines() if line.startswith("| Pole")]
    assert "| 3 | 20 | 10 | ≥ 15 | met |" in one
    assert "not measured yet" in two
    assert found["img/results/one.svg"].startswith("<svg")

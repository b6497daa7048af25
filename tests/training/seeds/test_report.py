"""Reports on groups: what is computed, what is refused, and pages that load nothing from elsewhere."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.records.results.report_pages import html_page, markdown_page, text_rows, write_report
from steppe.training.seeds.report import SeedSeries, compute_report, parse_bounds

pytestmark = pytest.mark.unit


def series(label, env, scores, *, unfinished=None):
    curves = [[(100, 0.0), (200, score / 2), (300, float(score))] for score in scores]
    seeds = list(range(len(scores)))
    return SeedSeries(label, f"{label}-{env}", env, seeds, np.array(scores, float), curves, unfinished or {})


def four_groups():
    return [
        series("ppo", "Pole", [10, 20, 30, 40]),
        series("dqn", "Pole", [0, 10, 20, 30], unfinished={7: "FAILED"}),
        series("ppo", "Car", [-100, -90, -80]),
        series("dqn", "Car", [-200, -190, -180]),
    ]


def test_each_environment_has_its_own_scores():
    report = compute_report(four_groups(), {})
    pole, car = report["environments"]
    assert (pole["env"], car["env"]) == ("Pole", "Car")
    ppo = pole["series"][0]
    assert (ppo["iqm"]["value"], ppo["median"]["value"], ppo["worst"], ppo["best"]) == (25.0, 25.0, 10.0, 40.0)
    [better] = [row for row in car["improvement"] if row["label"] == "ppo"]
    assert (better["over"], better["value"], better["low"]) == ("dqn", 1.0, 1.0)
    assert pole["efficiency"]["series"]["ppo"]["value"][-1] == 25.0
    assert ppo["steps_to_learn"] == 300
    assert report["normalized"] is None


def test_environments_are_combined_on_a_common_scale():
    report = compute_report(four_groups(), parse_bounds(["Pole=0:40", "Car=-200:-80"]))
    ppo, dqn = report["normalized"]["series"]
    assert ppo["mean"]["value"] == pytest.approx(np.mean([0.25, 0.5, 0.75, 1, 100 / 120, 110 / 120, 1]))
    assert (ppo["runs"], dqn["runs"]) == (7, 7)
    assert report["normalized"]["improvement"][0]["value"] == pytest.approx((11.5 / 16 + 1) / 2)


def test_a_missing_scale_is_named():
    with pytest.raises(UsageError, match="missing for Car"):
        compute_report(four_groups(), {"Pole": (0, 1)})


@pytest.mark.parametrize("word", ["Pole", "Pole=1", "Pole=1:1", "Pole=a:b"])
def test_a_malformed_scale_is_refused(word):
    with pytest.raises(ConfigError, match="env=low:high"):
        parse_bounds([word])


def test_a_group_without_results_is_named():
    with pytest.raises(UsageError, match="ppo-Pole has no run"):
        compute_report([series("ppo", "Pole", [])], {})


def test_a_report_is_reproducible_and_strict_json(tmp_path):
    for name in ("a", "b"):
        write_report(compute_report(four_groups(), {}), tmp_path / name)
    texts = [(tmp_path / name / "report.json").read_text() for name in ("a", "b")]
    assert texts[0] == texts[1]
    assert "NaN" not in texts[0]
    assert json.loads(texts[0])["environments"][0]["series"][1]["unfinished"] == {"7": "FAILED"}


def test_pages_show_every_group_and_load_nothing(tmp_path):
    report = compute_report(four_groups(), parse_bounds(["Pole=0:40", "Car=-200:-80"]))
    page = html_page(report)
    assert page.count("<svg") == 6
    assert "<script" not in page
    assert not re.search(r"(?:src|href)=|url\(|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert "seed 7 is FAILED" in page
    text = markdown_page(report)
    paths = {path.name for path in write_report(report, tmp_path)}
    linked = set(re.findall(r"\]\((.*?\.svg)\)", text))
    assert len(linked) == 6
    assert linked <= paths
    for name in linked:
        ElementTree.parse(tmp_path / name)
    assert "25 [" in text
    assert [row[:3] for row in text_rows(report)][:2] == [
        ["All environments, normalized", "ppo", "7"],
        ["All environments, normalized", "dqn", "7"],
    ]


def test_labels_are_escaped():
    page = html_page(compute_report([series("<b>", "Pole", [1, 2])], {}))
    assert "<b>" not in page

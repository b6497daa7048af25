"""Reports are made from their JSON only: numbers in the text and in the pictures are those of the file."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from suite.charts import bars, lines, number
from suite.claims import Claim, further, further_ratio, ratio, ratio_to_smallest, same_settings
from suite.measuring import Reading, Row, Run
from suite.report import Part, keep

pytestmark = pytest.mark.unit


def row(label: str, values: list[float], *, others: float = 0.05, attempts: int = 1, **settings) -> Row:
    runs = [
        Run(
            place, Reading(value, settings, {"torch": "2"}, extra={"deep": value * 2}), 9.0, 8.0, others, None, attempts
        )
        for place, value in enumerate(values)
    ]
    return Row(label, runs)


@pytest.fixture
def part() -> Part:
    rows = {
        "Steppe": row("Steppe", [90_000.0, 100_000.0, 120_000.0], envs=8, epochs=4, nothing=None),
        "peer": row("peer", [4_000.0, 3_000.0, 5_000.0], others=0.31, attempts=3, epochs=10),
        "absent": Row("absent", [], "not | there"),
    }
    claims = [
        Claim("ours / theirs", 25, ratio(rows, "Steppe", "peer")),
        Claim("too much", 26, ratio(rows, "Steppe", "peer")),
        Claim("gone", 1, ratio(rows, "Steppe", "absent")),
        Claim("small enough", 0.05, ratio_to_smallest(rows, "peer", "Steppe"), at_least=False),
    ]
    return Part("A part", "About it.", "steps/s", rows, claims, columns={"deep": "twice", "wall_s": "wall, s"})


def cells(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_the_text_has_the_numbers_of_the_file(tmp_path, part):
    keep(tmp_path, "mine", "What it is", "a", part.record(3), ["a"])
    text = (tmp_path / "mine.md").read_text()
    saved = {one["label"]: one for one in json.loads((tmp_path / "mine.json").read_text())["parts"]["a"]["rows"]}
    assert saved["Steppe"]["median"] == 100_000.0
    assert cells(text, "Steppe")[:6] == ["Steppe", "100,000", "90,000 – 120,000", "3", "200,000", "9"]
    assert cells(text, "Steppe")[6:] == ["0.05", "envs 8, epochs 4"]
    assert cells(text, "peer")[:6] == ["peer", "4,000", "3,000 – 5,000", "3 (3 disturbed, 6 repeated)", "8,000", "9"]
    assert cells(text, "absent")[1] == "not measured"
    assert cells(text, "absent")[-1] == "not \\| there"


def test_a_figure_that_is_a_text_is_shown_unchanged(tmp_path, part):
    for one, word in zip(part.rows["Steppe"].runs, ("3f", "3f", "a0"), strict=True):
        one.reading.extra["weights"] = word
    keep(tmp_path, "mine", "What it is", "a", replace(part, columns={"weights": "hash"}).record(3), ["a"])
    text = (tmp_path / "mine.md").read_text()
    assert cells(text, "Steppe")[4] == "3f, a0"
    assert cells(text, "peer")[4] == "–"


def test_questions_get_an_answer(tmp_path, part):
    keep(tmp_path, "mine", "What it is", "a", part.record(3), ["a"])
    text = (tmp_path / "mine.md").read_text()
    assert cells(text, "ours / theirs") == ["ours / theirs", "≥ 25 ×", "25 ×", "yes"]
    assert cells(text, "too much")[-1] == "no"
    assert cells(text, "gone") == ["gone", "≥ 1 ×", "– ×", "not measured"]
    assert cells(text, "small enough")[1:] == ["≤ 0.05 ×", "0.04 ×", "yes"]


def test_measuring_one_part_again_keeps_the_others(tmp_path, part):
    first, second = part.record(3), part.record(3) | {"title": "Newer"}
    keep(tmp_path, "mine", "What it is", "b", first, ["a", "b"])
    keep(tmp_path, "mine", "What it is", "a", first, ["a", "b"])
    found = keep(tmp_path, "mine", "What it is", "b", second, ["a", "b"])
    assert {key: one["title"] for key, one in found["parts"].items()} == {"a": "A part", "b": "Newer"}
    assert list(found["parts"]) == ["a", "b"]
    assert {path.name for path in tmp_path.iterdir()} == {"mine.json", "mine.md", "mine-a.svg", "mine-b.svg"}


def test_length_of_bars_is_proportional_to_the_medians(part):
    records = [one.record() for one in part.rows.values()]
    picture = ElementTree.fromstring(bars("title", records, "steps/s"))
    widths = [float(shape.get("width", 0)) for shape in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert len(widths) == 2
    assert widths[0] / widths[1] == pytest.approx(25, rel=0.01)
    words = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "100,000 steps/s" in words


def test_lines_place_powers_of_ten_evenly():
    series = [{"label": "<one>", "points": [[1, 0.0], [10, 5.0], [100, 10.0]]}, {"label": "none", "points": []}]
    picture = ElementTree.fromstring(lines({"title": "t", "x": "x", "y": "y", "series": series}))
    dots = [
        (float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in picture.iter("{http://www.w3.org/2000/svg}circle")
    ]
    (x1, y1), (x2, y2), (x3, y3) = dots
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y3 < y1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (float("inf"), "–"), (0, "0"), (0.0004567, "0.00046"), (0.15, "0.15"), (1.0, "1"), (2.444, "2.44"),
        (97.06, "97.1"), (123.4, "123"), (1234.5, "1,234"), (402_123.0, "402,123"),
    ],
)  # fmt: skip
def test_numbers_have_about_three_figures(value, text):
    assert number(value) == text


def test_comparison_is_with_the_best_of_the_others():
    rows = {name: row(name, [value]) for name, value in (("ours", 10.0), ("slow", 1.0), ("fast", 4.0))}
    assert ratio(rows, "ours", "slow", "fast") == 2.5
    assert ratio_to_smallest(rows, "ours", "slow", "fast") == 10.0


def test_claims_about_equal_settings_need_equal_settings():
    used = {"envs": 8, "rollout": 256, "epochs": 10, "minibatch": 64}
    rows = {
        "ours": row("ours", [1.0], **used, network="a"),
        "same": row("same", [1.0], **used, network="b"),
        "other": row("other", [1.0], **{**used, "minibatch": 1024}),
        "gone": Row("gone", [], "broken"),
    }
    assert [same_settings(rows, "ours", name) for name in ("same", "other", "gone")] == [True, False, False]


def test_further_figures_are_shown(part):
    assert further(part.rows, "Steppe", "deep") == 200_000
    assert further_ratio(part.rows, "deep", "Steppe", "peer") == 25
    assert further(part.rows, "Steppe", "none") is None
    assert further_ratio(part.rows, "deep", "Steppe", "absent") is None

"""Text charts, compared with values calculated by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steppe.cli import text_charts

pytestmark = pytest.mark.unit


def test_sparkline_spans_minimum_to_maximum():
    assert text_charts.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"


def test_sparkline_averages_values_beyond_its_width():
    assert text_charts.sparkline([0, 2, 7, 9], 2) == "▁█"
    assert text_charts.sparkline([5, 5, 0, 0, 5, 5], 3) == "█▁█"


def test_sparkline_of_empty_or_constant_values():
    assert text_charts.sparkline([], 10) == ""
    assert text_charts.sparkline([math.nan], 10) == ""
    assert text_charts.sparkline([1, math.nan, math.inf, 2], 10) == "▁█"
    assert len(set(text_charts.sparkline([3.0] * 5, 10))) == 1
    assert text_charts.sparkline([1, 2], 0) == ""


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300), st.integers(1, 80))
def test_sparkline_never_exceeds_its_width(values, width):
    line = text_charts.sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(text_charts.TICKS)


def test_a_bar_rounds_the_largest_remainder_up():
    assert text_charts.bar([0.5, 0.25, 0.25], 8) == [4, 2, 2]
    assert text_charts.bar([0.55, 0.45], 10) == [6, 4]
    assert text_charts.bar([0.34, 0.33, 0.33], 10) == [4, 3, 3]
    assert text_charts.bar([0.5], 10) == [5]
    assert text_charts.bar([], 10) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(lambda shares: sum(shares) > 0.1), st.integers(1, 60))
def test_a_bar_fills_its_width_when_shares_add_up_to_one(shares, width):
    normal = [share / sum(shares) for share in shares]
    columns = text_charts.bar(normal, width)
    assert sum(columns) == width
    assert all(abs(size - share * width) <= 1 for size, share in zip(columns, normal, strict=True))


def test_progress_bar_works_without_color():
    assert text_charts.progress(0.5, 4) == "━━──"
    assert text_charts.progress(2.0, 3) == "━━━"
    assert text_charts.progress(0.0, 3) == "───"


def test_numbers_are_formatted():
    assert text_charts.count(1234567) == "1,234,567"
    assert text_charts.count(None) == "–"
    assert text_charts.decimal(475.04) == "475.0"
    assert text_charts.decimal(-0.12345) == "-0.123"
    assert text_charts.decimal(math.nan) == "–"
    assert text_charts.percent(0.456) == "46 %"
    assert text_charts.duration(0.84) == "0.8 s"
    assert text_charts.duration(42.4) == "42 s"
    assert text_charts.duration(185) == "3:05"
    assert text_charts.duration(7385) == "2:03:05"
    assert text_charts.format_shares({"env": 0.2, "policy": 0.7, "blocked": 0.001}) == "policy 70 %  env 20 %"

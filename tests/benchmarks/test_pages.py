"""docs/performance.md: the text between the marks comes from the reports, the rest is unchanged."""

from __future__ import annotations

import shutil

import pytest
from suite.claims import Claim
from suite.measuring import Reading, Row, Run
from suite.pages import PAGE, REPORTS, refresh
from suite.report import Part, keep

pytestmark = pytest.mark.unit

TEXT = """# By hand
<!-- measured all -->
old <!-- end -->
between, by hand
<!-- measured mine -->
<!-- end -->
<!-- measured other -->
<!-- end -->
the end
"""


def test_marked_sections_are_replaced_and_the_rest_is_kept(tmp_path):
    page, reports = tmp_path / "page.md", tmp_path / "reports"
    page.write_text(TEXT)
    row = Row("Steppe", [Run(0, Reading(1234.0), 1.0, 1.0, 0.0)])
    part = Part("Fast", "How.", "steps/s", {"Steppe": row}, [Claim("fast enough", 1000, 1234.0, unit="steps/s")])
    keep(reports, "mine", "Mine", "only", part.record(1), ["only"])
    refresh(page, reports)
    once = page.read_text()
    assert [line for line in once.splitlines() if "hand" in line or "end" in line] == [
        "# By hand", "<!-- end -->", "between, by hand", "<!-- end -->", "<!-- end -->", "the end",
    ]  # fmt: skip
    assert once.count("| fast enough | ≥ 1,000 steps/s | 1,234 steps/s | yes |") == 1
    assert "| Steppe | 1,234 | 1,234 – 1,234 |" in once
    assert "(../benchmarks/reports/mine-only.svg)" in once
    assert "Not measured yet: `make bench-other`." in once
    assert "old" not in once
    refresh(page, reports)
    assert page.read_text() == once


def test_the_page_matches_the_reports(tmp_path):
    shutil.copy(PAGE, tmp_path / "page.md")
    refresh(tmp_path / "page.md", REPORTS)
    assert (tmp_path / "page.md").read_text() == PAGE.read_text()

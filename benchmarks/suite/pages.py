"""docs/performance.md: the text between `<!-- measured NAME -->` and `<!-- end -->` is written from the reports' JSON, the
rest by hand. `<!-- measured all -->` is the table of all targets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite.report import claim_line, claim_table, number, part_pictures

ROOT = Path(__file__).resolve().parents[2]
PAGE, REPORTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "reports"
_MARKED = re.compile(r"(<!-- measured (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refresh(page: Path = PAGE, reports: Path = REPORTS) -> None:
    """Rewrite every marked section from the current reports."""
    known = {path.stem: json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))}

    def section(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        body = everything(known) if name == "all" else one(name, known.get(name))
        return f"{opening}\n{body}\n\n{closing}"

    page.write_text(_MARKED.sub(section, page.read_text()))


def everything(known: Mapping[str, Mapping[str, Any]]) -> str:
    """One table of all claims, in the order of the benchmarks' names."""
    found = [claim for report in known.values() for part in report["parts"].values() for claim in part["claims"]]
    if not found:
        return "Not measured yet: `make bench`."
    return "\n".join([*claim_table([]), *map(claim_line, found)])


def one(name: str, report: Mapping[str, Any] | None) -> str:
    """A benchmark's parts: figures, charts, and the link to its report."""
    if report is None:
        return f"Not measured yet: `make bench-{name}`."
    text: list[str] = []
    for key, part in report["parts"].items():
        text += [f"### {part['title']}", "", part["about"], "", *(figures(part) if part["rows"] else []), ""]
        text += [
            f"![{part['title']}](../benchmarks/reports/{picture})" for picture, _ in part_pictures(report, key, part)
        ]
        text += ["", *part["notes"], *([""] if part["notes"] else [])]
    return "\n".join([*text, f"[The whole report](../benchmarks/reports/{name}.md), with settings, versions and load."])


def figures(part: Mapping[str, Any]) -> list[str]:
    """Median and spread of each row."""
    head = [f"| | {part['unit']} | lowest – highest |", "|---|---:|---:|"]
    return head + [
        f"| {row['label']} | {number(row['median'])} | {number(row['low'])} – {number(row['high'])} |"
        for row in part["rows"]
        if not row["error"]
    ]

"""`steppe report`: statistics over the seeds of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table

Groups = Annotated[
    list[str], typer.Argument(metavar="GROUP...", help="Names or directories of groups.", show_default=False)
]
Normalize = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ENV=LOW:HIGH",
        help="Also combine environments: scores LOW and HIGH become 0 and 1. Once for every environment.",
    ),
]
Into = Annotated[
    Path | None,
    typer.Option("--into", metavar="DIR", help="Directory of the report. Default: report/ of the first group."),
]


def report(groups: Groups, normalize: Normalize = None, into: Into = None, as_json: AsJson = False) -> None:
    """Compare groups of seeds.

    Interquartile mean and median with bootstrap intervals, performance profiles, probability of improvement, and evaluations over steps.
    Writes report.html, report.md with its plots, and report.json.
    """
    from steppe.records.results.report_pages import text_rows, write_report
    from steppe.training.seeds.group import SeedGroup
    from steppe.training.seeds.report import make_report, parse_bounds

    found = make_report(groups, parse_bounds(normalize or []))
    paths = write_report(found, into or SeedGroup.open(groups[0]).path / "report")
    if as_json:
        return emit(found)
    headers = ["environment", "", "runs", "interquartile mean", "median", "worst"]
    print_table(headers, text_rows(found), right=headers[2:])
    return print(f"written: {paths[0]}, report.md and report.json beside it")

"""A report on groups of seeds as a page of HTML, as Markdown with plots, and as JSON. Nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from steppe.core.io.atomic_files import write_atomic
from steppe.records.results.line_chart import Line, line_chart

Plot = tuple[str, str]  # file name and SVG
STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#1f2328;background:#fff}table{border-collapse:collapse;margin:1rem 0}th,td{padding:.25rem .75rem;text-align:right;"
    "border-bottom:1px solid #d0d7de}th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}"
    "@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}th,td{border-color:#30363d}}"
)


def write_report(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write report.html, report.md with its plots, and report.json into a directory, and return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    plots = {name: svg for section in sections_of(report) for name, svg in plots_of(*section)}
    files = {
        "report.html": html_page(report),
        "report.md": markdown_page(report),
        "report.json": json.dumps(_without_nan(report), indent=1, allow_nan=False) + "\n",
        **plots,
    }
    for name, text in files.items():
        write_atomic(directory / name, text.encode())
    return [directory / name for name in files]


def sections_of(report: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (title, section): the normalized scores over all environments first, if there are, then each environment."""
    if report["normalized"] is not None:
        yield "All environments, normalized", report["normalized"]
    for section in report["environments"]:
        yield section["env"], section


def markdown_page(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown; its plots are files beside it."""
    lines = ["# Results over seeds", "", _method(report), ""]
    for title, section in sections_of(report):
        lines += [f"## {title}", ""]
        for header, rows in _tables(section):
            lines += [_markdown_row(header), "|---" + "|---:" * (len(header) - 1) + "|", *map(_markdown_row, rows), ""]
        lines += [f"- {note}" for note in _notes(section)]
        lines += [f"![{title}: {name.rsplit('-', 1)[-1][:-4]}]({name})" for name, _ in plots_of(title, section)]
        lines.append("")
    return "\n".join(lines)


def html_page(report: Mapping[str, Any]) -> str:
    """Return the report as one self-contained page, dark or light as the reader prefers."""
    parts = ["<h1>Results over seeds</h1>", f"<p>{escape(_method(report))}</p>"]
    for title, section in sections_of(report):
        parts.append(f"<h2>{escape(title)}</h2>")
        for header, rows in _tables(section):
            cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
            names = "".join(f"<th>{escape(name)}</th>" for name in header)
            parts.append(f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
        parts += [f"<p>{escape(note)}</p>" for note in _notes(section)]
        parts += [svg for _, svg in plots_of(title, section)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Results over seeds</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def text_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """Return the main table for the terminal: environment, label, runs, interquartile mean, median, worst."""
    return [
        [title, row["label"], _runs(row), _interval(row["iqm"]), _interval(row["median"]), _number(row.get("worst"))]
        for title, section in sections_of(report)
        for row in section["series"]
    ]


def plots_of(title: str, section: Mapping[str, Any]) -> list[Plot]:
    """Return the plots of a section: evaluations over steps, and the performance profile."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    efficiency, profile = section["efficiency"], section["profile"]
    score = "score" if "env" in section else "normalized score"
    curves = _lines(efficiency["steps"], efficiency["series"])
    shares = _lines(profile["thresholds"], profile["series"])
    return [
        (f"{slug}-curves.svg", line_chart(f"{title}: interquartile mean", curves, x="environment steps", y=score)),
        (
            f"{slug}-profile.svg",
            line_chart(f"{title}: share of runs above a score", shares, x=score, y="share of runs"),
        ),
    ]


def _lines(xs: Sequence[float], series: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Line]:
    return [
        Line(label, list(zip(xs, one["value"], strict=True)), list(zip(one["low"], one["high"], strict=True)))
        for label, one in series.items()
    ]


def _method(report: Mapping[str, Any]) -> str:
    return (
        f"Scores are mean returns of each run's final evaluation. Intervals are {report['confidence']:.0%} stratified percentile "
        f"bootstraps with {report['resamples']:,} resamples and a fixed seed (Agarwal et al. 2021)."
    )


def _tables(section: Mapping[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    plain = "env" in section
    extra = ["worst", "best", "steps to learn"] if plain else []
    yield (
        ["", "runs", "interquartile mean", "median", "mean", *extra],
        [
            [
                row["label"],
                _runs(row),
                *(_interval(row[name]) for name in ("iqm", "median", "mean")),
                *((_number(row["worst"]), _number(row["best"]), _number(row["steps_to_learn"])) if plain else ()),
            ]
            for row in section["series"]
        ],
    )
    if section["improvement"]:
        yield (
            ["probability that a run is better", "value"],
            [[f"{row['label']} than {row['over']}", _interval(row)] for row in section["improvement"]],
        )


def _notes(section: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['group']}: seed {seed} is {state} and not among the runs"
        for row in section["series"]
        for seed, state in row.get("unfinished", {}).items()
    ]


def _runs(row: Mapping[str, Any]) -> str:
    return str(row["runs"] if "runs" in row else len(row["seeds"]))


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{_number(estimate['value'])} [{_number(estimate['low'])}, {_number(estimate['high'])}]"


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value

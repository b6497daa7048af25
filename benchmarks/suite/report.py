"""Writes the report of a benchmark: NAME.json with every figure, and NAME.md and charts made from it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suite.charts import bars, lines, number
from suite.claims import Claim
from suite.machine import machine
from suite.measuring import Row, finite

FIRST_SETTINGS = ("envs", "rollout", "epochs", "minibatch", "network", "actors", "mode", "runtime", "threads")


@dataclass
class Part:
    """One alternating measurement. `columns` are further figures of each row, read from its runs' `extra` by name."""

    title: str
    about: str
    unit: str
    rows: Mapping[str, Row]
    claims: Sequence[Claim] = ()
    columns: Mapping[str, str] = field(default_factory=dict)  # key in `extra` → heading
    plots: Sequence[Mapping[str, Any]] = ()  # lines instead of bars, see charts.lines
    notes: Sequence[str] = ()  # additional Markdown after the tables

    def record(self, rounds: int) -> dict[str, Any]:
        return {
            "title": self.title,
            "about": self.about,
            "unit": self.unit,
            "rounds": rounds,
            "measured": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "machine": machine(),
            "rows": [row.record() for row in self.rows.values()],
            "claims": [claim.record() for claim in self.claims],
            "columns": dict(self.columns),
            "plots": [dict(plot) for plot in self.plots],
            "notes": list(self.notes),
        }


def keep(
    directory: Path, name: str, about: str, key: str, part: dict[str, Any], order: Iterable[str]
) -> dict[str, Any]:
    """Replace one part of a benchmark's report and write all files again."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    before = json.loads(path.read_text())["parts"] if path.exists() else {}
    parts = before | {key: part}
    report = {"name": name, "about": about, "parts": {known: parts[known] for known in order if known in parts}}
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    for picture, drawn in pictures(report).items():
        (directory / picture).write_text(drawn)
    (directory / f"{name}.md").write_text(markdown(report))
    return report


def pictures(report: Mapping[str, Any]) -> dict[str, str]:
    """File name → SVG."""
    return {
        picture: drawn for key, part in report["parts"].items() for picture, drawn in part_pictures(report, key, part)
    }


def part_pictures(report: Mapping[str, Any], key: str, part: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Bars of its rows, or its own plots."""
    name = f"{report['name']}-{key}"
    if not part["rows"]:
        return []
    if not part["plots"]:
        return [
            (
                f"{name}.svg",
                bars(f"{part['title']}: {part['unit']}, median of {part['rounds']}", part["rows"], part["unit"]),
            )
        ]
    return [(f"{name}-{place}.svg", lines(plot)) for place, plot in enumerate(part["plots"], 1)]


def markdown(report: Mapping[str, Any]) -> str:
    """Format the report as Markdown."""
    text = [f"# {report['about']}", "", f"Written by `steppe bench {report['name']}`; every figure is in "
            f"[{report['name']}.json]({report['name']}.json)."]  # fmt: skip
    for key, part in report["parts"].items():
        text += ["", *part_lines(report, key, part)]
    return "\n".join(text) + "\n"


def part_lines(report: Mapping[str, Any], key: str, part: Mapping[str, Any]) -> list[str]:
    """Format one part: targets, figures, time shares and conditions."""
    lines_of = [f"## {part['title']}", "", part["about"], ""]
    if part["claims"]:
        lines_of += [*claim_table(part["claims"]), ""]
    lines_of += [*row_table(part), ""] if part["rows"] else []
    lines_of += [f"![{part['title']}]({picture})" for picture, _ in part_pictures(report, key, part)]
    lines_of += ["", *share_table(part["rows"])]
    lines_of += [*part["notes"], *([""] if part["notes"] else [])]
    return [*lines_of, *(conditions(part) if part["rows"] else [])]


def claim_table(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """What | asked | measured | met."""
    return ["| | asked | measured | met |", "|---|---:|---:|---|", *map(claim_line, claims)]


def claim_line(claim: Mapping[str, Any]) -> str:
    """One line of that table."""
    sense, unit = ("≥" if claim["at_least"] else "≤"), claim["unit"]
    met = {True: "yes", False: "no", None: "not measured"}[claim["met"]]
    return f"| {claim['what']} | {sense} {number(claim['asked'])} {unit} | {number(claim['measured'])} {unit} | {met} |"


def row_table(part: Mapping[str, Any]) -> list[str]:
    """Median, spread, further figures, load by others and settings of each row."""
    columns = part["columns"]
    head = ["", f"median {part['unit']}", "lowest – highest", "runs", *columns.values(), "others, cores", "settings"]
    text = [f"| {' | '.join(head)} |", "|---|---:|---:|---:|" + "---:|" * len(columns) + "---:|---|"]
    for row in part["rows"]:
        if row["error"]:
            cells = [
                row["label"],
                "not measured",
                "",
                str(len(row["runs"])),
                *[""] * len(columns),
                "",
                cell(row["error"]),
            ]
        else:
            spread = f"{number(row['low'])} – {number(row['high'])}"
            further = [figure(row, key) for key in columns]
            middle_value = number(row["median"]) if row["median"] is not None else "not reached"
            cells = [row["label"], middle_value, spread, runs(row), *further, others(row), settings(row["settings"])]
        text.append(f"| {' | '.join(cells)} |")
    return text


def figure(row: Mapping[str, Any], key: str) -> str:
    """An additional figure of a row: the median of numbers, or all distinct texts."""
    words = dict.fromkeys(value for value in found(row, key) if isinstance(value, str))
    return ", ".join(words) if words else number(middle(row, key))


def middle(row: Mapping[str, Any], key: str) -> float | None:
    """Median of an additional figure over a row's runs."""
    values = found(row, key)
    return finite(statistics.median(values)) if values else None


def found(row: Mapping[str, Any], key: str) -> list[Any]:
    """Values of an additional figure of a row's runs, from their output or their measured resources."""
    values = [run["extra"].get(key, run.get(key)) for run in row["runs"]]
    return [value for value in values if value is not None]


def runs(row: Mapping[str, Any]) -> str:
    """Number of runs, and how many of them were disturbed or repeated."""
    marked = sum(run["marked"] for run in row["runs"])
    again = sum(run["attempts"] - 1 for run in row["runs"])
    words = [f"{marked} disturbed"] * bool(marked) + [f"{again} repeated"] * bool(again)
    return str(len(row["runs"])) + (f" ({', '.join(words)})" if words else "")


def others(row: Mapping[str, Any]) -> str:
    """Maximum CPU use of other processes during a recorded run."""
    return f"{max((run['others_cores'] for run in row['runs']), default=0.0):.2f}"


def settings(found: Mapping[str, Any]) -> str:
    """Order settings by importance, the same for every row; omit those that do not apply."""
    keys = [key for key in FIRST_SETTINGS if key in found] + [key for key in found if key not in FIRST_SETTINGS]
    return cell(", ".join(f"{key.replace('_', ' ')} {found[key]}" for key in keys if found[key] is not None))


def share_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Time shares of each of our rows, per role and phase, in its typical run."""
    timed = [row for row in rows if row["shares"]]
    if not timed:
        return []
    text = ["Where the time goes, in the run nearest to the median:", "", "| | role | phases |", "|---|---|---|"]
    for row in timed:
        for role, phases in row["shares"].items():
            words = ", ".join(f"{phase} {100 * share:.1f} %" for phase, share in phases.items())
            text.append(f"| {row['label']} | {role} | {words} |")
    return [*text, ""]


def conditions(part: Mapping[str, Any]) -> list[str]:
    """Machine, versions and method."""
    found = part["machine"]
    memory = f"{found['memory_bytes'] / 2**30:.0f} GiB" if found["memory_bytes"] else "?"
    commit = found["commit"] or "unknown commit"
    sides = {label: words for label, words in ((row["label"], row["versions"]) for row in part["rows"]) if words}
    return [
        f"{part['rounds']} rounds, all cases in turn; {part['measured']}; {found['cpu']}, {found['cores']} cores, {memory}, "
        f"{found['platform']}; commit {commit[:12]}. Versions: {'; '.join(versions(sides))}."
    ]


def versions(sides: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Each set of versions once, with the rows that used it."""
    by_words: dict[str, list[str]] = {}
    for label, found in sides.items():
        words = " ".join(f"{name} {version}" for name, version in found.items() if version)
        by_words.setdefault(words, []).append(label)
    return [f"{', '.join(labels)}: {words}" for words, labels in by_words.items()]


def cell(text: str) -> str:
    """Escape text for a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")

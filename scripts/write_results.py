"""Write docs/results.md and its plots from benchmarks/references: `scripts/write_results.py`, or `--check` to compare only."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from steppe.records.results.line_chart import Line, line_chart
from steppe.records.results.reference_results import Reference, ReferenceExperiment, read_experiments, read_reference
from steppe.records.results.score_statistics import curve_at

ROOT = Path(__file__).resolve().parents[1]
REFERENCES, DOCS = ROOT / "benchmarks" / "references", ROOT / "docs"
SIZE = (420, 200)
POINTS = 50
HEAD = """\
# Results

Reference experiments with default settings, unless a row names others. A score is the mean return of {episodes} episodes after training, of the
last weights, except where *exact* (policy evaluation by the environment's model; the time limit counts) or *best* (the best
checkpoint) is said. Every seed's settings, curves, times and commit are in [`benchmarks/references/`](../benchmarks/references);
`steppe verify ALGO ENV` repeats an experiment and says whether its score lies in the {confidence:.0%} band.

This page is written by `scripts/write_results.py`. `scripts/measure_reference.py --name NAME` measures a row.

"""


def files(references: Path = REFERENCES) -> dict[str, str]:
    """Return what the page and its plots should contain, by path under docs/."""
    experiments = read_experiments(references / "experiments.toml")
    measured = {name: read_reference(path) for name in experiments if (path := references / f"{name}.json").exists()}
    head = HEAD.format(episodes=100, confidence=0.99)
    header = "| experiment | algorithm | steps | seeds | median | worst | asked | | published | band | CPU a seed |"
    lines = [header, "|---|---|---:|---:|---:|---:|---|---|---|---|---:|"]
    lines += [_row(experiment, measured.get(name)) for name, experiment in experiments.items()]
    found = {}
    plots = [
        "",
        "## Curves",
        "",
        "Mean return of the evaluations during training: median, lowest and highest seed.",
        "",
    ]
    for name, reference in measured.items():
        if plot := _plot(reference):
            found[f"img/results/{name}.svg"] = plot
            plots.append(f"![{name}](img/results/{name}.svg)")
    return {"results.md": head + "\n".join([*lines, *plots]) + "\n", **found}


def _row(experiment: ReferenceExperiment, reference: Reference | None) -> str:
    settings = "".join(f", `{key}={value}`" for key, value in experiment.settings.items())
    published = "; ".join(f"{one.value:g} ({one.about}; {one.source})" for one in experiment.published)
    score = "" if experiment.score == "final" else f", {experiment.score}"
    cells = [f"{experiment.env}{settings}{score}", experiment.algo, f"{experiment.steps:,}"]
    if reference is None:
        return _cells([*cells, "not measured yet", "", "", experiment.asked, "", published, "", ""])
    scores = reference.scores
    cpu = statistics.median(result.cpu_s for result in reference.results)
    met = {True: "met", False: "**missed**", None: ""}[meets_targets(reference)]
    band = f"{reference.band.low:.4g} to {reference.band.high:.4g}"
    middle, worst = f"{statistics.median(scores):.4g}", f"{min(scores):.4g}"
    return _cells([*cells, str(len(scores)), middle, worst, experiment.asked, met, published, band, f"{cpu:.0f} s"])


def meets_targets(reference: Reference) -> bool | None:
    """Return whether all targets are met; None if there are none."""
    targets, scores = reference.experiment.targets, reference.scores
    if not targets:
        return None
    middle = statistics.median(scores)
    optimum = reference.results[0].exact.get("optimum", float("inf"))
    reached = {
        "median": lambda asked: middle >= asked,
        "worst": lambda asked: min(scores) >= asked,
        "relative_gap": lambda asked: optimum - middle <= asked * abs(optimum),
        "absolute_gap": lambda asked: optimum - middle <= asked,
    }
    return all(reached[name](asked) for name, asked in targets.items())


def _plot(reference: Reference) -> str | None:
    curves = [result.evaluations for result in reference.results if result.evaluations]
    if not curves:
        return None
    start, end = max(curve[0][0] for curve in curves), max(curve[-1][0] for curve in curves)
    steps = sorted({round(start + (end - start) * index / (POINTS - 1)) for index in range(POINTS)})
    values = [curve_at(curve, steps).tolist() for curve in curves]
    middle = [statistics.median(column) for column in zip(*values, strict=True)]
    band = [(min(column), max(column)) for column in zip(*values, strict=True)]
    line = Line(f"{len(curves)} seeds", list(zip(steps, middle, strict=True)), band)
    return line_chart(reference.experiment.name, [line], x="environment steps", y="return", size=SIZE)


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def outdated(found: dict[str, str], docs: Path = DOCS) -> list[str]:
    """Return the files under docs/ that are not what they should be, and plots that belong to nothing."""
    wrong = [name for name, text in found.items() if not (docs / name).exists() or (docs / name).read_text() != text]
    left = [path.relative_to(docs).as_posix() for path in (docs / "img" / "results").glob("*.svg")]
    return wrong + [name for name in left if name not in found]


def main() -> int:
    found = files()
    if "--check" in sys.argv:
        wrong = outdated(found)
        print("\n".join(f"{name} is out of date: run scripts/write_results.py" for name in wrong), file=sys.stderr)
        return 1 if wrong else 0
    for name in outdated(found):
        path = DOCS / name
        if name not in found:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found[name])
        print(f"written: docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

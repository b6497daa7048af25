"""The command line of every benchmark: `python benchmarks/NAME.py [--quick] [--part KEY] [--rounds N]`."""

from __future__ import annotations

import argparse
import ast
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from suite.measuring import Case, Row, measure
from suite.pages import refresh
from suite.report import Part, claim_table, keep

REPORTS = Path(__file__).resolve().parents[1] / "reports"
ROUNDS, QUICK_ROUNDS, QUICK_SHARE = 3, 1, 20


@dataclass(frozen=True)
class Effort:
    """Effort of a measurement. Figures of a quick one are written to a separate directory."""

    quick: bool = False
    rounds: int = ROUNDS

    def of(self, full: int, quick: int | None = None) -> int:
        """Return the full number (of steps, for example), or the smaller one of a quick measurement."""
        return full if not self.quick else quick if quick is not None else max(1, full // QUICK_SHARE)

    def measure(self, cases: Sequence[Case], *, rounds: int | None = None, warm_ups: int = 0) -> dict[str, Row]:
        """Measure all cases alternately."""
        return measure(cases, rounds or self.rounds, warm_ups=warm_ups, say=_say)


Measure = Callable[[Effort], Part]


def benchmark(file: str, parts: Mapping[str, Measure], words: Sequence[str] | None = None) -> int:
    """Measure the parts that the command line names (all without one) and write the report after each."""
    signal.signal(signal.SIGTERM, _end)
    path = Path(file)
    about = (ast.get_docstring(ast.parse(path.read_text())) or path.stem).splitlines()[0].rstrip(".")
    given = _parse(path.stem, about, list(parts), words)
    effort = Effort(given.quick, max(1, given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)))
    directory = given.into or (REPORTS / "quick" if given.quick else REPORTS)
    for key in given.part or parts:
        _say(f"{path.stem}: {key}")
        part = parts[key](effort)
        rounds = max((len(row.runs) for row in part.rows.values()), default=0)
        record = part.record(rounds)
        keep(directory, path.stem, about, key, record, parts)
        asked = claim_table(record["claims"]) if record["claims"] else []
        print("\n".join([part.title, *asked]), flush=True)
    if directory == REPORTS:
        refresh()
    _say(f"written: {directory / path.stem}.md")
    return 0


def _parse(name: str, about: str, parts: list[str], words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"steppe bench {name}", description=about)
    parser.add_argument(
        "--quick", action="store_true", help="few steps, one round; into reports/quick, not into the docs"
    )
    parser.add_argument("--part", action="append", choices=parts, help="measure only this part; may be given again")
    parser.add_argument("--into", type=Path, help="where the report goes, instead of reports/ and the docs")
    parser.add_argument("--rounds", type=int, help=f"runs of each case, {ROUNDS} unless given")
    return parser.parse_args(words)


def _end(number: int, frame: FrameType | None) -> None:
    """Raise on SIGTERM, so that every broker and process of a part is stopped."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""`steppe bench`: lists the benchmarks of a source checkout and runs them, each as the script that it is."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table
from steppe.core.contracts.errors import UsageError, did_you_mean

ENTRY = "from suite.running import"  # what tells a benchmark from other scripts


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The benchmark; without one they are listed.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all of them, one after the other.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A short try: its figures are not kept with the others.")
    ] = False,
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="KEY", help="Only this part of it; repeatable.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", metavar="N", help="Runs of each case; 3 if absent.")] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Where the report goes, instead of the two below.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed beside other libraries.

    Needs a source checkout. Reports go to benchmarks/reports and docs/performance.md; peers get environments of their own.
    """
    known = benchmarks()
    if name is None and not every:
        _list(known, as_json=as_json)
        return
    if (name is not None and every) or (every and part) or as_json:
        raise UsageError("give one benchmark's name (with --part and --rounds), or --all; --json is for the list")
    chosen = list(known) if every else [_require_known(name or "", known)]
    words = ["--quick"] * quick + [f"--part={key}" for key in part or ()]
    words += [f"--rounds={rounds}"] if rounds is not None else []
    words += [f"--into={into.resolve()}"] if into is not None else []
    codes = [_run([sys.executable, str(known[one]), *words]) for one in chosen]
    raise typer.Exit(max(map(abs, codes)))


def _run(command: list[str]) -> int:
    """Run a benchmark; SIGTERM is passed on to it, and it stops what it started."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        return process.wait()


def benchmarks() -> dict[str, Path]:
    """Name → script, for the checkout that this package is run from."""
    directory = Path(__file__).resolve().parents[4] / "benchmarks"
    if not (directory / "suite").is_dir():
        raise UsageError(
            "the benchmarks are not part of the installed package: run `steppe bench` from a source checkout (make bench)"
        )
    scripts = (path for path in sorted(directory.glob("*.py")) if ENTRY in path.read_text())
    return {path.stem: path for path in scripts}


def _require_known(name: str, known: dict[str, Path]) -> str:
    name = name.replace("-", "_")
    if name not in known:
        raise UsageError(f"there is no benchmark {name!r}; there are: {', '.join(known)}.{did_you_mean(name, known)}")
    return name


def _list(known: dict[str, Path], *, as_json: bool) -> None:
    rows = [(name, _first_line(path)) for name, path in known.items()]
    if as_json:
        emit([{"name": name, "about": about} for name, about in rows])
    else:
        print_table(["benchmark", "what it measures"], rows)


def _first_line(path: Path) -> str:
    """The first line of a script's docstring; the script itself is not run for it."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]

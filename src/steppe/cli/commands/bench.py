"""`steppe bench`: lists and runs the benchmark scripts of a source checkout."""

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

ENTRY = "from suite.running import"  # only benchmarks contain this line


def bench(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Benchmark to run. Without a name, all benchmarks are listed.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Run all benchmarks, one after the other.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short trial run; its figures are not written to the reports.")
    ] = False,
    part: Annotated[
        list[str] | None, typer.Option("--part", metavar="KEY", help="Run only this part of the benchmark; repeatable.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", metavar="N", help="Runs per case. Default: 3.")] = None,
    into: Annotated[
        Path | None, typer.Option("--into", metavar="DIR", help="Directory of the report, instead of the two below.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed and compare it with other libraries.

    Needs a source checkout. Reports are written to benchmarks/reports and docs/performance.md. Each other library is installed in a
    virtual environment of its own.
    """
    known = benchmarks()
    if name is None and not every:
        _list(known, as_json=as_json)
        return
    if (name is not None and every) or (every and part) or as_json:
        raise UsageError(
            "give the name of one benchmark (with --part and --rounds), or --all; --json works with the list only"
        )
    chosen = list(known) if every else [_require_known(name or "", known)]
    flags = ["--quick"] * quick + [f"--part={key}" for key in part or ()]
    flags += [f"--rounds={rounds}"] if rounds is not None else []
    flags += [f"--into={into.resolve()}"] if into is not None else []
    codes = [_run([sys.executable, str(known[benchmark]), *flags]) for benchmark in chosen]
    raise typer.Exit(max(map(abs, codes)))


def _run(command: list[str]) -> int:
    """Run a benchmark and forward SIGTERM to it, so that it stops the processes that it started."""
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda number, frame: process.terminate())
        return process.wait()


def benchmarks() -> dict[str, Path]:
    """Map the name of each benchmark of this checkout to its script."""
    directory = Path(__file__).resolve().parents[4] / "benchmarks"
    if not (directory / "suite").is_dir():
        raise UsageError(
            "the installed package does not contain the benchmarks: run `steppe bench` from a source checkout (make bench)"
        )
    scripts = (path for path in sorted(directory.glob("*.py")) if ENTRY in path.read_text())
    return {path.stem: path for path in scripts}


def _require_known(name: str, known: dict[str, Path]) -> str:
    name = name.replace("-", "_")
    if name not in known:
        raise UsageError(f"unknown benchmark {name!r}; available: {', '.join(known)}.{did_you_mean(name, known)}")
    return name


def _list(known: dict[str, Path], *, as_json: bool) -> None:
    rows = [(name, _first_line(path)) for name, path in known.items()]
    if as_json:
        emit([{"name": name, "about": about} for name, about in rows])
    else:
        print_table(["benchmark", "what it measures"], rows)


def _first_line(path: Path) -> str:
    """Return the first line of a script's docstring without running the script."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]

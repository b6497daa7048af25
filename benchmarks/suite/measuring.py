"""Measures cases alternately: all cases in every round, each run in its own process tree.

A run during which others took more than QUIET_CORES of a core is repeated; when that does not help it is marked.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUIET_CORES = 0.2
ATTEMPTS = 3
LAUNCHER = Path(__file__).with_name("launching.py")


class RunError(Exception):
    """Raised for a run without a figure; the message is one line with the reason."""


@dataclass(frozen=True)
class Done:
    """A successful command: its output, its directory and its measured resources (see launching.py)."""

    stdout: str
    directory: Path
    account: Mapping[str, Any]

    def last_json(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout."""
        lines = self.stdout.strip().splitlines()
        try:
            found = json.loads(lines[-1] if lines else "")
        except json.JSONDecodeError:
            raise RunError(f"printed no JSON object on its last line: {(lines or [''])[-1][:200]!r}") from None
        if not isinstance(found, dict):
            raise RunError("printed JSON on its last line that is no object")
        return found


@dataclass(frozen=True)
class Reading:
    """Result of one run: the figure, and the values printed with it."""

    value: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # role → phase → share of its time
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One case to measure: its command in a round, and how to read its figure."""

    label: str
    command: Callable[[int], Sequence[str]]
    read: Callable[[Done], Reading]
    timeout_s: float = 600.0
    sample_s: float = 0.0  # interval of memory samples of the process tree; 0 disables them
    python_paths: tuple[Path, ...] = ()  # prepended to the command's module path
    codes: tuple[int, ...] = (0,)  # exit codes with valid output
    aside_s: Callable[[], float] = lambda: (
        0.0
    )  # CPU seconds so far of a server outside the process tree that works for it


@dataclass
class Run:
    """One recorded run of a case."""

    round: int
    reading: Reading
    wall_s: float
    cpu_s: float
    others_cores: float
    peak_mib: float | None = None
    attempts: int = 1

    @property
    def marked(self) -> bool:
        """Whether other processes disturbed it."""
        return self.others_cores > QUIET_CORES


@dataclass
class Row:
    """A case and its runs; `error` says why there are fewer than there should be."""

    label: str
    runs: list[Run] = field(default_factory=list)
    error: str = ""

    @property
    def values(self) -> list[float]:
        return [run.reading.value for run in self.runs]

    @property
    def median(self) -> float | None:
        """Median; infinite values (never reached) are included."""
        return statistics.median(self.values) if self.runs and not self.error else None

    @property
    def typical(self) -> Run | None:
        """The run whose figure is nearest to the median; the report shows its details."""
        middle = self.median
        if middle is None:
            return None
        return min(self.runs, key=lambda run: 0.0 if run.reading.value == middle else abs(run.reading.value - middle))

    def record(self) -> dict[str, Any]:
        """Plain values for JSON; infinity becomes null."""
        typical = self.typical
        return {
            "label": self.label,
            "error": self.error,
            "median": finite(self.median),
            "low": finite(min(self.values, default=None)),
            "high": finite(max(self.values, default=None)),
            "settings": dict(typical.reading.settings) if typical else {},
            "versions": dict(typical.reading.versions) if typical else {},
            "shares": {role: dict(found) for role, found in typical.reading.shares.items()} if typical else {},
            "runs": [self._run_record(run) for run in self.runs],
        }

    @staticmethod
    def _run_record(run: Run) -> dict[str, Any]:
        return {
            "round": run.round,
            "value": finite(run.reading.value),
            "wall_s": run.wall_s,
            "cpu_s": run.cpu_s,
            "others_cores": run.others_cores,
            "peak_mib": run.peak_mib,
            "attempts": run.attempts,
            "marked": run.marked,
            "extra": dict(run.reading.extra),
        }


def measure(
    cases: Sequence[Case], rounds: int, *, warm_ups: int = 0, say: Callable[[str], None] = lambda _: None
) -> dict[str, Row]:
    """Run every case once per round, in the same order. Warm-up rounds come first and are not recorded."""
    rows = {case.label: Row(case.label) for case in cases}
    for number in range(-warm_ups, rounds):
        for case in cases:
            row = rows[case.label]
            if row.error:
                continue  # do not retry a case that failed
            try:
                run = run_quietly(case, max(0, number)) if number >= 0 else run_once(case, 0)
            except RunError as error:
                row.error = str(error)
                say(f"{case.label}: {row.error}")
                continue
            if number >= 0:
                row.runs.append(run)
                mark = f", others took {run.others_cores:.2f} of a core" if run.marked else ""
                say(f"round {number + 1} of {rounds}: {case.label}: {run.reading.value:,.4g}{mark}")
    return rows


def run_quietly(case: Case, number: int, attempts: int = ATTEMPTS) -> Run:
    """Run a case; repeat it if other processes disturbed it. If all runs were disturbed, keep the least disturbed."""
    tried: list[Run] = []
    while len(tried) < attempts:
        tried.append(run_once(case, number))
        if not tried[-1].marked:
            break
    kept = min(tried, key=lambda run: run.others_cores)
    kept.attempts = len(tried)
    return kept


def run_once(case: Case, number: int) -> Run:
    """Run a case's command in a fresh directory and read its figure."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory, aside_s = Path(name), case.aside_s()
        done = launch(case.command(number), directory, case.timeout_s, case.sample_s, case.python_paths, case.codes)
        try:
            reading, account = case.read(done), done.account
        except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
            raise RunError(f"its figures could not be read: {type(error).__name__} {error}") from error
    others_cores = max(0.0, account["others_cores"] - (case.aside_s() - aside_s) / account["elapsed_s"])
    return Run(number, reading, account["wall_s"], account["cpu_s"], others_cores, account["peak_mib"])


def launch(
    command: Sequence[str],
    directory: Path,
    timeout_s: float,
    sample_s: float = 0.0,
    python_paths: Sequence[Path] = (),
    codes: Sequence[int] = (0,),
) -> Done:
    """Run a command to its end under the launcher, in `directory`; raises RunError with its last output lines if it fails."""
    account, log = directory / "account.json", directory / "stderr.log"
    words = [sys.executable, "-I", "-S", str(LAUNCHER), str(account), str(timeout_s), str(sample_s), *command]
    variables = environment(directory) | (
        {"PYTHONPATH": os.pathsep.join(map(str, python_paths))} if python_paths else {}
    )
    with log.open("wb") as stderr:
        done = subprocess.run(words, cwd=directory, env=variables, stdout=subprocess.PIPE, stderr=stderr, check=False)
    stdout, said = done.stdout.decode(errors="replace"), log.read_text(errors="replace")
    if not account.exists():
        raise RunError(f"could not be launched: {last_line(said)}")
    found = json.loads(account.read_text())
    if found["code"] not in codes or (found["code"] and not stdout.strip()):
        raise RunError(f"ended with code {found['code']}: {last_line(said or stdout)}")
    return Done(stdout, directory, found)


def environment(directory: Path) -> dict[str, str]:
    """Environment variables for every side: one thread, without the caller's Steppe and Python settings, runs in `directory`."""
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("STEPPE_", "PYTHON"))}
    return {**kept, "OMP_NUM_THREADS": "1", "STEPPE_RUNS": str(directory / "runs")}


def last_line(text: str) -> str:
    """Return the last meaningful line of the output, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None

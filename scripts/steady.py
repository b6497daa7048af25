"""Repeat a test suite while busy processes compete for the cores: `make steady`.

Each run gets a separate Hypothesis seed. Failures are printed with the seed and the run's log; the outcome is appended, with the
commit, to the record in docs/testing.md. Exits with 1 if any run failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "testing.md"
LOGS = ROOT / "build" / "steady"
HEADING = "| date | commit | target | busy | seed | minutes | outcome |"


@dataclass(frozen=True)
class Outcome:
    """One run of the suite."""

    seed: int
    minutes: float
    summary: str
    failures: list[str]
    log: Path


def main() -> int:
    """Parse the arguments, run, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--target", choices=["test", "test-all"], default="test")
    parser.add_argument("--busy", type=int, default=2, help="processes that each use all of a core")
    parser.add_argument(
        "--record", type=Path, default=RECORD, help="file with the table to which every run adds a line"
    )
    options = parser.parse_args()
    failed = 0
    with busy(options.busy):
        for number in range(1, options.runs + 1):
            outcome = run_suite(options.target)
            record(options.record, options.target, options.busy, outcome)
            print(
                f"run {number} of {options.runs}: {outcome.summary} (seed {outcome.seed}, log {outcome.log})",
                flush=True,
            )
            for failure in outcome.failures:
                print(f"  {failure}\n    repeat with --hypothesis-seed={outcome.seed}; log: {outcome.log}", flush=True)
            failed += bool(outcome.failures)
    return 1 if failed else 0


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` busy processes meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_suite(target: str) -> Outcome:
    """Run `make TARGET` once with a new seed and keep its output."""
    seed = random.SystemRandom().randrange(2**32)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{target}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.log"
    environ = {**os.environ, "PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} --hypothesis-seed={seed}"}
    began = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(
            ["make", target], cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    minutes = (time.monotonic() - began) / 60
    text = log.read_text()
    failures = re.findall(r"^(?:FAILED|ERROR) .*$", text, flags=re.MULTILINE)
    summaries = re.findall(r"^=* ?(\d+ (?:passed|failed)[^=]*?)(?: in [^=]*)?=*$", text, flags=re.MULTILINE)
    if code and not failures:
        failures = [f"make {target} ended with {code}"]
    return Outcome(seed, minutes, summaries[-1].strip() if summaries else f"ended with {code}", failures, log)


def record(path: Path, target: str, busy_processes: int, outcome: Outcome) -> None:
    """Append a line to the table in the file."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cells = [
        time.strftime("%Y-%m-%d", time.gmtime()), commit.stdout.strip(), target, str(busy_processes), str(outcome.seed),
        f"{outcome.minutes:.1f}", outcome.summary,
    ]  # fmt: skip
    lines = path.read_text().splitlines()
    if HEADING not in lines:
        raise SystemExit(f"steady: {path} has no table that begins with {HEADING!r}")
    end = lines.index(HEADING)
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    lines.insert(end, f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())

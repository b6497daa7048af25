"""Measures branch coverage of `make test-all` and writes the table of docs/testing.md: `make coverage`.

Every process counts: roles of every runtime save what they ran before they exit (killed ones don't), Ray's processes while
they run (ray_coverage/sitecustomize.py). Compiled kernels are invisible to a tracer, so a second pass runs the unit tests
with compilation off, and both are combined. With tests given, e.g. `tests/replay`, only these run; the table is printed and
the page is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "build" / "coverage"
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- coverage: written by make coverage -->", "<!-- end of coverage -->"
LOW = 80.0
RAY_HOOK = ROOT / "scripts" / "ray_coverage"
# Passes: name → environment and arguments of pytest.
PASSES = {
    "everything": ({}, ["-m", ""]),
    # NumPy warns of integer overflows that compiled code ignores; a warning would be an error.
    "kernels": ({"NUMBA_DISABLE_JIT": "1"}, ["-m", "unit and not slow", "-W", "ignore::RuntimeWarning"]),
}
# Modules whose lines run in processes that save no coverage → the reason.
REASONS = {
    "control/backends/kubernetes.py": "runs in `make test-kube`, which is not measured",
    "control/backends/kube_client.py": "runs in `make test-kube`, which is not measured",
    "control/backends/base.py": "runs in `make test-kube`, which is not measured",
}


@dataclass
class Count:
    """Lines and branches of some files."""

    lines: int = 0
    covered: int = 0
    branches: int = 0
    taken: int = 0

    def add(self, summary: dict[str, int]) -> None:
        """Add a file's numbers."""
        self.lines += summary["num_statements"]
        self.covered += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.taken += summary["covered_branches"]

    @property
    def percent(self) -> float:
        """Share of lines that ran."""
        return 100 * self.covered / self.lines if self.lines else 100.0

    def row(self, name: str) -> str:
        """A row of the table."""
        branch = 100 * self.taken / self.branches if self.branches else 100.0
        return f"| {name} | {self.lines:,} | {self.percent:.1f} % | {branch:.1f} % |"


def main() -> int:
    """Run the passes, combine them and write the table; the exit code is 0 if every test passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", nargs="*", choices=PASSES, default=list(PASSES))
    parser.add_argument("--keep", action="store_true", help="add to what was measured before")
    parser.add_argument("--workers", type=int, default=4, help="of pytest (0: one process)")
    parser.add_argument("tests", nargs="*", help="only these, e.g. tests/replay (default: all, and write the page)")
    options = parser.parse_args()
    if not options.keep:
        shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(parents=True, exist_ok=True)
    workers = ["--numprocesses", str(options.workers), "--dist", "worksteal"]
    codes = [run_pass(name, [*workers, *options.tests]) for name in options.passes]
    coverage("combine", "--quiet", "--keep")
    # Some tests install a copy of the package elsewhere and remove it: count only files of this tree.
    coverage("json", "--quiet", "--ignore-errors", "--include", "src/steppe/*", "-o", str(DATA / "report.json"))
    text = table(json.loads((DATA / "report.json").read_text())["files"])
    print(text)
    if not options.tests:
        PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: text, PAGE.read_text(), flags=re.DOTALL))
    return max(codes, default=0)


def run_pass(name: str, more: list[str]) -> int:
    """Run pytest under coverage with a pass's environment."""
    environ, words = PASSES[name]
    path = os.pathsep.join(filter(None, [str(RAY_HOOK), os.environ.get("PYTHONPATH")]))
    return coverage("run", "-m", "pytest", "-o", "timeout=1800", *words, *more, check=False, PYTHONPATH=path, **environ)


def coverage(*words: str, check: bool = True, **environ: str) -> int:
    """Run the coverage command on our data."""
    place = {"COVERAGE_FILE": str(DATA / ".coverage"), **environ}
    return subprocess.run(
        [sys.executable, "-m", "coverage", *words], cwd=ROOT, env={**os.environ, **place}, check=check
    ).returncode


def table(files: dict[str, dict[str, dict[str, int]]]) -> str:
    """Lines and branches by package, and the modules below the threshold, as the page has them."""
    packages: dict[str, Count] = defaultdict(Count)
    low, total = [], Count()
    for path, found in sorted(files.items()):
        module = path.partition("steppe/")[2]
        packages[module.split("/")[0]].add(found["summary"])
        total.add(found["summary"])
        own = Count()
        own.add(found["summary"])
        if own.percent < LOW:
            low.append(f"- `{module}` {own.percent:.0f} %: {REASONS.get(module, 'to be tested')}")
    rows = ["| package | lines | lines run | branches taken |", "|---|---|---|---|"]
    rows += [count.row(f"`{name}`") for name, count in packages.items()] + [total.row("all")]
    return "\n".join([BEGIN, *rows, "", f"Modules under {LOW:.0f} %:", "", *(low or ["none"]), END])


if __name__ == "__main__":
    sys.exit(main())

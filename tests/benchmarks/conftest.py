"""The benchmark suite is not part of the package: tests import it from its directory. Cases here are small scripts in
real processes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from suite.measuring import Case, Done, Reading  # noqa: E402


@pytest.fixture
def python_case() -> Callable[..., Case]:
    """Return a case that runs Python code and reads the `value` that it prints; `sys.argv[1]` is the round."""

    def make(label: str, code: str, **options) -> Case:
        def read(done: Done) -> Reading:
            found = done.last_json()
            return Reading(found.pop("value"), found.pop("settings", {}), extra=found)

        return Case(label, lambda number: [sys.executable, "-c", code, str(number)], read, **options)

    return make


@pytest.fixture
def burner() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another program that uses all of a core."""
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()

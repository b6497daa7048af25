"""Arbitrary arrays at every public entry, in child processes: an answer or a SteppeError, and nobody dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import steppe

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(steppe.__file__).parents[2]
EXAMPLES = {
    "composition": 12, "episodes": 20, "replay": 60, "classic": 8, "params": 40, "federated": 30, "client": 30,
    "environment": 15, "loaded": 30, "codec": 40, "segments": 15,
}  # fmt: skip


@pytest.mark.parametrize("entry", EXAMPLES)
def test_arbitrary_arrays_are_answered_or_refused(entry: str) -> None:
    command = [sys.executable, "-m", "tests.support.array_fuzz", entry, str(EXAMPLES[entry])]
    here = Path(__file__).parents[2]
    paths = os.pathsep.join([str(here), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=here,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode >= 0, f"signal {-done.returncode}: {done.stderr[-2000:]}"
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]

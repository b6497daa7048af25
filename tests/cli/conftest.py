"""The real `steppe` executable, run in an empty directory with no configuration from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

STEPPE = Path(sys.executable).with_name("steppe")
Steppe = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def steppe(tmp_path: Path) -> Steppe:
    """Run `steppe WORDS…` in `tmp_path`; keyword arguments are environment variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**clean, "COLUMNS": "100", **variables}
        return subprocess.run(
            [STEPPE, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run

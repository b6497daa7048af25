"""kill -9 in the middle of a save: what loads afterwards is the save before, or the new one, never a mixture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_loses_nothing(tmp_path):
    script = Path(__file__).with_name("killed_saves.py")
    done = subprocess.run([sys.executable, script, tmp_path / "pool"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    kills, complete = map(int, done.stdout.split())
    assert kills > 30
    assert 0 < complete < kills  # some came after the new save was in place, while the old one was removed

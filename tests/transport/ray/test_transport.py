"""Channel and WeightStore over Ray keep their contracts between the processes of a real cluster of two nodes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SUITE = Path(__file__).with_name("conformance_suite.py")


@pytest.mark.slow
def test_channel_and_weights_between_nodes():
    done = subprocess.run([sys.executable, SUITE], capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 30
    assert "skipped" not in done.stdout

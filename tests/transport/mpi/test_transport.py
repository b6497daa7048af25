"""Channel and WeightStore over MPI keep their contracts between the ranks of real worlds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.runtimes.mpi.launch import find_mpiexec
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration

SUITE = Path(__file__).with_name("conformance_suite.py")


@pytest.mark.long
@pytest.mark.parametrize("ranks", rest_slow(2, 4))
def test_channel_and_weights_between_ranks(ranks):
    command = [find_mpiexec(), "-n", str(ranks), sys.executable, SUITE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 41
    assert "skipped" not in done.stdout

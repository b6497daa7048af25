"""`steppe bench` from a checkout and from an installed package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import steppe as package

pytestmark = pytest.mark.integration


def test_list_of_benchmarks(steppe):
    done = steppe("bench", "--json")
    listed = {one["name"]: one["about"] for one in json.loads(done.stdout)}
    assert {
        "ppo_cartpole",
        "solve_time",
        "dqn_cartpole",
        "slow_env",
        "weights",
        "startup",
        "scaling",
        "classic",
        "control",
        "params",
    } <= listed.keys()
    assert "chaos" not in listed
    assert all(listed.values())
    table = steppe("bench").stdout
    assert all(name in table for name in listed)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ppo_cartpol"], "Did you mean 'ppo_cartpole'?"),
        (["weights", "--all"], "give the name of one benchmark"),
        (["--all", "--part", "a"], "give the name of one benchmark"),
        (["weights", "--json"], "--json works with the list only"),
    ],
)
def test_usage_error_is_one_sentence(steppe, words, said):
    done = steppe("bench", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_unknown_part_is_refused(steppe):
    done = steppe("bench", "weights", "--quick", "--part", "none")
    assert done.returncode == 2
    assert "'visible'" in done.stderr


def test_installed_package_has_no_benchmarks(tmp_path):
    shutil.copytree(Path(package.__file__).parent, tmp_path / "site" / "steppe")
    code = "import sys; sys.argv[0] = 'steppe'; from steppe.cli.main import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench"],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "steppe: the installed package does not contain the benchmarks: run `steppe bench` from a source checkout "
        "(make bench)\n"
    )

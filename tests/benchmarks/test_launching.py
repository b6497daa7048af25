"""What a process family is charged with, and what is left for others, against the kernel's own figures."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from suite.launching import TIMED_OUT, all_cores_busy_s
from suite.measuring import RunError, launch

pytestmark = pytest.mark.integration

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# A grandchild whose parent is gone burns 0.5 s of CPU; it says so in a file when it has.
ORPHAN = """
import os, sys, time
if os.fork():
    os._exit(0)
if os.fork():
    os._exit(0)
while time.process_time() < 0.5:
    pass
open("orphan", "w").write(str(time.process_time()))
"""
# A child that its parent leaves to the system burns 1.5 s of CPU: nobody's accounts have it.
UNCLAIMED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    while time.process_time() < 1.5:
        pass
    os._exit(0)
try:
    os.wait()
except ChildProcessError:
    pass
"""
# Two processes of 64 MiB each that stay until both have it, and then as long as it takes to be looked at.
TWO_AT_ONCE = """
import os, time
(here, there), (back, forth) = os.pipe(), os.pipe()
child = os.fork()
kept = bytearray(os.urandom(1)) * (64 << 20)
os.write(there if child else forth, b".")
os.read(back if child else here, 1)
time.sleep(2.0)
"""


def cpu_s_of(pid: int) -> float:
    """User and system time of one process, from its stat file."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def test_the_cpu_time_of_orphaned_grandchildren_is_the_familys(tmp_path):
    before_s = all_cores_busy_s()
    done = launch([sys.executable, "-c", ORPHAN], tmp_path, 60.0)
    busy_s = all_cores_busy_s() - before_s
    burnt = float((tmp_path / "orphan").read_text())
    assert done.account["cpu_s"] >= burnt
    others_s = done.account["others_cores"] * done.account["elapsed_s"]
    assert others_s <= busy_s - burnt + 10 * TICK_S


def test_a_child_that_nobody_waits_for_is_the_familys_too(tmp_path):
    done = launch([sys.executable, "-c", UNCLAIMED], tmp_path, 60.0)
    assert 0.75 < done.account["cpu_s"] < 2.9, "none of it, or all of it twice"


def test_what_others_do_meanwhile_is_not_the_familys(tmp_path, burner):
    before_s, began = cpu_s_of(burner.pid), time.monotonic()
    done = launch(["sleep", "0.7"], tmp_path, 60.0)
    elapsed_s, burnt = time.monotonic() - began, cpu_s_of(burner.pid) - before_s
    unseen_s = elapsed_s - done.account["wall_s"]  # the launcher's own start and end
    assert done.account["others_cores"] * done.account["wall_s"] >= burnt - unseen_s - 10 * TICK_S
    assert done.account["cpu_s"] < burnt


def test_what_is_left_running_is_ended(tmp_path):
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    done = launch([sys.executable, "-c", code], tmp_path, 60.0)
    assert done.account["killed"] == 1
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(RunError, match=f"code {TIMED_OUT}"):
        launch(["sleep", "600"], tmp_path, 0.2)


def test_a_command_that_does_not_exist_is_one_line(tmp_path):
    with pytest.raises(RunError, match=r"could not be launched: FileNotFoundError.*nowhere"):
        launch(["nowhere/at/all"], tmp_path, 60.0)


def test_memory_is_that_of_the_whole_family(tmp_path):
    done = launch([sys.executable, "-c", TWO_AT_ONCE], tmp_path, 60.0, sample_s=0.1)
    assert done.account["peak_mib"] >= 2 * 64
    assert launch(["true"], tmp_path, 60.0).account["peak_mib"] is None

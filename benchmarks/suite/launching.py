"""Runs one command and measures its resources: `launching.py ACCOUNT TIMEOUT_S SAMPLE_S COMMAND…`, standard library only.

Everything the command starts, however deep, becomes a child of this process when its own parent ends (a "subreaper"), so
the CPU time of the whole family is known at its end, and what the family leaves running is ended too. A parent that lets the
system bury its children (Ray's does) hides theirs: so they are also looked at on the way. What all cores did meanwhile, less
the family's share, was done by others.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.25  # between two polls of the process tree's CPU time
GRACE_S = 3.0  # for child processes that are still ending after the command
TIMED_OUT = 124


def main(account: str, timeout_s: str, sample_s: str, *command: str) -> int:
    """Write the account and return the command's exit code."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the family's subreaper")
    memory, processors = Memory(float(sample_s)), Processors(LOOK_S)
    busy_s, began_s = all_cores_busy_s(), time.monotonic()
    child = subprocess.Popen(command)
    memory.start()
    processors.start()
    code = wait(child, float(timeout_s))
    wall_s = time.monotonic() - began_s
    memory.stop()
    killed = end_family()
    processors.stop()
    own_s = max(family_cpu_s(), processors.seen_s)
    elapsed_s = time.monotonic() - began_s
    others_s = max(0.0, all_cores_busy_s() - busy_s - own_s)
    found = {
        "code": code,
        "began_s": began_s,  # on the machine's monotonic clock
        "wall_s": wall_s,
        "elapsed_s": elapsed_s,  # including the time until all child processes ended
        "cpu_s": own_s,
        "others_cores": others_s / elapsed_s,
        "peak_mib": None if memory.peak is None else memory.peak / 2**20,
        "killed": killed,
    }
    Path(account).write_text(json.dumps(found))
    return code


def wait(child: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Return the command's exit code; end the command after the timeout."""
    try:
        return child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return TIMED_OUT


def end_family() -> int:
    """Wait for child processes to end, then kill the rest; return the number of killed processes."""
    deadline, killed = time.monotonic() + GRACE_S, set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return len(killed)
        if pid:
            continue
        if time.monotonic() > deadline:
            for left in descendants(os.getpid()):
                killed.add(left)
                os.kill(left, signal.SIGKILL)
        time.sleep(0.005)


def descendants(pid: int) -> list[int]:
    """Return all descendants, nearest first."""
    found, waiting = [], [pid]
    while waiting:
        for path in Path(f"/proc/{waiting.pop(0)}/task").glob("*/children"):
            try:
                children = [int(word) for word in path.read_text().split()]
            except OSError:
                continue  # the thread has ended
            found += children
            waiting += children
    return found


def all_cores_busy_s() -> float:
    """CPU seconds of all cores since boot, without idle and I/O wait, with stolen time."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def family_cpu_s() -> float:
    """CPU seconds of this process and of every descendant that has ended."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Looking:
    """Polls the memory of the process tree every `every_s` in a thread; 0 disables it."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def start(self) -> None:
        if self._every_s > 0:
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._every_s > 0:
            self._thread.join()

    def look(self, pids: list[int]) -> None:
        raise NotImplementedError

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self.look(descendants(os.getpid()))


class Memory(Looking):
    """Peak memory of the process tree. Shared pages are counted once (proportional set size)."""

    peak: int | None = None

    def look(self, pids: list[int]) -> None:
        self.peak = max(self.peak or 0, sum(map(proportional_bytes, pids)))


class Processors(Looking):
    """The CPU time of every descendant when it was last seen."""

    def __init__(self, every_s: float) -> None:
        super().__init__(every_s)
        self._seen: dict[tuple[int, str], float] = {}  # by pid and start time: pids are reused

    @property
    def seen_s(self) -> float:
        return sum(self._seen.values())

    def look(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            self._seen[pid, words[19]] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int) -> int:
    """Proportional set size of a process; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has ended
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

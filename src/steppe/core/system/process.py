"""What the system says about a process: its size, and whether the kernel ran out of memory."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OOM = Path("/sys/fs/cgroup/memory.events")


def rss_bytes(pid: int | str = "self") -> int | None:
    """Resident memory of a process; None where the system does not say or the process is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def oom_kills() -> int:
    """How often the kernel has killed something in this control group for want of memory; 0 where it does not say."""
    try:
        lines = _OOM.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def format_mib(size: int | None) -> str:
    """A size in words."""
    return "an unknown size" if size is None else f"{size >> 20} MiB"

"""Process information from the operating system: resident memory and out-of-memory kills."""

from __future__ import annotations

import os
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_OOM = Path("/sys/fs/cgroup/memory.events")


def rss_bytes(pid: int | str = "self") -> int | None:
    """Return the resident memory of a process; None where the system does not report it or the process has exited."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def oom_kills() -> int:
    """Return the number of out-of-memory kills in this control group; 0 where the system does not report it."""
    try:
        lines = _OOM.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def format_mib(size: int | None) -> str:
    """Format a size for messages."""
    return "an unknown size" if size is None else f"{size >> 20} MiB"

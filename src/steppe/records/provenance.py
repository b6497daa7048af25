"""What a run ran on: versions, hardware, the user's commit and command line. Imports no library to get its version."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("steppe", "numpy", "torch", "gymnasium", "numba", "msgspec", "safetensors")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
)
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # a directory per GPU, if the driver is loaded
_GIT_TIMEOUT_S = 5.0


def provenance(project: Path | None = None) -> dict[str, Any]:
    """Return plain values for run.json; `project` is where to look for git, by default the working directory."""
    return {
        "versions": versions(),
        "hardware": hardware(),
        "git": git(project or Path.cwd()),
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "command": list(sys.argv),
        "cwd": str(Path.cwd()),
    }


def versions() -> dict[str, str | None]:
    """Return library → installed version, None if it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = None
    return found


def hardware() -> dict[str, Any]:
    """Describe the machine, as far as the operating system reports it without special permissions."""
    return {
        "platform": platform.platform(),
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(NVIDIA_GPUS),
    }


def git(project: Path) -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it; None outside a repository or without git."""
    commit = _git(project, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(project, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(project: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(project), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _memory_bytes() -> int | None:
    fields = (_field(Path("/proc/meminfo"), "MemTotal") or "").split()
    return int(fields[0]) * 1024 if fields else None


def _gpus(directory: Path) -> list[str]:
    """Return model names from the NVIDIA driver's files in /proc: no library, no start-up cost."""
    files = sorted(directory.glob("*/information")) if directory.is_dir() else []
    return [name for name in (_field(file, "Model") for file in files) if name]


def _field(path: Path, name: str) -> str | None:
    """Return the value of the first `name: value` line of a file under /proc, or None."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return None

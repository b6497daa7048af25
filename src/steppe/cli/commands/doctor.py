"""`steppe doctor`: checks what training needs on this machine and says how to fix what is missing. diagnosis.py implements
`steppe doctor RUN`."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from steppe.cli.commands.diagnosis import diagnose_run
from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table
from steppe.core.contracts.errors import UsageError

MODULES = {"pillow": "PIL", "protobuf": "google.protobuf"}  # distributions whose module has a different name
SMALL_SHM_BYTES = 256 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. `broken` means that training cannot work."""

    what: str
    status: Literal["ok", "note", "broken"]
    details: str
    advice: str = ""


def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run whose bottleneck to report.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not import packages; check only that they are installed.")
    ] = False,
) -> None:
    """Check this machine, or find the bottleneck of a run.

    Without RUN: checks Python, packages, GPU, shared memory and write access; exit code 1 if training cannot work. With RUN (running
    or ended): prints where its time goes and what to change.
    """
    if run is not None:
        if quick:
            raise UsageError("--quick applies to the check of this machine: remove --quick, or remove RUN")
        return diagnose_run(run, as_json=as_json)
    findings = list(run_checks(quick=quick))
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        emit({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        print_table(
            ["check", "status", "found", "what to do"], [list(asdict(finding).values()) for finding in findings]
        )
        names = ", ".join(finding.what for finding in broken)
        print(f"\nNot ready to train: fix {names}." if broken else "\nReady to train.")
    raise typer.Exit(1 if broken else 0)


def run_checks(*, quick: bool = False) -> Iterator[CheckResult]:
    """Run all checks. A check that raises is reported as broken."""
    yield python()
    yield from packages(quick=quick)
    yield from extras()
    checks: list[Callable[[], CheckResult]] = [cores, memory, shared_memory, processes, run_directory, numba_cache]
    if not quick:
        checks.insert(2, gpu)
    for check in checks:
        try:
            yield check()
        except (OSError, ImportError, RuntimeError) as error:
            yield CheckResult(check.__name__.replace("_", " "), "broken", str(error))


def python() -> CheckResult:
    """Check the version of the Python interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    return CheckResult("python", "ok" if sys.version_info >= (3, 11) else "broken", found, "")


def requirements() -> Iterator[tuple[str, str | None]]:
    """Yield (distribution, extra or None) from the metadata of the installed package."""
    import re
    from importlib.metadata import requires

    for line in requires("steppe") or []:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name:
            yield name.group(), extra.group(1) if extra else None


def packages(*, quick: bool) -> Iterator[CheckResult]:
    """Check that the required dependencies are installed and can be imported."""
    from importlib.metadata import PackageNotFoundError, version

    for name, extra in requirements():
        if extra is not None:
            continue
        try:
            found = version(name)
            if not quick:
                importlib.import_module(MODULES.get(name, name))
            yield CheckResult(name, "ok", found)
        except (PackageNotFoundError, ImportError, OSError) as error:
            missing = isinstance(error, PackageNotFoundError)
            details = "missing" if missing else f"cannot be imported: {error}"
            yield CheckResult(name, "broken", details, f"pip install --force-reinstall {name}")


def extras() -> Iterator[CheckResult]:
    """Check which optional dependencies are installed."""
    from importlib.metadata import PackageNotFoundError, version

    for name, extra in requirements():
        if extra is None:
            continue
        try:
            yield CheckResult(f"{name} [{extra}]", "ok", version(name))
        except PackageNotFoundError:
            yield CheckResult(f"{name} [{extra}]", "note", "not installed", f"pip install 'steppe[{extra}]'")


def cores() -> CheckResult:
    """Report the cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return CheckResult("cores", "ok", f"{usable} usable of {os.cpu_count()}")


def memory() -> CheckResult:
    """Check physical memory, or the container's memory limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    total = min(total, int(text)) if text.isdigit() else total
    enough = total >= 2 * GIB
    return CheckResult(
        "memory", "ok" if enough else "note", f"{total / GIB:.1f} GiB", "" if enough else "use only one or two actors"
    )


def gpu() -> CheckResult:
    """Report the GPUs that torch can use; without one, `--device auto` means the CPU."""
    import torch

    if not torch.cuda.is_available():
        return CheckResult("gpu", "note", "none that torch can use; training runs on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return CheckResult("gpu", "ok", ", ".join(names))


def shared_memory() -> CheckResult:
    """Check shared memory (/dev/shm), which holds the segments of the `processes` runtime."""
    from multiprocessing.shared_memory import SharedMemory

    probe = SharedMemory(create=True, size=4096)
    probe.close()
    probe.unlink()
    if not Path("/dev/shm").is_dir():
        return CheckResult("shared memory", "ok", "works")
    space = os.statvfs("/dev/shm")
    free = space.f_bavail * space.f_frsize
    details = f"{free / GIB:.2f} GiB free of {space.f_blocks * space.f_frsize / GIB:.2f} in /dev/shm"
    if free >= SMALL_SHM_BYTES:
        return CheckResult("shared memory", "ok", details)
    return CheckResult("shared memory", "note", details, "docker run --shm-size=1g, or --runtime inline")


def processes() -> CheckResult:
    """Check that child processes and semaphores can be created."""
    import multiprocessing

    multiprocessing.get_context("forkserver").Semaphore(1)
    return CheckResult("processes", "ok", "forkserver and semaphores work")


def run_directory() -> CheckResult:
    """Check that the directory for runs is writable."""
    from steppe.records.run_directory import runs_root

    wanted = runs_root().absolute()
    nearest = next(path for path in (wanted, *wanted.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return CheckResult("runs", "ok", f"{wanted} is writable")
    return CheckResult("runs", "broken", f"{wanted} is not writable", "set STEPPE_RUNS to a writable directory")


def numba_cache() -> CheckResult:
    """Check that numba can write its cache of compiled kernels; it refuses to cache without a writable directory."""
    import steppe

    configured = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(steppe.__file__ or ".").parent
    for directory in [Path(configured)] if configured else [package, Path.home()]:
        existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        if os.access(existing, os.W_OK | os.X_OK):
            return CheckResult("numba cache", "ok", f"{directory} is writable")
    return CheckResult("numba cache", "broken", "no writable directory", "set NUMBA_CACHE_DIR to a writable directory")

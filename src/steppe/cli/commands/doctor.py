"""`steppe doctor`: tries what training needs on this machine, and says what to do about whatever is missing. What holds a run
back is for diagnosis.py to say."""

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

MODULES = {"pillow": "PIL"}  # distributions whose module has another name
SMALL_SHM_BYTES = 256 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class CheckResult:
    """One thing that was tried. `broken` means that training cannot work."""

    what: str
    status: Literal["ok", "note", "broken"]
    details: str
    advice: str = ""


def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Say what holds this run back.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="Look packages up without importing them.")] = False,
) -> None:
    """Check this machine, or say what holds a run back.

    Without RUN: tries Python, packages, GPU, shared memory and write access; exit code 1 when something needed is broken. With
    RUN, running or ended: where its time goes, and what to change.
    """
    if run is not None:
        if quick:
            raise UsageError("--quick is for the check of this machine: leave it out, or leave RUN out")
        return diagnose_run(run, as_json=as_json)
    findings = list(run_checks(quick=quick))
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        emit({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        print_table(["", "status", "found", "to do"], [list(asdict(finding).values()) for finding in findings])
        words = ", ".join(finding.what for finding in broken)
        print(f"\nNot ready to train: {words} broken." if broken else "\nReady to train.")
    raise typer.Exit(1 if broken else 0)


def run_checks(*, quick: bool = False) -> Iterator[CheckResult]:
    """Every check in turn; one that fails unexpectedly is itself a finding."""
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
    """The interpreter; the package itself declares which it needs."""
    found = f"{platform.python_version()} at {sys.executable}"
    return CheckResult("python", "ok" if sys.version_info >= (3, 11) else "broken", found, "")


def requirements() -> Iterator[tuple[str, str | None]]:
    """(distribution, extra or None) as the installed package declares them."""
    import re
    from importlib.metadata import requires

    for line in requires("steppe") or []:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name:
            yield name.group(), extra.group(1) if extra else None


def packages(*, quick: bool) -> Iterator[CheckResult]:
    """The core dependencies: present, and importable."""
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
    """The optional dependencies; training works without them."""
    from importlib.metadata import PackageNotFoundError, version

    for name, extra in requirements():
        if extra is None:
            continue
        try:
            yield CheckResult(f"{name} [{extra}]", "ok", version(name))
        except PackageNotFoundError:
            yield CheckResult(f"{name} [{extra}]", "note", "not installed", f"pip install 'steppe[{extra}]'")


def cores() -> CheckResult:
    """The cores this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return CheckResult("cores", "ok", f"{usable} usable of {os.cpu_count()}")


def memory() -> CheckResult:
    """Physical memory, or a container's limit where there is one."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    total = min(total, int(text)) if text.isdigit() else total
    enough = total >= 2 * GIB
    return CheckResult(
        "memory", "ok" if enough else "note", f"{total / GIB:.1f} GiB", "" if enough else "use few actors"
    )


def gpu() -> CheckResult:
    """Whether torch sees a GPU; `--device auto` uses the CPU without one."""
    import torch

    if not torch.cuda.is_available():
        return CheckResult("gpu", "note", "none that torch can use; training runs on the CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return CheckResult("gpu", "ok", ", ".join(names))


def shared_memory() -> CheckResult:
    """/dev/shm, where segments of the `processes` runtime live."""
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
    """The means by which processes wait for each other."""
    import multiprocessing

    multiprocessing.get_context("forkserver").Semaphore(1)
    return CheckResult("processes", "ok", "forkserver and semaphores work")


def run_directory() -> CheckResult:
    """Whether runs can be written where they would be."""
    from steppe.records.run_directory import runs_root

    wanted = runs_root().absolute()
    nearest = next(path for path in (wanted, *wanted.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return CheckResult("runs", "ok", f"{wanted} can be written")
    return CheckResult("runs", "broken", f"{wanted} cannot be written", "set STEPPE_RUNS to a directory of yours")


def numba_cache() -> CheckResult:
    """Where compiled kernels are kept between runs; without any such place numba refuses to cache."""
    import steppe

    own = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(steppe.__file__ or ".").parent
    for place in [Path(own)] if own else [package, Path.home()]:
        existing = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
        if os.access(existing, os.W_OK | os.X_OK):
            return CheckResult("numba cache", "ok", f"{place} can be written")
    return CheckResult("numba cache", "broken", "no place to write it", "set NUMBA_CACHE_DIR to a directory of yours")

"""The `mpi` runtime: one rank per worker slot. Unless mpiexec has already started the ranks, it is started here.

`mpiexec -n 4 steppe train …`: rank 0 supervises and learns (root.py). `steppe train …`: this process supervises, never
initializes MPI, and outlives the ranks. If a rank is killed, mpiexec kills the others: the run has failed, and the
files that MPI left in shared memory are removed here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from steppe.core.config.run import FlowConfig
from steppe.core.config.runtime_table import find_program
from steppe.core.contracts.errors import ConfigError, MissingExtra
from steppe.core.system.process import format_mib, oom_kills
from steppe.records.run_directory import RunDirectory
from steppe.runtimes.handle import Fault, Handle
from steppe.runtimes.launch_spec import LaunchSpec, import_path
from steppe.runtimes.mpi.rank import SHM_DIR, slots_by_rank
from steppe.runtimes.plan import Plan
from steppe.runtimes.subprocess_driver.parent import SubprocessHandle

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # of MPICH and its relatives, PMIx, Open MPI
BOOTSTRAP_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from steppe.runtimes.mpi import root; root.main()"
)
STALE_S = 60.0  # MPI's files older than this that no process has mapped were left by killed processes


def under_mpiexec() -> bool:
    """Whether this process is one of several that an MPI launcher started."""
    return any(name in os.environ for name in RANK_VARIABLES)


def join() -> None:
    """Under mpiexec, let every rank except 0 serve rank 0 until the program ends."""
    if under_mpiexec():
        require_library()
        from steppe.runtimes.mpi import root

        root.join()


def require_library() -> None:
    """Raise unless mpi4py is installed; under mpiexec only rank 0 raises, and the others exit."""
    if importlib.util.find_spec("mpi4py") is not None:
        return
    if any(os.environ.get(name, "0") != "0" for name in RANK_VARIABLES):
        sys.exit(MissingExtra.exit_code)
    raise MissingExtra("runtime 'mpi'", "mpi")


def require(plan: Plan) -> None:
    """Raise, before anything is written, if this plan cannot run here."""
    require_library()
    if plan.config.flow.max_restarts not in (0, FlowConfig().max_restarts):
        raise ConfigError(
            "flow.max_restarts is not for runtime 'mpi', where the run ends with any rank: use --restarts"
        )
    if under_mpiexec():
        from steppe.runtimes.mpi import root

        root.require_size(plan)
    else:
        find_mpiexec()


def find_mpiexec() -> str:
    """Return the mpiexec beside this Python, or the first on PATH."""
    found = find_program("mpiexec")
    if found is None:
        raise MissingExtra("runtime 'mpi' (mpiexec)", "mpi")
    return found


def launch(plan: Plan, directory: RunDirectory) -> Handle:
    """Run the plan on the existing ranks, or start mpiexec."""
    require(plan)
    remove_stale_shm_files()
    if under_mpiexec():
        from steppe.runtimes.mpi import root

        return root.MpiRootHandle(LaunchSpec.of(plan, directory, None), directory, root.comm_world())
    return MpiexecHandle(plan, directory)


class MpiexecHandle(SubprocessHandle):
    """A run under an mpiexec that this process started."""

    name, log = "mpiexec", "mpiexec.log"

    def __init__(self, plan: Plan, directory: RunDirectory) -> None:
        self._dead_slots: list[str] = []  # worker slots whose rank is gone, oldest first
        path = json.dumps(import_path())
        super().__init__(
            plan,
            directory,
            [find_mpiexec(), "-n", str(len(slots_by_rank(plan))), sys.executable, "-P", "-c", BOOTSTRAP_CODE, path],
        )

    @property
    def _child_ended(self) -> bool:
        """Whether a rank ended unexpectedly: then mpiexec kills the others."""
        return bool(self._dead_slots) or super()._child_ended

    def _process_found(self, worker_slot: str, pidfd: int) -> None:
        self._selector.register(pidfd, selectors.EVENT_READ, worker_slot)

    def _process_ended(self, worker_slot: str) -> None:
        self._dead_slots.append(worker_slot)

    def _explain(self) -> Fault:
        if not self._dead_slots:
            found = self._selector.select(0.0)
            self._dead_slots += [key.data for key, _ in found if key.fileobj is not self._process.stdout]
        if not self._dead_slots:
            return super()._explain()
        worker_slot = self._dead_slots[0]
        size = self._rss_bytes.get(worker_slot)
        if oom_kills() > self._oom_kills:
            message = f"memory ran out; {worker_slot} had {format_mib(size)}: use fewer or smaller environments"
            return Fault(worker_slot, "out_of_memory", message, {"rss_bytes": size})
        message = (
            f"the process of {worker_slot} was killed or crashed (it had {format_mib(size)}), and MPI ends with any of its "
            f"processes; its output is in logs/{worker_slot}.log"
        )
        return Fault(worker_slot, "role_died", message, {"rss_bytes": size})

    def _terminate(self) -> None:
        super()._terminate()
        for rank in self._state["ranks"].values():
            if rank["host"] == socket.gethostname():
                _remove(rank["files"])


def remove_stale_shm_files() -> None:
    """Remove shared-memory files of killed MPI processes: stale files of this user that no process has mapped."""
    old = time.time() - STALE_S
    files = [file for file in SHM_DIR.glob("mpich_shm_*") if _is_own(file, old)]
    if files:
        mapped = "\n".join(_read_or_empty(maps) for maps in Path("/proc").glob("[0-9]*/maps"))
        _remove(str(file) for file in files if str(file) not in mapped)


def _is_own(file: Path, older_than_s: float) -> bool:
    try:
        found = file.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and found.st_mtime < older_than_s


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # the file belongs to another user, or is gone


def _remove(files: Iterable[str]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            Path(file).unlink()

"""The `mpi` runtime: one rank per place. Under mpiexec the ranks are there already; otherwise it is started from here.

`mpiexec -n 4 steppe train …`: the first rank supervises and learns (mpi_world.py). `steppe train …`: this process
supervises, never joins the world, and outlives it. When a rank is killed, mpiexec kills the others: the run has failed,
and what MPI left in shared memory is removed here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from steppe.core import factory
from steppe.core.config import FlowConfig
from steppe.core.errors import ConfigError, MissingExtra
from steppe.core.process import in_mib, oom_kills, rss_bytes
from steppe.records.directory import RunDirectory
from steppe.roles.context import STOP
from steppe.runtimes.mpi_rank import KINDS, SHM, Order, seats
from steppe.runtimes.plan import Plan
from steppe.runtimes.turns import Fault, Handle

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # of MPICH and its relatives, PMIx, Open MPI
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from steppe.runtimes import mpi_world; mpi_world.main()"
)
LOG = "mpiexec.log"
REAP_S = 2.0  # how long mpiexec has to bring down what is left
STALE_S = 60.0  # files of MPI that nobody has mapped after so long were left by processes that were killed


def under_mpiexec() -> bool:
    """Whether this process is one of several that an MPI launcher started."""
    return any(name in os.environ for name in RANK_VARIABLES)


def join(runtime: object) -> None:
    """Under mpiexec, for this runtime: let every rank but the first serve the first, from here to the end of the program."""
    if runtime == "mpi" and under_mpiexec():
        require_library()
        from steppe.runtimes import mpi_world

        mpi_world.join()


def require_library() -> None:
    """Raise unless MPI is installed; under mpiexec only the first rank says so."""
    if importlib.util.find_spec("mpi4py") is not None:
        return
    if any(os.environ.get(name, "0") != "0" for name in RANK_VARIABLES):
        sys.exit(MissingExtra.exit_code)
    raise MissingExtra("runtime 'mpi'", "mpi")


def require(plan: Plan) -> None:
    """Raise, before anything is written, unless this plan can run here."""
    require_library()
    if plan.config.flow.max_restarts not in (0, FlowConfig().max_restarts):
        raise ConfigError(
            "flow.max_restarts is not for runtime 'mpi', where the run ends with any rank: use --restarts"
        )
    if under_mpiexec():
        from steppe.runtimes import mpi_world

        mpi_world.require_size(plan)
    else:
        mpiexec()


def mpiexec() -> str:
    """The launcher that belongs to this Python, or the first on the path."""
    own = Path(sys.executable).with_name("mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if found is None:
        raise MissingExtra("runtime 'mpi' (mpiexec)", "mpi")
    return found


def launch(plan: Plan, directory: RunDirectory) -> Handle:
    """Let the ranks that are there, or those that mpiexec starts now, run the plan."""
    require(plan)
    sweep()
    if under_mpiexec():
        from steppe.runtimes import mpi_world

        return mpi_world.WorldHandle(Order.of(plan, directory, None), directory, mpi_world.world())
    return MpiexecHandle(plan, directory)


class MpiexecHandle:
    """A world of ranks, seen from outside: words go in through mpiexec's standard input, and come out of its output."""

    def __init__(self, plan: Plan, directory: RunDirectory) -> None:
        self._plan, self._directory = plan, directory
        self._places = seats(plan)
        self._state: dict[str, Any] = {"ended": [], "faults": [], "ranks": {}}
        self._rest = b""
        self._sizes: dict[str, int | None] = {}
        self._handles: dict[str, int] = {}  # place → pidfd of its rank
        self._dead: list[str] = []  # places whose rank is gone, first one first
        self._parted = self._closed = False
        self._fault: Fault | None = None
        self._oom_kills = oom_kills()
        self._selector = selectors.DefaultSelector()
        self._process = self._start()
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._say(msgspec.to_builtins(Order.of(plan, directory, factory.main_script())))

    def _start(self) -> subprocess.Popen[bytes]:
        logs = self._directory.path / "logs"
        logs.mkdir(exist_ok=True)
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        command = [mpiexec(), "-n", str(len(self._places)), sys.executable, "-P", "-c", BOOT, path]
        with (logs / LOG).open("ab") as log:
            # In a session of its own: Ctrl-C is for this process, which decides what becomes of it.
            pipe = subprocess.PIPE
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True, bufsize=0)

    def advance(self, timeout_s: float) -> None:
        for place, rank in self._state["ranks"].items():
            self._sizes[place] = rss_bytes(rank["pid"]) or self._sizes.get(place)
        self._listen(timeout_s)

    def ended(self, kind: str) -> bool:
        places = {role.place for role in self._plan.roles if role.kind == kind}
        return self._gone or places <= set(self._state["ended"])

    def faults(self) -> list[Fault]:
        self._listen(0.0)
        if self._gone and not self._closed and self._fault is None:
            self._fault = self._explain()
        told = [msgspec.convert(fault, Fault) for fault in self._state["faults"]]
        return told + ([self._fault] if self._fault is not None else [])

    def ask(self, kind: str, what: int) -> None:
        self._say({"kind": kind, "what": what})

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        gone, self._closed = self._gone, True
        try:
            if not gone:
                for kind in KINDS:
                    self.ask(kind, STOP)
                self._say({"close_s": timeout_s})
                self._await_farewell(timeout_s)
        finally:  # also when a second Ctrl-C ends the waiting
            self._bring_down()

    @property
    def _gone(self) -> bool:
        """Whether ranks have ended that were not told to: mpiexec brings down the others."""
        return bool(self._dead) or self._process.poll() is not None

    def _say(self, words: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # nobody is left to hear it
            self._process.stdin.write(msgspec.json.encode(words) + b"\n")

    def _listen(self, timeout_s: float) -> None:
        if self._gone:
            return
        for key, _ in self._selector.select(timeout_s):  # in the order in which they happened
            if key.fileobj is self._process.stdout:
                self._hear()
            elif not self._closed:
                self._dead.append(key.data)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        data = os.read(self._process.stdout.fileno(), 1 << 20)
        if not data:
            self._selector.unregister(self._process.stdout)
            self._process.wait(REAP_S)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            words = msgspec.json.decode(line)
            self._parted = self._parted or "farewell" in words
            self._state.update(words)
        self._watch_ranks()

    def _watch_ranks(self) -> None:
        """Be told when a rank ends, as far as ranks are on this host and the system can tell."""
        if not hasattr(os, "pidfd_open"):
            return
        for place, rank in self._state["ranks"].items():
            if place not in self._handles and rank["host"] == socket.gethostname():
                with contextlib.suppress(ProcessLookupError):
                    self._handles[place] = os.pidfd_open(rank["pid"])
                    self._selector.register(self._handles[place], selectors.EVENT_READ, place)

    def _explain(self) -> Fault:
        """What can be said of a world that could not say anything itself."""
        if not self._dead:
            self._listen_for_dead()
        log = (self._directory.path / "logs" / LOG).read_text(errors="replace")
        if not self._dead:
            code = self._process.wait(REAP_S)
            message = f"mpiexec ended with exit code {code}; its output is in logs/{LOG}"
            return Fault("mpiexec", "role_died", message, {"traceback": log[-4000:]})
        place = self._dead[0]
        size = self._sizes.get(place)
        if oom_kills() > self._oom_kills:
            message = f"memory ran out; {place} had {in_mib(size)}: use fewer or smaller environments"
            return Fault(place, "out_of_memory", message, {"rss_bytes": size})
        message = (
            f"the process of {place} was killed or crashed (it had {in_mib(size)}), and MPI ends with any of its "
            f"processes; its output is in logs/{place}.log"
        )
        return Fault(place, "role_died", message, {"rss_bytes": size})

    def _listen_for_dead(self) -> None:
        found = self._selector.select(0.0)
        self._dead += [key.data for key, _ in found if key.fileobj is not self._process.stdout]

    def _await_farewell(self, timeout_s: float) -> None:
        all_ended = set(self._places) <= set(self._state["ended"])
        deadline = time.monotonic() + (max(timeout_s, REAP_S) if all_ended else timeout_s)
        while not self._parted and self._process.poll() is None and (left_s := deadline - time.monotonic()) > 0:
            self._listen(left_s)

    def _bring_down(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S if self._parted or self._dead else 0.0)
        self._process.kill()
        self._process.wait()
        for handle in self._handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], REAP_S)
            os.close(handle)
        self._handles.clear()
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        for rank in self._state["ranks"].values():
            if rank["host"] == socket.gethostname():
                _remove(rank["files"])


def sweep() -> None:
    """Remove what MPI left in shared memory when its processes were killed: files of ours that nobody has mapped."""
    old = time.time() - STALE_S
    files = [file for file in SHM.glob("mpich_shm_*") if _is_own(file, old)]
    if files:
        mapped = "\n".join(_text(maps) for maps in Path("/proc").glob("[0-9]*/maps"))
        _remove(str(file) for file in files if str(file) not in mapped)


def _is_own(file: Path, older_than_s: float) -> bool:
    try:
        found = file.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and found.st_mtime < older_than_s


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # of another user, or gone


def _remove(files: Iterable[str]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            Path(file).unlink()

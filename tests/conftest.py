"""What holds for every test: runs go to a directory of its own, and it leaves no process, thread or shared memory behind."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
# Ray's niceness of 15 would let all other tests go before those that wait for Ray; workers that nobody needs would import it.
os.environ |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
if threading.current_thread() is threading.main_thread():
    # A shell ignores Ctrl-C for what it runs in the background, and children inherit that: not what is tested here.
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

if TYPE_CHECKING:
    from tests.support.warm_host import WarmHost

ROOT = Path(__file__).parents[1]
inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if str(ROOT) not in inherited:  # so that processes which tests start find `tests.…` and this tree's `steppe`
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), *inherited]))
pytest.register_assert_rewrite("tests.support")

Steppe = Callable[..., subprocess.CompletedProcess[str]]
PATIENCE_S = 60.0  # for what is ending just now; only bounds how long a failure takes
collect_ignore = [] if os.environ.get("STEPPE_KUBE") else ["kube"]  # `make test-kube` brings a control plane


def pytest_sessionstart(session: pytest.Session) -> None:
    """Test no kernel that still contains the code of yesterday; once, before workers begin."""
    gc.disable()  # hardly anything that collecting tests makes is garbage
    if not hasattr(session.config, "workerinput"):
        from steppe.cli.commands.warm import PACKAGE, delete_stale_kernels

        delete_stale_kernels(PACKAGE)


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over modules and tests, a million objects that stay until the end."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the session's broker, if a test had it started; once, after all workers have ended."""
    factory = getattr(session.config, "_tmp_path_factory", None)
    if factory is not None and not hasattr(session.config, "workerinput"):
        from tests.support.kafka import own_broker, session_home

        own_broker(session_home(factory)).down()


class FailuresAtOnce:
    """Names each test that fails when it fails; how is told at the end of the suite, which may be half an hour later."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\nfailed in {report.when}: {report.nodeid}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))


@pytest.hookimpl(trylast=True)  # after what is not to run was deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin every worker's share with tests that take long, so that none is left for the end when the others have finished."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    rest = [item for item in items if not item.get_closest_marker("long")]
    share = -(-len(rest) // workers)
    items[:] = [
        item
        for worker in range(workers)
        for item in long[worker::workers] + rest[worker * share : (worker + 1) * share]
    ]


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a real Kafka broker."""
    from tests.support.kafka import session_home, started

    return started(session_home(tmp_path_factory))


@pytest.fixture(scope="session")
def cli_host() -> Iterator[WarmHost]:
    """A process whose forks run `steppe`; where most commands train networks, a module has `torch_host` instead."""
    from tests.support.warm_host import WarmHost

    host = WarmHost()
    yield host
    host.close()


@pytest.fixture
def steppe(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, cli_host: WarmHost) -> Steppe:
    """Run `steppe WORDS…` in `tmp_path`, with no configuration from outside; keyword arguments are environment variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STEPPE_")}

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {**clean, "COLUMNS": "100", **variables}
        return cli_host.run([str(word) for word in words], environ, tmp_path, tmp_path_factory.mktemp("cli"))

    return run


@pytest.fixture(scope="session")
def torch_host() -> Iterator[WarmHost]:
    """A process with torch, whose forks run commands that would otherwise import it each."""
    from tests.support.warm_host import WarmHost

    host = WarmHost(torch=True)
    yield host
    host.close()


@pytest.fixture(autouse=True)
def _own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path / "runs"))


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    threads, children, rooms = set(threading.enumerate()), descendants(), set(_rooms())
    yield
    late = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in late:
        thread.join(PATIENCE_S)
    left = [f"thread {thread.name}" for thread in late if thread.is_alive()]
    deadline = time.monotonic() + PATIENCE_S
    while (strays := descendants() - children) and time.monotonic() < deadline:
        time.sleep(0.01)
    left += [f"process {pid} ({_command(pid)})" for pid in strays]
    # A run of the same name that a test beside this one killed is abandoned too, until that test goes on with it.
    while (still := _own_rooms(set(_rooms()) - rooms, tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left += [f"room {room}" for room in still]
    assert not left, "left behind: " + ", ".join(left)


def descendants() -> set[int]:
    """This process's children and theirs, without multiprocessing's own two servers and what has ended."""
    found, waiting = set(), [os.getpid()]
    servers = _servers()
    while waiting:
        for child in _children(waiting.pop()):
            waiting.append(child)
            if child not in servers and _alive(child):
                found.add(child)
    return found


def _servers() -> set[int | None]:
    from multiprocessing import forkserver, resource_tracker

    # multiprocessing says nowhere else which processes its two servers are.
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


def _children(pid: int) -> list[int]:
    lists = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            lists.append(path.read_text())
        except OSError:
            continue  # the thread has ended
    return [int(word) for text in lists for word in text.split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return "ended since"


def _rooms() -> list[Path]:
    return list(Path("/dev/shm").glob("steppe-*"))


def _own_rooms(rooms: set[Path], tmp_path: Path) -> list[Path]:
    """Those of runs that were made in this test; other tests may be running beside this one, with runs of the same name."""
    if not rooms:
        return []
    from steppe.core.system import shared_dir as shared

    runs = [path.parent.name[:40] for path in tmp_path.rglob("run.json")]
    named = [room for room in rooms if any(room.name.startswith(f"steppe-{run}-") for run in runs)]
    return [room for room in rooms if room in shared.owned_dirs or (room in named and _abandoned(room))]


def _abandoned(room: Path) -> bool:
    try:
        with (room / "owner").open() as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held by a process that is alive, or gone by now
    return True

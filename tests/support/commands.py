"""Commands under way, the processes below them, and what their runs say, for tests of runtimes from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from steppe.core.contracts.errors import SteppeError
from steppe.core.contracts.transport import TRAINING
from steppe.records.run_directory import RunDirectory

PATIENCE_S = 240.0  # only bounds how long a failure takes


def free_port() -> int:
    """A port of this machine for a server that is told its address before it is started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def under_way(command, host=None):
    """A command while it runs; of a `host` (`tests.support.warm_host`), `steppe` is a fork that need not import anything."""
    if host is None:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    else:
        logs = Path(tempfile.mkdtemp(prefix="output-", dir=Path(os.environ["STEPPE_RUNS"]).parent))
        process = host.start([str(word) for word in command[1:]], dict(os.environ), Path.cwd(), logs)
    try:
        yield process
    finally:
        for pid in family(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def parents():
    """pid → parent of every live process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            found[int(path.parent.name)] = int(parent)
    return found


def family(pid):
    """A process and everything below it, as far as alive."""
    known = parents()
    found = [pid] if pid in known else []
    for one in found:
        found += [child for child, parent in known.items() if parent == one]
    return found


def wait_until(true, process=None, every_s=0.02):
    """Ask every so often; less often where an answer costs much."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(every_s)


def opened(name="run"):
    return RunDirectory.open(name)


def status(name="run"):
    try:
        return opened(name).store.status()
    except SteppeError:
        return None


def trained(name="run"):
    return status(name) is not None and bool(opened(name).store.read(TRAINING))

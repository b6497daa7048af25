"""The process of a run that the service started: it has its own session, so that it outlives the service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steppe.core.config.run import KafkaConfig
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.errors import Conflict, RunNotFound, SteppeError
from steppe.core.contracts.transport import COMMANDS
from steppe.core.system.shared_dir import remove_abandoned_dirs
from steppe.records.run_directory import RunDirectory
from steppe.records.store import FAILED, LIVE, NO_OWNER, PENDING, STARTING, Status

if TYPE_CHECKING:
    from steppe.training.result import RunResult

SUPERVISOR_LOG = "supervisor"
_BOOTSTRAP_CODE = "from steppe.control.process_host import main; main()"


def start_run_process(directory: RunDirectory, kafka: KafkaConfig | None = None) -> subprocess.Popen[bytes]:
    """Start or resume a run in its own process, which begins once the store names it as the run's owner.

    A run over Kafka uses the brokers `kafka`, which may have moved since the run was created. Raises Conflict if
    another process, perhaps another service, is starting the run.
    """
    brokers = kafka.address if kafka is not None and capabilities_of(directory.config().runtime).needs_brokers else None
    directory.acquire()
    try:
        earlier = directory.store.newest(COMMANDS)  # later commands are for the attempt that starts now
        process = _spawn_if_free(directory)
    finally:
        directory.release()
    assert process.stdin is not None
    request = {"path": str(directory.path.resolve()), "commands_after": earlier, "kafka": brokers}
    process.stdin.write(json.dumps(request).encode())
    process.stdin.close()
    return process


def _spawn_if_free(directory: RunDirectory) -> subprocess.Popen[bytes]:
    status = directory.store.status()
    if status.live or (status.state == PENDING and status.pid != NO_OWNER):
        raise Conflict(f"{directory.path.name} is {status.state} already")
    logs = directory.path / "logs"
    logs.mkdir(exist_ok=True)
    environ = os.environ | {"STEPPE_RUNS": str(directory.path.resolve().parent)}
    with (logs / f"{SUPERVISOR_LOG}.log").open("ab") as log:
        # -P: a file in the current directory must not shadow an installed module.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP_CODE],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )
    state = PENDING if status.state == PENDING else STARTING
    directory.store.set_status(state, "starting", "its process is starting", owner=process.pid)
    return process


def log_sources(logs: Path) -> list[str]:
    """Return the names of a run's logs. Symbolic links are skipped: they could lead anywhere on this machine."""
    if logs.is_symlink() or not logs.is_dir():
        return []
    return sorted(path.stem for path in logs.glob("*.log") if path.is_file() and not path.is_symlink())


def read_log(path: Path, after: int, most: int) -> bytes:
    """Return up to `most` bytes of a log from offset `after`; the log must not be a symbolic link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise RunNotFound("there is no log of that name") from None
    with open(descriptor, "rb") as file:
        file.seek(after)
        return file.read(most)


def kill_run_processes(status: Status) -> None:
    """Kill a run's processes at once. `status` must be fresh: its pid must still be the owner's."""
    if not status.pid or not (status.state in LIVE or status.state == PENDING):
        return
    try:
        is_group_leader = os.getpgid(status.pid) == status.pid  # true for runs that were started here
        (os.killpg if is_group_leader else os.kill)(status.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def remove_stale_shared_memory() -> None:
    """Remove the shared memory that killed runs left behind."""
    if Path("/dev/shm").is_dir():
        remove_abandoned_dirs(Path("/dev/shm"))


def main() -> None:
    """Train the run that the parent process names on standard input until it ends."""
    text = sys.stdin.buffer.read()
    if not text:
        sys.exit(1)  # the service died before it sent the request
    request = json.loads(text)
    sys.path.append(os.getcwd())  # modules that the service allows may be there
    directory = RunDirectory(Path(request["path"]))
    with directory.store.heartbeats():  # before the imports, which are slow on a busy machine
        result = _train(directory, request)
    print(f"{directory.id} ended {result.summary['state']} ({result.summary.get('reason')})", flush=True)


def _train(directory: RunDirectory, request: dict[str, Any]) -> RunResult:
    """Train to the end; record the reason of a run that cannot start."""
    try:
        from steppe.training.resume import resume_directory

        return resume_directory(directory, kafka=request["kafka"], commands_after=request["commands_after"])
    except SteppeError as error:
        _set_failed(directory, str(error))
        print(f"steppe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        _set_failed(directory, f"{type(error).__name__}: {error}")
        raise


def _set_failed(directory: RunDirectory, message: str) -> None:
    """Mark a run that could not start as FAILED, with the reason."""
    status = directory.store.status()
    if status.state == PENDING or status.live:
        directory.store.set_status(FAILED, "cannot_start", message)

"""A group of runs that differ by their seed only: created together, run side by side, resumed and stopped as a whole.

runs/NAME/group.json   the manifest: configuration with sources, and the members
runs/NAME/stop         present after `steppe stop`: no further member starts
runs/NAME/logs/        what the members' processes printed
runs/NAME-seed-7/      a member: an ordinary run
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from steppe.core.config import references
from steppe.core.config.run import ResolvedConfig, flatten
from steppe.core.config.runtime_table import capabilities_of
from steppe.core.contracts.errors import ConfigError, Conflict, DamagedFile, RunExists, RunFailed, RunNotFound
from steppe.core.contracts.transport import COMMANDS
from steppe.core.io.atomic_files import write_atomic
from steppe.envs.factory import probe
from steppe.records.run_directory import RunDirectory, new_run_id, runs_root
from steppe.records.store import FAILED, LOST, PENDING, SUCCEEDED
from steppe.records.view import RunView
from steppe.replay.factory import available_bytes
from steppe.runtimes.memory_need import estimate_memory
from steppe.training.autotune import usable_cores
from steppe.training.resume import COMPLETE_REASONS
from steppe.training.supervisor import StopSignalHandler

MANIFEST, STOP_FILE, LOCK, FORMAT = "group.json", "stop", "lock", 1
PROCESS_BYTES = 350 << 20  # of a process with torch, besides the run's arrays
MAX_MEMORY_SHARE = 0.8
POLL_S = 0.2
STOP_S = 10.0  # for all members to end in order after Ctrl-C
_BOOTSTRAP_CODE = "from steppe.training.seeds.member import main; main()"


class Member(msgspec.Struct, frozen=True):
    """A run of the group, by the name of its directory beside the group's."""

    seed: int
    name: str


class Manifest(msgspec.Struct, frozen=True):
    """What a group is."""

    id: str
    created_s: float
    members: list[Member]
    config: dict[str, Any]
    sources: dict[str, str]
    script: tuple[str, str] | None = None  # path and package of the user's script, if it defines parts of the run
    format: int = FORMAT


@dataclass(frozen=True)
class MemberResult:
    """How a member ended, or PENDING if it has not been started."""

    seed: int
    path: Path
    state: str
    reason: str | None = None
    message: str | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.state in (FAILED, LOST)


@dataclass(frozen=True)
class GroupResult:
    """The results of a group's members, in the order of the seeds that were given."""

    id: str
    path: Path
    runs: list[MemberResult]
    interrupted: bool = False

    @property
    def failed(self) -> list[MemberResult]:
        """The members that failed."""
        return [run for run in self.runs if run.failed]

    @property
    def returns(self) -> dict[int, float]:
        """Seed → mean return of the final evaluation, of the members that have one."""
        found = {run.seed: run.summary.get("eval_return_mean") for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def raise_for_fault(self) -> None:
        """Raise RunFailed if a member failed; names the seeds."""
        if self.failed:
            told = "; ".join(f"seed {run.seed}: {run.message or run.reason or run.state}" for run in self.failed)
            raise RunFailed(f"{len(self.failed)} of {len(self.runs)} runs of group {self.id} failed: {told}")

    def summary(self) -> dict[str, Any]:
        """Return the results as plain values."""
        return {
            "group": self.id,
            "path": str(self.path),
            "states": dict(Counter(run.state for run in self.runs)),
            "failed_seeds": [run.seed for run in self.failed],
            "runs": [
                {
                    "seed": run.seed,
                    "path": str(run.path),
                    "state": run.state,
                    "reason": run.reason,
                    "message": run.message,
                }
                | {"summary": dict(run.summary) or None}
                for run in self.runs
            ],
        }


GroupObserver = Callable[["SeedGroup", dict[int, RunView]], object]


class SeedGroup:
    """An existing group."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError) as error:
            raise DamagedFile(f"{path / MANIFEST} cannot be read: {error}") from None
        if self.manifest.format > FORMAT:
            raise DamagedFile(f"{path / MANIFEST} has format {self.manifest.format}; this version reads {FORMAT}")

    @classmethod
    def create(cls, resolved: ResolvedConfig, seeds: Sequence[int]) -> SeedGroup:
        """Write the manifest of a new group. RunExists if its directory, or that of a member, is taken."""
        config = resolved.config
        script = _script_of(resolved)
        path = config.run_dir or runs_root() / (config.name or f"{new_run_id(config)}-seeds")
        names = [f"{path.name}-seed-{seed}" for seed in seeds]
        for taken in (path / MANIFEST, path / "run.json", *(path.parent / name / "run.json" for name in names)):
            if taken.exists():
                raise RunExists(f"{taken.parent} is there already: choose another --name or --run-dir, or delete it")
        members = [Member(seed, name) for seed, name in zip(seeds, names, strict=True)]
        path.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(path.name, time.time(), members, flatten(config), resolved.sources, script)
        write_atomic(path / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        return cls(path)

    @classmethod
    def find(cls, group: str | Path) -> SeedGroup | None:
        """Return the group of that name under the runs root, or at that path; None if there is none."""
        for path in (runs_root() / group, Path(group)):
            if (path / MANIFEST).exists():
                return cls(path)
        return None

    @classmethod
    def open(cls, group: str | Path) -> SeedGroup:
        """Return the group of that name or path; RunNotFound if there is none."""
        found = cls.find(group)
        if found is None:
            raise RunNotFound(f"there is no group of runs {str(group)!r}: `steppe train … --seeds N` starts one")
        return found

    @property
    def id(self) -> str:
        return self.manifest.id

    def member_path(self, member: Member) -> Path:
        return self.path.parent / member.name

    def existing(self) -> dict[int, RunDirectory]:
        """Return seed → run of the members that have been started."""
        paths = {member.seed: self.member_path(member) for member in self.manifest.members}
        return {seed: RunDirectory(path) for seed, path in paths.items() if (path / "run.json").exists()}

    def results(self) -> list[MemberResult]:
        """Return each member's state as it is now."""
        return [self._result(member) for member in self.manifest.members]

    def _result(self, member: Member) -> MemberResult:
        path = self.member_path(member)
        if not (path / "run.json").exists():
            return MemberResult(member.seed, path, PENDING)
        directory = RunDirectory(path)
        status = directory.store.status()
        summary = directory.summary() or {}
        return MemberResult(member.seed, path, status.state, status.reason, status.message, summary)

    def stop(self, issuer: str) -> int:
        """Ask the running members to stop, and let no other one start; return how many were running."""
        (self.path / STOP_FILE).touch()
        running = [run for run in self.existing().values() if run.store.status().live]
        for run in running:
            command = {"command": "stop", "id": uuid.uuid4().hex, "issuer": issuer, "time_s": time.time()}
            run.store.post(COMMANDS, command)
        return len(running)


def parse_seeds(seeds: int | str | Sequence[int], first: int = 0) -> list[int]:
    """Return the seeds that are meant: a number N means `first` to `first + N - 1`; "1,7,42" or a sequence lists them."""
    if isinstance(seeds, str):
        words = [word.strip() for word in seeds.split(",")]
        if not all(word.isdigit() for word in words if word) or not any(words):
            raise ConfigError(
                f"seeds={seeds!r}: give a number of seeds (5), or seeds with commas between them (1,7,42)"
            )
        seeds = int(seeds) if len(words) == 1 else [int(word) for word in words if word]
    if isinstance(seeds, int):
        if seeds < 1:
            raise ConfigError(f"seeds={seeds}: must be at least 1")
        return list(range(first, first + seeds))
    chosen = list(seeds)
    if not chosen or min(chosen) < 0 or len(set(chosen)) != len(chosen):
        raise ConfigError(f"seeds={chosen}: give at least one seed, each once, none below 0")
    return chosen


def runs_at_once(resolved: ResolvedConfig, cores: int, memory_bytes: float) -> int:
    """Return how many runs of this configuration the machine holds; at least 1.

    A run in one process needs a core per thread. A run in several needs a core for its learner and for each actor; the manager's
    evaluations take a small share.
    """
    config = resolved.config
    roles = 1 if capabilities_of(config.runtime).one_process else config.actors + (0 if config.mode == "workers" else 1)
    processes = 1 if roles == 1 else roles + 1
    arrays = sum(estimate_memory(config, probe(config.env, config.environment)).values())
    by_memory = MAX_MEMORY_SHARE * memory_bytes / (processes * PROCESS_BYTES + arrays)
    return max(1, min(cores // (roles * config.flow.threads), int(by_memory)))


def train_group(
    resolved: ResolvedConfig,
    seeds: Sequence[int],
    *,
    jobs: int | None = None,
    observers: Sequence[GroupObserver] = (),
) -> GroupResult:
    """Create a group and run it to its end."""
    if resolved.auto:
        from steppe.training.autotune import resolve_auto_settings

        resolved = resolve_auto_settings(resolved)
    return run_group(SeedGroup.create(resolved, seeds), jobs=jobs, observers=observers)


def run_group(
    group: SeedGroup, *, jobs: int | None = None, steps: int | None = None, observers: Sequence[GroupObserver] = ()
) -> GroupResult:
    """Run the members that are not complete, `jobs` at once (default: as many as the machine holds).

    A member that is still running, because the process that started it was killed, is waited for. A member that fails does not stop the
    others. The first SIGINT or SIGTERM stops all members in order, a second one at once. `steps` is a new total of environment
    steps.
    """
    from steppe.core.config.run import unflatten

    with _only_runner(group), StopSignalHandler() as interrupts:
        (group.path / STOP_FILE).unlink(missing_ok=True)
        config = unflatten(group.manifest.config)
        resolved = ResolvedConfig(config, group.manifest.sources)
        limit = jobs or runs_at_once(resolved, usable_cores(), available_bytes())
        runner = _Runner(group, limit, steps, observers, interrupts)
        try:
            runner.run()
        finally:
            runner.end()
        return GroupResult(group.id, group.path, runner.results(), interrupted=interrupts.count > 0)


class _Runner:
    """Starts members in their order and watches them."""

    def __init__(
        self,
        group: SeedGroup,
        limit: int,
        steps: int | None,
        observers: Sequence[GroupObserver],
        interrupts: StopSignalHandler,
    ) -> None:
        self.group, self.limit, self.steps, self.observers, self.interrupts = group, limit, steps, observers, interrupts
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.exit_codes: dict[int, int] = {}
        self.views: dict[int, RunView] = {}
        self.waiting = [member for member in group.manifest.members if not self._complete(member)]

    def run(self) -> None:
        """Return when every member has ended, or when the user asked for the end."""
        while not self.interrupts.count:
            self._collect_ended()
            if (self.group.path / STOP_FILE).exists():
                self.waiting.clear()
            adopted = self._adopted()
            self.waiting = [member for member in self.waiting if member.seed not in adopted]
            while self.waiting and len(self.processes) + len(adopted) < self.limit:
                member = self.waiting.pop(0)
                self.processes[member.seed] = _start(self.group, member, self.steps)
            self._show()
            if not self.processes and not adopted and not self.waiting:
                return
            time.sleep(POLL_S)

    def end(self) -> None:
        """Stop the members that still run: in order first, then at once."""
        deadline = time.monotonic() + STOP_S
        if self.interrupts.count and self._adopted():
            self.group.stop("group")
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            while any(process.poll() is None for process in self.processes.values()) and time.monotonic() < deadline:
                self._show()
                time.sleep(POLL_S)
        self.interrupts.ignore()
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._show()

    def results(self) -> list[MemberResult]:
        """Return how each member ended; one whose process could not create its run has failed."""
        return [
            replace(result, state=FAILED, reason="cannot_start", message=_last_line(_log_path(self.group, result.seed)))
            if result.state == PENDING and self.exit_codes.get(result.seed, 0) > 0
            else result
            for result in self.group.results()
        ]

    def _collect_ended(self) -> None:
        for seed, process in list(self.processes.items()):
            if (code := process.poll()) is not None:
                self.exit_codes[seed] = code
                del self.processes[seed]

    def _complete(self, member: Member) -> bool:
        """Whether the member has reached its end, so that there is nothing to resume."""
        path = self.group.member_path(member)
        if self.steps is not None or not (path / "run.json").exists():
            return False
        status = RunDirectory(path).store.status()
        return status.state == SUCCEEDED and status.reason in COMPLETE_REASONS

    def _adopted(self) -> list[int]:
        """Return the seeds of members that run without a process of ours."""
        return [
            seed
            for seed, run in self.group.existing().items()
            if seed not in self.processes and run.store.status().live
        ]

    def _show(self) -> None:
        for seed, run in self.group.existing().items():
            if seed not in self.views:
                self.views[seed] = RunView(run)
            self.views[seed].refresh()
        for observer in self.observers:
            observer(self.group, self.views)


def _log_path(group: SeedGroup, seed: int) -> Path:
    return group.path / "logs" / f"seed-{seed}.log"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return lines[-1].removeprefix("steppe: ") if lines else ""


def _start(group: SeedGroup, member: Member, steps: int | None) -> subprocess.Popen[bytes]:
    path = _log_path(group, member.seed)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP_CODE],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the group's process only, which stops the members in order
        )
    assert process.stdin is not None
    told = {"group": str(group.path.resolve()), "seed": member.seed, "steps": steps}
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
    return process


@contextlib.contextmanager
def _only_runner(group: SeedGroup) -> Iterator[None]:
    """Hold the group's lock, which the kernel releases if this process dies."""
    descriptor = os.open(group.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Conflict(f"the group {group.id} is running already: stop it first (steppe stop {group.id})") from None
    try:
        yield
    finally:
        os.close(descriptor)


def _script_of(resolved: ResolvedConfig) -> tuple[str, str] | None:
    """Return the user's script if parts of the run are defined in it. FactoryError for what other processes cannot import."""
    config = resolved.config
    for text, what in ((config.env, "the environment"), (config.algo, "the algorithm")):
        references.require_portable(text, what)
    parts = (config.env, config.algo, *config.environment.wrappers)
    return references.main_script() if any(part.startswith("__main__:") for part in parts) else None

"""A run's directory: everything that a run leaves on disk, written by one process at a time.

run.json        what ran: configuration with sources, seed, versions, hardware, commit, command line
run.sqlite      messages and status (store.py)
lock            held by the owner while it writes; the kernel releases it when the owner dies
reserve         disk space set aside for the final reports on a full disk, while the run is live
checkpoints/    recordings/    tb/    metrics.jsonl    summary.json    arrivals.jsonl    faults/    profile/
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from steppe.core.config.run import RunConfig, flatten, unflatten
from steppe.core.contracts.errors import (
    ConfigError,
    Conflict,
    DamagedFile,
    DiskFull,
    RunExists,
    RunNotFound,
    did_you_mean,
)
from steppe.core.contracts.specs import EnvSpec
from steppe.core.io.atomic_files import raising_disk_full, read_json, remove_temporary_files, write_json
from steppe.records.buffered_board import BufferedBoard
from steppe.records.provenance import provenance
from steppe.records.store import RunStore, Status

FORMAT = 1
RECORD, STORE, LOCK, SUMMARY, RESERVE = "run.json", "run.sqlite", "lock", "summary.json", "reserve"
RESERVE_BYTES = 256 << 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def runs_root() -> Path:
    """Return the directory that holds the runs: $STEPPE_RUNS, or ./runs."""
    return Path(os.environ.get("STEPPE_RUNS") or "runs")


class RunDirectory:
    """An existing run. A writer holds its lock; any process may read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def create(cls, config: RunConfig, sources: dict[str, str], extra: Mapping[str, Any] | None = None) -> RunDirectory:
        """Create a run, locked by this process. RunExists, with nothing written, if the directory already holds one.

        `extra` is added to run.json.
        """
        path = _choose_path(config)
        if (path / RECORD).exists():
            raise _run_exists_error(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot create the run directory {path}: {error.strerror}; choose another --run-dir, or set STEPPE_RUNS to a writable directory"
            ) from None
        directory = cls(path)
        directory.acquire()
        try:
            if (path / RECORD).exists():
                raise _run_exists_error(path)
            directory._initialize(config, sources, extra or {})
        except BaseException:
            directory.release()
            raise
        return directory

    @classmethod
    def open(cls, run: str | Path) -> RunDirectory:
        """Open a run by its name under the runs root, or by its path."""
        by_name = runs_root() / run
        for path in (by_name, Path(run)):
            if (path / RECORD).exists():
                return cls(path)
        if os.sep in str(run) or Path(run).is_dir():
            raise RunNotFound(f"{run} holds no run: there is no {RECORD} in it")
        known = [path.name for path in run_paths(runs_root())]
        where = f"{runs_root()} contains {len(known)} runs" if known else f"{runs_root()} contains no runs yet"
        raise RunNotFound(f"there is no run {str(run)!r}; {where}.{did_you_mean(str(run), known)}")

    @cached_property
    def record(self) -> dict[str, Any]:
        """The contents of run.json. DamagedFile if it cannot be read."""
        record = read_json(self.path / RECORD)
        if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
            raise DamagedFile(f"{self.path / RECORD} is damaged: it does not describe a run")
        if record.get("format", 0) > FORMAT:
            raise DamagedFile(
                f"{self.path / RECORD} has format {record['format']}; this version of Steppe reads {FORMAT}"
            )
        return record

    @property
    def id(self) -> str:
        return str(self.record.get("id", self.path.name))

    @property
    def key(self) -> str:
        """A key that no other run has, not even one of the same name; it identifies the run's checkpoints."""
        return str(self.record.get("key", self.id))

    @property
    def sources(self) -> dict[str, str]:
        """Dotted configuration key → where its value came from."""
        return dict(self.record.get("sources", {}))

    def config(self) -> RunConfig:
        """Return the configuration that the run was created with."""
        return unflatten(self.record["config"])

    @property
    def spec(self) -> EnvSpec | None:
        """The environment's specification; None until the environment has been inspected."""
        found = self.record.get("spec")
        return None if found is None else EnvSpec.from_record(found)

    def write_resolved(self, config: RunConfig, spec: EnvSpec | None = None) -> None:
        """Write resolved choices into run.json, for a run that was created without them. The caller holds the lock."""
        record = self.record | {"config": flatten(config)} | ({} if spec is None else {"spec": asdict(spec)})
        write_json(self.path / RECORD, record)
        self.record = record

    @cached_property
    def store(self) -> RunStore:
        return RunStore(self.path / STORE)

    @cached_property
    def board(self) -> BufferedBoard:
        """The store's messages, for writers that must not fail when the disk is full."""
        return BufferedBoard(self.store)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def start(self) -> Path:
        """What the learner starts from, in the form of checkpoints; absent if it starts from scratch."""
        return self.path / "start"

    @property
    def arrivals(self) -> Path:
        """Which segments an async run learned from (arrivals.py); only with flow.record_arrivals."""
        return self.path / "arrivals.jsonl"

    @property
    def faults(self) -> Path:
        """Recordings of how environments came to raise an exception (faults.py)."""
        return self.path / "faults"

    @property
    def profile(self) -> Path:
        """Flame graphs and times by phase, with flow.profile (records/profiling/report.py)."""
        return self.path / "profile"

    @property
    def temporary(self) -> bool:
        """Whether the run is removed after use, so that it cannot be resumed."""
        return bool(self.record.get("passing", False))

    @property
    def address(self) -> str:
        """How to refer to the run on the command line: its name if that is enough, otherwise its path."""
        by_name = runs_root() / self.path.name
        return self.path.name if by_name.resolve() == self.path.resolve() else str(self.path)

    @property
    def recordings(self) -> Path:
        return self.path / "recordings"

    @property
    def result(self) -> Path:
        """The weights that the run is evaluated by, once it has ended."""
        return self.path / "weights.safetensors"

    @property
    def summary_path(self) -> Path:
        return self.path / SUMMARY

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the run's results; NaN and infinity become null."""
        write_json(self.summary_path, _nonfinite_to_none(summary))

    def summary(self) -> dict[str, Any] | None:
        """Return the results that were written, or None."""
        if not self.summary_path.exists():
            return None
        summary = read_json(self.summary_path)
        if not isinstance(summary, dict):
            raise DamagedFile(f"{self.summary_path} is damaged: it is not a summary")
        return summary

    def acquire(self) -> None:
        """Become the only writer until `release` or the end of this process. Conflict if another process is."""
        if self._lock is not None:
            return
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise Conflict(
                f"the run in {self.path} is in use by process {owner}: stop it first (steppe stop {self.path.name})"
            ) from None
        os.ftruncate(descriptor, 0)
        with (
            contextlib.suppress(DiskFull),
            raising_disk_full(self.path),
        ):  # the lock also holds without its owner's pid
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def reserve(self) -> None:
        """Set disk space aside for the run's final reports, if there is any."""
        with contextlib.suppress(OSError):
            (self.path / RESERVE).write_bytes(bytes(RESERVE_BYTES))

    def free_reserve(self) -> None:
        """Free the reserved disk space for the next writes."""
        (self.path / RESERVE).unlink(missing_ok=True)

    def _initialize(self, config: RunConfig, sources: dict[str, str], extra: Mapping[str, Any]) -> None:
        remove_temporary_files(self.path)
        self.checkpoints.mkdir(exist_ok=True)
        self.recordings.mkdir(exist_ok=True)
        created = time.time()
        with raising_disk_full(self.path):
            store = self.store
        record = {
            "format": FORMAT,
            "id": config.name or self.path.resolve().name,
            "key": secrets.token_hex(8),
            "created_s": created,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
            "seed": config.seed,
            "config": flatten(config),
            "sources": sources,
            **provenance(),
            **extra,
        }
        store.set_status("PENDING")
        with raising_disk_full(self.path):
            write_json(self.path / RECORD, record)  # last: a directory without it holds no run


@dataclass(frozen=True)
class RunInfo:
    """One row in a list of runs. `damage` tells what could not be read; the other fields are then as far as known."""

    id: str
    path: Path
    created_s: float
    env: str
    algo: str
    status: Status
    summary: dict[str, Any] | None = None
    damage: str | None = None
    total_steps: int | None = None


def list_runs(root: Path | None = None) -> list[RunInfo]:
    """Return every run under a root, newest first, including damaged ones."""
    infos = [get_run_info(RunDirectory(path)) for path in run_paths(root or runs_root())]
    return sorted(infos, key=lambda info: info.created_s, reverse=True)


def get_run_info(directory: RunDirectory) -> RunInfo:
    """Return the row of one run, damaged or not."""
    try:
        record, config = directory.record, directory.record["config"]
        created, env, algo = float(record["created_s"]), str(config.get("env")), str(config.get("algo"))
        if not os.path.exists(directory.path / STORE):
            raise RunNotFound(f"{directory.path / STORE} is missing: this directory holds no run")
        status, summary = directory.store.status(), directory.summary()
        total = config.get("steps")
        return RunInfo(directory.id, directory.path, created, env, algo, status, summary, total_steps=total)
    except (DamagedFile, RunNotFound, KeyError, ValueError, TypeError) as error:
        created = (directory.path / RECORD).stat().st_mtime
        return RunInfo(directory.path.name, directory.path, created, "?", "?", Status(), damage=str(error))


def run_paths(root: Path) -> list[Path]:
    """Return the directories under a root that hold runs."""
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        return [
            root / name for name in sorted(entry.name for entry in entries if os.path.exists(f"{entry.path}/{RECORD}"))
        ]
    return []


def _choose_path(config: RunConfig) -> Path:
    if config.name is not None and not _NAME.fullmatch(config.name):
        raise ConfigError(
            f"name={config.name!r}: use letters, digits, '.', '-' and '_', beginning with a letter or digit"
        )
    if config.run_dir is not None:
        return config.run_dir
    return runs_root() / (config.name or new_run_id(config))


def new_run_id(config: RunConfig) -> str:
    """Return a readable and unique id, for example cartpole-v1-ppo-20261115-2333-k3f9."""
    text = f"{config.env.split(':')[-1]}-{config.algo.split(':')[-1]}".lower()
    slug = re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:48] or "run"
    suffix = "".join(secrets.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(4))
    return f"{slug}-{time.strftime('%Y%m%d-%H%M')}-{suffix}"


def _run_exists_error(path: Path) -> RunExists:
    return RunExists(f"{path} already contains a run: choose another --name or --run-dir, or delete it")


def _nonfinite_to_none(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _nonfinite_to_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nonfinite_to_none(item) for item in value]
    return value

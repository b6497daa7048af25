"""The runs of a service: their directories, cached views, and the database of their operations."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import uuid
from contextlib import AbstractContextManager
from pathlib import Path

from steppe.control import models, presenters
from steppe.control.database import ControlDatabase, RequestedState
from steppe.control.run_cache import CachedRun, RunCache
from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import Conflict, DamagedFile, RunNotFound
from steppe.records.run_directory import RECORD, RunDirectory, RunInfo, run_paths, runs_root
from steppe.records.store import NO_OWNER
from steppe.records.view import ENDED, RunView
from steppe.training.resume import with_set_hyperparameters

PRIVATE = ".control"  # in the directory of the runs


class RunRepository:
    """Reads runs under `STEPPE_RUNS`. Thread-safe; hold `lock` across a check and the change that depends on it."""

    def __init__(self, only: str | None = None) -> None:
        """With `only`, this is the only run."""
        self.root = runs_root().resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        self.private = self.root / PRIVATE  # directory of the service's own files
        self.database = ControlDatabase(self.private)
        self.lock = threading.RLock()
        self._only = only
        self._cache = RunCache()
        self._entries: dict[str, tuple[RunInfo, RequestedState, models.Run]] = {}

    def close(self) -> None:
        self.database.close()

    def directory(self, run: str) -> RunDirectory:
        """Return the directory of a run; raises RunNotFound."""
        return RunDirectory(self._path(run))

    def cached(self, run: str) -> CachedRun:
        """Return the cached curves and view of a run; raises RunNotFound."""
        return self._cache.of(self._path(run))

    def view(self, run: str) -> AbstractContextManager[RunView]:
        """Return a context manager with the run's current view, which the caller holds exclusively until it exits."""
        return self.cached(run).view()

    def forget(self, run: str) -> None:
        """Drop the cached view of a run."""
        self._cache.forget(run)
        self._entries.pop(run, None)

    def config(self, directory: RunDirectory) -> RunConfig:
        """Return a run's configuration with the hyperparameters that were set since its creation."""
        return with_set_hyperparameters(directory.config(), directory)

    def infos(self) -> list[RunInfo]:
        """Return the info of every run, newest first."""
        found = [self._cache.info(path) for path in run_paths(self.root) if self._is_run(path)]
        return sorted(found, key=lambda info: info.created_s, reverse=True)

    def info(self, directory: RunDirectory) -> RunInfo:
        return self._cache.info(directory.path)

    def entry(self, info: RunInfo, requested: RequestedState) -> models.Run:
        """Return an entry of the run list, with the view of a run that is live or ended without a summary."""
        if not info.damage and (info.summary is None or info.status.live):
            with contextlib.suppress(DamagedFile, RunNotFound), self._cache.of(info.path).view() as view:
                return presenters.present_run(info, view, requested)
        before = self._entries.get(info.path.name)
        if before is None or before[0] is not info or before[1] != requested:  # reuse an unchanged entry
            before = self._entries[info.path.name] = (info, requested, presenters.present_run(info, None, requested))
        return before[2]

    def delete(self, directory: RunDirectory, expected: int | None) -> None:
        """Delete a run that has ended or was never started; raises Conflict if it is live."""
        run = directory.path.name
        with self.lock:
            status = directory.store.status()
            if status.state not in ENDED and status.pid != NO_OWNER:
                raise Conflict(f"{run} is {status.state}: stop it before deleting it")
            directory.acquire()
            try:
                self.database.change(run, None, expected)
                deleted = self.private / f"deleted-{uuid.uuid4().hex}"
                directory.path.rename(deleted)
            finally:
                directory.release()
            self.forget(run)
            self.database.delete_run_records(run)
            shutil.rmtree(deleted, ignore_errors=True)

    def _path(self, run: str) -> Path:
        if self._only is not None and run != self._only:
            raise RunNotFound(f"this service manages the run {self._only} only")
        path = self.root / run
        if not self._is_run(path):
            raise RunNotFound("there is no run with that id")
        return path

    def _is_run(self, path: Path) -> bool:
        """Return whether the path is a run directly under the root, with a safe name and no symbolic link."""
        if self._only is not None and path.name != self._only:
            return False
        named = re.fullmatch(models.RUN_ID, path.name) is not None and path.parent == self.root
        return named and not os.path.islink(path) and os.path.exists(f"{path}/{RECORD}")

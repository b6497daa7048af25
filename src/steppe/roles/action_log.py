"""Log of an actor's actions since a reproducible starting point of its environments.

When an environment raises, the log is saved, so that the fault can be reproduced in another process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import SegmentEnv
from steppe.core.contracts.errors import EnvironmentFault
from steppe.core.contracts.segment import Segment

MAX_ACTION_BYTES = 16 << 20  # limit of the action log of an environment that cannot be snapshotted

SaveFault = Callable[[Tree], dict[str, str]]


class ActionLog:
    """Keep the newest starting point (a segment's packed state, or a reset's seeds, see `begin`) and the actions since.

    With exact snapshots the log restarts at every segment. Otherwise it grows from the seeds up to MAX_ACTION_BYTES,
    and then restarts from a segment's state, if the state can be resumed.
    """

    def __init__(self, actor: int, env: SegmentEnv, save_fault: SaveFault | None) -> None:
        self._actor, self._env, self._save_fault = actor, env, save_fault
        self._origin: Tree = {"after": None}
        self._actions: list[np.ndarray] = []
        self._num_bytes = 0
        self._complete = True

    def begin(self, *, after: int | None) -> None:
        """Restart the log at a reset: with the actor's initial seeds, or with its seeds `after` a segment."""
        self._start({"after": after})

    def resume(self, state: bytes | None) -> None:
        """Restart the log at the packed state that a segment left, to which the environments were restored."""
        self._start({"state": state})

    def forget_origin(self) -> None:
        """Mark the starting point as unknown: the reset was unseeded, or the log grew too long."""
        self._start({"after": None})
        self._complete = False

    def record_segment(self, segment: Segment, *, resumable: bool) -> None:
        """Append a collected segment's actions; `resumable` says whether its state includes an environment snapshot."""
        if self._save_fault is None:
            return
        actions = segment["action"]
        fits = self._num_bytes + actions.nbytes <= MAX_ACTION_BYTES
        if resumable and (not fits or self._env.resume_kind == "exact"):
            self.resume(segment.state)
        elif fits:
            self._actions.append(actions.copy())
            self._num_bytes += actions.nbytes
        else:
            self.forget_origin()

    def attach_to(self, error: EnvironmentFault, actions: np.ndarray | None) -> EnvironmentFault:
        """Save the log and return the fault with the command that reproduces it.

        `actions` are those of the segment in progress. If the log cannot be written, the fault's message says why.
        """
        if self._save_fault is None:
            return error
        try:
            saved = self._save_fault(self._fault_record(error, actions))
        except OSError as reason:
            note = f"the actions that led to it could not be saved: {reason.strerror}"
            return EnvironmentFault(f"{error}; {note}", error.details)
        message = f"{error}; reproduce it with: {saved['reproduce']}"
        return EnvironmentFault(message, {**error.details, **saved})

    def _fault_record(self, error: EnvironmentFault, actions: np.ndarray | None) -> Tree:
        cause = error.__cause__ or error
        rows = [*self._actions, *([] if actions is None else [actions])]
        return {
            "actor": self._actor,
            "origin": self._origin,
            "whole": self._complete,
            "actions": np.concatenate(rows) if rows else None,
            "exception": type(cause).__name__,
            "message": str(error),
            "details": dict(error.details),
        }

    def _start(self, origin: Tree) -> None:
        self._origin, self._actions, self._num_bytes, self._complete = origin, [], 0, True

"""How an actor's world came to where it is: a beginning that can be had again, and every action since.

When an environment raises, this is written down, so that the fault can be seen again in another process.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import SegmentEnv
from steppe.core.contracts.errors import EnvironmentFault
from steppe.core.contracts.segment import Segment

MAX_ACTION_BYTES = 16 << 20  # of actions, where the world cannot be read

SaveFault = Callable[[Tree], dict[str, str]]


class ActionLog:
    """Holds the newest beginning: the packed state after a segment, or the seeds of a reset (see `begin`).

    A world that can be read begins anew with every segment. Another one is followed from its seeds for as long as there is
    room; after that from where it can be resumed, if it can.
    """

    def __init__(self, actor: int, world: SegmentEnv, keep: SaveFault | None) -> None:
        self._actor, self._world, self._keep = actor, world, keep
        self._origin: Tree = {"after": None}
        self._actions: list[np.ndarray] = []
        self._num_bytes = 0
        self._whole = True

    def begin(self, *, after: int | None) -> None:
        """Every environment is reset with the seeds that the actor begins with, or goes on with `after` a segment."""
        self._start({"after": after})

    def resume(self, state: bytes | None) -> None:
        """The world was brought where it was after the segment that left this state."""
        self._start({"state": state})

    def lost(self) -> None:
        """From here on nobody can say how it began: it was reset without seeds, or the way was too long."""
        self._start({"after": None})
        self._whole = False

    def record_segment(self, segment: Segment, *, resumable: bool) -> None:
        """A segment was collected; `resumable` says whether its state holds the world."""
        if self._keep is None:
            return
        actions = segment["action"]
        room = self._num_bytes + actions.nbytes <= MAX_ACTION_BYTES
        if resumable and (not room or self._world.resume_kind == "exact"):
            self.resume(segment.state)
        elif room:
            self._actions.append(actions.copy())
            self._num_bytes += actions.nbytes
        else:
            self.lost()

    def attach_to(self, error: EnvironmentFault, actions: np.ndarray | None) -> EnvironmentFault:
        """The fault with word of where it was written down; `actions` are those of the segment under way."""
        if self._keep is None:
            return error
        try:
            kept = self._keep(self._fault_record(error, actions))
        except OSError as reason:
            note = f"how it came to that could not be written down: {reason.strerror}"
            return EnvironmentFault(f"{error}; {note}", error.details)
        words = f"{error}; reproduce it with: {kept['reproduce']}"
        return EnvironmentFault(words, {**error.details, **kept})

    def _fault_record(self, error: EnvironmentFault, actions: np.ndarray | None) -> Tree:
        cause = error.__cause__ or error
        rows = [*self._actions, *([] if actions is None else [actions])]
        return {
            "actor": self._actor,
            "origin": self._origin,
            "whole": self._whole,
            "actions": np.concatenate(rows) if rows else None,
            "exception": type(cause).__name__,
            "message": str(error),
            "details": dict(error.details),
        }

    def _start(self, origin: Tree) -> None:
        self._origin, self._actions, self._num_bytes, self._whole = origin, [], 0, True

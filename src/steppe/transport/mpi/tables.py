"""A table that the ranks of an MPI world learn together: it lies on the first rank, and messages go by tag.

    tag 5 · worker + what    BEGIN, MERGE, CLAIM, CLAIM_EPISODES → the first rank      ANSWER → the worker's rank

Nothing is done by all ranks at once, so it does not matter who comes to an end when. What is said is in transport/tables/messages.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steppe.transport.mpi.links import Comm, Outbox, Status, import_mpi
from steppe.transport.tables.messages import ANSWER, MessageTable

_KINDS = 5


class MpiTable(MessageTable):
    """A Table over MPI. `ranks` says where each worker is; the first rank keeps the table, and may work itself."""

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        """All ranks of `comm` make theirs at the same time."""
        self._mpi = import_mpi()
        self._comm: Comm = comm.Dup()
        super().__init__(keeps=self._comm.Get_rank() == 0)
        self._ranks = list(ranks)
        self._outbox = Outbox()
        self._status: Status = self._mpi.Status()

    def progress(self) -> None:
        """Take in what came, and let go of what was sent."""
        self._outbox.progress()
        anyone, any_tag = self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        while (message := self._comm.Improbe(anyone, any_tag, self._status)) is not None:
            worker, what = divmod(self._status.Get_tag(), _KINDS)
            data = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            message.Recv(data)
            self._take(worker, what, data)

    @property
    def settled(self) -> bool:
        """Whether nothing is under way from here, and no answer to here."""
        return self._outbox.empty and self._answered

    def close(self) -> None:
        """Together with the other ranks, when nothing is under way."""
        self._comm.Free()

    def _post(self, worker: int, what: int, data: np.ndarray) -> None:
        to = self._ranks[worker] if what == ANSWER else 0
        self._outbox.keep(self._comm.Isend(data, to, worker * _KINDS + what), data)

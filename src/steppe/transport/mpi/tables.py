"""A table that MPI ranks share: the first rank holds it, and workers send it messages.

    tag 5 · worker + kind    BEGIN, MERGE, CLAIM, CLAIM_EPISODES → the first rank      REPLY → the worker's rank

There are no collective operations besides creating and closing, so the order in which ranks finish does not matter. The
messages are described in transport/tables/messages.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steppe.transport.mpi.links import Comm, Outbox, Status, import_mpi
from steppe.transport.tables.messages import REPLY, MessageTable

_KINDS = 5


class MpiTable(MessageTable):
    """A SharedTable over MPI. `ranks` has each worker's rank; the first rank owns the table, and may run a worker."""

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        """Collective: all ranks of `comm` create their table together."""
        self._mpi = import_mpi()
        self._comm: Comm = comm.Dup()
        super().__init__(owns_table=self._comm.Get_rank() == 0)
        self._ranks = list(ranks)
        self._outbox = Outbox()
        self._status: Status = self._mpi.Status()

    def progress(self) -> None:
        """Receive what arrived, and drop completed sends."""
        self._outbox.progress()
        any_source, any_tag = self._mpi.ANY_SOURCE, self._mpi.ANY_TAG
        while (message := self._comm.Improbe(any_source, any_tag, self._status)) is not None:
            worker, kind = divmod(self._status.Get_tag(), _KINDS)
            data = np.empty(self._status.Get_count(self._mpi.BYTE), np.uint8)
            message.Recv(data)
            self._handle(worker, kind, data)

    @property
    def settled(self) -> bool:
        """Whether no message from here and no reply to here is in flight."""
        return self._outbox.empty and self._all_replied

    def close(self) -> None:
        """Free the communicator; collective, when nothing is in flight."""
        self._comm.Free()

    def _post(self, worker: int, kind: int, data: np.ndarray) -> None:
        destination = self._ranks[worker] if kind == REPLY else 0
        self._outbox.keep(self._comm.Isend(data, destination, worker * _KINDS + kind), data)

"""The replay role: one shard of the learner's replay in its own process, if one process has too little memory.

It saves its shard itself at every checkpoint of the learner. If it dies, the run resumes from there.
"""

from __future__ import annotations

from typing import Protocol

from steppe.core.contracts.transport import RpcServer
from steppe.core.io.codec import Buffer
from steppe.roles.context import Context

TAKE_S = 0.05  # how long a step waits for a request


class RequestHandler(Protocol):
    """Handles one encoded request and returns the encoded reply."""

    def answer(self, question: Buffer) -> bytes: ...


class ReplayServer:
    """Serve the learner's requests until asked to end."""

    def __init__(self, shelf: RequestHandler, desk: RpcServer, context: Context) -> None:
        self.name, self.done = context.name, False
        self._shelf, self._rpc_server, self._context = shelf, desk, context

    def step(self) -> bool:
        """Serve one request. This role ends after the learner, whose last checkpoint needs it."""
        question = self._rpc_server.take(TAKE_S)
        if question is None:
            self.done = self._context.ending
            return False
        self._rpc_server.reply(self._shelf.answer(question))
        return True

    def close(self) -> None:
        """Do nothing: the learner has already requested the last checkpoint."""

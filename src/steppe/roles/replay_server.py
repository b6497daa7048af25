"""The replay role: one shard of the learner's replay in its own process, if one process has too little memory.

It saves its shard itself at every checkpoint of the learner. If it dies, the run resumes from there.
"""

from __future__ import annotations

from typing import Protocol

from steppe.core.contracts.transport import RpcServer
from steppe.core.io.codec import Buffer
from steppe.roles.context import Context

REQUEST_TIMEOUT_S = 0.05  # how long a step waits for a request


class RequestHandler(Protocol):
    """Handles one encoded request and returns the encoded reply."""

    def handle(self, request: Buffer) -> bytes: ...


class ReplayServer:
    """Serve the learner's requests until asked to end."""

    def __init__(self, handler: RequestHandler, rpc_server: RpcServer, context: Context) -> None:
        self.name, self.done = context.name, False
        self._handler, self._rpc_server, self._context = handler, rpc_server, context

    def step(self) -> bool:
        """Serve one request. This role ends after the learner, whose last checkpoint needs it."""
        request = self._rpc_server.take(REQUEST_TIMEOUT_S)
        if request is None:
            self.done = self._context.ending
            return False
        self._rpc_server.reply(self._handler.handle(request))
        return True

    def close(self) -> None:
        """Do nothing: the learner has already requested the last checkpoint."""

"""A replay role: one buffer of the learner's replay in a place of its own, where one place's memory is not enough.

What it holds is written down with every checkpoint of the learner's, by itself; when it dies, the run resumes from there.
"""

from __future__ import annotations

from typing import Protocol

from steppe.core.contracts.transport import RpcServer
from steppe.core.io.codec import Buffer
from steppe.roles.context import Context

TAKE_S = 0.05  # how long a step waits for a question


class RequestHandler(Protocol):
    """What does what it is asked in messages."""

    def answer(self, question: Buffer) -> bytes: ...


class ReplayServer:
    """Answers the learner until it is told to end."""

    def __init__(self, shelf: RequestHandler, desk: RpcServer, context: Context) -> None:
        self.name, self.done = context.name, False
        self._shelf, self._rpc_server, self._context = shelf, desk, context

    def step(self) -> bool:
        """Answer one question. The end comes after the learner's: its last checkpoint needs this role."""
        question = self._rpc_server.take(TAKE_S)
        if question is None:
            self.done = self._context.ending
            return False
        self._rpc_server.reply(self._shelf.answer(question))
        return True

    def close(self) -> None:
        """There is nothing to write down: the learner asked for that."""

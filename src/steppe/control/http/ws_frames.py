"""WebSocket frames that are made once and go to many clients: what a server says is not masked, so it is the same for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request

FRAMES = "steppe.frames"  # the extension of a WebSocket's scope that is its FrameSocket


def text_frame(text: bytes) -> bytes:
    """A text of UTF-8 as it goes over the wire to a client that agreed on no compression."""
    return Frame(Opcode.TEXT, text).serialize(mask=False)


class FrameSocket(WebSocketsSansIOProtocol):
    """uvicorn's side of a WebSocket, which the application finds in the scope and may hand whole frames."""

    when_ready: Callable[[], None] | None = None  # called when the client has taken what it was told

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # it was not refused
            cast(dict[str, Any], self.scope["extensions"])[FRAMES] = self

    @property
    def ready(self) -> bool:
        """Whether the client takes more."""
        return self.writable.is_set() and not (self.close_sent or self.transport.is_closing())

    def write_frame(self, frame: bytes) -> None:
        """Say it behind what was said before; only while `ready`."""
        self.transport.write(frame)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.when_ready is not None:
            self.when_ready()

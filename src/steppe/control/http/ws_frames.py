"""WebSocket frames that are built once and sent to many clients: server frames are unmasked, so they are identical."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Request

FRAMES = "steppe.frames"  # key of the FrameSocket in the extensions of a WebSocket's scope


def text_frame(text: bytes) -> bytes:
    """Return UTF-8 text as a frame for a client without compression."""
    return Frame(Opcode.TEXT, text).serialize(mask=False)


class FrameSocket(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, which the application finds in the scope and can write whole frames to."""

    when_ready: Callable[[], None] | None = None  # called when the client can take more data

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # the connection was not refused
            cast(dict[str, Any], self.scope["extensions"])[FRAMES] = self

    @property
    def ready(self) -> bool:
        """Whether the client can take more data."""
        return self.writable.is_set() and not (self.close_sent or self.transport.is_closing())

    def write_frame(self, frame: bytes) -> None:
        """Write a frame after the earlier ones; call only while `ready`."""
        self.transport.write(frame)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.when_ready is not None:
            self.when_ready()

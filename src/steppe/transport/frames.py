"""A segment or weights as one flat buffer: eight words, then the arrays. What messages of MPI and objects of Ray hold.

Nothing is pickled and nothing is encoded: the arrays are filled where they will be sent from.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from steppe.core.contracts.errors import DamagedFile
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.contracts.weights import Weights, WeightsLayout
from steppe.core.io.codec import validate_layout

HEADER_BYTES = 64  # bytes before the arrays: eight words
_ALIGN = 64


class SegmentFrame:
    """The memory of one segment: eight words, then the columns.

    words: the writer's slot, epoch, sequence, version, started_s (a float), schema, bytes of state (-1: none), ticket
    """

    SLOT, EPOCH, SEQUENCE, VERSION, STARTED, SCHEMA, STATE, SEND_NUMBER = range(8)

    def __init__(self, spec: SegmentSpec, slot: int) -> None:
        self.buffer = np.zeros(HEADER_BYTES + spec.nbytes, np.uint8)
        self.words = self.buffer[:HEADER_BYTES].view(np.int64)
        self._floats = self.buffer[:HEADER_BYTES].view(np.float64)
        self.segment = Segment(spec, spec.columns(self.buffer[HEADER_BYTES:]), slot=slot)

    def write(self, slot: int, header: SegmentHeader, state: bytes | None, ticket: int = 0) -> None:
        """Set the words; `ticket` is the transport's own."""
        size = -1 if state is None else len(state)
        self.words[:] = (slot, header.epoch, header.sequence, header.version, 0, header.schema, size, ticket)
        self._floats[self.STARTED] = header.started_s

    @property
    def state_bytes(self) -> int:
        """Of the state that belongs to the segment; negative where there is none."""
        return int(self.words[self.STATE])

    def read(self, run: str, actor: int, state: bytes | None) -> Segment:
        """The segment in this memory, as its reader holds it."""
        _, epoch, sequence, version, _, schema = self.words[:6].tolist()
        started_s = float(self._floats[self.STARTED])
        self.segment.header = SegmentHeader(run, actor, epoch, sequence, version, started_s, schema)
        self.segment.state = state
        return self.segment


class WeightsFrame:
    """Weights: eight words, policy and layout as JSON, the buffer.

    words: bytes of JSON, version, updates, env_steps, episodes, train_s (a float), unused, unused
    """

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.words = data[:HEADER_BYTES].view(np.int64)
        self.floats = data[:HEADER_BYTES].view(np.float64)
        self.pending_sends = 0  # sends under way

    @classmethod
    def blank(cls, policy: str, weights: Weights) -> WeightsFrame:
        """One for weights of this layout."""
        rows = [(entry.name, entry.shape, entry.dtype, entry.offset) for entry in weights.layout.entries]
        about = msgspec.json.encode((policy, rows))
        letter = cls(np.zeros(_start(len(about)) + weights.buffer.nbytes, np.uint8))
        letter.words[0] = len(about)
        letter.data[HEADER_BYTES : HEADER_BYTES + len(about)] = np.frombuffer(about, np.uint8)
        return letter

    @property
    def about(self) -> bytes:
        return self.data[HEADER_BYTES : HEADER_BYTES + int(self.words[0])].tobytes()

    @property
    def buffer(self) -> np.ndarray:
        return self.data[_start(int(self.words[0])) :]

    @property
    def version(self) -> int:
        return int(self.words[1])

    def write(self, weights: Weights) -> None:
        self.words[1:5] = (weights.version, weights.updates, weights.env_steps, weights.episodes)
        self.floats[5] = weights.train_s
        np.copyto(self.buffer, weights.buffer)

    def read(self, layout: WeightsLayout) -> Weights:
        """The weights in a buffer of their own."""
        version, updates, env_steps, episodes = self.words[1:5].tolist()
        return Weights(layout, self.buffer.copy(), version, updates, env_steps, episodes, float(self.floats[5]))


def decode_weights_metadata(about: bytes, nbytes: int) -> tuple[str, WeightsLayout]:
    """The policy and the layout that a letter with a buffer of `nbytes` says it has."""
    try:
        policy, rows = msgspec.json.decode(about, type=tuple[str, list[Any]])
        return policy, validate_layout(rows, nbytes)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise DamagedFile(f"a message with weights is damaged: {error}") from None


def _start(about: int) -> int:
    return -(-(HEADER_BYTES + about) // _ALIGN) * _ALIGN

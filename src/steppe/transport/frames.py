"""Segments and weights as one flat buffer each: eight 64-bit words, then the arrays. MPI and Ray messages carry these.

Nothing is pickled or encoded: the arrays are filled in the memory that they are sent from.
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

HEADER_BYTES = 64  # size of the header: eight words
_ALIGN = 64


class SegmentFrame:
    """The memory of one segment: eight words, then the columns.

    words: the writer's slot, epoch, sequence, version, started_s (a float), schema, bytes of state (-1: none), send
    number
    """

    SLOT, EPOCH, SEQUENCE, VERSION, STARTED, SCHEMA, STATE, SEND_NUMBER = range(8)

    def __init__(self, spec: SegmentSpec, slot: int) -> None:
        self.buffer = np.zeros(HEADER_BYTES + spec.nbytes, np.uint8)
        self.words = self.buffer[:HEADER_BYTES].view(np.int64)
        self._floats = self.buffer[:HEADER_BYTES].view(np.float64)
        self.segment = Segment(spec, spec.columns(self.buffer[HEADER_BYTES:]), slot=slot)

    def write(self, slot: int, header: SegmentHeader, state: bytes | None, send_number: int = 0) -> None:
        """Write the header words; the transport chooses `send_number`."""
        size = -1 if state is None else len(state)
        self.words[:] = (slot, header.epoch, header.sequence, header.version, 0, header.schema, size, send_number)
        self._floats[self.STARTED] = header.started_s

    @property
    def state_bytes(self) -> int:
        """Size of the state that belongs to the segment; negative if it has none."""
        return int(self.words[self.STATE])

    def read(self, run: str, actor: int, state: bytes | None) -> Segment:
        """Return the segment in this memory with its header and state set; it is not a copy."""
        _, epoch, sequence, version, _, schema = self.words[:6].tolist()
        started_s = float(self._floats[self.STARTED])
        self.segment.header = SegmentHeader(run, actor, epoch, sequence, version, started_s, schema)
        self.segment.state = state
        return self.segment


class WeightsFrame:
    """The memory of one version of weights: eight words, policy and layout as JSON, the buffer.

    words: bytes of JSON, version, updates, env_steps, episodes, train_s (a float), unused, unused
    """

    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.words = data[:HEADER_BYTES].view(np.int64)
        self.floats = data[:HEADER_BYTES].view(np.float64)
        self.pending_sends = 0  # sends in flight

    @classmethod
    def blank(cls, policy: str, weights: Weights) -> WeightsFrame:
        """Return a frame that fits weights of this layout, with policy and layout written."""
        rows = [(entry.name, entry.shape, entry.dtype, entry.offset) for entry in weights.layout.entries]
        metadata = msgspec.json.encode((policy, rows))
        frame = cls(np.zeros(_start(len(metadata)) + weights.buffer.nbytes, np.uint8))
        frame.words[0] = len(metadata)
        frame.data[HEADER_BYTES : HEADER_BYTES + len(metadata)] = np.frombuffer(metadata, np.uint8)
        return frame

    @property
    def metadata(self) -> bytes:
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
        """Return the weights, copied into their own buffer."""
        version, updates, env_steps, episodes = self.words[1:5].tolist()
        return Weights(layout, self.buffer.copy(), version, updates, env_steps, episodes, float(self.floats[5]))


def decode_weights_metadata(metadata: bytes, nbytes: int) -> tuple[str, WeightsLayout]:
    """Return policy and layout of a frame whose buffer has `nbytes`. DamagedFile if they are invalid or do not fit."""
    try:
        policy, rows = msgspec.json.decode(metadata, type=tuple[str, list[Any]])
        return policy, validate_layout(rows, nbytes)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise DamagedFile(f"a message with weights is damaged: {error}") from None


def _start(metadata: int) -> int:
    return -(-(HEADER_BYTES + metadata) // _ALIGN) * _ALIGN

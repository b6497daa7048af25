"""What a learner on Ray does with answers that are no segments of its run; no cluster is needed for that."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from steppe.core.contracts.segment import SegmentHeader
from steppe.core.contracts.transport import ValidatingChannel
from steppe.testing.channel import SPEC
from steppe.transport.frames import HEADER_BYTES, SegmentFrame
from steppe.transport.ray.links import RayReader

pytestmark = [pytest.mark.unit, pytest.mark.regression]


class Writer:
    """An actor whose answers the test gives, in any order; `calls` are the slots that it got back."""

    def __init__(self):
        self.calls, self.waiting = [], []

    def take(self, released):
        self.calls.append(released)
        self.waiting.append(Future())
        return SimpleNamespace(future=lambda answer=self.waiting[-1]: answer)

    def answer(self, data):
        self.waiting.pop(0).set_result(data)


def message(sequence, slot=0, state=b"s"):
    frame = SegmentFrame(SPEC, slot)
    frame.buffer[HEADER_BYTES:] = 1
    frame.write(slot, SegmentHeader("run", 0, 0, sequence, 3, 0.5), state, send_number=sequence)
    return np.concatenate([frame.buffer, np.frombuffer(state, np.uint8)])


@pytest.fixture
def channel():
    return RayReader(SPEC, "run", 1, 2, lambda: None)


@pytest.fixture
def writer(channel):
    made = Writer()
    channel.attach(0, made.take)
    return made


@pytest.mark.parametrize("cut", [slice(None, -1), slice(None, 200), slice(None, HEADER_BYTES)])
def test_a_segment_of_the_wrong_size_is_emptied_and_counted_and_its_round_goes_on(channel, writer, cut):
    writer.answer(message(0)[cut])
    writer.answer(message(1, slot=1))
    empty = channel.poll()
    assert (empty.header.sequence, empty.header.version, empty.state) == (0, 3, None)
    assert not empty["valid"].any()
    channel.release(empty)
    assert writer.calls == [-1, -1, 0], "its slot is the writer's again"
    sound = channel.poll()
    assert (sound.header.sequence, sound.state) == (1, b"s")
    assert sound["valid"].all()
    assert isinstance(channel, ValidatingChannel)
    assert channel.dropped == {"rejected": 1}


def wrong_head(word, value):
    data = message(0)
    data[:HEADER_BYTES].view(np.int64)[word] = value
    return data[:-1]


@pytest.mark.parametrize(
    "data",
    [
        np.ones(1, np.uint8),
        wrong_head(SegmentFrame.SLOT, 2),
        wrong_head(SegmentFrame.SLOT, -1),
        wrong_head(SegmentFrame.SEND_NUMBER, 2**62),
    ],
)
def test_what_says_nothing_of_itself_is_counted_and_passed_over(channel, writer, data):
    writer.answer(data)
    assert writer.calls == [-1, -1, -1], "the writer is asked again"
    writer.answer(message(0))
    assert channel.poll().header.sequence == 0
    assert channel.dropped == {"rejected": 1}

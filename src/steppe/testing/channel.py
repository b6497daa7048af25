"""Conformance suite for Channel, to inherit; contents are compared with independent copies.

class TestMine(ChannelConformance):
    @contextmanager
    def make(self, num_actors, slots_per_actor): yield MyChannel(self.spec, self.run, num_actors, slots_per_actor)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.contracts.transport import Channel
from steppe.core.system.timing import RunClock
from steppe.roles.context import RUN, Context
from steppe.roles.learner import Learner, RunLimits
from steppe.roles.scheduling import RoundBatchPolicy
from steppe.transport.local import LocalBoard, LocalWeights

SPEC = SegmentSpec(
    num_steps=4,
    num_envs=3,
    obs=FieldSpec("obs", (5,), "float32"),
    action=FieldSpec("action", (), "int64", below=(2,)),  # `fill` exceeds this bound
    extras=(FieldSpec("logp", (), "float32"), FieldSpec("hidden", (2, 7), "float64")),
)
Columns = dict[str, np.ndarray]


class ChannelConformance:
    """Inherit and implement `make`; also `beside`, if each process opens the channel separately."""

    spec = SPEC
    run = "conformance"
    random_steps = 600  # of the test of random operations; fewer where each takes long

    def make(self, num_actors: int, slots_per_actor: int) -> AbstractContextManager[Channel]:
        """Return a new channel for segments of `spec` in the run named `run`, as opened by the reader."""
        raise NotImplementedError

    def beside(self, channel: Channel) -> Channel:
        """Return the same channel as opened by a writer."""
        return channel

    def test_a_new_channel_is_empty(self) -> None:
        with self.make(2, 1) as channel:
            assert channel.poll() is None

    def test_what_is_offered_arrives_whole_and_once(self) -> None:
        with self.make(1, 2) as reader:
            writer = self.beside(reader)
            for sequence in range(5):
                expected = send(writer, self.run, 0, sequence)
                segment = reader.poll()
                require_equal(segment, expected, header(self.run, 0, sequence))
                assert reader.poll() is None, "the same segment came twice"
                assert segment is not None
                reader.release(segment)
                assert reader.poll() is None, "a released segment came again"

    def test_a_header_arrives_as_it_was(self) -> None:
        with self.make(3, 1) as reader:
            writer = self.beside(reader)
            given = SegmentHeader(self.run, 2, epoch=3, sequence=2**40, version=2**33 + 1, started_s=1.25e9 + 1 / 3)
            send(writer, self.run, 2, 0, given)
            segment = reader.poll()
            assert segment is not None
            assert segment.header == given

    def test_one_writers_segments_come_in_order(self) -> None:
        with self.make(1, 3) as reader:
            writer = self.beside(reader)
            sent = deque(send(writer, self.run, 0, sequence) for sequence in range(3))
            for sequence in range(3, 12):  # the channel may reuse slots in any order
                self._receive(reader, sent.popleft(), 0, sequence - 3)
                sent.append(send(writer, self.run, 0, sequence))
            for sequence in range(9, 12):
                self._receive(reader, sent.popleft(), 0, sequence)

    def test_a_full_share_holds_back_its_writer_alone(self) -> None:
        with self.make(2, 2) as reader:
            one, other = self.beside(reader), self.beside(reader)
            sent = [send(one, self.run, 0, sequence) for sequence in range(2)]
            assert one.blank(0) is None, "more segments than slots_per_actor"
            assert other.blank(1) is not None, "one writer crowded out another"
            segment = reader.poll()
            require_equal(segment, sent[0], header(self.run, 0, 0))
            assert one.blank(0) is None, "a segment was given back while it was being read"
            assert segment is not None
            reader.release(segment)
            send(one, self.run, 0, 2)
            assert one.blank(0) is None, "one release made room for two"

    def test_a_blank_stays_the_same_until_it_is_offered(self) -> None:
        with self.make(1, 2) as reader:
            writer = self.beside(reader)
            send(writer, self.run, 0, 0)
            blank = writer.blank(0)
            assert blank is not None
            expected = fill(blank, 0, 1)
            first = reader.poll()
            assert first is not None
            reader.release(first)  # another slot is free now, and the channel may prefer it
            again = writer.blank(0)
            assert again is not None
            require_equal(again, expected, None)
            assert np.shares_memory(again["obs"], blank["obs"])

    def test_what_is_being_read_is_left_alone(self) -> None:
        with self.make(2, 2) as reader:
            writer = self.beside(reader)
            expected = send(writer, self.run, 0, 0)
            held = reader.poll()
            send(writer, self.run, 0, 1)
            send(writer, self.run, 1, 0)
            send(writer, self.run, 1, 1)
            reader.poll()
            require_equal(held, expected, header(self.run, 0, 0))

    def test_released_in_any_order(self) -> None:
        with self.make(1, 3) as reader:
            writer = self.beside(reader)
            sent = [send(writer, self.run, 0, sequence) for sequence in range(3)]
            held = [reader.poll() for _ in range(3)]
            for sequence in (1, 2, 0):
                segment = held[sequence]
                require_equal(segment, sent[sequence], header(self.run, 0, sequence))
                assert segment is not None
                reader.release(segment)
            fresh = [send(writer, self.run, 0, sequence) for sequence in range(3, 6)]
            for sequence, expected in enumerate(fresh, start=3):
                self._receive(reader, expected, 0, sequence)

    def test_a_state_travels_with_its_segment(self) -> None:
        with self.make(2, 2) as reader:
            writer = self.beside(reader)
            states: list[bytes | None] = [b"first", None, b"third" * 1000, b""]
            for sequence, state in enumerate(states):
                send(writer, self.run, 1, sequence, state=state)
                segment = reader.poll()
                assert segment is not None
                assert segment.state == state
                reader.release(segment)

    def test_the_last_offer_is_recalled(self) -> None:
        """A dead writer's replacement recalls it, whether the segment is pending, being read or released."""
        with self.make(2, 2) as reader:
            assert self.beside(reader).recall(0) is None
            for sequence in range(5):
                send(self.beside(reader), self.run, 0, sequence, state=f"after {sequence}".encode())
                expected = (sequence, f"after {sequence}".encode())
                assert self.beside(reader).recall(0) == expected
                segment = reader.poll()
                assert self.beside(reader).recall(0) == expected
                assert segment is not None
                reader.release(segment)
                assert self.beside(reader).recall(0) == expected
            assert self.beside(reader).recall(1) is None

    def test_a_blank_that_was_never_offered_is_not_recalled(self) -> None:
        with self.make(1, 2) as reader:
            writer = self.beside(reader)
            send(writer, self.run, 0, 0, state=b"whole")
            blank = writer.blank(0)
            assert blank is not None
            fill(blank, 0, 1)
            blank.state = b"half"
            assert self.beside(reader).recall(0) == (0, b"whole")

    def test_a_resumed_run_begins_where_it_was(self) -> None:
        with self.make(2, 1) as reader:
            reader.prime(1, 41, b"as it was")
            writer = self.beside(reader)
            assert writer.recall(1) == (41, b"as it was")
            assert writer.recall(0) is None
            assert reader.poll() is None, "what was learned from already came again"
            expected = send(writer, self.run, 1, 42, state=b"as it is")
            require_equal(reader.poll(), expected, header(self.run, 1, 42))
            assert writer.recall(1) == (42, b"as it is")

    def test_a_random_life_of_several_writers(self) -> None:
        """Blank, offer, poll and release in random order, compared with a model of plain queues."""
        num_actors, slots = 3, 2
        stream = np.random.default_rng(5)
        with self.make(num_actors, slots) as reader:
            writers = [self.beside(reader) for _ in range(num_actors)]
            interleaving = _ChannelModel(self.run, num_actors)
            for _ in range(self.random_steps):
                actor = int(stream.integers(num_actors))
                if stream.random() < 0.5:
                    interleaving.write(writers[actor], actor, slots)
                elif stream.random() < 0.5 and interleaving.held:
                    reader.release(interleaving.held.pop(int(stream.integers(len(interleaving.held))))[0])
                else:
                    interleaving.read(reader)
            assert min(interleaving.sequences) > self.random_steps // 60

    def test_a_segment_out_of_range_is_refused_and_counted(self) -> None:
        with self.make(1, 2) as reader:
            writer, received = self.beside(reader), _RecordingParts()
            learner = received.learner(reader)
            for sequence, action in enumerate((1, 10**8, -5, 2, 0)):
                segment = writer.blank(0)
                assert segment is not None
                fill(segment, 0, sequence)
                segment["valid"][...] = True
                segment["action"][1, 2] = action
                segment["action"][...] = np.where(segment["action"] == action, action, 0)
                segment.header = header(self.run, 0, sequence)
                assert writer.offer(segment)
                assert learner.receive(), "a round ends although its segment was refused"
            assert learner.batch_policy.tracker.dropped == {"refused": 3}
            assert received.valid == [12, 0, 0, 0, 12], "of a refused segment nothing is remembered"

    def _receive(self, reader: Channel, expected: Columns, actor: int, sequence: int) -> None:
        segment = reader.poll()
        require_equal(segment, expected, header(self.run, actor, sequence))
        assert segment is not None
        reader.release(segment)


class _RecordingParts:
    """Stand-in for agent and memory: records how many rows of each segment are valid."""

    def __init__(self) -> None:
        self.valid: list[int] = []

    def learner(self, channel: Channel) -> Learner:
        """Return a learner that reads from a channel and learns nothing."""
        context = Context("run", "learner", channel, LocalWeights(), LocalBoard(), lambda: RUN, RunClock())
        parts: Any = self
        return Learner(parts, parts, RoundBatchPolicy(channel, 1), RunLimits(), lambda *_: None, context)

    def observe(self, segment: Segment, progress: Progress) -> None:
        assert (segment["action"] >= 0).all()
        assert (segment["action"] < 2).all()

    def add(self, segments: Sequence[Segment]) -> None:
        self.valid += [segment.num_valid for segment in segments]


class _ChannelModel:
    """Expected contents of a channel, in plain queues."""

    def __init__(self, run: str, num_actors: int) -> None:
        self.run = run
        self.sequences = [0] * num_actors
        self.sent: list[deque[Columns]] = [deque() for _ in range(num_actors)]
        self.held: list[tuple[Segment, int]] = []  # held by the reader, with the actor of each

    def write(self, writer: Channel, actor: int, slots: int) -> None:
        used = len(self.sent[actor]) + sum(whose == actor for _, whose in self.held)
        if used == slots:
            assert writer.blank(actor) is None
            return
        self.sent[actor].append(send(writer, self.run, actor, self.sequences[actor]))
        self.sequences[actor] += 1

    def read(self, reader: Channel) -> None:
        segment = reader.poll()
        if segment is None:
            assert not any(self.sent), "segments are waiting, but nothing was polled"
            return
        assert segment.header is not None
        actor = segment.header.actor
        sequence = self.sequences[actor] - len(self.sent[actor])
        require_equal(segment, self.sent[actor].popleft(), header(self.run, actor, sequence))
        self.held.append((segment, actor))


def header(run: str, actor: int, sequence: int) -> SegmentHeader:
    """Return the header that `send` uses."""
    return SegmentHeader(run, actor, epoch=1, sequence=sequence, version=sequence // 2, started_s=sequence + 0.5)


def fill(segment: Segment, actor: int, sequence: int) -> Columns:
    """Fill a segment with random contents unique to this actor and sequence number; return an independent copy."""
    stream = np.random.default_rng([actor, sequence])
    contents = {}
    for name, column in segment.columns.items():
        values = (
            stream.random(column.shape) < 0.5 if column.dtype == np.bool_ else 1e6 * stream.normal(size=column.shape)
        )
        contents[name] = values.astype(column.dtype)
        column[...] = contents[name]
    return contents


def send(
    writer: Channel,
    run: str,
    actor: int,
    sequence: int,
    given: SegmentHeader | None = None,
    *,
    state: bytes | None = None,
) -> Columns:
    """Fill a blank segment and offer it; return its contents as an independent copy."""
    segment = writer.blank(actor)
    assert segment is not None, f"no blank for actor {actor}, whose share is not full"
    contents = fill(segment, actor, sequence)
    segment.header = given or header(run, actor, sequence)
    segment.state = state
    assert writer.offer(segment), "a segment that came from `blank` was refused"
    return contents


def require_equal(segment: Segment | None, expected: Columns, head: SegmentHeader | None) -> None:
    """Check that there is a segment with these contents and, unless None, this header."""
    assert segment is not None, "nothing was polled"
    assert segment.columns.keys() == expected.keys()
    for name, values in expected.items():
        sent_rows = segment.cut if name == "final_obs" else ...  # meaningless elsewhere, and need not be sent
        np.testing.assert_array_equal(segment[name][sent_rows], values[sent_rows], err_msg=name)
        assert segment[name].dtype == values.dtype
    if head is not None:
        assert segment.header == head

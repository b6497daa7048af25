"""Rollouts: segments side by side, nothing read that means nothing."""

import mmap

import numpy as np
import pytest

from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.replay import RolloutBuffer
from steppe.testing.memory import SPEC, ScriptedActor

pytestmark = pytest.mark.unit


def segments(count, seed=0):
    return [ScriptedActor(SPEC, actor, seed).segment(version=10 + actor) for actor in range(count)]


def test_segments_are_joined_along_b_in_the_order_given():
    rollout = RolloutBuffer(SPEC)
    one, two, three = segments(3)
    rollout.add([two, one, three])
    batch = rollout.sample()
    assert batch.versions == (11, 10, 12)
    assert batch.weights is None
    assert batch["obs"].shape == (6, 9, 4)
    assert batch["reward"].shape == (5, 9)
    for place, segment in enumerate((two, one, three)):
        for name, column in segment.columns.items():
            own = batch[name][:, 3 * place : 3 * place + 3]
            if name == "final_obs":
                own, column = own[segment.cut], column[segment.cut]
            np.testing.assert_array_equal(own, column)


def test_columns_are_contiguous_at_any_offset():
    rollout = RolloutBuffer(SPEC)
    for count in (1, 4, 2, 5, 1):
        rollout.add(segments(count))
        batch = rollout.sample()
        assert all(column.flags.c_contiguous for column in batch.columns.values())
        assert batch["obs"].shape[1] == 3 * count
        rollout.update(batch, Learned(1))


def test_memory_is_reused_when_it_is_large_enough():
    rollout = RolloutBuffer(SPEC)
    addresses = []
    for count in (3, 1, 3):
        rollout.add(segments(count))
        addresses.append({name: column.ctypes.data for name, column in rollout.sample().columns.items()})
        rollout.update(rollout.sample(), Learned(1))
    assert addresses[0] == addresses[1] == addresses[2]


def test_learned_from_once():
    rollout = RolloutBuffer(SPEC)
    rollout.add(segments(1))
    assert rollout.ready()
    assert not rollout.wants_data()
    batch = rollout.sample()
    assert rollout.sample() is batch
    rollout.update(batch, Learned(1))
    assert rollout.wants_data()
    with pytest.raises(UsageError, match="add segments first"):
        rollout.sample()


def test_an_intake_that_was_not_learned_from_is_not_overwritten():
    rollout = RolloutBuffer(SPEC)
    rollout.add(segments(1))
    with pytest.raises(UsageError, match="after the last ones were learned from"):
        rollout.add(segments(1, seed=1))


def test_statistics_leave_autoreset_steps_out():
    rollout = RolloutBuffer(SPEC)
    actor = ScriptedActor(SPEC, seed=3, next_step=True)
    rollout.add([actor.segment()])
    assert rollout.stats() == {"size": float(len(actor.steps))}
    assert len(actor.steps) < 15


def test_invalid_input_is_refused():
    other = SegmentSpec(4, 3, SPEC.obs, SPEC.action)
    with pytest.raises(UsageError, match="does not fit"):
        RolloutBuffer(SPEC).add([ScriptedActor(other).segment()])
    with pytest.raises(UsageError, match="header"):
        RolloutBuffer(SPEC).add([Segment.blank(SPEC)])


def resident_pages(array):
    """How many pages of an array's own mapping are in memory, from the kernel's account of this process."""
    start, found = array.ctypes.data, 0
    with open("/proc/self/pagemap", "rb") as table:
        for address in range(start - start % mmap.PAGESIZE + mmap.PAGESIZE, start + array.nbytes, mmap.PAGESIZE):
            table.seek(address // mmap.PAGESIZE * 8)
            found += int.from_bytes(table.read(8), "little") >> 63
    return found


def test_rows_of_final_obs_that_mean_nothing_are_neither_read_nor_written():
    spec = SegmentSpec(16, 4, FieldSpec("obs", (4, 64, 64), "uint8"), FieldSpec("action", (), "int64"))
    rollout = RolloutBuffer(spec)
    header = SegmentHeader("r", 0, 0, 0, 0)
    blank = Segment.blank(spec)
    blank.header = header
    rollout.add([blank])
    rollout.sample()["final_obs"][...] = 3
    rollout.update(rollout.sample(), Learned(1))
    segment = Segment(spec, spec.columns(memoryview(mmap.mmap(-1, spec.nbytes))), header)
    segment["truncated"][5, 2] = segment["terminated"][9, 0] = True
    segment["final_obs"][5, 2] = 7
    segment["final_obs"][9, 0] = 9
    rollout.add([segment])
    pages = segment["final_obs"].nbytes // mmap.PAGESIZE
    assert resident_pages(segment["final_obs"]) <= 2 * (pages // 64 + 1)
    final = rollout.sample()["final_obs"]
    assert (final[5, 2] == 7).all()
    assert (final[9, 0] == 9).all()
    assert np.count_nonzero(final == 3) == final.size * 62 // 64

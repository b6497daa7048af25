"""Stacks of frames: stored once per frame, given back byte for byte."""

import numpy as np
import pytest

from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import UsageError
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferPool, ReplayMemory, SamplingConfig
from steppe.replay.store.columns import bytes_per_row
from steppe.replay.store.frames import FrameStore
from steppe.replay.store.store import ReplayStore
from tests.support.replay_model import EPISODE, images

pytestmark = pytest.mark.unit

KEYS = ["obs", "next_obs", "number"]


def block(numbers):
    stacks = [images(number) for number in numbers]
    return {
        "obs": np.stack([one for one, _ in stacks]),
        "next_obs": np.stack([two for _, two in stacks]),
        "number": np.array(numbers),
    }


def require_own_images(batch):
    for row, number in enumerate(batch["number"].tolist()):
        np.testing.assert_array_equal(batch["obs"][row], images(number)[0])
        np.testing.assert_array_equal(batch["next_obs"][row], images(number)[1])


@pytest.mark.parametrize("envs", [1, 3])
def test_stacks_come_back_whatever_the_order_of_environments(envs):
    buffer = ReplayBuffer(200, KEYS, frame_stack=4, seed=0)
    for time in range(0, 300):  # environments take turns, each in an episode of its own
        buffer.add_batch(block([env * 7000 + time for env in range(envs)]))
        if len(buffer) >= 20 and time % 10 == 0:
            require_own_images(buffer.sample(20))
    per_row = len(buffer.store.frames) / len(buffer)
    assert per_row == pytest.approx(1 + 1 / EPISODE, rel=0.1)  # a frame per step and one per start of an episode


def test_a_quarter_of_the_memory_and_less():
    """84 × 84 stacks of 4, before and after: what was touched of the frames' memory, and all else."""
    frames = np.random.default_rng(0).integers(0, 255, (1001, 84, 84), np.uint8)
    stacks = frames[np.maximum(0, np.arange(1001)[:, None] + np.arange(-3, 1))]
    buffer = ReplayBuffer(1000, ["obs", "next_obs"], frame_stack=4)
    buffer.add_batch({"obs": stacks[:-1], "next_obs": stacks[1:]})
    store = buffer.store
    touched = store.frames.high * store.frames.frame_bytes + sum(c.nbytes for c in store.columns.values())
    assert touched < 1000 * stacks[0].nbytes / 4 * 1.02  # even of storing each stack once, not twice
    assert 1001 <= store.frames.high <= 1005  # one that was not recognised is kept twice
    assert bytes_per_row(store.fields, interleaved=False) < 1.3 * 84 * 84


def test_memory_stays_bounded_when_rows_are_overwritten():
    buffer = PrioritizedReplayBuffer(100, KEYS, frame_stack=4, seed=0)
    for start in range(0, 5000, 50):
        buffer.add_batch(block(range(start, start + 50)))
    assert buffer.store.frames.high < 100 * 1.3 + 128 * 2
    require_own_images(buffer.sample(100)[0])
    buffer.clear()
    assert len(buffer.store.frames) == 0
    assert not buffer.store.frames.refs.any()


def test_stacks_without_common_frames_are_refused_in_time():
    stream = np.random.default_rng(0)
    buffer = ReplayBuffer(2000, ["obs"], frame_stack=4)
    for _ in range(15):
        buffer.add_batch({"obs": stream.integers(0, 255, (100, 4, 16, 16), np.uint8)})
    with pytest.raises(UsageError, match="share too few frames"):
        buffer.add_batch({"obs": stream.integers(0, 255, (100, 4, 16, 16), np.uint8)})
    size = len(buffer)
    assert size == 1500
    assert len(buffer.store.frames) == 4 * size  # what was refused holds nothing
    buffer.sample(10)


def test_a_refused_block_says_how_much_of_it_is_stored():
    buffer = ReplayBuffer(2000, ["obs"], frame_stack=4, seed=0)
    stacks = np.random.default_rng(0).integers(0, 255, (2000, 4, 16, 16), np.uint8)
    with pytest.raises(UsageError, match="share too few frames") as refused:
        buffer.add_batch({"obs": stacks})
    assert 0 < len(buffer) < 2000
    assert str(refused.value).endswith(f"the first {len(buffer)} of these experiences are stored")
    drawn = buffer.sample(50)["obs"]
    assert {stack.tobytes() for stack in drawn} <= {stack.tobytes() for stack in stacks[: len(buffer)]}


def test_small_or_flat_columns_are_stored_whole():
    buffer = ReplayBuffer(10, ["obs", "image"], frame_stack=4)
    buffer.add_batch({"obs": np.zeros((3, 16), np.float32), "image": np.zeros((3, 4, 5, 5), np.uint8)})
    assert buffer.store.frames is None
    with pytest.raises(UsageError, match="frame_stack must be at least 1"):
        ReplayBuffer(10, ["obs"], frame_stack=0)


def test_frames_of_any_width_and_kind():
    for shape, dtype in (((1, 17, 19), np.uint8), ((3, 10, 11), np.uint8), ((1, 9, 9), np.float32)):
        stream = np.random.default_rng(1)
        frames = (stream.random((60, *shape)) * 250).astype(dtype)
        stacks = np.stack([np.concatenate(frames[t : t + 3]) for t in range(57)])
        buffer = ReplayBuffer(50, ["obs", "number"], frame_stack=3, seed=0)
        buffer.add_batch({"obs": stacks, "number": np.arange(57)})
        assert buffer.store.frames is not None
        assert len(buffer.store.frames) == 52
        batch = buffer.sample(40)
        np.testing.assert_array_equal(batch["obs"], stacks[batch["number"]])


def test_balancing_moves_frames_along():
    pool = ReplayBufferPool(3, 60, frame_stack=4, seed=0)
    pool.add_experiences(block(range(60)), buffer_id=0)
    pool.add_experiences(block(range(900, 910)), buffer_id=2)
    kept = len(pool.store.frames)
    pool.balance_buffers()
    assert [buffer.size() for buffer in pool.buffers] == [24, 23, 23]
    assert len(pool.store.frames) == kept
    require_own_images(pool.sample_batch(70))


def test_a_state_stores_each_frame_once_and_is_restored():
    pool = ReplayBufferPool(2, 40, frame_stack=4, seed=0)
    for start in range(0, 200, 20):
        pool.add_experiences(block(range(start, start + 20)))
    state = pool.store.state()
    assert len(state["frames"]["rows"]) == len(pool.store.frames)
    fresh, used = ReplayStore(40, 2), ReplayStore(40, 2)
    used.allocate(pool.store.fields)
    used.write(0, block(range(500, 530)))
    for store in (fresh, used):
        store.restore(state)
        assert [f.shape for f in store.fields] == [f.shape for f in pool.store.fields]
        slots = np.concatenate([store.slots_oldest_first(0), store.slots_oldest_first(1)])
        require_own_images(store.gather(slots))
        np.testing.assert_array_equal(store.columns["number"][slots], pool.store.columns["number"][slots])
        store.write(1, block(range(200, 230)))
        require_own_images(store.gather(np.concatenate([store.slots_oldest_first(0), store.slots_oldest_first(1)])))
        assert len(store.frames) == np.count_nonzero(store.frames.refs)


def test_a_frame_that_looks_alike_is_no_other():
    frames = FrameStore(10, 8, (16, 16), "uint8")
    one = np.zeros((1, 4, 16, 16), np.uint8)
    other = one.copy()
    other[0, 3, 15, 15] = 1
    np.testing.assert_array_equal(frames.put(one, 4), [[0, 0, 0, 0]])
    np.testing.assert_array_equal(frames.put(other, 4), [[0, 0, 0, 1]])
    assert frames.refs[:2].tolist() == [7, 1]


class Camera:
    """An actor that sees stacks of 4 frames, which say where they are from; episodes of 9 steps are truncated."""

    SPEC = SegmentSpec(5, 2, FieldSpec("obs", (4, 16, 16), "uint8", 4), FieldSpec("action", (), "int64"))

    def __init__(self):
        self.sequence, self.time, self.episode = 0, 0, np.array([10, 20])

    def stack(self, env, time):
        return np.stack([np.full((16, 16), self.episode[env] + max(0, time + k), np.uint8) for k in range(-3, 1)])

    def segment(self):
        segment = Segment.blank(self.SPEC)
        segment["valid"][...] = True
        for env in range(2):
            segment["obs"][0, env] = self.stack(env, self.time)
        for t in range(5):
            self.time += 1
            ends = self.time == 9
            for env in range(2):
                segment["action"][t, env] = self.episode[env] + self.time - 1
                if ends:
                    segment["truncated"][t, env] = True
                    segment["final_obs"][t, env] = self.stack(env, self.time)
            if ends:
                self.time = 0
                self.episode += 30
                self.episode %= 200
            for env in range(2):
                segment["obs"][t + 1, env] = self.stack(env, self.time)
        segment.header = SegmentHeader("camera", 0, 0, self.sequence, 0)
        self.sequence += 1
        return segment


@pytest.mark.parametrize("n_step", [1, 3])
def test_the_learner_keeps_frames_once_by_itself(n_step):
    pool = ReplayBufferPool(1, 100)
    memory = ReplayMemory(Camera.SPEC, pool, SamplingConfig(32, n_step=n_step), stream=np.random.default_rng(0))
    camera = Camera()
    for _ in range(30):
        memory.add([camera.segment()])
        if len(pool.store) < 32:
            continue
        batch = memory.sample()
        newest = batch["obs"][:, 3, 0, 0].astype(int)
        np.testing.assert_array_equal(newest, batch["action"])  # the frame that was newest when the action was chosen
        ahead = batch["next_obs"][:, 3, 0, 0].astype(int) - newest
        assert ((ahead >= 1) & (ahead <= n_step)).all()
        older = batch["obs"][:, 2, 0, 0].astype(int)
        assert np.isin(newest - older, [0, 1]).all()
        memory.update(batch, Learned(1))
    assert pool.store.frames is not None
    assert len(pool.store.frames) < 1.3 * len(pool.store)

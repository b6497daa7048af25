"""Buffers of dictionaries: rings against a deque, sampling laws, refusals."""

import re
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from steppe.core.contracts.errors import ConfigError, UsageError
from steppe.core.contracts.specs import FieldSpec
from steppe.replay import ExperienceBuffer, PrioritizedReplayBuffer, ReplayBuffer
from steppe.replay.kernels.ring_index import compute_importance_weights
from steppe.replay.store import gather
from steppe.replay.store.store import ReplayStore

pytestmark = pytest.mark.unit

KEYS = ["obs", "action", "reward"]


def experience(number):
    return {"obs": np.full(3, number, np.float32), "action": number, "reward": number / 2}


def content(buffer):
    return content_of(buffer, "action") if len(buffer) else []


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.lists(st.one_of(st.integers(0, 25), st.just("clear")), max_size=12))
def test_a_ring_keeps_the_newest(capacity, sizes):
    buffer, model, number = ReplayBuffer(capacity, KEYS), deque(maxlen=capacity), 0
    for size in sizes:
        if size == "clear":
            buffer.clear()
            model.clear()
            continue
        block = range(number, number + size)
        number += size
        model.extend(block)
        if size == 1:
            buffer.add(experience(block[0]))
        else:
            buffer.add_batch([experience(n) for n in block])
        assert content(buffer) == list(model)
        assert buffer.size() == len(buffer) == len(model)
        assert buffer.is_full() == (len(model) == capacity)


def test_rows_stay_together_and_arrays_are_new():
    buffer = ReplayBuffer(10, KEYS, seed=0)
    buffer.add_batch([experience(n) for n in range(25)])
    batch = buffer.sample(10)
    assert set(batch) == set(KEYS)
    assert batch["obs"].dtype == np.float32
    np.testing.assert_array_equal(batch["obs"], np.repeat(batch["action"][:, None], 3, axis=1))
    np.testing.assert_array_equal(batch["reward"], batch["action"] / 2)
    assert set(batch["action"]) <= set(range(15, 25))
    before = batch["obs"].copy()
    buffer.sample(10)
    np.testing.assert_array_equal(batch["obs"], before)


def test_uniform_draws_are_uniform():
    buffer = ReplayBuffer(37, KEYS, seed=1)
    buffer.add_batch([experience(n) for n in range(30)])
    counts = sum(np.bincount(buffer.sample(30)["action"], minlength=30) for _ in range(1000))
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_seed_decides_the_draws():
    batches = []
    for seed in (3, 3, 4):
        buffer = ReplayBuffer(100, KEYS, seed=seed)
        buffer.add_batch([experience(n) for n in range(100)])
        batches.append(buffer.sample(50)["action"].tolist())
    assert batches[0] == batches[1] != batches[2]


def test_experiences_may_come_as_columns():
    one, other = ReplayBuffer(8, KEYS, seed=0), ReplayBuffer(8, KEYS, seed=0)
    one.add_batch([experience(n) for n in range(5)])
    other.add_batch(
        {
            "obs": np.repeat(np.arange(5, dtype=np.float32)[:, None], 3, 1),
            "action": range(5),
            "reward": np.arange(5) / 2,
        }
    )
    np.testing.assert_equal(one.sample(5), other.sample(5))
    one.add_batch([])
    one.add_batch({key: [] for key in KEYS})
    assert len(one) == 5


def test_whole_first_rewards_do_not_make_every_reward_whole():
    buffer = ReplayBuffer(4, ["reward"])
    buffer.add({"reward": 0})
    buffer.add({"reward": 0.5})
    assert content_of(buffer, "reward") == [0, 0.5]


def content_of(buffer, key):
    return buffer.store.gather(buffer.store.slots_oldest_first(0))[key].tolist()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"obs": np.zeros(3), "action": 1}, "lacks reward"),
        ({**experience(1), "done": True}, "has unknown done"),
        ({"obs": np.zeros(3), "action": 1, "rewards": 0.0}, "Did you mean 'reward'"),
        (
            {**experience(1), "obs": np.zeros(4, np.float32)},
            r"'obs' has shape \(4,\), but this buffer's column has \(3,\)",
        ),
        ({**experience(1), "action": 0.5}, "'action' is float64, which does not fit"),
        ({**experience(1), "action": None}, "'action' holds object"),
        ({**experience(1), "action": "left"}, "'action' holds"),
        ([1, 2, 3], "experience=.* violates type hint"),
    ],
)
def test_invalid_input_is_refused_completely(wrong, words):
    buffer = ReplayBuffer(5, KEYS)
    buffer.add(experience(1))
    with pytest.raises(UsageError, match=words):
        buffer.add(wrong)
    with pytest.raises(UsageError):
        buffer.add_batch([experience(2), wrong])
    assert content(buffer) == [1]


def test_shapes_within_one_batch_must_agree():
    with pytest.raises(UsageError, match=r"'obs' comes in different shapes: \(3,\), \(4,\)"):
        ReplayBuffer(5, ["obs"]).add_batch([{"obs": np.zeros(3)}, {"obs": np.zeros(4)}])
    with pytest.raises(UsageError, match="one common length"):
        ReplayBuffer(5, ["a", "b"]).add_batch({"a": [1, 2], "b": [1]})
    with pytest.raises(UsageError, match="wrap a single one"):
        ReplayBuffer(5, ["a"]).add_batch({"a": 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((5,), "experiences are a list of dictionaries, or a dictionary of arrays, not a int"),
        (("obs",), "an experience is a dictionary with obs, action, reward, not a str"),
        (([3],), "an experience is a dictionary with obs, action, reward, not a int"),
        (
            ([{"obs": 0, "action": 0, "reward": 0}], "high"),
            "priorities are numbers, one for each experience, not 'high'",
        ),
        (([{"obs": 0, "action": 0, "reward": 0}], [None, "x"]), "priorities are numbers, one for each"),
    ],
)
def test_an_invalid_experience_raises_with_the_expected_format(given, words):
    buffer = PrioritizedReplayBuffer(10, KEYS)
    with pytest.raises(UsageError, match=re.escape(words)):
        buffer.add_batch(*given)
    assert len(buffer) == 0


def test_integers_that_do_not_fit_are_refused():
    buffer = ReplayBuffer(5, ["a"])
    buffer.add({"a": np.int8(1)})
    buffer.add({"a": 100})
    with pytest.raises(UsageError, match="does not fit"):
        buffer.add({"a": 200})


@pytest.mark.parametrize("batch_size", [0, -1, 4])
def test_drawing_more_than_there_is(batch_size):
    buffer = ReplayBuffer(5, KEYS)
    buffer.add_batch([experience(n) for n in range(3)])
    with pytest.raises(UsageError, match=r"batch_size|cannot sample 4 experiences from 3"):
        buffer.sample(batch_size)


def test_no_room():
    with pytest.raises(UsageError, match="at least one"):
        ReplayBuffer(0, KEYS)
    with pytest.raises(ConfigError, match="lower the size"):
        ReplayStore(2**40).allocate([FieldSpec("obs", (2**20,), "float64")])


def test_prioritized_draws_and_weights_follow_the_law():
    """P(i) = p_i ** alpha / sum, w_i = (N P(i)) ** -beta / max w: Schaul et al. 2016, equations 1 and section 3.4."""
    alpha, beta = 0.7, 0.5
    buffer = PrioritizedReplayBuffer(64, KEYS, alpha=alpha, beta=beta, beta_increment=0, seed=2)
    priorities = np.random.default_rng(0).exponential(size=50)
    for number, priority in enumerate(priorities):
        buffer.add(experience(number), priority=priority)
    probabilities = priorities**alpha / (priorities**alpha).sum()
    counts = np.zeros(50)
    for _ in range(2000):
        batch, weights, indices = buffer.sample(50)
        np.testing.assert_array_equal(batch["action"], indices)
        expected = (50 * probabilities[indices]) ** -beta
        np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-5)
        counts += np.bincount(indices, minlength=50)
    assert stats.chisquare(counts, probabilities * counts.sum()).pvalue > 1e-3


def test_priorities_can_be_changed():
    buffer = PrioritizedReplayBuffer(100, KEYS, alpha=1.0, seed=0)
    buffer.add_batch([experience(n) for n in range(60)])
    buffer.update_priorities(np.arange(60), np.zeros(60))
    buffer.update_priorities([7, 9, 7], [5.0, 1.0, 3.0])  # 7 twice: the last one counts
    counts = np.bincount(np.concatenate([buffer.sample(50)[2] for _ in range(400)]), minlength=60)
    assert set(np.flatnonzero(counts)) == {7, 9}
    assert stats.chisquare(counts[[7, 9]], np.array([0.75, 0.25]) * 20_000).pvalue > 1e-3


def test_overwritten_experience_takes_its_priority_along():
    buffer = PrioritizedReplayBuffer(4, KEYS, alpha=1.0, seed=0)
    for number in range(4):
        buffer.add(experience(number), priority=1000.0)
    for number in range(4, 7):
        buffer.add(experience(number), priority=0.0)
    assert set(buffer.sample(4)[0]["action"]) == {3}
    buffer.clear()
    buffer.add(experience(9))
    assert set(buffer.sample(1)[0]["action"]) == {9}


def test_beta_rises_to_one():
    buffer = PrioritizedReplayBuffer(4, KEYS, beta=0.4, beta_increment=0.25)
    buffer.add(experience(0))
    betas = [buffer.beta]
    for _ in range(4):
        buffer.sample(1)
        betas.append(buffer.beta)
    assert betas == pytest.approx([0.4, 0.65, 0.9, 1.0, 1.0])


@pytest.mark.parametrize("priority", [np.nan, np.inf, -1.0])
def test_impossible_priorities_are_refused(priority):
    buffer = PrioritizedReplayBuffer(4, KEYS)
    with pytest.raises(UsageError, match="priority must be"):
        buffer.add(experience(0), priority=priority)
    assert len(buffer) == 0
    buffer.add(experience(0))
    with pytest.raises(UsageError, match="priority must be"):
        buffer.update_priorities([0], [priority])
    assert buffer.sample(1)[2] == [0]


@pytest.mark.parametrize("index", [-1, 1, 3, 4, 100])
def test_priorities_for_rows_that_are_not_there_are_refused(index):
    buffer = PrioritizedReplayBuffer(4, KEYS)
    buffer.add(experience(0))
    with pytest.raises(UsageError, match="indices"):
        buffer.update_priorities([index], [1.0])


def test_priorities_that_do_not_match_are_refused():
    buffer = PrioritizedReplayBuffer(4, KEYS)
    buffer.add(experience(0))
    with pytest.raises(UsageError, match="2 experiences need 2 priorities"):
        buffer.add_batch([experience(1), experience(2)], priorities=np.ones(3))
    with pytest.raises(UsageError, match="need 1 priorities"):
        buffer.update_priorities([0], [1.0, 2.0])
    with pytest.raises(UsageError, match="alpha and beta"):
        PrioritizedReplayBuffer(4, KEYS, alpha=-1)


def test_nothing_can_be_drawn_when_every_priority_is_zero():
    buffer = PrioritizedReplayBuffer(4, KEYS)
    buffer.add(experience(0), priority=0.0)
    with pytest.raises(UsageError, match="every priority is 0"):
        buffer.sample(1)


def test_extreme_priorities_stay_drawable():
    buffer = PrioritizedReplayBuffer(4, KEYS, alpha=1.0, seed=0)
    buffer.add(experience(0), priority=1e-300)
    assert buffer.sample(1)[0]["action"] == [0]
    buffer.add(experience(1), priority=1e300)
    _, weights, _ = buffer.sample(2)
    assert np.isfinite(weights).all()


def test_importance_of_equal_leaves_is_one():
    weights = np.empty(5, np.float32)
    compute_importance_weights(np.full(5, 0.3, np.float32), 0.4, weights)
    np.testing.assert_array_equal(weights, np.ones(5, np.float32))


def test_numbers_that_are_drawn_by_priority_share_a_cache_line():
    """Whatever they are called, and whatever their order: 13 bytes in steps of 16, and arrays by themselves."""
    buffer = PrioritizedReplayBuffer(100, ["done", "obs", "", "action"], alpha=1.0, seed=0)
    numbers = np.arange(250)
    given = {
        "done": numbers % 3 == 0,
        "obs": numbers[:, None].repeat(8, 1).astype(np.float32),
        "": numbers.astype(np.float32) / 2,
        "action": numbers,
    }
    for first in range(0, 250, 50):
        buffer.add_batch({name: column[first : first + 50] for name, column in given.items()})
    columns = buffer.store.columns
    addresses = [columns[name].ctypes.data for name in ("done", "", "action")]
    assert {columns[name].strides for name in ("done", "", "action")} == {(16,)}
    assert max(addresses) - min(addresses) < 16
    assert min(addresses) % 64 == 0
    batch, _, indices = buffer.sample(80)
    for name, column in given.items():
        np.testing.assert_array_equal(batch[name], column[indices], strict=True)
        assert batch[name].flags.c_contiguous


def test_batches_too_large_for_one_dtype(monkeypatch):
    """A dtype has at most 2 GiB: columns are then cut out of their memory one by one, with the same result."""
    found = []
    for most in (2**31 - 1, 100):
        monkeypatch.setattr(gather, "MAX_DTYPE_BYTES", most)
        buffer = PrioritizedReplayBuffer(50, KEYS, seed=3)
        buffer.add_batch([experience(n) for n in range(50)])
        found.append(buffer.sample(40))
    np.testing.assert_equal(found[0], found[1])
    assert set(found[0][0]) == set(KEYS)


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [
        ("3", "parameter batch_size="),
        (2.0, "parameter batch_size="),
        (None, "parameter batch_size="),
        (0, "must be a whole number"),
    ],
)
def test_a_batch_size_is_a_whole_number(batch_size, words):
    for buffer in (ReplayBuffer(5, KEYS), PrioritizedReplayBuffer(5, KEYS)):
        buffer.add_batch([experience(n) for n in range(3)])
        with pytest.raises(UsageError, match=words):
            buffer.sample(batch_size)


@pytest.mark.parametrize(
    ("indices", "priorities", "words"),
    [
        ("x", [1.0], "'indices' holds <U1 values, where numbers are needed"),
        ([0], ["much"], "'priorities' holds <U4 values, where numbers are needed"),
        ([2**70], [1.0], "'indices' holds object values, where numbers are needed"),
        (None, [1.0], "'indices' holds object values, where numbers are needed"),
        ([0.5], [1.0], "'indices' has the value 0.5, which is no int64"),
        ([float("nan")], [1.0], "'indices' has the value nan, which is no int64"),
    ],
)
def test_priorities_that_are_no_numbers_are_refused(indices, priorities, words):
    buffer = PrioritizedReplayBuffer(5, KEYS)
    buffer.add_batch([experience(n) for n in range(3)])
    with pytest.raises(UsageError, match=words):
        buffer.update_priorities(indices, priorities)


def test_experience_buffer_keeps_the_newest_steps():
    buffer = ExperienceBuffer(capacity=3, seed=0)
    assert buffer.sample(5) == []
    for number in range(5):
        buffer.push(number, number % 2, 0 if number == 0 else number / 2, number + 1, number == 4)
    assert len(buffer) == 3
    assert buffer.sample(10) == [(2, 0, 1.0, 3, False), (3, 1, 1.5, 4, False), (4, 0, 2.0, 5, True)]
    drawn = buffer.sample(2)
    assert len(set(drawn)) == 2
    assert {tuple(map(type, step)) for step in drawn} == {(int, int, float, int, bool)}


def test_experience_buffer_draws_without_repeats():
    buffer = ExperienceBuffer(seed=1)
    for number in range(20):
        buffer.push(np.full(2, number), 0, 0.0, np.zeros(2), False)
    counts = np.zeros(20)
    for _ in range(2000):
        states = [int(step[0][0]) for step in buffer.sample(5)]
        assert len(set(states)) == 5
        counts[states] += 1
    assert stats.chisquare(counts).pvalue > 1e-3


def test_a_priority_that_comes_too_late_changes_nothing():
    buffer = PrioritizedReplayBuffer(10, KEYS, alpha=1.0, seed=0)
    buffer.add_batch([experience(n) for n in range(10)])
    _, _, indices = buffer.sample(10)
    buffer.add_batch([experience(n) for n in range(10, 15)])  # over 0 to 4
    before = buffer.store.tree.leaves.copy()
    buffer.update_priorities([2, 7, 4], [9.0, 5.0, 9.0])
    assert buffer.stale_updates == 2
    after = buffer.store.tree.leaves[0]
    assert after[7] == 5.0
    np.testing.assert_array_equal(np.delete(after, 7), np.delete(before[0], 7))
    buffer.update_priorities(indices, np.full(10, 3.0))
    assert buffer.stale_updates == 2 + np.count_nonzero(indices < 5)
    assert set(buffer.sample(10)[2]) <= set(range(5, 15))  # a row's number, not its place


def test_no_index_is_good_again_after_clearing():
    buffer = PrioritizedReplayBuffer(4, KEYS, seed=0)
    for round_number in range(5):
        for number in range(3 + round_number):
            buffer.add(experience(number))
        _, _, indices = buffer.sample(3)
        buffer.clear()
        for number in range(4):
            buffer.add(experience(number), priority=1.0)
        before = buffer.store.tree.leaves.copy()
        buffer.update_priorities(indices, np.full(3, 50.0))
        np.testing.assert_array_equal(buffer.store.tree.leaves, before)
        buffer.clear()
    assert buffer.stale_updates == 15


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 12, 16, 31, 32, 33, 64, 100])
def test_rows_of_any_width_come_back(width):
    stream = np.random.default_rng(width)
    rows = stream.integers(0, 255, (300, width), np.uint8)
    buffer = ReplayBuffer(300, ["rows", "number", "flag", "none"], seed=0)
    columns = {"rows": rows, "number": np.arange(300), "flag": rows[:, 0] > 100, "none": np.zeros((300, 0))}
    buffer.add_batch(columns)
    for size in (1, 5, 64, 300):
        batch = buffer.sample(size)
        for name in columns:
            np.testing.assert_array_equal(batch[name], columns[name][batch["number"]])
            assert batch[name].dtype == columns[name].dtype


def test_columns_that_do_not_lie_in_one_piece():
    buffer = ReplayBuffer(10, ["a", "b"], seed=0)
    wide = np.arange(60.0).reshape(10, 6)
    for _ in range(2):
        buffer.add_batch({"a": wide[:, ::2], "b": np.asfortranarray(wide[:, :2])})
        store = buffer.store.gather(buffer.store.slots_oldest_first(0))
        np.testing.assert_array_equal(store["a"], wide[:, ::2])
        np.testing.assert_array_equal(store["b"], wide[:, :2])


def test_memory_of_large_batches_is_reused_only_when_unreferenced():
    buffer = ReplayBuffer(1000, ["rows"], seed=0)
    buffer.add_batch({"rows": np.arange(1000 * 64, dtype=np.float64).reshape(1000, 64)})
    held = [buffer.sample(500)["rows"] for _ in range(6)]
    assert len({rows.ctypes.data for rows in held}) == 6
    copies = [rows.copy() for rows in held]
    views = [rows[3:5, 1] for rows in held]
    parts = [view.copy() for view in views]
    del held[2:]
    for _ in range(20):
        buffer.sample(500)
        for rows, copy in zip(held, copies, strict=False):
            np.testing.assert_array_equal(rows, copy)
        for view, part in zip(views, parts, strict=True):
            np.testing.assert_array_equal(view, part)
    del views, held, rows, view
    addresses = set()
    for _ in range(20):
        batch = buffer.sample(500)
        addresses.add(batch["rows"].ctypes.data)
    assert len(addresses) <= 3

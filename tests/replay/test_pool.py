"""The pool: one big buffer in several parts, kept on disk without surprises."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from steppe.core.contracts.errors import ConfigError, DamagedFile, UsageError
from steppe.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayBufferPool
from steppe.replay.store import files as replay_files

pytestmark = pytest.mark.unit


def experiences(*numbers):
    return [{"obs": np.full(2, n, np.float32), "action": n, "done": n % 3 == 0} for n in numbers]


def uneven(*, use_prioritized=False, **options):
    """40 experiences, numbered, in buffers of very different fill; the third one is empty."""
    pool = ReplayBufferPool(4, 30, use_prioritized=use_prioritized, **options)
    pool.add_experiences(experiences(*range(3)), buffer_id=0)
    pool.add_experiences(experiences(*range(1000, 1040)), buffer_id=1)  # ten of them are overwritten
    pool.add_experiences(experiences(*range(33, 40)), buffer_id=3)
    return pool


NUMBERS = [*range(3), *range(1010, 1040), *range(33, 40)]


def counts_of(pool, draws):
    drawn = np.concatenate([pool.sample_batch(40)["action"] for _ in range(draws)])
    numbers, counts = np.unique(drawn, return_counts=True)
    found = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
    assert set(found) <= set(NUMBERS)
    return np.array([found.get(number, 0) for number in NUMBERS])


def test_turns_are_taken_by_default():
    pool = ReplayBufferPool(3, 10)
    for number in range(7):
        pool.add_experiences(experiences(number, number))
    assert [buffer.size() for buffer in pool.buffers] == [6, 4, 4]
    pool.add_experiences(experiences(9), buffer_id=2)
    pool.add_experiences([])
    pool.add_experiences(experiences(9))
    assert [buffer.size() for buffer in pool.buffers] == [6, 5, 5]
    assert pool.get_total_experiences() == 16


def test_routing_by_fill_and_by_source():
    pool = ReplayBufferPool(3, 10, routing="least_filled")
    pool.add_experiences(experiences(*range(4)), buffer_id=1)
    for number in range(6):
        pool.add_experiences(experiences(number))
    assert [buffer.size() for buffer in pool.buffers] == [3, 4, 3]
    pool = ReplayBufferPool(3, 10, routing="by_source")
    for source in (0, 5, 2, 3, 5):
        pool.add_experiences(experiences(source), source=source)
    assert [pool.store.gather(pool.store.slots_oldest_first(part))["action"].tolist() for part in range(3)] == [
        [0, 3],
        [],
        [5, 2, 5],
    ]
    with pytest.raises(UsageError, match="say who gathered"):
        pool.add_experiences(experiences(1))
    pool.add_experiences(experiences(1), buffer_id=1)
    with pytest.raises(ConfigError, match="routing"):
        ReplayBufferPool(3, 10, routing="by_luck")


def test_experience_may_bring_its_own_priority():
    pool = ReplayBufferPool(2, 10, use_prioritized=True, alpha=1.0, seed=0)
    pool.add_experiences(experiences(0, 1), priorities=np.array([1.0, 3.0]))
    pool.add_experiences(experiences(2))  # as large as the largest so far
    counts = np.bincount(np.concatenate([pool.sample_batch(3)["action"] for _ in range(4000)]), minlength=3)
    assert stats.chisquare(counts, np.array([1, 3, 3]) / 7 * 12_000).pvalue > 1e-3
    with pytest.raises(UsageError, match="priority must be"):
        pool.add_experiences(experiences(3), priorities=np.array([np.nan]))
    assert pool.get_total_experiences() == 3


@pytest.mark.parametrize("num_buffers", [1, 2, 5, 8])
def test_the_number_of_buffers_changes_no_odds(num_buffers):
    """The same 60 experiences and priorities, spread very unevenly, give the draws of one big buffer."""
    stream = np.random.default_rng(7)
    priorities = stream.exponential(size=60) * (stream.random(60) < 0.8)
    pool = ReplayBufferPool(num_buffers, 60, use_prioritized=True, alpha=0.8, seed=num_buffers)
    homes = np.minimum(stream.geometric(0.6, 60) - 1, num_buffers - 1)
    for number, (priority, home) in enumerate(zip(priorities, homes.tolist(), strict=True)):
        pool.add_experiences(experiences(number), home, priorities=np.array([priority]))
    counts = np.bincount(np.concatenate([pool.sample_batch(60)["action"] for _ in range(1000)]), minlength=60)
    odds = priorities**0.8
    assert not counts[odds == 0].any()
    kept = odds > 0
    assert stats.chisquare(counts[kept], odds[kept] / odds.sum() * 60_000).pvalue > 1e-3


def test_late_priorities_are_counted():
    pool = ReplayBufferPool(2, 5, use_prioritized=True, seed=0)
    pool.add_experiences(experiences(*range(5)), buffer_id=0)
    pool.add_experiences(experiences(*range(5, 10)), buffer_id=1)
    batch = pool.sample_batch(10)
    pool.add_experiences(experiences(*range(10, 15)), buffer_id=0)
    pool.update_priorities(batch["indices"], np.full(10, 2.0))
    assert pool.get_buffer_stats()["stale_updates"] == np.count_nonzero(batch["action"] < 5)
    again = pool.sample_batch(10)
    pool.balance_buffers()  # nothing to move: indices stay good
    pool.update_priorities(again["indices"], np.full(10, 2.0))
    with pytest.raises(UsageError, match="never sampled"):
        pool.update_priorities([2**40], [1.0])
    assert pool.get_buffer_stats()["stale_updates"] == np.count_nonzero(batch["action"] < 5)


def test_the_pool_draws_as_one_buffer():
    counts = counts_of(uneven(seed=0), 1000)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_prioritized_pool_draws_as_one_buffer():
    pool = uneven(use_prioritized=True, seed=1)
    stream = np.random.default_rng(2)
    priorities = dict(zip(NUMBERS, stream.exponential(size=40).tolist(), strict=True))
    for _ in range(100):  # whatever is drawn gets its own priority; in the end that is everything
        batch = pool.sample_batch(40)
        pool.update_priorities(batch["indices"], [priorities[n] for n in batch["action"].tolist()])
    expected = np.array([priorities[n] for n in NUMBERS]) ** 0.6
    counts = counts_of(pool, 1000)
    assert stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 1e-3
    batch = pool.sample_batch(40)
    probabilities = np.array([priorities[n] for n in batch["action"].tolist()]) ** 0.6 / expected.sum()
    weights = (40 * probabilities) ** -0.4
    np.testing.assert_allclose(batch["weights"], weights / weights.max(), rtol=1e-5)


def test_drawing_from_one_buffer():
    for use_prioritized in (False, True):
        pool = uneven(use_prioritized=use_prioritized)
        for buffer_id, size, numbers in ((0, 3, range(3)), (1, 30, range(1010, 1040)), (3, 7, range(33, 40))):
            drawn = np.concatenate([pool.sample_batch(size, buffer_id)["action"] for _ in range(100)])
            assert set(drawn.tolist()) == set(numbers)
        with pytest.raises(UsageError, match="cannot draw 1 experiences from 0"):
            pool.sample_batch(1, buffer_id=2)
        with pytest.raises(UsageError, match="there is no buffer 4"):
            pool.sample_batch(1, buffer_id=4)
        with pytest.raises(UsageError, match="there is no buffer -1"):
            pool.add_experiences(experiences(1), buffer_id=-1)
        with pytest.raises(UsageError, match="cannot draw 41"):
            pool.sample_batch(41)


def test_buffers_of_the_pool_are_buffers():
    pool = uneven(use_prioritized=True, seed=0)
    buffer = pool.buffers[1]
    assert isinstance(buffer, PrioritizedReplayBuffer)
    batch, _, indices = buffer.sample(20)
    assert set(batch["action"]) <= set(range(1010, 1040))
    assert set(indices) <= set(range(10, 40))  # the ten first ones are gone
    buffer.update_priorities(np.arange(10, 40), np.zeros(30))
    buffer.update_priorities(indices[:1], [1.0])
    assert set(buffer.sample(20)[0]["action"]) == {batch["action"][0]}
    buffer.clear()
    assert pool.get_total_experiences() == 10
    assert set(pool.sample_batch(10)["action"]) <= {*range(3), *range(33, 40)}
    assert type(uneven().buffers[0]) is ReplayBuffer


def test_new_experience_enters_with_the_largest_priority():
    pool = ReplayBufferPool(1, 10, use_prioritized=True, alpha=1.0, seed=0)
    pool.add_experiences(experiences(0, 1))
    pool.update_priorities([0, 1], [7.0, 0.0])
    pool.add_experiences(experiences(2))
    counts = np.bincount(np.concatenate([pool.sample_batch(3)["action"] for _ in range(3000)]), minlength=3)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2]]).pvalue > 1e-3


def test_statistics():
    stats_now = uneven().get_buffer_stats()
    assert stats_now["total_experiences"] == 40
    assert stats_now["total_capacity"] == 120
    assert stats_now["utilization"] == pytest.approx(1 / 3)
    assert [b["size"] for b in stats_now["buffers"]] == [3, 30, 0, 7]
    assert stats_now["buffers"][1] == {"size": 30, "capacity": 30, "utilization": 1.0, "is_full": True, "added": 40}


@pytest.mark.parametrize("use_prioritized", [False, True])
def test_balancing_moves_experience_and_changes_no_odds(use_prioritized):
    pool = uneven(use_prioritized=use_prioritized, seed=3)
    odds = np.ones(40)
    if use_prioritized:
        for _ in range(100):
            batch = pool.sample_batch(40)
            pool.update_priorities(batch["indices"], 1.0 + batch["action"] % 5)
        odds = (1.0 + np.array(NUMBERS) % 5) ** 0.6
    pool.balance_buffers()
    assert [buffer.size() for buffer in pool.buffers] == [10, 10, 10, 10]
    counts = counts_of(pool, 1000)
    assert stats.chisquare(counts, odds / odds.sum() * counts.sum()).pvalue > 1e-3
    kept = pool.store.gather(pool.store.slots_oldest_first(1))
    assert kept["action"].tolist() == list(range(1030, 1040))  # the newest stayed, in order
    pool.add_experiences(experiences(*range(50, 71)), buffer_id=1)
    assert 1030 not in pool.store.gather(pool.store.slots_oldest_first(1))["action"]  # and the oldest goes first


def test_balancing_what_cannot_be_divided():
    pool = ReplayBufferPool(3, 10)
    pool.add_experiences(experiences(*range(8)), buffer_id=2)
    pool.balance_buffers()
    assert sorted(buffer.size() for buffer in pool.buffers) == [2, 3, 3]
    assert sorted(
        pool.store.gather(np.concatenate([pool.store.slots_oldest_first(p) for p in range(3)]))["action"]
    ) == list(range(8))
    empty = ReplayBufferPool(3, 10)
    empty.balance_buffers()
    assert empty.get_total_experiences() == 0


def test_clearing():
    pool = uneven(use_prioritized=True)
    pool.clear_all_buffers()
    assert pool.get_total_experiences() == 0
    pool.add_experiences(experiences(5))
    assert pool.sample_batch(1)["action"] == [5]


def test_keys_are_those_given_or_those_of_the_first_experience():
    pool = ReplayBufferPool(2, 10, experience_keys=["obs"])
    with pytest.raises(UsageError, match="has unknown action, done"):
        pool.add_experiences(experiences(1))
    pool = ReplayBufferPool(2, 10)
    pool.add_experiences(experiences(1))
    with pytest.raises(UsageError, match="lacks action, done"):
        pool.add_experiences([{"obs": np.zeros(2, np.float32)}])
    assert pool.get_total_experiences() == 1


@pytest.mark.parametrize("use_prioritized", [False, True])
def test_a_loaded_pool_goes_on_as_the_saved_one(tmp_path, use_prioritized):
    pool = uneven(use_prioritized=use_prioritized, save_path=tmp_path / "pool", seed=5)
    if use_prioritized:
        pool.update_priorities(pool.sample_batch(20)["indices"], np.arange(20.0))
    pool.save_buffers()
    loaded = ReplayBufferPool(4, 30, use_prioritized=use_prioritized)
    loaded.load_buffers(tmp_path / "pool")
    assert loaded.get_buffer_stats() == pool.get_buffer_stats()
    for number in range(6):
        np.testing.assert_equal(loaded.sample_batch(16), pool.sample_batch(16))
        for each in (pool, loaded):
            each.add_experiences(experiences(*range(number, number + 9)))
    if use_prioritized:
        assert loaded.store.tree.nodes.tobytes() == pool.store.tree.nodes.tobytes()


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    pool = uneven()
    for number in range(12):
        pool.add_experiences(experiences(number))
        pool.save_buffers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["save-11"]
    loaded = ReplayBufferPool(4, 30)
    loaded.load_buffers(tmp_path)
    assert loaded.get_buffer_stats() == pool.get_buffer_stats()


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    pool = uneven()
    pool.save_buffers(tmp_path)
    pool.add_experiences(experiences(7))

    def die(*_):
        raise OSError("no space left")

    monkeypatch.setattr(replay_files, "write_bundle", die)
    with pytest.raises(OSError, match="no space"):
        pool.save_buffers(tmp_path)
    loaded = ReplayBufferPool(4, 30)
    loaded.load_buffers(tmp_path)
    assert loaded.get_total_experiences() == 40


@pytest.mark.parametrize("name", ["tail.rows", "rows.json", "state.bin", "pool.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_named_and_changes_nothing(tmp_path, name, damage):
    pool = uneven(use_prioritized=True)
    pool.save_buffers(tmp_path)
    path = tmp_path / "save-0" / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-3])
    else:
        path.unlink()
    other = uneven(use_prioritized=True)
    with pytest.raises(DamagedFile, match=name):
        other.load_buffers(tmp_path)
    assert other.get_buffer_stats() == pool.get_buffer_stats()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 3}, "format 3"),
        ({"format": 0}, "format 0"),
        ({"format": 1}, "does not describe"),
        ({"capacity": "many"}, "does not describe"),
    ],
)
def test_a_description_that_lies_is_refused(tmp_path, change, words):
    """Also where every checksum is right."""
    uneven().save_buffers(tmp_path)
    require_refused(tmp_path, change, words, ReplayBufferPool(4, 30))


FORMAT_1 = Path(__file__).parent / "fixtures" / "pool-format-1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capacity": 5}, "contradicts itself"),
        ({"rings": []}, "contradicts itself"),
        ({"prioritized": False}, "lacks columns"),
        ({"rings": [{"size": 3, "cursor": 3, "added": 3}]}, "one file for each"),
        ({"rings": [{"size": 4, "cursor": 4, "added": 4}] * 2}, "has not 4 rows"),
        ({"extra": "[]"}, "is damaged"),
    ],
)
def test_a_description_of_the_first_format_that_lies_is_refused(tmp_path, change, words):
    shutil.copytree(FORMAT_1, tmp_path, dirs_exist_ok=True)
    require_refused(tmp_path, change, words, ReplayBufferPool(2, 6, use_prioritized=True))


def require_refused(tmp_path, change, words, pool):
    files = {path.name: path.read_bytes() for path in (tmp_path / "save-0").iterdir() if path.name != "manifest.json"}
    files["pool.json"] = json.dumps({**json.loads(files["pool.json"]), **change}).encode()
    shutil.rmtree(tmp_path / "save-0")
    replay_files.write_bundle(tmp_path / "save-0", files)
    with pytest.raises(DamagedFile, match=words):
        pool.load_buffers(tmp_path)


def test_loading_what_does_not_fit(tmp_path):
    uneven().save_buffers(tmp_path)
    for wrong in (
        ReplayBufferPool(3, 30),
        ReplayBufferPool(4, 31),
        ReplayBufferPool(4, 30, use_prioritized=True),
        ReplayBufferPool(4, 30, experience_keys=["state"]),
    ):
        with pytest.raises(UsageError, match="the saved pool has"):
            wrong.load_buffers(tmp_path)
        assert wrong.get_total_experiences() == 0
    other = ReplayBufferPool(4, 30)
    other.add_experiences([{"obs": 1, "action": 2, "done": True}])
    with pytest.raises(UsageError, match="the saved columns"):
        other.load_buffers(tmp_path)
    assert other.get_total_experiences() == 1


def test_saving_and_loading_nowhere(tmp_path):
    with pytest.raises(UsageError, match="say where"):
        uneven().save_buffers()
    with pytest.raises(UsageError, match="no saved buffers"):
        ReplayBufferPool().load_buffers(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="nothing to save"):
        ReplayBufferPool().save_buffers(tmp_path)

"""Replay in roles of its own: real shelves behind real sockets give the batches of a pool of as many buffers, bit for bit,
by the law of priorities, across checkpoints; and a shard that is gone, full or confused is told of."""

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from steppe.algorithms.dhc.config import DHCConfig
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.r2d2.config import R2D2Config
from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import ConfigError, DamagedFile, DiskFull, RoleDied, UsageError
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.contracts.weights import Weights, WeightsLayout
from steppe.records.checkpoints import Checkpoints
from steppe.replay import ReplayBufferPool
from steppe.replay.factory import make_memory, make_replay_shard
from steppe.testing.memory import SPEC, ScriptedActor
from steppe.transport.unix_socket import SocketRpcClient, SocketRpcServer
from tests.replay.test_team_sequences import SPEC as TEAM
from tests.replay.test_team_sequences import Script

pytestmark = pytest.mark.unit

COMMON = {"batch_size": 24, "learning_starts": 40, "samples_per_insert": 3.0}
Q_VAL = (FieldSpec("hidden", (3,), "float32"), FieldSpec("q_val", (100,), "float32"))
SEQUENCES = SegmentSpec(SPEC.num_steps, SPEC.num_envs, SPEC.obs, SPEC.action, Q_VAL)
CASES = {
    "uniform": (DQNConfig(buffer_size=300, n_step=2, **COMMON), SPEC),
    "prioritized": (DQNConfig(buffer_size=300, prioritized=True, **COMMON), SPEC),
    "sequences": (R2D2Config(buffer_size=2000, sequence_length=4, burn_in=2, sequence_stride=2, **COMMON), SEQUENCES),
    "team": (DHCConfig(buffer_size=2000, sequence_length=4, burn_in=2, sequence_stride=3, **COMMON), TEAM),
}
EMPTY = Weights(WeightsLayout(()), np.zeros(0, np.uint8))


class Shelves:
    """Shelves of a configuration, each with a thread that answers at a socket, and lines to them."""

    def __init__(self, agent, spec, count):
        self.directory = Path(tempfile.mkdtemp(prefix="far-"))
        self.servers = [SocketRpcServer(self.directory / f"rpc-{number}") for number in range(count)]
        self.made = [make_replay_shard(agent, spec, count) for _ in range(count)]
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=self.serve, args=pair) for pair in zip(self.servers, self.made, strict=True)
        ]
        for thread in self.threads:
            thread.start()
        self.clients = [SocketRpcClient(f"replay-{n}", self.directory / f"rpc-{n}", lambda: True) for n in range(count)]

    def serve(self, server, shard):
        while not self.over.is_set():
            if (question := server.take(0.02)) is not None:
                server.reply(shard.handle(question))

    def end(self):
        """Without a word, as one that was killed does."""
        self.over.set()
        for thread, server in zip(self.threads, self.servers, strict=True):
            thread.join()
            server.close()

    def close(self):
        self.end()
        for line in self.clients:
            line.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def shelves_of(name, count=3):
    agent, spec = CASES[name]
    shelves = Shelves(agent, spec, count)
    try:
        yield shelves, made(name, replay_clients=shelves.clients)
    finally:
        shelves.close()


def made(name, seed=5, **how):
    agent, spec = CASES[name]
    return make_memory(agent, spec, stream=np.random.default_rng(seed), total_steps=4000, num_actors=2, **how)


def actors_of(name):
    if name == "team":
        return [Script(seed, actor=seed) for seed in range(2)]
    return [ScriptedActor(CASES[name][1], actor, seed=3) for actor in range(2)]


def learn(memory, actors, rounds, seed=0):
    """Take in and learn as a learner does; every batch, in copies."""
    stream, found = np.random.default_rng(seed), []
    for _ in range(rounds):
        memory.add([actor.segment() for actor in actors])
        while memory.ready():
            batch = memory.sample()
            copies = {column: values.copy() for column, values in batch.columns.items()}
            found.append((copies, np.array(batch.weights), np.array(batch.indices)))
            memory.update(batch, Learned(1, priorities=stream.gamma(0.5, size=COMMON["batch_size"])))
    return found


def require_same(ours, theirs):
    assert len(ours) == len(theirs) > 5
    for (columns, *rest), (others, *more) in zip(ours, theirs, strict=True):
        assert columns.keys() == others.keys()
        for column in columns:
            np.testing.assert_array_equal(columns[column], others[column], err_msg=column)
        for one, other in zip(rest, more, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 3])
def test_the_batches_of_a_pool_of_as_many_buffers(name, count):
    """Over several laps of the rings, with priorities that come too late among them."""
    near = made(name, num_buffers=count)
    with shelves_of(name, count) as (_, far):
        ours, theirs = (learn(memory, actors_of(name), rounds=80) for memory in (far, near))
        require_same(ours, theirs)
        assert far.stats() == near.stats()
        assert near.stats()["size"] < near.limiter.inserted or name in ("sequences", "team")


@pytest.mark.parametrize("name", ["prioritized", "uniform"])
def test_the_law_of_drawing(name):
    """Rows of unevenly filled shelves are drawn in proportion to priority ** 0.6, or alike: chi-square at 1e-6."""
    with shelves_of(name) as (_, memory):
        store = memory.pool.store
        stream = np.random.default_rng(0)
        priorities, rows = [], 0
        for part, count in enumerate((3, 40, 90)):
            values = np.arange(rows, rows + count, dtype=np.float32)
            block = {f.name: np.zeros((count, *f.shape), f.dtype) for f in store.fields} | {"reward": values}
            own = stream.gamma(0.7, size=count) if name == "prioritized" else None
            store.write(part, block, own)
            priorities += [np.ones(count)] if own is None else [own]
            rows += count
        assert len(store) == rows
        drawn = np.concatenate(
            [store.batch(stream, 2000, store.batch_buffer(2000), 0.4)["reward"].copy() for _ in range(30)]
        )
    law = np.concatenate(priorities) ** (0.6 if name == "prioritized" else 1.0)
    expected = law / law.sum() * len(drawn)
    counts = np.bincount(drawn.astype(int), minlength=rows)
    kept = expected >= 5
    counts, expected = np.append(counts[kept], counts[~kept].sum()), np.append(expected[kept], expected[~kept].sum())
    used = expected > 0
    assert stats.chisquare(counts[used], expected[used]).pvalue > 1e-6


def test_weights_are_those_of_the_law():
    """(N · P) ** -beta over its largest, N and P over all shelves."""
    with shelves_of("prioritized") as (_, memory):
        store, priorities = memory.pool.store, np.array([0.1, 0.5, 4.0])
        for part, priority in enumerate(priorities):
            block = {f.name: np.full((1, *f.shape), part, f.dtype) for f in store.fields}
            store.write(part, block, np.array([priority]))
        batch = store.batch(np.random.default_rng(1), 500, store.batch_buffer(500), 0.7)
        share = priorities**0.6 / (priorities**0.6).sum()
        expected = (3 * share) ** -0.7 / ((3 * share) ** -0.7).max()
        np.testing.assert_allclose(batch.weights, expected[batch["reward"].astype(int)], rtol=1e-5)


@pytest.mark.parametrize("name", ["prioritized", "team"])
def test_checkpoints_hold_every_shard(name, tmp_path):
    """Written by the shelves themselves, sharing what has not changed; whoever goes on from one draws what would have come."""
    checkpoints, actors = Checkpoints(tmp_path, keep=2), actors_of(name)
    with shelves_of(name) as (_, memory):
        learn(memory, actors, rounds=20)
        checkpoints.save(EMPTY, {"memory": memory.live_state()}, {})
        learn(memory, actors, rounds=20)
        checkpoints.save(EMPTY, {"memory": memory.live_state()}, {})
        turning = [actor.sequence for actor in actors]
        calm = learn(memory, actors, rounds=30, seed=9)
    again = actors_of(name)
    for actor, sequence in zip(again, turning, strict=True):
        for _ in range(sequence):
            actor.segment()
    with shelves_of(name) as (_, memory):
        memory.restore(checkpoints.latest().state["memory"])
        require_same(learn(memory, again, rounds=30, seed=9), calm)
    with shelves_of(name, count=2) as (_, memory), pytest.raises(UsageError, match="is in 3 roles, not 2"):
        memory.restore(checkpoints.latest().state["memory"])


def test_a_damaged_shelf_is_a_damaged_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    with shelves_of("prioritized") as (_, memory):
        for _ in range(2):
            learn(memory, actors_of("prioritized"), rounds=5)
            checkpoints.save(EMPTY, {"memory": memory.live_state()}, {})
    rows = next((tmp_path / "00000002" / "replay-1").glob("*.rows"))
    rows.write_bytes(rows.read_bytes()[:-1] + b"?")
    found = checkpoints.latest()
    assert found.number == 1
    assert "replay-1" in found.damaged[0]
    shutil.rmtree(tmp_path / "00000002" / "replay-1")
    with pytest.raises(DamagedFile, match="replay-1 is missing"):
        checkpoints.load(2)


def test_a_shelf_that_is_gone_is_named(tmp_path):
    with shelves_of("prioritized") as (shelves, memory):
        memory.add([actor.segment() for actor in actors_of("prioritized")])
        assert memory.stats()["size"] > 0
        shelves.end()
        with pytest.raises(RoleDied, match=r"replay-[012] is gone, and with it a part of the replay"):
            learn(memory, actors_of("prioritized"), rounds=9)


def test_what_goes_wrong_over_there_is_raised_here(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with shelves_of("prioritized") as (_, memory):
        learn(memory, actors_of("prioritized"), rounds=5)
        monkeypatch.setattr("steppe.replay.remote.server.write_save", full)
        with pytest.raises(DiskFull, match="replay-0: there is no room"):
            Checkpoints(tmp_path).save(EMPTY, {"memory": memory.live_state()}, {})
        monkeypatch.undo()
        assert Checkpoints(tmp_path).latest() is None, "half a checkpoint is none"
        memory.pool.store.update_priorities(np.array([160002]), np.ones(1))
        with pytest.raises(UsageError, match="replay-2: index 40000 was never sampled"):
            memory.stats()
        learn(memory, actors_of("prioritized"), rounds=2)


def test_a_pool_of_the_callers_is_not_divided():
    with pytest.raises(ConfigError, match=r"leave flow\.replay_roles out"):
        made("uniform", pool=ReplayBufferPool(1, 300), num_buffers=2)

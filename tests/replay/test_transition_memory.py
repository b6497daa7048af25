"""The learner's replay memory: what is in it, how much comes out, with which weights, and whether it fits the machine."""

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.ppo.config import PPOConfig
from steppe.core.config.agent import AgentConfig
from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import ConfigError, NotFinite, UsageError
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.replay import ReplayBufferPool, ReplayMemory, RolloutBuffer, SamplingConfig, factory, make_memory
from steppe.testing.memory import SPEC, ScriptedActor

pytestmark = pytest.mark.unit


def memory_of(*, prioritized=False, capacity=1000, num_buffers=1, seed=0, spec=SPEC, **draws):
    pool = ReplayBufferPool(num_buffers, capacity, use_prioritized=prioritized, alpha=0.6)
    return ReplayMemory(spec, pool, SamplingConfig(**{"batch_size": 8, **draws}), stream=np.random.default_rng(seed))


def stored(memory):
    store = memory.pool.store
    return store.gather(np.concatenate([store.slots_oldest_first(part) for part in range(store.num_parts)]))


def test_one_step_transitions_are_the_steps_themselves():
    memory = memory_of()
    actors = [ScriptedActor(SPEC, actor, seed=2, next_step=actor == 1) for actor in range(2)]
    for _ in range(6):
        memory.add([actor.segment() for actor in actors])
    rows = stored(memory)
    steps = {step.obs: step for actor in actors for step in actor.steps}
    assert len(rows["reward"]) == len(steps) == memory.inserted
    for index in range(len(steps)):
        step = steps[tuple(rows["obs"][index].tolist())]
        assert (rows["action"][index], rows["reward"][index]) == (step.action, np.float32(step.reward))
        assert tuple(rows["next_obs"][index].tolist()) == step.next_obs
        assert rows["terminated"][index] == step.terminated
        assert rows["discount"][index] == np.float32(0.99)


@pytest.mark.parametrize("samples_per_insert", [0.3, 1.0, 32.0])
@pytest.mark.parametrize("learning_starts", [0, 10, 47])
def test_the_limiter_pays_for_updates_with_insertions(samples_per_insert, learning_starts):
    memory = memory_of(learning_starts=learning_starts, samples_per_insert=samples_per_insert)
    actor, updates = ScriptedActor(SPEC, seed=1), 0
    for count in range(1, 12):
        assert memory.wants_data()
        memory.add([actor.segment()])
        while memory.ready():
            assert not memory.wants_data()
            memory.update(memory.sample(), Learned(1))
            updates += 1
        inserted = count * 15
        paid = max(0.0, (inserted - learning_starts) * samples_per_insert)
        assert updates == (math.ceil(paid / 8) if inserted >= 8 else 0)
    assert memory.stats() == {
        "size": 165.0,
        "inserted": 165.0,
        "sampled": 8.0 * updates,
        "samples_per_insert": pytest.approx(8 * updates / (165 - learning_starts)),
    }


def test_not_ready_before_a_batch_is_there():
    memory = memory_of(batch_size=16, samples_per_insert=1000)
    actor = ScriptedActor(SPEC)
    memory.add([actor.segment()])
    assert not memory.ready()
    with pytest.raises(UsageError, match="a batch of 16 cannot be drawn from 15"):
        memory.sample()
    memory.add([actor.segment()])
    assert memory.ready()


def test_batches_are_uniform_and_whole():
    memory = memory_of(capacity=40, batch_size=40)
    actor = ScriptedActor(SPEC)
    for _ in range(4):
        memory.add([actor.segment()])
    rows = stored(memory)
    place = {tuple(obs): index for index, obs in enumerate(rows["obs"].tolist())}
    counts = np.zeros(40)
    for _ in range(1000):
        batch = memory.sample()
        assert batch.weights is None
        which = [place[tuple(obs)] for obs in batch["obs"].tolist()]
        for name, column in batch.columns.items():
            np.testing.assert_array_equal(column, rows[name][which])
        counts += np.bincount(which, minlength=40)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_sampled_arrays_are_reused():
    memory = memory_of()
    memory.add([ScriptedActor(SPEC).segment()])
    one = {name: column.ctypes.data for name, column in memory.sample().columns.items()}
    assert one == {name: column.ctypes.data for name, column in memory.sample().columns.items()}


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_priorities_shape_the_draws(num_buffers):
    memory = memory_of(prioritized=True, capacity=20, num_buffers=num_buffers, beta=0.5, batch_size=15)
    memory.add([ScriptedActor(SPEC).segment()])
    for _ in range(60):
        batch = memory.sample()
        memory.update(batch, Learned(1, priorities=np.abs(batch["reward"])))
    rows = stored(memory)
    expected = np.abs(rows["reward"].astype(np.float64)) ** 0.6
    probabilities = expected / expected.sum()
    place = {tuple(obs): index for index, obs in enumerate(rows["obs"].tolist())}
    counts = np.zeros(15)
    for _ in range(2000):
        batch = memory.sample()
        which = [place[tuple(obs)] for obs in batch["obs"].tolist()]
        weights = (15 * probabilities[which]) ** -0.5
        np.testing.assert_allclose(batch.weights, weights / weights.max(), rtol=1e-5)
        counts += np.bincount(which, minlength=15)
    assert stats.chisquare(counts, probabilities * counts.sum()).pvalue > 1e-3


def test_beta_rises_with_the_run():
    memory = memory_of(prioritized=True, beta=0.4, total_steps=60)
    actor, betas = ScriptedActor(SPEC), [memory.beta]
    for _ in range(5):
        memory.add([actor.segment()])
        betas.append(memory.beta)
    assert betas == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0, 1.0])
    memory = memory_of(prioritized=True, beta=0.4)
    memory.add([actor.segment()])
    assert memory.beta == 0.4


def test_an_error_of_zero_does_not_bury_a_transition():
    memory = memory_of(prioritized=True)
    memory.add([ScriptedActor(SPEC).segment()])
    batch = memory.sample()
    memory.update(batch, Learned(1, priorities=np.zeros(8)))
    assert (memory.pool.store.tree.leaves[0, :15] > 0).all()


def test_impossible_priorities():
    memory = memory_of(prioritized=True)
    memory.add([ScriptedActor(SPEC).segment()])
    batch = memory.sample()
    with pytest.raises(NotFinite, match="NaN"):
        memory.update(batch, Learned(1, priorities=np.full(8, np.nan)))
    with pytest.raises(UsageError, match="needs an agent that returns priorities"):
        memory.update(batch, Learned(1))


def test_segments_and_pools_that_do_not_fit():
    other = SegmentSpec(4, 3, SPEC.obs, SPEC.action)
    with pytest.raises(UsageError, match="does not fit"):
        memory_of().add([ScriptedActor(other).segment()])
    used, keyed = ReplayBufferPool(1, 10), ReplayBufferPool(1, 10, experience_keys=["state", "reward"])
    used.add_experiences([{"state": 1}])
    for pool in (used, keyed):
        with pytest.raises(UsageError, match="other columns than the agent needs"):
            ReplayMemory(SPEC, pool, SamplingConfig(1), stream=np.random.default_rng())
    with pytest.raises(ConfigError, match="batches of 8 cannot be drawn from 4"):
        memory_of(capacity=4)


def test_a_state_of_another_shape_is_refused():
    state = memory_of(capacity=50).state()
    with pytest.raises(UsageError, match="cannot take over"):
        memory_of(prioritized=True, capacity=50).restore(state)
    with pytest.raises(UsageError, match="do not fit"):
        memory_of(capacity=50, num_buffers=2).restore(state)
    wide = SegmentSpec(5, 3, FieldSpec("obs", (5,), "float32"), SPEC.action)
    with pytest.raises(UsageError, match="saved columns"):
        memory_of(spec=wide).restore(state)


def test_make_memory_reads_the_configuration():
    stream = np.random.default_rng(0)
    assert isinstance(make_memory(PPOConfig(), SPEC, stream=stream, total_steps=None), RolloutBuffer)
    config = DQNConfig(
        buffer_size=77, batch_size=5, learning_starts=9, samples_per_insert=3.0, n_step=4, gamma=0.8, prioritized=True,
        alpha=0.5, beta=0.3,
    )  # fmt: skip
    memory = make_memory(config, SPEC, stream=stream, total_steps=123, num_actors=2)
    assert isinstance(memory, ReplayMemory)
    assert memory.draws == SamplingConfig(5, 9, 3.0, 4, 0.8, 0.3, 123)
    assert (memory.pool.num_buffers, memory.pool.buffer_capacity) == (1, 77)
    assert memory.pool.store.alpha == 0.5
    uniform = make_memory(DQNConfig(), SPEC, stream=stream, total_steps=123)
    assert not uniform.pool.use_prioritized


def test_a_pool_of_ones_own_is_used_in_place():
    pool = ReplayBufferPool(2, 50, use_prioritized=True)
    memory = make_memory(
        DQNConfig(batch_size=4, n_step=1), SPEC, stream=np.random.default_rng(0), total_steps=9, pool=pool
    )
    memory.add([ScriptedActor(SPEC).segment()])
    assert pool.get_total_experiences() == 15
    assert memory.sample().weights is not None
    with pytest.raises(ConfigError, match="use_prioritized=True"):
        make_memory(
            DQNConfig(prioritized=True), SPEC, stream=np.random.default_rng(0), total_steps=9, pool=ReplayBufferPool()
        )


def test_a_configuration_of_ones_own_needs_a_size():
    class Config(AgentConfig):
        memory = "replay"

    with pytest.raises(ConfigError, match="no field buffer_size"):
        make_memory(Config(), SPEC, stream=np.random.default_rng(0), total_steps=None)

    class Sized(Config):
        buffer_size: int = 10
        batch_size: int = 2

    memory = make_memory(Sized(gamma=0.5), SPEC, stream=np.random.default_rng(0), total_steps=None)
    assert memory.draws.gamma == 0.5


def test_what_the_machine_cannot_hold_is_refused(monkeypatch):
    spec = SegmentSpec(2, 1, FieldSpec("obs", (4, 84, 84), "uint8"), FieldSpec("action", (), "int64"))
    with pytest.raises(
        ConfigError,
        match=r"replay of 1,000,000,000 transitions \(buffer_size\) needs 52\d{3}\.\d GiB .* GiB of memory are available",
    ):
        make_memory(DQNConfig(buffer_size=10**9), spec, stream=np.random.default_rng(0), total_steps=None)
    row = 2 * 4 * 84 * 84 + 8 + 4 + 1 + 4
    monkeypatch.setattr(factory, "available_bytes", lambda: 2000 * row)
    make_memory(DQNConfig(buffer_size=1799, n_step=1), spec, stream=np.random.default_rng(0), total_steps=None)
    with pytest.raises(ConfigError, match="at most about 1,800 transitions fit"):
        make_memory(DQNConfig(buffer_size=1801, n_step=1), spec, stream=np.random.default_rng(0), total_steps=None)


def test_a_container_limit_counts(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   2000000 kB\n",
        "/sys/fs/cgroup/memory.max": "5000000\n",
        "/sys/fs/cgroup/memory.current": "1000000\n",
    }
    monkeypatch.setattr(factory, "_text", lambda path: files[path])
    assert factory.available_bytes() == 4_000_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert factory.available_bytes() == 2_000_000 * 1024


def test_rollouts_need_no_compiler():
    """An on-policy learner starts without importing numba, and nothing here imports torch."""
    code = (
        "import sys, numpy, steppe.replay as r\n"
        "from steppe.algorithms.dqn.config import DQNConfig\n"
        "from steppe.algorithms.ppo.config import PPOConfig\n"
        "from steppe.testing.memory import SPEC\n"
        "r.make_memory(PPOConfig(), SPEC, stream=numpy.random.default_rng(0), total_steps=1)\n"
        "assert 'numba' not in sys.modules\n"
        "r.make_memory(DQNConfig(), SPEC, stream=numpy.random.default_rng(0), total_steps=1)\n"
        "assert 'torch' not in sys.modules\n"
        "assert all(hasattr(r, name) for name in r.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

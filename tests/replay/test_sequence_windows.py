"""Sequence replay against plain Python: windows never leave their episode, targets are right, priorities are per sequence."""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from steppe.core.contracts.algorithm import Learned
from steppe.core.contracts.errors import ConfigError, SteppeError, UsageError
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.io import codec
from steppe.core.priorities import PRIORITY_ETA, sequence_priority
from steppe.replay import GlobalBuffer, LocalBuffer, ReplayBufferPool, SequenceMemory, SequenceSamplingConfig, Windowing
from steppe.replay.sequence_windows import estimate_priorities
from steppe.testing.memory import ScriptedActor

pytestmark = pytest.mark.unit

SPEC = SegmentSpec(
    5, 3, FieldSpec("obs", (4,), "float32"), FieldSpec("action", (), "int64"), (FieldSpec("hidden", (2,), "float32"),)
)
RULES = [
    Windowing(length=6, burn_in=3, stride=2, n_step=2, gamma=0.9),
    Windowing(length=4, burn_in=0, n_step=1, gamma=0.9),
    Windowing(length=1, burn_in=7, stride=1, n_step=3, gamma=0.9),
]


def with_hidden(segment):
    """The stored state says which observation it was stored with."""
    segment["hidden"][...] = segment["obs"][:-1, :, 2:]
    return segment


def memory_of(rules, *, capacity=4000, num_buffers=1, alpha=0.6, seed=0, batch_size=16, spec=SPEC, **draws):
    pool = ReplayBufferPool(num_buffers, capacity, use_prioritized=True, alpha=alpha)
    settings = SequenceSamplingConfig(batch_size, rules, **draws)
    return SequenceMemory(spec, pool, settings, stream=np.random.default_rng(seed))


def filled(rules, segments=30, **options):
    memory, actors = memory_of(rules, **options), [ScriptedActor(SPEC, actor, next_step=actor == 1) for actor in (0, 1)]
    for _ in range(segments):
        memory.add([with_hidden(actor.segment()) for actor in actors])
    return memory, {step.obs: step for actor in actors for step in actor.steps}


def require_true(batch, column, rules, steps):
    """One window against the script."""
    obs = [tuple(row) for row in batch["obs"][:, column].tolist()]
    valid, learn = batch["valid"][:, column], batch["learn"][:, column]
    rows = int(valid.sum())
    assert valid[:rows].all(), "what is there comes first"
    for one, other in pairwise(obs[:rows]):
        assert other == (*one[:3], one[3] + 1), "windows are one episode's, step by step"
    first = int(np.argmax(learn))
    assert 1 <= learn.sum() <= rules.length
    assert learn[first : first + learn.sum()].all()
    assert first <= rules.burn_in
    start = obs[first]
    assert start[3] % rules.step == 0, "sequences begin every `stride` steps of an episode"
    if first < rules.burn_in:
        assert obs[0][3] == 0, "a burn-in is only shortened by the start of the episode"
    assert batch["hidden"][column].tolist() == list(obs[0][2:]), "the state that was stored with the first row"
    for t in np.flatnonzero(learn):
        total, factor, count, at = 0.0, 1.0, 0, obs[t]
        while count < rules.n_step:
            step = steps[at]
            total, factor, count, at = total + factor * step.reward, factor * rules.gamma, count + 1, step.next_obs
            if step.terminated or step.truncated:
                break
        assert batch["action"][t, column] == steps[obs[t]].action
        assert batch["reward"][t, column] == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert batch["discount"][t, column] == pytest.approx(factor)
        assert batch["terminated"][t, column] == step.terminated
        assert obs[batch["following"][t, column]] == at
    if learn.sum() < rules.length:
        assert step.terminated or step.truncated, "shorter only at the end of an episode"


@pytest.mark.parametrize("rules", RULES)
def test_windows_are_what_happened(rules):
    memory, steps = filled(rules)
    for _ in range(20):
        batch = memory.sample()
        assert batch["obs"].shape == (rules.rows, 16, 4)
        for column in range(16):
            require_true(batch, column, rules, steps)


@pytest.mark.parametrize("rules", RULES)
def test_every_sequence_is_there_once(rules):
    """Starts are at multiples of the stride, in whichever segments an episode was collected."""
    memory, steps = filled(rules, alpha=0.0)
    store = memory.pool.store
    starts = np.flatnonzero(store.tree.leaves[0, : store.capacity] > 0)
    found = sorted(tuple(row) for row in store.columns["obs"][starts].tolist())
    ended = {obs[:3] for obs, step in steps.items() if step.terminated or step.truncated}
    assert found == sorted(obs for obs in steps if obs[3] % rules.step == 0 and obs[:3] in ended)


class Seldom:
    """In place of an actor's random numbers: every 1,500th step terminates."""

    def __init__(self):
        self.asked = 0

    def normal(self):
        return np.sin(self.asked)

    def random(self):
        self.asked += 1  # twice per step
        return 0.0 if self.asked % 3000 == 2999 else 1.0


@pytest.mark.parametrize("rules", RULES)
def test_long_episodes_come_in_pieces_that_nobody_sees(rules):
    spec = SegmentSpec(64, 1, SPEC.obs, SPEC.action, SPEC.extras)
    memory = memory_of(rules, capacity=8000, alpha=0.0, spec=spec)
    actor = ScriptedActor(spec)
    actor.stream = Seldom()
    for _ in range(60):
        memory.add([with_hidden(actor.segment())])
    steps = {step.obs: step for step in actor.steps}
    store = memory.pool.store
    starts = np.flatnonzero(store.tree.leaves[0, : store.capacity] > 0)
    found = sorted(tuple(row) for row in store.columns["obs"][starts].tolist())
    ended = [obs for obs in found if obs[2] < 2]
    assert ended == sorted(obs for obs in steps if obs[3] % rules.step == 0 and obs[2] < 2)
    assert len(found) > len(ended) == 2 * 1500 // rules.step
    assert len(store) < 1.2 * len(steps) + 50 * rules.rows
    for _ in range(20):
        batch = memory.sample()
        for column in range(16):
            require_true(batch, column, rules, steps)


@pytest.mark.parametrize("rules", RULES)
def test_overwritten_rows_are_never_part_of_a_window(rules):
    memory, steps = filled(rules, segments=3, capacity=300)
    actors = [ScriptedActor(SPEC, actor) for actor in (5, 6)]
    for _ in range(60):
        memory.add([with_hidden(actor.segment()) for actor in actors])
        steps |= {step.obs: step for actor in actors for step in actor.steps}
        batch = memory.sample()  # each time: what was overwritten last lies just before the oldest row
        for column in range(16):
            first = int(np.argmax(batch["learn"][:, column]))
            rows = int(batch["valid"][:, column].sum())
            obs = [tuple(row) for row in batch["obs"][:rows, column].tolist()]
            for one, other in pairwise(obs):
                assert other == (*one[:3], one[3] + 1)
            assert batch["hidden"][column].tolist() == list(obs[0][2:])
            assert batch["action"][first, column] == steps[obs[first]].action


def test_a_lost_segment_ends_what_was_open():
    rules = RULES[0]
    memory, actor = memory_of(rules), ScriptedActor(SPEC, seed=4)
    for number in range(40):
        segment = with_hidden(actor.segment())
        if number % 7 != 3:
            memory.add([segment])
    steps = {step.obs: step for step in actor.steps if step.sequence % 7 != 3}
    for _ in range(20):
        batch = memory.sample()
        for column in range(16):
            rows = int(batch["valid"][:, column].sum())
            obs = [tuple(row) for row in batch["obs"][:rows, column].tolist()]
            for one, other in pairwise(obs):
                assert other == (*one[:3], one[3] + 1)
            for t in np.flatnonzero(batch["learn"][:, column]):
                assert obs[t] in steps


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_sequences_are_drawn_by_their_priorities(num_buffers):
    rules = Windowing(length=4, stride=2, n_step=1)
    memory, _ = filled(rules, segments=8, capacity=600, num_buffers=num_buffers, batch_size=64)
    store = memory.pool.store
    names = {}
    for _ in range(60):
        batch = memory.sample()
        priorities = 0.2 + batch["obs"][np.argmax(batch["learn"], axis=0), np.arange(64), 3] % 5
        memory.update(batch, Learned(1, priorities=priorities))
        names |= dict(zip(batch.indices.tolist(), priorities.tolist(), strict=True))
    assert len(names) == np.count_nonzero(store.tree.leaves)
    odds = np.array(list(names.values())) ** 0.6
    counts = dict.fromkeys(names, 0)
    for _ in range(1000):
        batch = memory.sample()
        for index in batch.indices.tolist():
            counts[index] += 1
        own = np.array([names[index] for index in batch.indices.tolist()]) ** 0.6
        np.testing.assert_allclose(batch.weights, (own.min() / own) ** memory.beta, rtol=1e-5)
    assert stats.chisquare(list(counts.values()), odds / odds.sum() * 64_000).pvalue > 1e-3


def test_alpha_zero_draws_sequences_uniformly():
    memory, _ = filled(RULES[1], segments=8, alpha=0.0, batch_size=64)
    counts = {}
    for _ in range(600):
        batch = memory.sample()
        np.testing.assert_array_equal(batch.weights, 1)
        memory.update(batch, Learned(1))
        for index in batch.indices.tolist():
            counts[index] = counts.get(index, 0) + 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_a_priority_for_a_sequence_that_is_gone_changes_nothing():
    memory, actor = memory_of(RULES[1], capacity=300), ScriptedActor(SPEC)
    for _ in range(8):
        memory.add([with_hidden(actor.segment())])
    batch = memory.sample()
    old = batch.indices.copy()
    for _ in range(60):
        memory.add([with_hidden(actor.segment())])
    before = memory.pool.store.tree.leaves.copy()
    batch.indices = old
    memory.update(batch, Learned(1, priorities=np.full(16, 7.0)))
    np.testing.assert_array_equal(memory.pool.store.tree.leaves, before)
    assert memory.stats()["stale_updates"] == 16


def test_goes_on_exactly_from_its_state():
    for split in (1, 7, 20):
        actors = [ScriptedActor(SPEC, actor) for actor in (0, 1)]
        rounds = [[with_hidden(actor.segment()) for actor in actors] for _ in range(30)]
        one, other = memory_of(RULES[0], capacity=400), memory_of(RULES[0], capacity=400)
        run(one, rounds[:split])
        other.restore(codec.unpack(codec.pack(one.state())))
        left, right = run(one, rounds[split:]), run(other, rounds[split:])
        assert len(left) == len(right) > 0
        np.testing.assert_equal(left, right)
        assert one.stats() == other.stats()


def run(memory, rounds):
    found = []
    for segments in rounds:
        memory.add(segments)
        while memory.ready():
            batch = memory.sample()
            found.append({name: column.copy() for name, column in batch.columns.items()} | {"w": batch.weights.copy()})
            memory.update(batch, Learned(1, priorities=0.1 + np.abs(batch["reward"]).max(axis=0)))
    return found


def test_priorities_mix_the_largest_and_the_mean_error():
    errors = np.array([[1.0, -5.0], [-3.0, 2.0], [9.0, 9.0]])
    counted = np.array([[True, True], [True, False], [False, False]])
    np.testing.assert_allclose(sequence_priority(errors, counted), [PRIORITY_ETA * 3 + (1 - PRIORITY_ETA) * 2, 5.0])
    assert sequence_priority(errors, np.zeros((3, 2), bool)).tolist() == [0, 0]


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("agents", [(), (3,)])
@pytest.mark.parametrize("rescaled", [False, True])
def test_estimates_are_those_of_the_actors_values(terminated, whole, agents, rescaled):
    """By hand, step by step: nothing beyond a termination, and never a value of a state that was not valued."""
    terminated = terminated and whole
    scale = {"rescaled": True} if rescaled else {}  # values are plain unless somebody says otherwise
    stream, rules = np.random.default_rng(0), Windowing(length=4, stride=2, n_step=3, gamma=0.9, **scale)
    rows = 11
    piece = {
        "q_val": stream.normal(size=(rows, *agents, 5)).astype(np.float32),
        "action": stream.integers(0, 5, (rows, *agents)),
        "reward": stream.normal(size=rows).astype(np.float32),
        "terminated": np.zeros(rows, bool),
    }
    piece["terminated"][rows - 2] = terminated
    steps, known = rows - 1, rows - whole
    errors = []
    for t in range(steps):
        count = min(3, steps - t)
        ends = terminated and t + count == steps
        while not ends and t + count >= known:
            count -= 1
        if count == 0:
            errors.append(None)
            continue
        target = sum(0.9**k * float(piece["reward"][t + k]) for k in range(count))
        each = []
        for agent in np.ndindex(agents):
            ahead = float(piece["q_val"][(t + count, *agent)].max())
            if rescaled:  # the value v with sign(v) (√(|v| + 1) − 1) + .001 v = ahead, by bisection
                low, high = -100.0, 100.0
                while high - low > 1e-12:
                    middle = (low + high) / 2
                    below = math.copysign(math.sqrt(abs(middle) + 1) - 1, middle) + 1e-3 * middle < ahead
                    low, high = (middle, high) if below else (low, middle)
                ahead = low
            aim = target + (0.0 if ends else 0.9**count * ahead)
            if rescaled:
                aim = math.copysign(math.sqrt(abs(aim) + 1) - 1, aim) + 1e-3 * aim
            each.append(abs(aim - float(piece["q_val"][(t, *agent)][piece["action"][(t, *agent)]])))
        errors.append(sum(each) / len(each))
    starts = np.arange(0, steps, 2)
    expected = []
    for start in starts:
        own = [error for error in errors[start : start + 4] if error is not None]
        expected.append(PRIORITY_ETA * max(own) + (1 - PRIORITY_ETA) * sum(own) / len(own) if own else np.nan)
    np.testing.assert_allclose(estimate_priorities(piece, starts, rules, complete=whole), expected, rtol=1e-6)


def test_settings_that_cannot_be():
    for wrong in ({"length": 0}, {"stride": 0}, {"length": 4, "stride": 5}, {"burn_in": -1}, {"n_step": 0}):
        with pytest.raises(ConfigError, match="a sequence has length"):
            Windowing(**wrong)
    with pytest.raises(AttributeError):
        Windowing().length = 0  # checked once, and so never changed
    pool = ReplayBufferPool(1, 1000)
    with pytest.raises(ConfigError, match="use_prioritized=True"):
        SequenceMemory(SPEC, pool, SequenceSamplingConfig(4), stream=np.random.default_rng())
    with pytest.raises(ConfigError, match="more room"):
        memory_of(RULES[0], capacity=100)
    with pytest.raises(UsageError, match="does not fit"):
        memory_of(RULES[0]).add([ScriptedActor(SegmentSpec(4, 3, SPEC.obs, SPEC.action)).segment()])


def episode(number, steps, *, terminated, agents=2):
    local = LocalBuffer(np.full((agents, 3), number * 1000, np.float32))
    for t in range(steps):
        local.add(
            action=np.arange(agents) % 5,
            reward=float(t),
            next_obs=np.full((agents, 3), number * 1000 + t + 1, np.float32),
            hidden=np.full((agents, 4), number * 1000 + t, np.float32),
            comm_mask=np.eye(agents, dtype=bool),
            q_val=np.zeros((agents, 5), np.float32),
        )
    assert len(local) == steps
    return local.finish(terminated=terminated)


def test_local_buffers_fill_a_global_one():
    buffer = GlobalBuffer(2000, Windowing(length=4, burn_in=2, stride=2, n_step=2, gamma=0.5), batch_size=32, seed=0)
    with pytest.raises(UsageError, match="add one first"):
        buffer.get_data()
    for number in range(20):
        buffer.add(episode(number, 3 + number, terminated=number % 2 == 0))
    batch = buffer.get_data()
    assert batch["obs"].shape == (8, 32, 2, 3)
    assert batch["comm_mask"].shape == (8, 32, 2, 2)
    assert batch["hidden"].shape == (32, 2, 4)
    np.testing.assert_array_equal(batch["obs"][0, :, 0, 0], batch["hidden"][:, 0, 0])
    for column in range(32):
        number, _ = divmod(int(batch["obs"][0, column, 0, 0]), 1000)
        for t in np.flatnonzero(batch["learn"][:, column]):
            time = int(batch["obs"][t, column, 0, 0]) % 1000
            after = int(batch["obs"][batch["following"][t, column], column, 0, 0]) % 1000
            assert after == min(time + 2, 3 + number)
            assert batch["reward"][t, column] == sum(0.5**k * (time + k) for k in range(after - time))
            assert batch["terminated"][t, column] == (number % 2 == 0 and after == 3 + number)
    buffer.update_priorities(batch.indices, np.ones(32))
    assert buffer.get_batch(5)["obs"].shape == (8, 5, 2, 3)


@pytest.mark.regression
def test_only_rows_that_begin_a_sequence_have_a_priority():
    """Of 6 steps with a stride of 2: rows 0, 2 and 4 begin one; row 6 has only the last observation."""
    buffer = GlobalBuffer(9, Windowing(length=4, stride=2), batch_size=64, seed=0)
    with pytest.raises(UsageError, match="index 0 was never sampled"):
        buffer.update_priorities([0], [1.0])
    buffer.add(episode(1, 6, terminated=True))
    assert set(buffer.get_batch().indices) == {0, 2, 4}
    for row in (1, 3, 5, 6):
        with pytest.raises(UsageError, match=f"index {row} is of a row that begins no sequence: use the indices that"):
            buffer.update_priorities([2, row], [0.0, 1.0])
    for row in (7, -1):
        with pytest.raises(UsageError, match=f"index {row} was never sampled"):
            buffer.update_priorities([row], [1.0])
    assert set(buffer.get_batch().indices) == {0, 2, 4}, "a call that is refused changes nothing"

    buffer.update_priorities([2], [0.0])
    assert set(buffer.get_batch().indices) == {0, 4}
    buffer.update_priorities([2], [1.0])
    assert set(buffer.get_batch().indices) == {0, 2, 4}, "a sequence with priority 0 still is one"

    buffer.add(episode(2, 4, terminated=True))  # rows 7 to 11, over rows 0 to 2
    assert set(buffer.get_batch().indices) == {4, 7, 9}
    buffer.update_priorities([0, 1, 2, 4, 7], [9.0, 9.0, 9.0, 0.0, 0.0])
    assert buffer.pool.get_buffer_stats()["stale_updates"] == 3
    assert set(buffer.get_batch().indices) == {9}
    with pytest.raises(UsageError, match="index 8 is of a row"):
        buffer.update_priorities([8], [1.0])


def test_episodes_that_do_not_fit():
    buffer = GlobalBuffer(50, Windowing(length=4))
    buffer.add(episode(1, 10, terminated=True))
    with pytest.raises(UsageError, match=r"'obs' has shape \(3, 3\), but this buffer's column has \(2, 3\)"):
        buffer.add(episode(1, 10, terminated=True, agents=3))
    with pytest.raises(ConfigError, match="an episode of 81 rows does not fit a buffer of 50"):
        buffer.add(episode(1, 80, terminated=True))
    with pytest.raises(UsageError, match="without a step"):
        LocalBuffer(np.zeros((2, 3))).finish(terminated=True)
    assert len(buffer) == 11


def test_batches_unpack_and_numbers_may_have_an_axis() -> None:
    plain, axes = (GlobalBuffer(500, Windowing(length=4), batch_size=8, seed=0) for _ in range(2))
    for buffer, number in ((plain, float), (axes, lambda value: [value])):
        local = LocalBuffer(np.zeros((2, 3), np.float32))
        for step in range(6):
            obs, hidden, mask = np.full((2, 3), step, np.float32), np.zeros((2, 4), np.float32), np.ones((2, 2), bool)
            local.add(np.array(number(1)).astype(int), number(step), obs, hidden, mask, np.zeros(5, np.float32))
        buffer.add(local.finish(terminated=True))
    obs, action, reward, terminated, *_ = plain.get_batch()
    other = axes.get_batch()
    assert obs.shape == (5, 8, 2, 3)
    for mine, theirs in zip((obs, action, reward, terminated), other, strict=False):
        np.testing.assert_array_equal(mine, theirs)
    assert len(list(other)) == len(other.columns)


def test_an_episode_with_nan_is_refused() -> None:
    local = LocalBuffer(np.zeros((1, 3), np.float32))
    good = (1, 0.5, np.zeros((1, 3)), np.zeros((1, 4)), np.ones((1, 1), bool), np.zeros(5))
    for place, name in ((1, "reward"), (2, "next_obs"), (3, "hidden"), (5, "q_val")):
        bad = [value if index != place else np.full(np.shape(value), np.nan) for index, value in enumerate(good)]
        with pytest.raises(UsageError, match=f"{name} of step 0 has NaN"):
            local.add(*bad)
    local.add(*good)
    assert len(local) == 1


@pytest.mark.regression
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"action": np.full((11, 2), 10**8)}, "'action' is 100000000"),
        ({"action": np.full((11, 2), 0.5)}, "'action' has the value 0.5"),
        ({"action": np.zeros(11, int)}, r"'action' has shape \(\), but this buffer's column has \(2,\)"),
        ({"obs": np.full((11, 2, 3), np.nan)}, "'obs' is nan"),
        ({"reward": np.full(11, 1e300)}, "'reward' is inf"),
        ({"obs": np.full((11, 2, 3), "x")}, "'obs' holds <U1 values"),
        ({"hidden": np.zeros((10, 2, 4))}, "one common length"),
        ({"before": np.zeros(11, int)}, "the episode has before, which is made when it is drawn"),
        ({"more": np.zeros(11)}, "has unknown more"),
        ({"terminated": np.full(11, 2, np.uint8).view(bool)}, "'terminated' has bytes that are neither 0 nor 1"),
    ],
)
def test_episodes_that_cannot_be_learned_from_are_refused_whole(changes, words):
    """Windows are laid by compiled code, which checks nothing."""
    good = episode(1, 10, terminated=True)
    buffer = GlobalBuffer(50, Windowing(length=4), batch_size=2)
    buffer.add(good)
    with pytest.raises(SteppeError, match=words):
        buffer.add({**good, **changes})
    with pytest.raises(UsageError, match="the episode lacks reward"):
        buffer.add({name: rows for name, rows in good.items() if name != "reward"})
    assert len(buffer) == 11


def test_columns_of_a_first_episode_are_of_the_same_agents():
    buffer, good = GlobalBuffer(50, Windowing(length=4)), episode(1, 10, terminated=True)
    with pytest.raises(UsageError, match=r"'action' has shape \(11,\), but 'q_val' has \(11, 2, 5\)"):
        buffer.add({**good, "action": np.zeros(11, int)})
    buffer.add(good)
    assert len(buffer) == 11


@pytest.mark.parametrize("batch_size", [0, -1, 10**12, 10**30])
def test_a_batch_that_memory_cannot_hold_is_refused(batch_size):
    buffer = GlobalBuffer(50, Windowing(length=4), batch_size=2)
    buffer.add(episode(1, 10, terminated=True))
    with pytest.raises(UsageError, match="memory has room for"):
        buffer.get_batch(batch_size)


def test_steps_are_copied_and_have_one_shape():
    obs = np.zeros((1, 3), np.float32)
    rest = (1, 0.5, obs, np.zeros((1, 4)), np.ones((1, 1), bool), np.zeros(5))
    local = LocalBuffer(obs)
    local.add(*rest)
    obs[...] = 7.0  # as an environment does that uses its memory again
    local.add(*rest)
    with pytest.raises(UsageError, match=r"next_obs of step 2 has shape \(2, 3\), but it was \(1, 3\) before"):
        local.add(1, 0.5, np.zeros((2, 3)), *rest[3:])
    assert local.finish(terminated=True)["obs"][:, 0, 0].tolist() == [0.0, 0.0, 7.0]


def test_windows_have_the_documented_defaults():
    rules = Windowing()
    assert (rules.length, rules.burn_in, rules.n_step, rules.gamma, rules.rescaled) == (16, 0, 1, 0.99, False)


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_rows_that_are_not_learned_pay_nothing_and_are_ends(num_buffers):
    """In every buffer of the pool, not only in the first."""
    memory, steps = filled(RULES[0], num_buffers=num_buffers)
    for _ in range(10):
        batch = memory.sample()
        outside = ~batch["learn"]
        assert outside.any()
        assert batch["terminated"][outside].all()
        assert (batch["reward"][outside] == 0).all()
        assert (batch["discount"][outside] == 0).all()
        for column in range(16):
            require_true(batch, column, RULES[0], steps)

"""Snapshots of worlds: restored into a new world they go on bit by bit, or say that they cannot."""

import enum
import importlib
import random
import sys
import types
from collections import deque

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from steppe.core.config.references import make_reference
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.errors import CannotResume, EnvironmentFault
from steppe.core.contracts.segment import Segment
from steppe.core.contracts.specs import SegmentSpec
from steppe.core.io import codec
from steppe.envs import make_segment_env
from steppe.envs.snapshot import reader, snapshots
from steppe.envs.snapshot.writer import SnapshotWriter
from steppe.testing.env import sample
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration

LOOP = EnvConfig(vector="loop")
MORE = 300


def chain(env="CartPole-v1"):
    made = gym.wrappers.RecordEpisodeStatistics(gym.make(env, disable_env_checker=True))
    made = gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(made))
    made = gym.wrappers.FrameStackObservation(made, 3)
    made = gym.wrappers.ClipReward(gym.wrappers.FlattenObservation(made), -5, 5)
    return gym.wrappers.TimeLimit(made, 23)


def checked():
    """With the wrappers that gym.make adds by itself, one of which keeps the last observation and info."""
    return gym.make("CartPole-v1")


class Rig:
    """A world, the segment it writes into, and the random actions it gets."""

    def __init__(self, env, config, num_envs, seed):
        self.world = make_segment_env(env, config, num_envs, np.random.SeedSequence(seed))
        spec = self.world.spec
        self.segment = Segment.blank(SegmentSpec(1, num_envs, spec.obs, spec.action.field))

    def begin(self):
        self.world.reset(self.segment["obs"][0])
        return self

    def run(self, actions):
        """Everything that is written and told in these steps, as bytes and plain values."""
        results = []
        for action in actions:
            for name in ("reward", "final_obs"):
                self.segment[name][...] = 0
            self.world.step(action, self.segment, 0)
            columns = {n: c.tobytes() for n, c in self.segment.columns.items() if n not in ("obs", "action")}
            results.append((columns, self.segment["obs"][1].tobytes(), self.world.starts.tolist()))
            results.append((self.world.take_finished(), self.world.unfinished()))
        return results

    def actions(self, count, seed):
        generator = np.random.default_rng(seed)
        return [sample(self.world.spec.action, self.world.num_envs, generator) for _ in range(count)]


def travelled(state):
    assert state is not None
    return codec.unpack(codec.pack(state))


def rebuild(live, tree):
    building = SnapshotWriter()
    building.fill(live, tree)
    building.finish()


def require_exact(env, config=LOOP, num_envs=3, steps=57, kind="exact"):
    """One world is interrupted by a snapshot, one never; a third begins elsewhere and takes over."""
    control, original, heir = (Rig(env, config, num_envs, seed) for seed in (5, 5, 6))
    first, then = control.actions(steps, 1), control.actions(MORE, 2)
    assert control.begin().run(first) == original.begin().run(first)
    state = travelled(original.world.snapshot())
    assert original.world.resume_kind == kind
    expected = control.run(then)
    assert original.run(then) == expected
    heir.world.restore(state)
    assert heir.world.seeds == original.world.seeds
    assert heir.run(then) == expected
    assert any(finished for finished, _ in expected[1::2]) or MORE < 1000
    assert heir.world.resume_kind == kind
    # the heir can be asked in turn, and the state was not used up by the first restore
    again = Rig(env, config, num_envs, 7).begin()
    again.run(again.actions(3, 3))
    again.world.restore(travelled(heir.world.snapshot()))
    assert again.run(then) == heir.run(then)
    again.world.restore(state)
    assert again.run(then) == expected
    for rig in (control, original, heir, again):
        rig.world.close()


ENVS = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Taxi-v4"]
ENVS += ["FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1"]
ENVS += [f"steppe/{name}-v0" for name in ("Identity", "ContinuousIdentity", "TwoStateChain", "TwoStateChainTruncated")]
ENVS += ["steppe/Counting-v0"]


@pytest.mark.parametrize("env", [*ENVS, make_reference(chain), make_reference(checked)])
@pytest.mark.parametrize("steps", rest_slow(57, 0, 1, 250))
def test_a_restored_loop_continues_exactly(env, steps):
    require_exact(env, steps=steps)


@pytest.mark.parametrize("env", ["CartPole-v1", "MountainCarContinuous-v0", "Pendulum-v1"])
def test_frames_limits_clipped_rewards_and_wrappers_go_along(env):
    wrappers = ("gymnasium.wrappers:TimeAwareObservation", "gymnasium.wrappers:RecordEpisodeStatistics")
    config = EnvConfig(
        vector="loop", frame_stack=3, time_limit=31, reward_scale=0.5, reward_clip=0.4, wrappers=wrappers
    )
    require_exact(env, config)


@pytest.mark.parametrize("steps", rest_slow(57, 0, 1, 250))
@pytest.mark.parametrize("config", [{}, {"frame_stack": 3}, {"time_limit": 9}])
def test_a_restored_native_vector_continues_exactly(config, steps):
    require_exact("CartPole-v1", EnvConfig(vector="native", **config), num_envs=8, steps=steps)


def test_a_native_snapshot_between_an_end_and_its_reset_row_is_exact():
    one, other = (Rig("CartPole-v1", EnvConfig(vector="native"), 4, seed).begin() for seed in (1, 2))
    actions = one.actions(200, 1)
    count = 0
    while not one.world.ended.any():
        one.run([actions[count]])
        count += 1
    other.world.restore(travelled(one.world.snapshot()))
    assert other.world.ended.any()
    assert other.world.steps == count
    assert one.run(actions[count:]) == other.run(actions[count:])


@pytest.mark.parametrize("env", ["steppe/Failing-v0", "steppe/NaN-v0"])
def test_environments_made_to_fail_fail_at_the_same_step(env):
    one, other = (Rig(env, LOOP, 1, seed).begin() for seed in (1, 2))
    one.run(one.actions(7, 1))
    other.world.restore(travelled(one.world.snapshot()))
    if env == "steppe/Failing-v0":
        other.run(one.actions(2, 2))
        with pytest.raises(EnvironmentFault, match=f"seeded with {one.world.seeds[0]}"):
            other.run(one.actions(1, 3))
    else:
        assert one.run(one.actions(20, 2)) == other.run(one.actions(20, 2))


def test_snapshots_are_copies():
    rig = Rig(make_reference(chain), LOOP, 2, 1).begin()
    rig.run(rig.actions(10, 1))
    state = rig.world.snapshot()
    packed = codec.pack(state)
    rig.run(rig.actions(50, 2))
    assert codec.pack(state) == packed


@pytest.mark.parametrize("vector", ["loop", "native"])
def test_unread_finished_episodes_are_part_of_the_state(vector):
    one, other = (Rig("CartPole-v1", EnvConfig(vector=vector), 3, seed).begin() for seed in (1, 2))
    for action in one.actions(60, 1):
        one.world.step(action, one.segment, 0)
    other.world.restore(travelled(one.world.snapshot()))
    finished = one.world.take_finished()
    assert len(finished) > 2
    assert other.world.take_finished() == finished


def test_there_is_nothing_to_take_before_the_first_reset():
    assert Rig("CartPole-v1", LOOP, 2, 1).world.snapshot() is None
    assert Rig("CartPole-v1", EnvConfig(vector="native"), 2, 1).world.snapshot() is None


class Mood(enum.Enum):
    CALM = 1
    WILD = 2


class Board:
    """A part of an environment with state of its own."""

    def __init__(self):
        self.cells = np.zeros((3, 4), np.int8)
        self.history = deque(maxlen=5)
        self.owner = None


class Zoo(gym.Env):
    """Keeps state in many types, shares it between attributes, and shows all of it."""

    def __init__(self):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (9,), np.float64)
        self.action_space = gym.spaces.Discrete(3)
        self.board = Board()
        self.board.owner = self
        self.alias = self.board.cells
        self.dice = random.Random(4)
        self.legacy = np.random.RandomState(4)
        self.tilted = np.ones((5, 7), np.float32).T
        self.walls = {(1, 2), (3, 4)}
        self.memory = {(0, 1): [1.5], "~": 2, 7: None}
        self.mood = Mood.CALM
        self.word = np.str_("x")
        self.letters = np.array([["a", "bc"]])
        self.scale = lambda value: value * 2
        self.show = self._show

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
            self.dice.seed(seed)
            self.legacy.seed(seed)
        self.late = (np.float32(self.np_random.random()), [1, 2.5])
        return self.show(), {}

    def step(self, action):
        self.alias[self.dice.randrange(3), self.np_random.integers(4)] += 1
        self.board.history.append(self.alias.sum())
        self.memory[(0, 1)].append(float(self.legacy.normal()))
        self.tilted *= np.float32(1 + 0.01 * self.action_space.sample())
        self.mood = Mood.WILD if self.np_random.spawn(1)[0].random() < 0.5 else Mood.CALM
        self.letters[0, 0] = self.word = np.str_("xyz"[int(action)])
        self.late = (self.late[0] * np.float32(1.1), [*self.late[1], 3])
        return self.show(), self.scale(float(self.mood.value)), self.dice.random() < 0.05, False, {}

    def _show(self):
        parts = [self.board.cells.sum(), len(self.memory[(0, 1)]), sum(self.memory[(0, 1)]), self.tilted.sum()]
        parts += [self.mood.value, ord(self.letters[0, 0]), self.late[0], len(self.late[1]), sum(self.board.history)]
        return np.array(parts, np.float64)


def test_every_type_that_can_be_read_comes_back():
    require_exact(make_reference(Zoo), num_envs=2)


def test_types_layout_and_sharing_come_back_exactly():
    one, other = Zoo(), Zoo()
    one.reset(seed=1)
    other.reset(seed=2)
    for _ in range(4):
        one.step(1)
    tree = codec.unpack(codec.pack(reader.SnapshotReader().object(one)))
    rebuild(other, tree)
    assert other.alias is other.board.cells
    assert other.board.owner is other
    assert (type(other.late), type(other.late[0]), type(other.late[1])) == (tuple, np.float32, list)
    assert (type(other.word), other.word, other.mood) == (np.str_, one.word, one.mood)
    assert other.tilted.strides == one.tilted.strides
    assert other.letters.dtype == one.letters.dtype
    assert other.memory == one.memory
    assert list(other.memory) == list(one.memory)
    assert other.board.history.maxlen == 5
    assert other.show.__self__ is other


VALUES = [None, True, 3, -(2**200), 1.5, "text", b"bytes", np.float32(1.1), np.float64(1.1), np.int8(-3)]
VALUES += [np.bool_(True), (), (1, (2.0, None)), [], [[1], (2,)], {}, {"a": 1}, {1: "x", "~": (3,)}, {(1, 2): 3}]
VALUES += [deque([1, 2], 4), np.array(3.5), np.zeros((0, 3), np.int16), np.arange(6, dtype=np.float32).reshape(2, 3)]
VALUES += [np.array([["ab", "c"]]), np.array([b"a", b""]), np.str_(""), Mood.WILD, {5, 2}, np.array([], "U3")]
VALUES += [frozenset([3, 1])]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_as_the_type_they_were(value):
    back = SnapshotWriter().value(codec.unpack(codec.pack(reader.SnapshotReader().value(value))))
    assert type(back) is type(value)
    assert repr(back) == repr(value)
    np.testing.assert_equal(back, value)


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_random_streams_continue_and_spawn_as_before(kind):
    stream = np.random.Generator(getattr(np.random, kind)(11))
    stream.spawn(2)
    stream.integers(5, dtype=np.int32)
    back = SnapshotWriter().value(codec.unpack(codec.pack(reader.SnapshotReader().value(stream))))
    assert back.spawn(1)[0].random(3).tolist() == stream.spawn(1)[0].random(3).tolist()
    assert back.integers(9, size=5, dtype=np.int32).tolist() == stream.integers(9, size=5, dtype=np.int32).tolist()
    assert back.normal(size=5).tolist() == stream.normal(size=5).tolist()


class Holder(gym.Env):
    """Holds whatever it is given."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, held=None):
        self.held = held


class Slotted:
    __slots__ = ("inner",)


class Listed(list):
    pass


def counting():
    count = 0

    def count_up():
        nonlocal count
        count += 1
        return count

    return count_up


def remembering():
    past = []
    return lambda: past.append(1)


def overlapping():
    whole = np.zeros(6)
    return [whole[:4], whole[2:]]


class Local(enum.Flag):
    A = 1
    B = 2


REFUSED = {
    "Slotted": lambda: Slotted(),
    "Listed": lambda: Listed(),
    "generator": lambda: (x for x in ()),
    "lock": lambda: __import__("threading").Lock(),
    "count_up": counting,
    "<lambda>": remembering,
    "method": lambda: np.random.default_rng(0).random,
    "builtin_function": lambda: [].append,
    "shares its memory": overlapping,
    "object": lambda: np.array([None]),
    ">f8": lambda: np.zeros(3, ">f8"),
    "combined": lambda: Local.A | Local.B,
    "Board": lambda: [Board()],
}


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_values_are_refused_by_name(name):
    with pytest.raises(reader.Unreadable, match=r"^Holder\.held holds") as refusal:
        reader.SnapshotReader().object(Holder(REFUSED[name]()))
    expected = "builtins.function" if name in ("count_up", "<lambda>") else name
    assert expected in str(refusal.value)


@pytest.mark.parametrize("harmless", [max, np.add, Board, np, len, lambda: 1, np.dtype("f4"), gym.spec("CartPole-v1")])
def test_attributes_without_state_keep_the_new_environments_value(harmless):
    tree = codec.unpack(codec.pack(reader.SnapshotReader().object(Holder(harmless))))
    heir = Holder(harmless)
    rebuild(heir, tree)
    assert heir.held is harmless
    with pytest.raises(CannotResume, match=r"Holder\.held should be"):
        rebuild(Holder(3), tree)


def test_a_class_that_works_with_a_compiled_module_is_not_trusted(monkeypatch):
    home = types.ModuleType("home_of_physics")
    monkeypatch.setitem(sys.modules, home.__name__, home)
    client = type("Client", (), {"__module__": home.__name__})
    reader.SnapshotReader().object(Holder(client()))
    home.physics = importlib.import_module("msgspec._core")
    other = type("Client", (), {"__module__": home.__name__})
    with pytest.raises(reader.Unreadable, match=r"home_of_physics\.Client, which works with msgspec\._core"):
        reader.SnapshotReader().object(Holder(other()))


def test_a_function_bound_to_a_random_stream_is_refused_although_the_stream_can_be_read():
    holder = Holder(np.random.default_rng(0))
    holder.draw = holder.held.random
    with pytest.raises(reader.Unreadable, match=r"Holder\.draw"):
        reader.SnapshotReader().object(holder)


def test_separate_windows_on_one_array_may_be_held():
    rows = np.arange(6.0).reshape(2, 3)
    back = SnapshotWriter().value(codec.unpack(codec.pack(reader.SnapshotReader().value([rows[0], rows[1]]))))
    np.testing.assert_array_equal(back, rows)


def test_attributes_that_were_not_there_go_away():
    tree = reader.SnapshotReader().object(Holder(1))
    heir = Holder(2)
    heir.extra = 5
    rebuild(heir, tree)
    assert vars(heir) == {"held": 1}


def test_another_class_is_refused():
    with pytest.raises(CannotResume, match="CartPole"):
        rebuild(Holder(), reader.SnapshotReader().object(gym.make("CartPole-v1").unwrapped))


def test_streams_of_spaces_go_along_once_they_are_used():
    one, other = Holder(), Holder()
    one.space, other.space = (gym.spaces.Dict(a=gym.spaces.Discrete(99), b=gym.spaces.Box(0, 1)) for _ in range(2))
    other.space.seed(1)
    rebuild(other, travelled(reader.SnapshotReader().object(one)))
    assert other.space._np_random is None  # gymnasium would make a stream for whoever asks for np_random
    one.space.seed(3)
    one.space.sample()
    rebuild(other, travelled(reader.SnapshotReader().object(one)))
    assert repr(other.space.sample()) == repr(one.space.sample())


def random_lake():
    return gym.make("FrozenLake-v1", desc=None, map_name=None)


def test_tables_made_by_chance_are_not_taken_for_the_same():
    one, other = (Rig(make_reference(random_lake), LOOP, 1, 1).begin() for _ in range(2))
    with pytest.raises(CannotResume, match="other tables"):
        other.world.restore(travelled(one.world.snapshot()))


class Own(gym.Env):
    """Hides its state behind an object that cannot be read, and says itself what it is."""

    def __init__(self, declines=False, raises=False):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.hidden = iter(())
        self.total = [0.0]
        self.declines, self.raises = declines, raises

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.total[0] = float(self.np_random.random())
        return np.array(self.total, np.float32), {}

    def step(self, action):
        self.total[0] += float(self.np_random.random()) * (1 + action)
        return np.array(self.total, np.float32), self.total[0], self.total[0] > 20, False, {}

    def snapshot(self):
        if self.raises:
            raise RuntimeError("no")
        return None if self.declines else {"total": np.array(self.total)}

    def restore(self, state):
        self.total[0] = float(state["total"][0])


def own_in_chain():
    return gym.wrappers.RecordEpisodeStatistics(gym.wrappers.TimeLimit(Own(), 15))


@pytest.mark.parametrize("env", [Own, own_in_chain])
def test_an_environments_own_snapshot_is_preferred(env):
    require_exact(make_reference(env))


def test_a_snapshot_that_raises_names_the_environment():
    with pytest.raises(EnvironmentFault, match=r"Own\.snapshot\(\) raised RuntimeError: no"):
        Rig(make_reference(Own), EnvConfig(vector="loop", kwargs={"raises": True}), 1, 1).begin()


class Opaque(gym.Env):
    """Draws from a Python generator, which nobody can read, made from its random stream at every reset."""

    drift = 0.0
    broken = False

    def __init__(self, length=40):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.length = length
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.elapsed = 0
        self.resets += 1
        self.sums = np.zeros(2)
        self.hidden = iter(self.np_random.normal(size=self.length).tolist())
        return self.sums.copy(), {}

    def step(self, action):
        assert action.dtype == np.float32
        if type(self).broken:
            raise RuntimeError("out of order")
        self.elapsed += 1
        self.sums += action * (next(self.hidden) + type(self).drift) + self.resets
        return self.sums.copy(), float(self.sums[0]), False, self.elapsed >= self.length, {}


def opaque_in_chain():
    return gym.wrappers.NormalizeObservation(gym.wrappers.RecordEpisodeStatistics(Opaque()))


class Choosing(Opaque):
    """The same with choices for actions."""

    def __init__(self):
        super().__init__()
        self.action_space = gym.spaces.Discrete(3, start=2)

    def step(self, action):
        assert action in self.action_space
        return super().step(np.float32(action))


@pytest.mark.parametrize("env", [Opaque, opaque_in_chain, Choosing])
@pytest.mark.parametrize("steps", [0, 39, 40, 57, 250])
def test_an_episode_that_cannot_be_read_is_repeated(env, steps):
    require_exact(make_reference(env), steps=steps, kind="replay")


@pytest.mark.parametrize("wrappers", [(), ("gymnasium.wrappers:RecordEpisodeStatistics",)])
def test_an_environment_may_decline_snapshots(wrappers):
    rig = Rig(make_reference(Own), EnvConfig(vector="loop", kwargs={"declines": True}, wrappers=wrappers), 2, 1).begin()
    rig.run(rig.actions(60, 1))
    assert rig.world.snapshot() is None
    assert rig.world.resume_kind == "episode-boundary"


@pytest.mark.parametrize(("name", "value", "message"), [("drift", 1e-3, "did not lead"), ("broken", True, "raised")])
def test_repeating_that_leads_elsewhere_is_refused(monkeypatch, name, value, message):
    one, other = (Rig(make_reference(Opaque), LOOP, 2, seed).begin() for seed in (1, 2))
    one.run(one.actions(10, 1))
    state = travelled(one.world.snapshot())
    monkeypatch.setattr(Opaque, name, value)
    with pytest.raises(CannotResume, match=message):
        other.world.restore(state)
    monkeypatch.undo()
    other.begin()
    assert other.world.starts.all()
    other.run(one.actions(10, 2))


def test_a_tape_ends_and_begins_again_with_the_next_episode(monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_REPLAY_STEPS", 30)
    rig = Rig(make_reference(Opaque), LOOP, 1, 1).begin()
    rig.run(rig.actions(30, 1))
    assert rig.world.snapshot() is not None
    rig.run(rig.actions(1, 2))
    assert rig.world.snapshot() is None
    assert rig.world.resume_kind == "episode-boundary"
    rig.run(rig.actions(9, 3))
    assert rig.world.snapshot() is not None
    assert rig.world.resume_kind == "replay"


class Late(Opaque):
    """Can be read until the end of its first episode."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        if self.resets == 1:
            self.hidden = None
        return result

    def step(self, action):
        if self.hidden is None:
            self.elapsed += 1
            return self.sums.copy(), 0.0, False, self.elapsed >= self.length, {}
        return super().step(action)


def test_tapes_are_started_when_something_unreadable_appears():
    one, other = (Rig(make_reference(Late), LOOP, 2, seed).begin() for seed in (1, 2))
    assert one.world.resume_kind == "exact"
    one.run(one.actions(40, 1))
    assert one.world.snapshot() is None
    assert one.world.resume_kind == "episode-boundary"
    one.run(one.actions(50, 2))
    other.world.restore(travelled(one.world.snapshot()))
    assert one.run(one.actions(100, 3)) == other.run(one.actions(100, 3))


class SlottedEnv(gym.Env):
    """An environment of which nothing can be read."""

    __slots__ = ("spot",)
    observation_space = gym.spaces.Discrete(4)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.spot = 0
        return 0, {}

    def step(self, action):
        self.spot += 1
        return self.spot, 1.0, self.spot == 3, False, {}


def test_an_unsupported_environment_resumes_at_episode_boundaries():
    rig = Rig(make_reference(SlottedEnv), LOOP, 2, 1).begin()
    rig.run(rig.actions(8, 1))
    assert rig.world.snapshot() is None
    assert rig.world.resume_kind == "episode-boundary"


def test_a_native_vector_that_cannot_be_read_resumes_at_episode_boundaries(monkeypatch):
    make = CartPoleVectorEnv.__init__

    def with_an_iterator(env, *words, **options):
        make(env, *words, **options)
        env.notes = iter(())

    monkeypatch.setattr(CartPoleVectorEnv, "__init__", with_an_iterator)
    rig = Rig("CartPole-v1", EnvConfig(vector="native"), 2, 1).begin()
    assert rig.world.snapshot() is None
    assert rig.world.resume_kind == "episode-boundary"


@pytest.mark.parametrize("config", [{"frame_stack": 2}, {"vector": "native"}])
def test_a_snapshot_of_differently_configured_environments_is_refused(config):
    one = Rig("CartPole-v1", LOOP, 2, 1).begin()
    other = Rig("CartPole-v1", EnvConfig(**{"vector": "loop", **config}), 2, 1)
    with pytest.raises(CannotResume):
        other.world.restore(travelled(one.world.snapshot()))


def test_a_snapshot_of_another_environment_is_refused():
    with pytest.raises(CannotResume, match="2 × CartPole-v1, not 2 × Acrobot-v1"):
        Rig("Acrobot-v1", LOOP, 2, 1).world.restore(Rig("CartPole-v1", LOOP, 2, 1).begin().world.snapshot())


def _damage(tree, path=()):
    """Every tree that has one inner part replaced by something else."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        if isinstance(child, dict | list | np.ndarray):
            for other in (None, "x", [None], {"~": "unknown"}):
                broken = codec.unpack(codec.pack(tree))
                broken[key] = other
                yield broken
            for deeper in _damage(child):
                broken = codec.unpack(codec.pack(tree))
                broken[key] = deeper
                yield broken


def test_a_damaged_snapshot_raises_only_cannot_resume():
    state = Rig("CartPole-v1", LOOP, 1, 1).begin().world.snapshot()
    tried = refused = 0
    for broken in _damage(state):
        tried += 1
        rig = Rig("CartPole-v1", LOOP, 1, 2)
        try:
            rig.world.restore(broken)
        except CannotResume:
            refused += 1
            rig.begin().run(rig.actions(2, 1))
    assert tried > 50
    assert refused > tried // 2


def test_an_invalid_snapshot_leaves_the_environment_unchanged():
    one, other = gym.wrappers.TimeLimit(Holder(1), 5), gym.wrappers.TimeLimit(Holder(2), 6)
    tree = reader.SnapshotReader().object(one)
    tree["values"]["env"]["left"]["missing"] = "some.Function"
    before = travelled(reader.SnapshotReader().object(other))
    with pytest.raises(CannotResume, match=r"Holder\.missing"):
        rebuild(other, tree)
    np.testing.assert_equal(travelled(reader.SnapshotReader().object(other)), before)
    assert other.env.held == 2

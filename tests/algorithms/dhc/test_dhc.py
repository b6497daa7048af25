"""DHC in small pathfinding worlds: what it remembers, whom it heeds, what it learns from, and its lessons."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import functional

from steppe.algorithms import make_agent
from steppe.algorithms.dhc.config import DHCConfig
from steppe.algorithms.dhc.unroll import MultiAgentSequences
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec
from steppe.core.io import codec
from steppe.envs import make_segment_env
from steppe.replay import make_memory
from steppe.roles.bound_policy import BoundPolicy
from steppe.runtimes.plan import segment_spec

pytestmark = pytest.mark.unit

WORLDS, AGENTS = 6, 3
SMALL = {"channels": 8, "segment_steps": 8, "sequence_length": 6, "burn_in": 3, "batch_size": 10, "learning_starts": 0}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def world_of(agents=AGENTS, size=6, worlds=WORLDS, seed=0, **kwargs):
    kwargs = {"num_agents": agents, "size": size, "density": 0.2, "max_steps": 20, **kwargs}
    return make_segment_env("steppe/Pathfinding-v0", EnvConfig(kwargs=kwargs), worlds, np.random.SeedSequence(seed))


class Walk:
    """An actor's loop, without its role."""

    def __init__(self, agent, world, seed=0):
        self.agent, self.world, self.sequence = agent, world, 0
        self.spec = segment_spec(agent.config, world.spec, world.num_envs)
        agent.begin(self.spec.num_envs, np.random.default_rng(seed))
        self.obs = np.zeros((self.spec.num_envs, *world.spec.obs.shape), np.uint8)
        self.bound = BoundPolicy(agent, world)
        self.bound.assign_curriculum_stages()
        world.reset(self.obs)

    def segment(self):
        segment = Segment.blank(self.spec)
        segment["obs"][0] = self.obs
        if self.sequence:
            self.bound.assign_curriculum_stages()
        for t in range(self.spec.num_steps):
            segment["comm_mask"][t] = self.world.comm_mask
            segment.write(t, self.bound.act(segment["obs"][t]))
            self.world.step(segment["action"][t], segment, t)
        segment["comm_mask"][-1] = self.world.comm_mask
        self.obs[...] = segment["obs"][-1]
        segment.header = SegmentHeader("test", 0, 0, self.sequence, 0)
        self.sequence += 1
        return segment


def agent_of(spec, seed=1, **settings):
    return make_agent("dhc", DHCConfig(**{**SMALL, **settings}).resolve_defaults(spec, 1, WORLDS)[0], spec, seed=seed)


def drawn(agent, walk, segments=16, seed=0):
    """A memory that has seen some segments, and a batch from it."""
    memory = make_memory(agent.config, walk.spec, stream=np.random.default_rng(seed), total_steps=None)
    for _ in range(segments):
        memory.add([walk.segment()])
    return memory.sample()


def test_stored_state_and_burn_in_give_what_the_whole_episode_gives():
    """The actor's values came from an unbroken walk; unrolled from the middle they are the same, up to half precision.

    Ends by time and by success, agents that are absent, and sequences from an episode's very start are all in the batch.
    """
    world = world_of(density=0.0, max_steps=30)
    agent = agent_of(world.spec, lesson_agents=[2, 3], lesson_episodes=1, lesson_pass=0.01)
    walk = Walk(agent, world)
    batch = drawn(agent, walk, segments=20)
    windows = MultiAgentSequences(batch, torch.device("cpu"), first_only=False)
    with torch.no_grad():
        values = windows.unroll(agent.network, traced=False).numpy()
    values = values.reshape(*windows.live.shape, -1)
    told = windows.live & batch["learn"][..., None]
    assert told.sum() > 50
    assert (batch["hidden"] != 0).any()
    np.testing.assert_allclose(values[told], batch["q_val"][:, :, : windows.num_agents][told], atol=3e-3)
    broken = Batch({**batch.columns, "hidden": np.zeros_like(batch["hidden"])})
    with torch.no_grad():
        other = (
            MultiAgentSequences(broken, torch.device("cpu"), first_only=False)
            .unroll(agent.network, traced=False)
            .numpy()
        )
    assert np.abs(other.reshape(values.shape) - values)[told].max() > 1e-2, "without the stored state they are others"


def naive_loss(agent, target, batch, *, first_only):
    """The loss by the book: every window and agent by itself, nothing skipped, no gradient through the burn-in."""
    network, count = agent.network, 0
    rows, windows, agents = batch["live"].shape
    total = torch.zeros(())

    def unrolled(net, window, *, detach_at=None):
        memory = torch.from_numpy(batch["hidden"][window].astype(np.float32))[None]
        found = []
        for row in range(rows):
            if row == detach_at:
                memory = memory.detach()
            seen = net.encode(torch.from_numpy(batch["obs"][row, window]))[None]
            seen = seen * torch.from_numpy(batch["live"][row, window].astype(np.float32))[None, :, None]
            memory = net.step(seen, memory, torch.from_numpy(batch["comm_mask"][row, window])[None])
            found.append(net.values(memory[0]))
        return torch.stack(found)

    for window in range(windows):
        learned = np.flatnonzero(batch["learn"][:, window])
        online = unrolled(network, window, detach_at=learned[0])
        with torch.no_grad():
            judged = unrolled(target, window)
        for row in learned:
            then = batch["following"][row, window]
            for a in range(1 if first_only else agents):
                if not batch["live"][row, window, a]:
                    continue
                goal = torch.tensor(batch["reward"][row, window, a])
                if not batch["terminated"][row, window, a]:
                    chooser = online[then, a] if agent.config.double else judged[then, a]
                    goal = goal + batch["discount"][row, window] * judged[then, a, chooser.argmax()]
                error = functional.huber_loss(online[row, a, batch["action"][row, window, a]], goal.detach())
                total = total + float(batch.weights[window]) * error
                count += 1
    return total / count


@pytest.mark.parametrize(("double", "learn_from"), [(True, "all"), (False, "all"), (True, "first")])
def test_the_gradient_is_that_of_the_loss_by_the_book(double, learn_from):
    world = world_of()
    agent = agent_of(world.spec, double=double, learn_from=learn_from, lesson_agents=[2, 3], batch_size=4)
    batch = drawn(agent, Walk(agent, world))
    target = agent_of(world.spec, seed=9, lesson_agents=[2, 3])
    agent.restore(agent.state() | {"target": target.weights().buffer})
    found = agent.gradients(batch)
    agent.flat.gradient.zero_()
    naive_loss(agent, target.network, batch, first_only=learn_from == "first").backward()
    known = agent.flat.gradient.numpy()
    assert np.abs(known).max() > 1e-4
    np.testing.assert_allclose(found, known, atol=2e-5 * max(1.0, np.abs(known).max()), rtol=2e-3)


def test_who_is_absent_has_no_values_and_remembers_nothing():
    world = world_of(agents=4)
    agent = agent_of(world.spec, lesson_agents=[2, 4])
    segment = Walk(agent, world).segment()
    valid = segment["valid"].reshape(-1, WORLDS, 4)
    assert valid[..., :2].all()
    assert not valid[..., 2:].any()
    for name in ("q_val", "hidden"):
        assert (segment[name][~segment["valid"]] == 0).all()
    assert (segment["hidden"][1:][segment["valid"][1:]] != 0).any()


def test_empty_places_change_nothing_for_those_who_are_there():
    few, many = world_of(agents=2), world_of(agents=5)
    one, other = agent_of(few.spec), agent_of(many.spec)
    other.load(_fitting(one, other))
    obs = np.random.default_rng(0).integers(0, 2, (WORLDS, 2, 6, 9, 9), np.uint8)
    mask = np.ones((WORLDS, 2, 2), bool)
    wide_obs, wide_mask = np.zeros((WORLDS, 5, 6, 9, 9), np.uint8), np.zeros((WORLDS, 5, 5), bool)
    wide_obs[:, [1, 3]], wide_mask[:, [[1], [3]], [1, 3]] = obs, mask
    starts = np.ones(WORLDS, bool)
    flat = obs.reshape(-1, 6, 9, 9)
    for _ in range(3):
        near = one.act(flat, np.repeat(starts, 2), explore=False, comm_mask=mask.reshape(-1, 2))
        far = other.act(
            wide_obs.reshape(-1, 6, 9, 9), np.repeat(starts, 5), explore=False, comm_mask=wide_mask.reshape(-1, 5)
        )
        wide = far["q_val"].reshape(WORLDS, 5, -1)
        np.testing.assert_allclose(wide[:, [1, 3]], near["q_val"].reshape(WORLDS, 2, -1), atol=1e-5)
        assert (wide[:, [0, 2, 4]] == 0).all()
        starts = np.zeros(WORLDS, bool)


def _fitting(one, other):
    """Weights of an agent for fewer agents: only what is open differs."""
    known, own = one.weights().arrays(), other.weights().copy()
    for name, array in own.arrays().items():
        if name != "lessons":
            array[...] = known[name]
    return own


def test_an_episode_begins_without_memories():
    world = world_of()
    agent = agent_of(world.spec)
    agent.begin(WORLDS * AGENTS, np.random.default_rng(0))
    obs = np.random.default_rng(1).integers(0, 2, (WORLDS * AGENTS, 6, 9, 9), np.uint8)
    first = agent.act(obs, np.ones(len(obs), bool), explore=False)["q_val"].copy()
    later = agent.act(obs, np.zeros(len(obs), bool), explore=False)["q_val"].copy()
    again = agent.act(obs, np.ones(len(obs), bool), explore=False)["q_val"]
    assert (first != later).any()
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("learn_from", ["all", "first"])
def test_one_agent_explores_at_a_time(learn_from):
    world = world_of(worlds=40)
    agent = agent_of(world.spec, learn_from=learn_from, epsilon_base=1.0)
    agent.begin(40 * AGENTS, np.random.default_rng(0))
    rng, strayed = np.random.default_rng(1), np.zeros(AGENTS, int)
    for _ in range(60):
        obs, starts = rng.integers(0, 2, (40 * AGENTS, 6, 9, 9), np.uint8), np.ones(40 * AGENTS, bool)
        best = agent.act(obs, starts, explore=False)["action"].reshape(40, AGENTS)
        done = agent.act(obs, starts)["action"].reshape(40, AGENTS)
        assert ((best != done).sum(axis=1) <= 1).all()
        strayed += (best != done).sum(axis=0)
    assert strayed.sum() == pytest.approx(60 * 40 * 0.8, rel=0.05), "any of five actions, the best one included"
    if learn_from == "first":
        assert not strayed[1:].any()
    else:
        assert strayed == pytest.approx(strayed.sum() / AGENTS, rel=0.1)


def test_environments_have_places_on_the_ladder():
    agent = agent_of(world_of().spec)
    shares = []
    for actor in range(2):
        agent.begin(4 * AGENTS, np.random.default_rng(0), actor=actor, num_actors=2)
        shares += agent.epsilon.tolist()
    assert sorted(shares) == pytest.approx(sorted(0.4 ** (1 + 7 * i / 7) for i in range(8)))


@pytest.mark.slow
def test_actions_by_a_softmax_of_their_values():
    world = world_of(worlds=2)
    agent = agent_of(world.spec, temperature=0.5)
    obs, starts = np.random.default_rng(1).integers(0, 2, (2 * AGENTS, 6, 9, 9), np.uint8), np.ones(2 * AGENTS, bool)
    mask = np.ones((2, AGENTS, AGENTS), bool)
    mask[:, -1] = mask[:, :, -1] = False
    agent.begin(2 * AGENTS, np.random.default_rng(0))
    counts = np.zeros((2 * AGENTS, 5))
    for _ in range(4_000):
        done = agent.act(obs, starts, explore=False, comm_mask=mask.reshape(-1, AGENTS))
        counts[np.arange(2 * AGENTS), done["action"]] += 1
    counts = counts.reshape(2, AGENTS, 5)
    values = done["q_val"].reshape(2, AGENTS, 5).astype(float)
    expected = np.exp(values / 0.5) / np.exp(values / 0.5).sum(axis=2, keepdims=True)
    np.testing.assert_allclose(counts[:, :-1] / 4_000, expected[:, :-1], atol=0.04)
    assert (counts[:, -1, 0] == 4_000).all(), "who is absent does nothing"


def test_agents_learn_the_ways_that_they_see():
    """There is no reward, so only the second loss can have taught it."""
    world = world_of()
    agent = agent_of(world.spec, advice=1.0, advice_margin=0.3, learning_rate=3e-3, lesson_agents=[], lesson_sizes=[])
    batch = drawn(agent, Walk(agent, world))
    batch["reward"][:] = 0.0

    def heeded():
        windows = MultiAgentSequences(batch, torch.device("cpu"), first_only=False)
        with torch.no_grad():
            best = windows.unroll(agent.network, traced=False).numpy().argmax(axis=2).reshape(windows.live.shape)
        told = []
        for t, window, who in np.argwhere(windows.counted).tolist():
            others, _, *ways = batch["obs"][t, window, who]
            if not any(others[cell] for cell in ((3, 4), (5, 4), (4, 3), (4, 5))):
                nearer = [bool(way[4, 4]) for way in ways]
                told.append([not any(nearer), *nearer][best[t, window, who]])
        return np.mean(told)

    assert heeded() < 0.6
    lags = [agent.learn(batch).stats["advice_lag"] for _ in range(80)]
    assert lags[0] > 0.1 > 10 * lags[-1]
    assert heeded() > 0.9


def test_advice_needs_planes_that_advise():
    spec = world_of().spec
    other = dataclasses.replace(spec, obs=dataclasses.replace(spec.obs, shape=(5, 9, 9)))
    with pytest.raises(ConfigError, match="do not say which moves lead nearer; leave it out"):
        agent_of(other, advice=0.5)


def lesson_segment(agent, world, outcomes):
    """A segment in which environment 0 ends an episode at each step, of lesson (agents, size), with or without success."""
    segment = Segment.blank(segment_spec(agent.config, world.spec, world.num_envs))
    rows = slice(0, AGENTS)
    segment["valid"][:] = True
    for t, (agents, size, success) in enumerate(outcomes):
        segment["valid"][t, rows] = np.arange(AGENTS) < agents
        segment["lesson"][t, rows] = agents, size
        segment["terminated" if success else "truncated"][t, rows] = segment["valid"][t, rows]
    return segment


def test_lessons_follow_from_what_was_seen_and_travel_with_the_weights():
    world = world_of(agents=3, size=12)
    settings = {"lesson_agents": [1, 3], "lesson_sizes": [8, 12], "lesson_episodes": 4, "lesson_pass": 0.75}
    learner, actor = agent_of(world.spec, **settings), agent_of(world.spec, **settings)
    assert {tuple(row) for row in actor.curriculum_stages(50).tolist()} == {(1, 8)}
    learner.observe(lesson_segment(learner, world, [(1, 8, True)] * 3 + [(3, 12, True)] * 5), Progress(1, 10))
    actor.load(codec.decode_weights(codec.encode_weights(learner.weights())))
    assert {tuple(row) for row in actor.curriculum_stages(50).tolist()} == {(1, 8)}, "three episodes are too few"
    learner.observe(lesson_segment(learner, world, [(1, 8, False)]), Progress(2, 10))
    actor.load(codec.decode_weights(codec.encode_weights(learner.weights())))
    assert {tuple(row) for row in actor.curriculum_stages(50).tolist()} == {(1, 8), (3, 8), (1, 12)}
    learner.observe(lesson_segment(learner, world, [(1, 12, True)] * 4), Progress(3, 10))
    actor.load(learner.weights())
    assert {tuple(row) for row in actor.curriculum_stages(80).tolist()} == {(1, 8), (3, 8), (1, 12), (3, 12)}


def test_counts_of_lessons_are_part_of_the_state():
    world = world_of(agents=3, size=12)
    settings = {"lesson_agents": [1, 3], "lesson_sizes": [12], "lesson_episodes": 4, "lesson_pass": 0.75}
    whole, resumed = agent_of(world.spec, **settings), agent_of(world.spec, **settings)
    whole.observe(lesson_segment(whole, world, [(1, 12, True)] * 3), Progress(1, 10))
    resumed.load(whole.weights())
    resumed.restore(codec.unpack(codec.pack(whole.state())))
    for agent in (whole, resumed):
        assert len({tuple(row) for row in agent.curriculum_stages(50).tolist()}) == 1
        agent.observe(lesson_segment(agent, world, [(1, 12, True)]), Progress(2, 10))
        assert {tuple(row) for row in agent.curriculum_stages(50).tolist()} == {(1, 12), (3, 12)}


def test_worlds_give_the_lessons_they_were_asked_for():
    """Whatever is drawn, each environment's next episode is of it, and its rows say so."""
    world = world_of(agents=3, size=12, max_steps=4)
    agent = agent_of(world.spec, lesson_agents=[1, 2, 3], lesson_sizes=[5, 12], lesson_pass=0.001, lesson_episodes=1)
    agent.curriculum.standing[...] = 1
    agent.network.lessons.copy_(torch.from_numpy(agent.curriculum.standing))
    walk, seen = Walk(agent, world), set()
    for _ in range(12):
        segment = walk.segment()
        there = segment["valid"].reshape(-1, WORLDS, 3)
        lesson = segment["lesson"].reshape(-1, WORLDS, 3, 2)
        np.testing.assert_array_equal(there.sum(axis=2), lesson[:, :, 0, 0])
        assert (lesson == lesson[:, :, :1]).all()
        seen |= {tuple(row) for row in lesson[:, :, 0].reshape(-1, 2).tolist()}
    assert seen == {(a, s) for a in (1, 2, 3) for s in (5, 12)}


def test_the_step_size_is_halved_on_time_and_the_target_follows():
    world = world_of()
    agent = agent_of(world.spec, halve_at=[2, 3], target_every=3, learning_rate=0.001, batch_size=4)
    batch = drawn(agent, Walk(agent, world))
    rates, targets = [], []
    for _ in range(5):
        rates.append(agent.learn(batch).stats["learning_rate"])
        targets.append(agent.state()["target"].tobytes())
    assert rates == pytest.approx([0.001, 0.001, 0.0005, 0.00025, 0.00025])
    assert targets[0] == targets[1] != targets[2] == targets[3]


def test_the_step_size_is_halved_on_time_where_others_take_the_steps():
    world = world_of()
    agent = agent_of(world.spec, halve_at=[2, 3], learning_rate=0.001)
    segment = Segment.blank(segment_spec(agent.config, world.spec, 2))
    for updates, rate in ((1, 0.001), (2, 0.0005), (5, 0.00025)):
        agent.load(agent.weights().stamped(version=0, updates=updates, env_steps=0))
        agent.observe(segment, Progress(0, None))
        assert agent.learning_rate == pytest.approx(rate)


def test_a_priority_is_a_sequence_s():
    world = world_of()
    agent = agent_of(world.spec)
    batch = drawn(agent, Walk(agent, world))
    learned = agent.learn(batch)
    assert learned.priorities.shape == (10,)
    assert (learned.priorities > 0).all()


def test_a_world_of_one_agent_will_do():
    world = world_of(agents=1)
    agent = agent_of(world.spec)
    batch = drawn(agent, Walk(agent, world))
    before = agent.weights().sha256()
    assert np.isfinite(list(agent.learn(batch).stats.values())).all()
    assert agent.weights().sha256() != before


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"lesson_agents": [1, 9]}, "lesson_agents"),
        ({"lesson_agents": [2, 1]}, "lesson_agents"),
        ({"lesson_sizes": [5, 50]}, "lesson_sizes"),
    ],
)
def test_curriculum_stages_that_an_environment_cannot_produce_are_refused(settings, word):
    world = world_of()
    with pytest.raises(ConfigError, match=word):
        agent_of(world.spec, **settings)


def test_an_environment_without_curriculum_stages_refuses_them():
    spec = EnvSpec("grid", FieldSpec("obs", (6, 9, 9), "uint8", most=1), ActionSpec("discrete", (5,)), num_agents=2)
    with pytest.raises(ConfigError, match="has no curriculum stages"):
        agent_of(spec, lesson_agents=[1, 2])


def test_vectors_are_refused():
    spec = EnvSpec("pole", FieldSpec("obs", (4,), "float32"), ActionSpec("discrete", (2,)))
    with pytest.raises(WorldError, match="planes"):
        agent_of(spec)


@pytest.mark.parametrize("key", ["hidden", "network", "dueling", "normalize_obs"])
def test_what_describes_other_networks_is_unknown_here(key):
    with pytest.raises(ValueError, match=key):
        DHCConfig(**{key: 1})


@pytest.mark.parametrize("channels", [0, 4, 12])
def test_channels_come_in_eights(channels):
    with pytest.raises(ValueError, match="channels"):
        DHCConfig(channels=channels)

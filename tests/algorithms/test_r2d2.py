"""R2D2 against torch's own cells: what it remembers, from where gradients come, and what its loss is."""

import numpy as np
import pytest
import torch

from steppe.algorithms.nn.flat_module import FlatModule
from steppe.algorithms.r2d2.config import R2D2Config
from steppe.algorithms.r2d2.r2d2 import R2D2
from steppe.core.config.run import EnvConfig
from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import ActionSpec, EnvSpec, FieldSpec, SegmentSpec
from steppe.core.io import codec
from steppe.envs import make_segment_env
from steppe.replay import make_memory
from tests.support.recurrent_oracles import leaves_of, unrolled

pytestmark = pytest.mark.unit
both = pytest.mark.parametrize("cell", ["lstm", "gru"])
SMALL = {
    "hidden": (7,), "cell_size": 6, "batch_size": 8, "learning_starts": 0, "buffer_size": 2_000, "sequence_length": 4,
    "burn_in": 3, "n_step": 2, "gamma": 0.9,
}  # fmt: skip
NUM_ENVS = 3


class Walk:
    """An actor: segments of a world, one after the other, with what the agent noted."""

    def __init__(self, agent, env="steppe/Counting-v0", vector="loop", num_steps=9, seed=0):
        self.agent = agent
        self.world = make_segment_env(env, EnvConfig(vector=vector), NUM_ENVS, np.random.SeedSequence(seed))
        spec = self.world.spec
        columns = agent.config.columns(spec)
        self.spec = SegmentSpec(num_steps, NUM_ENVS, spec.obs, spec.action.field, columns)
        self.obs = np.zeros((NUM_ENVS, *spec.obs.shape), np.float32)
        self.world.reset(self.obs)
        self.number = 0
        agent.begin(NUM_ENVS, np.random.default_rng(seed))

    def segment(self):
        segment = Segment.blank(self.spec)
        segment["obs"][0] = self.obs
        for t in range(self.spec.num_steps):
            segment.write(t, self.agent.act(segment["obs"][t], self.world.starts))
            self.world.step(segment["action"][t], segment, t)
        self.obs = segment["obs"][-1].copy()
        segment.header = SegmentHeader("walk", 0, 0, self.number, 0)
        self.number += 1
        return segment


def scaled_counting(agent):
    """Counting's identities are large numbers: the first layer is made blind to them."""
    agent.network.body.tower.gates[0].weight.data[0] = 0.0
    return agent


def make(cell="lstm", env_id="counting", **values):
    spec = EnvSpec(env_id, FieldSpec("obs", (3,), "float32"), ActionSpec("discrete", (2,)))
    return scaled_counting(R2D2(R2D2Config(cell=cell, **{**SMALL, **values}), spec, seed=2))


def disturb(agent, seed=0):
    stream = torch.Generator().manual_seed(seed)
    agent.flat.parameters += 0.2 * torch.randn(agent.flat.parameters.shape, generator=stream)
    scaled_counting(agent)


def values_by_torch(agent, leaves, obs, state=None):
    """Action values [T, A] of one environment."""
    outputs, _ = unrolled(leaves, obs, state, agent.config.cell, torch.relu)
    if not agent.config.dueling:
        return outputs
    advantage, value = outputs[:, :-1], outputs[:, -1:]
    return value + advantage - advantage.mean(dim=1, keepdim=True)


def filled(agent, segments=12, vector="loop"):
    """A memory with what the agent did, and the observations of every episode by (identity, episode)."""
    walk = Walk(agent, vector=vector)
    memory = make_memory(agent.config, walk.spec, stream=np.random.default_rng(0), total_steps=None)
    episodes = {}
    for _ in range(segments):
        segment = walk.segment()
        for t, env in zip(*np.nonzero(segment["valid"]), strict=True):
            seen = segment["obs"][t, env]
            episodes.setdefault(tuple(seen[:2]), []).append(seen)
            if segment.cut[t, env]:
                episodes[tuple(seen[:2])].append(segment["final_obs"][t, env])
        memory.add([segment])
    return memory, episodes


def compared(agent, memory, episodes, draws=4):
    """Largest difference at the rows learned from, and at those they bootstrap from, to an unroll from the episode's start."""
    leaves, worst = leaves_of(agent.network), 0.0
    for _ in range(draws):
        batch = memory.sample()
        found, _ = agent.network.values(batch["obs"], batch["hidden"])
        for n in range(batch["learn"].shape[1]):
            rows = np.flatnonzero(batch["learn"][:, n])
            rows = np.union1d(rows, batch["following"][rows, n])
            whole = episodes[tuple(batch["obs"][rows[0], n, :2])]
            expected = values_by_torch(agent, leaves, whole).detach().numpy()
            steps = batch["obs"][rows, n, 2].astype(int)
            worst = max(worst, np.abs(found[rows, n] - expected[steps]).max())
    return worst


@both
@pytest.mark.parametrize("dueling", [False, True])
def test_stored_state_and_burn_in_are_an_unroll_from_the_episodes_start(cell, dueling):
    """With the weights that acted, whatever the burn-in is, the values of a window are those of the whole episode."""
    for burn_in in (0, 3):
        agent = make(cell, burn_in=burn_in, dueling=dueling)
        assert compared(agent, *filled(agent)) < 1e-4


@both
def test_burn_in_brings_old_states_up_to_date(cell):
    """With other weights than those that acted: exactly if it reaches back to the start, and better than nothing if not."""
    worst = []
    for burn_in in (0, 3, 8):  # episodes have at most 7 steps
        agent = make(cell, burn_in=burn_in)
        memory, episodes = filled(agent)
        disturb(agent)
        worst.append(compared(agent, memory, episodes))
    assert worst[2] < 1e-4
    assert worst[0] > 10 * worst[2], "stored states are old ones"
    assert worst[1] < worst[0]


@both
def test_gradients_are_those_of_the_formula(cell):
    """Autograd through windows of one environment at a time, with the state cut off where learning begins."""
    agent = make(cell)
    memory, _ = filled(agent)
    agent.restore(agent.state())  # from now on there is a target network
    older = leaves_of(agent.network)
    disturb(agent)
    batch = memory.sample()
    leaves, losses = leaves_of(agent.network), []
    for n in range(batch["learn"].shape[1]):
        rows, obs = np.flatnonzero(batch["learn"][:, n]), batch["obs"][:, n]
        state = torch.from_numpy(batch["hidden"][n]).double()
        judged = values_by_torch(agent, older, obs, state).detach()
        if rows[0]:
            _, states = unrolled(leaves, obs[: rows[0]], state, cell, torch.relu)
            state = states[-1].detach()
        values = values_by_torch(agent, leaves, obs[rows[0] :], state)
        for t in rows:
            target = torch.tensor(float(batch["reward"][t, n])).double()
            if not batch["terminated"][t, n]:
                then = int(batch["following"][t, n])
                ahead = judged[then, values[then - rows[0]].argmax()]
                ahead = ahead.sign() * (((1 + 4e-3 * (ahead.abs() + 1.001)).sqrt() - 1) ** 2 / 4e-6 - 1)
                target += float(batch["discount"][t, n]) * ahead
            target = target.sign() * ((target.abs() + 1).sqrt() - 1) + 1e-3 * target
            value = values[t - rows[0], int(batch["action"][t, n])]
            losses.append(float(batch.weights[n]) * torch.nn.functional.huber_loss(value, target.detach()))
    torch.stack(losses).mean().backward()
    expected = np.concatenate([leaf.grad.numpy().ravel() for leaf in leaves.values()])
    found = agent.gradients(batch)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5 * np.abs(expected).max())
    learned = agent.learn(batch)
    assert learned.stats["loss"] == pytest.approx(float(torch.stack(losses).detach().mean()), rel=1e-4)
    assert learned.priorities.shape == (8,)
    assert (learned.priorities > 0).all()


@both
def test_starts_forget_and_nothing_else_does(cell):
    agent = make(cell)
    agent.begin(2, np.random.default_rng(0))
    obs = np.random.default_rng(1).normal(size=(6, 2, 3)).astype(np.float32)
    starts = np.zeros((6, 2), bool)
    starts[0], starts[3, 1] = True, True
    noted = [agent.act(obs[t], starts[t]) for t in range(6)]
    leaves = leaves_of(agent.network)
    for env, first in ((0, 0), (1, 3)):
        expected = values_by_torch(agent, leaves, obs[first:, env]).detach().numpy()
        found = np.stack([note["q_val"][env] for note in noted[first:]])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not noted[3]["hidden"][1].any()
    assert noted[3]["hidden"][0].any()


@both
def test_going_on_in_the_middle_of_an_episode_is_exact(cell):
    """Bit for bit: what is noted, and the state of the actor after it."""
    whole, cut = make(cell), make(cell)
    one, other = Walk(whole), Walk(cut)
    for walk in (one, other):
        walk.segment()
    assert not other.world.starts.all(), "within episodes"
    state, world, obs = codec.pack(cut.acting_state()), other.world.snapshot(), other.obs.copy()
    resumed = make(cell)
    again = Walk(resumed, seed=99)
    resumed.restore_acting(codec.unpack(state))
    again.world.restore(world)
    again.obs = obs
    for _ in range(3):
        first, second = one.segment(), again.segment()
        for name in ("action", "hidden", "q_val", "reward"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_an_actor_explores_by_its_place_on_the_ladder():
    agent = make()
    agent.begin(2, np.random.default_rng(0), actor=1, num_actors=2)
    np.testing.assert_allclose(agent.epsilon, [0.4 ** (1 + 7 / 3), 0.4**8])


def test_an_actor_builds_neither_optimizer_nor_target(monkeypatch):
    agent, twins = make(), []
    twin = FlatModule.clone
    monkeypatch.setattr(FlatModule, "clone", lambda flat: twins.append(flat) or twin(flat))
    Walk(agent).segment()
    assert twins == []
    assert agent.state()["adam"] == {}
    assert twins == [agent.flat], "a checkpoint needs one"


def test_the_target_network_follows_environment_steps():
    agent = make(target_every=100)
    walk = Walk(agent)
    agent.observe(walk.segment(), Progress(10))
    disturb(agent)
    agent.observe(walk.segment(), Progress(99))
    assert (agent.state()["target"] != agent.weights().buffer).any()
    agent.observe(walk.segment(), Progress(100))
    np.testing.assert_array_equal(agent.state()["target"], agent.weights().buffer)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="sequence_stride=9 would leave steps out between sequences of 8"):
        R2D2Config(sequence_length=8, sequence_stride=9)
    box = EnvSpec("box", FieldSpec("obs", (3,), "float32"), ActionSpec("box", (1,), (-1.0,), (1.0,)))
    with pytest.raises(WorldError, match="r2d2 cannot choose continuous actions"):
        R2D2(R2D2Config(), box)

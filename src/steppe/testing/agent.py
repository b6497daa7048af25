"""Conformance suite for Agent, to inherit, with synthetic experience that fits any EnvSpec.

class TestMine(AgentConformance):
    spec = EnvSpec(...)
    def make_agent(self): return MyAgent(MyConfig(), self.spec, seed=0)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.core.config.agent import AgentConfig
from steppe.core.contracts.algorithm import Agent, Policy, Progress
from steppe.core.contracts.errors import ConfigError
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import EnvSpec, SegmentSpec
from steppe.core.contracts.weights import Weights
from steppe.core.io import codec

NUM_STEPS, NUM_ENVS, BATCH_SIZE = 6, 4, 16


def invented_obs(spec: EnvSpec, shape: tuple[int, ...], stream: np.random.Generator) -> np.ndarray:
    """Return random observations with leading axes `shape`."""
    full = (*shape, *spec.obs.shape)
    if spec.obs.dtype == "uint8":
        return stream.integers(0, 256, full, np.uint8)
    return stream.standard_normal(full).astype(spec.obs.dtype)


def invented_segment(policy: Policy, config: AgentConfig, spec: EnvSpec, stream: np.random.Generator) -> Segment:
    """Return random experience with actions of `policy`: terminations, truncations and autoreset steps.

    Meaningless values (final observations without a cut, rewards of reset steps) are NaN, so that reading them is
    detected.
    """
    segment = Segment.blank(SegmentSpec(NUM_STEPS, NUM_ENVS, spec.obs, spec.action.field, config.columns(spec)))
    segment.header = SegmentHeader("conformance", 0, 0, 0, policy.version)
    segment["obs"][...] = invented_obs(spec, (NUM_STEPS + 1, NUM_ENVS), stream)
    draw = stream.random((NUM_STEPS, NUM_ENVS))
    valid = np.ones((NUM_STEPS, NUM_ENVS), bool)
    for t in range(1, NUM_STEPS):
        valid[t] = ~(valid[t - 1] & (draw[t - 1] < 0.4))
    segment["valid"][...] = valid
    segment["terminated"][...] = (draw < 0.2) & valid
    segment["truncated"][...] = (draw >= 0.2) & (draw < 0.4) & valid
    segment["reward"][...] = np.where(valid, stream.standard_normal(draw.shape), np.nan)
    if spec.obs.dtype != "uint8":
        segment["final_obs"][...] = np.nan
    segment["final_obs"][segment.cut] = invented_obs(spec, (int(segment.cut.sum()),), stream)
    for t in range(NUM_STEPS):
        segment.write(t, policy.act(segment["obs"][t], np.zeros(NUM_ENVS, bool)))
    return segment


def invented_draw(spec: EnvSpec, stream: np.random.Generator) -> Batch:
    """Return a batch like one sampled from replay."""
    columns = {
        "obs": invented_obs(spec, (BATCH_SIZE,), stream),
        "next_obs": invented_obs(spec, (BATCH_SIZE,), stream),
        "action": stream.integers(0, spec.action.sizes[0], BATCH_SIZE),
        "reward": stream.standard_normal(BATCH_SIZE).astype(np.float32),
        "terminated": stream.random(BATCH_SIZE) < 0.3,
        "discount": np.full(BATCH_SIZE, 0.97, np.float32),
    }
    return Batch(columns, weights=stream.random(BATCH_SIZE).astype(np.float32), indices=np.arange(BATCH_SIZE))


def invented_windows(config: AgentConfig, spec: EnvSpec, stream: np.random.Generator) -> Batch:
    """Return a batch like one of replayed sequences: windows of different lengths, some with a shorter burn-in."""
    given = {name: getattr(config, name, 1) for name in ("burn_in", "sequence_length", "n_step")}
    num_rows = sum(given.values())
    lead = stream.integers(0, given["burn_in"] + 1, BATCH_SIZE)
    steps = stream.integers(1, given["sequence_length"] + 1, BATCH_SIZE)
    t = np.arange(num_rows)[:, None]
    columns = {
        "obs": invented_obs(spec, (num_rows, BATCH_SIZE), stream),
        "action": stream.integers(0, spec.action.sizes[0], (num_rows, BATCH_SIZE, *spec.action.field.shape)),
        "reward": stream.standard_normal((num_rows, BATCH_SIZE)).astype(np.float32),
        "discount": np.full((num_rows, BATCH_SIZE), 0.97, np.float32),
        "terminated": stream.random((num_rows, BATCH_SIZE)) < 0.3,
        "following": np.minimum(t + 1, lead + steps),
        "valid": t <= lead + steps,
        "learn": (t >= lead) & (t < lead + steps),
    }
    for column in config.columns(spec):
        lead_shape = (BATCH_SIZE,) if column.name == "hidden" else (num_rows, BATCH_SIZE)
        columns[column.name] = stream.standard_normal((*lead_shape, *column.shape)).astype(column.dtype)
    return Batch(columns, weights=stream.random(BATCH_SIZE).astype(np.float32), indices=np.arange(BATCH_SIZE))


class AgentConformance:
    """Inherit, set `spec`, and implement `make_agent`: a new agent with the same seed each time."""

    spec: EnvSpec

    def make_agent(self) -> Agent:
        raise NotImplementedError

    def config_of(self, agent: Agent) -> AgentConfig:
        """Return the configuration that declares the agent's columns and memory, by default its attribute `config`."""
        config: AgentConfig = agent.config  # type: ignore[attr-defined]
        return config

    def begun(self, seed: int = 5) -> Agent:
        """Return a new agent that acts with a random generator of this seed."""
        agent = self.make_agent()
        agent.begin(NUM_ENVS, np.random.default_rng(seed))
        return agent

    def learn(self, agent: Agent, seed: int, steps: int = 50) -> dict[str, float]:
        """Observe one synthetic segment, and learn from a batch like the agent's memory would return."""
        stream = np.random.default_rng(seed)
        agent.begin(NUM_ENVS, np.random.default_rng(seed))
        segment = invented_segment(agent, self.config_of(agent), self.spec, stream)
        agent.observe(segment, Progress(steps, 1000))
        return agent.learn(self.batch(agent, segment, stream)).stats

    def batch(self, agent: Agent, segment: Segment, stream: np.random.Generator) -> Batch:
        config = self.config_of(agent)
        if config.memory == "rollout":
            return Batch(segment.columns)
        if config.memory == "sequences":
            return invented_windows(config, self.spec, stream)
        return invented_draw(self.spec, stream)

    def obs(self, num_rows: int = NUM_ENVS, seed: int = 3) -> np.ndarray:
        return invented_obs(self.spec, (num_rows,), np.random.default_rng(seed))

    def act(self, agent: Agent, *, explore: bool = True) -> dict[str, np.ndarray]:
        chosen = agent.act(self.obs(), np.ones(NUM_ENVS, bool), explore=explore)
        return {name: column.copy() for name, column in chosen.items()}

    def test_is_an_agent(self) -> None:
        assert isinstance(self.make_agent(), Agent)

    def test_the_layout_is_the_same_for_every_copy_and_after_learning(self) -> None:
        one, other = self.make_agent(), self.make_agent()
        before = one.weights().layout
        assert before == other.weights().layout
        assert one.weights().sha256() == other.weights().sha256()
        self.learn(one, 1)
        assert one.weights().layout == before

    def test_trainable_entries_are_one_float32_vector_at_the_front(self) -> None:
        agent = self.begun()
        segment = invented_segment(agent, self.config_of(agent), self.spec, np.random.default_rng(1))
        gradient = agent.gradients(self.batch(agent, segment, np.random.default_rng(2)))
        end = 0
        for entry in agent.weights().layout.entries:
            if end == gradient.nbytes:
                break
            assert (entry.dtype, entry.offset) == ("float32", end)
            end += entry.nbytes
        assert end == gradient.nbytes
        assert gradient.dtype == np.float32

    def test_weights_travel_to_another_agent(self) -> None:
        one, other = self.make_agent(), self.make_agent()
        self.learn(one, 1)
        sent = codec.decode_weights(codec.encode_weights(one.weights().stamped(version=7, updates=3, env_steps=99)))
        other.load(sent)
        assert other.weights().sha256() == one.weights().sha256()
        assert other.version == 7
        sent.buffer[:] = 0  # `load` must have copied
        assert other.weights().sha256() == one.weights().sha256()
        first, second = self.act(one, explore=False), self.act(other, explore=False)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])

    def test_other_weights_are_refused_by_name(self) -> None:
        agent = self.make_agent()
        arrays = dict(agent.weights().arrays())
        missing = next(iter(arrays))
        del arrays[missing]
        before = agent.weights().sha256()
        message = ""
        try:
            agent.load(Weights.from_arrays(arrays | {"stranger": np.zeros(3, np.float32)}))
        except ConfigError as error:
            message = str(error)
        assert missing in message, "weights of another layout were accepted, or refused without a reason"
        assert "stranger" in message
        assert agent.weights().sha256() == before

    def test_actions_have_the_declared_form_and_are_allowed(self) -> None:
        agent, action = self.begun(), self.spec.action
        for explore in (True, False):
            for rows in (1, NUM_ENVS, 33):
                chosen = agent.act(self.obs(rows), np.zeros(rows, bool), explore=explore)["action"]
                assert chosen.shape == (rows, *action.field.shape)
                assert chosen.dtype == action.field.dtype
                if action.kind == "box":
                    assert np.isfinite(chosen).all()
                else:
                    assert (chosen >= 0).all()
                    assert (chosen < np.array(action.sizes)).all()

    def test_columns_are_the_declared_ones(self) -> None:
        agent = self.begun()
        declared = {"action": self.spec.action.field}
        declared |= {column.name: column for column in self.config_of(agent).columns(self.spec)}
        chosen = self.act(agent)
        assert chosen.keys() == declared.keys()
        for name, column in chosen.items():
            assert (column.shape, column.dtype.name) == ((NUM_ENVS, *declared[name].shape), declared[name].dtype), name

    def test_acting_depends_on_the_stream_alone(self) -> None:
        one, other = self.begun(5), self.begun(5)
        for _ in range(3):
            first, second = self.act(one), self.act(other)
            for name in first:
                np.testing.assert_array_equal(first[name], second[name])

    def test_other_streams_explore_otherwise(self) -> None:
        one, other = self.begun(5), self.begun(6)
        assert any((self.act(one)["action"] != self.act(other)["action"]).any() for _ in range(10))

    def test_not_exploring_is_deterministic_and_draws_nothing(self) -> None:
        agent, fresh = self.begun(), self.begun()
        first, second = self.act(agent, explore=False), self.act(agent, explore=False)
        np.testing.assert_array_equal(first["action"], second["action"])
        np.testing.assert_array_equal(self.act(agent)["action"], self.act(fresh)["action"])

    def test_read_only_observations_are_fine(self) -> None:
        obs = self.obs()
        obs.flags.writeable = False
        agent = self.begun()
        np.testing.assert_array_equal(
            agent.act(obs, np.zeros(NUM_ENVS, bool), explore=False)["action"], self.act(agent, explore=False)["action"]
        )

    def test_learning_changes_the_weights_and_says_how(self) -> None:
        agent = self.make_agent()
        before = agent.weights().copy()
        stats = self.learn(agent, 1)
        assert agent.weights().sha256() != before.sha256()
        assert stats
        assert all(isinstance(number, float) and np.isfinite(number) for number in stats.values())
        for name, array in agent.weights().arrays().items():
            assert np.isfinite(array).all(), name

    def test_learning_is_the_same_twice(self) -> None:
        hashes = []
        for _ in range(2):
            agent = self.make_agent()
            for seed in range(3):
                self.learn(agent, seed, steps=50 * (seed + 1))
            hashes.append(agent.weights().sha256())
        assert hashes[0] == hashes[1]

    def test_continuing_from_a_checkpoint_is_exact(self) -> None:
        whole, saved = self.make_agent(), self.make_agent()
        for agent in (whole, saved):
            for seed in range(2):
                self.learn(agent, seed, steps=50 * (seed + 1))
        tree = codec.pack(saved.state())
        weights = codec.encode_weights(saved.weights())
        resumed = self.make_agent()
        resumed.load(codec.decode_weights(weights))
        resumed.restore(codec.unpack(tree))
        for agent in (whole, resumed):
            for seed in range(2, 5):
                self.learn(agent, seed, steps=50 * (seed + 1))
        assert resumed.weights().sha256() == whole.weights().sha256()
        assert_same_tree(resumed.state(), whole.state())

    def test_a_checkpoint_between_observing_and_learning_is_exact(self) -> None:
        whole, resumed, stream = self.make_agent(), self.make_agent(), np.random.default_rng(1)
        self.learn(whole, 0)
        whole.begin(NUM_ENVS, np.random.default_rng(0))
        segment = invented_segment(whole, self.config_of(whole), self.spec, stream)
        whole.observe(segment, Progress(100, 1000))
        resumed.load(codec.decode_weights(codec.encode_weights(whole.weights())))
        resumed.restore(codec.unpack(codec.pack(whole.state())))
        batch = self.batch(whole, segment, stream)
        whole.learn(batch)
        resumed.learn(batch)
        assert resumed.weights().sha256() == whole.weights().sha256()

    def test_gradients_change_nothing_until_they_are_applied(self) -> None:
        agent = self.begun()
        segment = invented_segment(agent, self.config_of(agent), self.spec, np.random.default_rng(1))
        before = agent.weights().sha256()
        batch = self.batch(agent, segment, np.random.default_rng(2))
        gradient = agent.gradients(batch)
        assert agent.weights().sha256() == before
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0
        np.testing.assert_array_equal(agent.gradients(batch), gradient)
        agent.apply(gradient)
        assert agent.weights().sha256() != before


def assert_same_tree(one: Any, other: Any, where: str = "state") -> None:
    """Check that two trees are bitwise equal, including arrays."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_tree(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other, err_msg=where)
    else:
        assert one == other, where

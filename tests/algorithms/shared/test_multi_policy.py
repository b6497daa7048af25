"""Several policies in one agent: rows go to their own group's agent and nobody else's, and all of it is one agent."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from steppe.algorithms import PPO, make_agent
from steppe.algorithms.dqn.config import DQNConfig
from steppe.algorithms.ppo.config import PPOConfig
from steppe.algorithms.shared.multi_policy import MultiPolicyAgent
from steppe.algorithms.tabular.config import QLearningConfig
from steppe.core.config.run import flatten, resolve_config, unflatten
from steppe.core.contracts.algorithm import Progress
from steppe.core.contracts.errors import ConfigError, WorldError
from steppe.core.contracts.segment import Batch, Segment, SegmentHeader
from steppe.core.contracts.specs import ActionSpec, AgentSpec, EnvSpec, FieldSpec, SegmentSpec
from steppe.core.system import seeding
from steppe.testing.agent import AgentConformance

pytestmark = pytest.mark.unit

NAMES = ("wolf_0", "sheep_0", "wolf_1")
OBS, ACTION = FieldSpec("obs", (4,), "float32"), ActionSpec("discrete", (3,))
SPEC = EnvSpec("meadow", OBS, ACTION, num_agents=3, agents=NAMES)
WOLF = AgentSpec(FieldSpec("obs", (2,), "float32"), ActionSpec("discrete", (2,)))
SHEEP = AgentSpec(OBS, ACTION)
UNLIKE = EnvSpec("unlike", OBS, ACTION, num_agents=3, agents=NAMES, members=(WOLF, SHEEP, WOLF))
PAIR = EnvSpec("pair", OBS, ACTION, num_agents=2, agents=NAMES[:2])
KINDS = {"wolf_*": "wolves", "*": "sheep"}
SMALL = {"hidden": (8,), "minibatch_size": 8, "epochs": 2}
HANDS = EnvSpec(
    "hands", OBS, ActionSpec("box", (4,), (-np.inf,) * 4, (np.inf,) * 4), num_agents=2, agents=("left", "right"),
    members=(AgentSpec(OBS, ActionSpec("box", (1,), (-1.0,), (1.0,))), AgentSpec(OBS, ActionSpec("box", (2, 2), (-1.0,) * 4, (1.0,) * 4))),
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestConformance(AgentConformance):
    spec = PAIR
    config = PPOConfig(**SMALL, policies=KINDS, normalize_obs=True, normalize_reward=True)

    def make_agent(self):
        return make_agent("ppo", self.config, self.spec, seed=3)


class TestConformanceOwn(TestConformance):
    config = PPOConfig(**SMALL, policies="own")


class TestConformanceRemembering(TestConformance):
    config = PPOConfig(hidden=(8,), minibatch_size=12, segment_steps=6, cell_size=5, recurrent=True, policies="own")


class TestConformanceUnlike(TestConformance):
    spec = replace(PAIR, members=(WOLF, SHEEP))

    def test_actions_have_the_declared_form_and_are_allowed(self):
        super().test_actions_have_the_declared_form_and_are_allowed()
        wolves = self.begun().act(self.obs(33), np.zeros(33, bool))["action"][0::2]
        assert (wolves < 2).all()


class TestConformanceUnlikeBoxes(TestConformance):
    spec = HANDS
    config = PPOConfig(**SMALL, policies="own")


def segment_of(agent, spec, seed, num_envs=2, num_steps=7):
    stream = np.random.default_rng(seed)
    rows = num_envs * spec.num_agents
    made = SegmentSpec(num_steps, rows, spec.obs, spec.action.field, agent.config.columns(spec), spec.num_agents)
    segment = Segment.blank(made)
    segment.header = SegmentHeader("test", 0, 0, 0, 0)
    segment["obs"][...] = stream.normal(size=segment["obs"].shape)
    segment["reward"][...] = stream.normal(size=segment["reward"].shape)
    segment["valid"][...] = stream.random(segment["valid"].shape) < 0.9
    segment["terminated"][...] = (stream.random(segment["valid"].shape) < 0.2) & segment["valid"]
    for t in range(num_steps):
        for name, column in agent.act(segment["obs"][t], np.zeros(rows, bool)).items():
            segment[name][t] = column
    return segment


def part_of(segment, rows, obs_size):
    """The rows of a segment that a lone agent would have had."""
    columns = {name: np.ascontiguousarray(column[:, rows]) for name, column in segment.columns.items()}
    columns["obs"], columns["final_obs"] = (
        columns["obs"][..., :obs_size].copy(),
        columns["final_obs"][..., :obs_size].copy(),
    )
    fields = segment.spec
    spec = SegmentSpec(
        fields.num_steps, len(rows), FieldSpec("obs", (obs_size,), "float32"), fields.action, fields.extras
    )
    return Segment(spec, columns, segment.header)


@pytest.mark.parametrize("spec", [SPEC, UNLIKE])
def test_each_group_learns_what_a_lone_agent_would_from_its_rows(spec):
    """Beside PPO agents of their own, which know nothing of groups, through three rollouts with optimizer and normalizers."""
    config = PPOConfig(**SMALL, policies=KINDS, normalize_obs=True)
    agent = make_agent("ppo", config, spec, seed=5)
    agent.begin(6, np.random.default_rng(1))
    lone = {}
    for name, rows, member in (("wolves", [0, 2, 3, 5], 0), ("sheep", [1, 4], 1)):
        own = spec.members[member] if spec.members else AgentSpec(OBS, ACTION)
        alone = EnvSpec("alone", own.obs, own.action)
        made = PPO(
            config.model_copy(update={"policies": "shared"}), alone, seed=seeding.integer_seed(5, "policy", name)
        )
        lone[name] = (made, rows, own.obs.shape[0])
    for turn in range(3):
        segment = segment_of(agent, spec, turn)
        agent.observe(segment, Progress(14 * (turn + 1), 1000))
        agent.learn(Batch(segment.columns))
        for made, rows, size in lone.values():
            mine = part_of(segment, rows, size)
            made.observe(mine, Progress(14 * (turn + 1), 1000))
            made.learn(Batch(mine.columns))
    merged = agent.weights().arrays()
    assert len(merged) == sum(len(made.weights().arrays()) for made, _, _ in lone.values())
    for name, (made, _, _) in lone.items():
        for entry, array in made.weights().arrays().items():
            np.testing.assert_array_equal(merged[f"{name}.{entry}"], array, err_msg=f"{name}.{entry}")


def test_each_row_is_acted_on_by_its_own_policy():
    agent = make_agent("ppo", PPOConfig(**SMALL, policies="own"), SPEC, seed=5)
    obs = np.tile(np.ones(4, np.float32), (6, 1))
    value = agent.act(obs, np.zeros(6, bool), explore=False)["value"]
    assert len(set(value[:3].tolist())) == 3, "three policies that see the same think differently of it"
    np.testing.assert_array_equal(value[:3], value[3:])
    shared = make_agent("ppo", PPOConfig(**SMALL), SPEC, seed=5)
    assert len(set(shared.act(obs, np.zeros(6, bool), explore=False)["value"].tolist())) == 1


def test_what_one_group_meets_is_nothing_to_another():
    def learned(spoiled):
        agent = make_agent("ppo", PPOConfig(**SMALL, policies=KINDS), SPEC, seed=5)
        segment = segment_of(agent, SPEC, 1)
        if spoiled:
            segment["reward"][:, [1, 4]] += 100.0
        agent.observe(segment, Progress(14, 1000))
        agent.learn(Batch(segment.columns))
        return agent.weights().arrays()

    plain, spoiled = learned(False), learned(True)
    changed = {name for name in plain if not np.array_equal(plain[name], spoiled[name])}
    assert changed
    assert all(name.startswith("sheep.") for name in changed)


def test_statistics_are_named_by_group():
    agent = make_agent("ppo", PPOConfig(**SMALL, policies=KINDS), SPEC, seed=5)
    stats = agent.learn(Batch(segment_of(agent, SPEC, 1).columns)).stats
    assert {name.split("/")[0] for name in stats} == {"wolves", "sheep"}


def test_a_gradient_of_another_length_changes_nothing():
    agent = make_agent("ppo", PPOConfig(**SMALL, policies=KINDS), SPEC, seed=5)
    before = agent.weights().sha256()
    gradient = agent.gradients(Batch(segment_of(agent, SPEC, 1).columns))
    with pytest.raises(ConfigError, match="the gradient has shape"):
        agent.apply(gradient[:-1])
    assert agent.weights().sha256() == before


def test_rows_of_half_an_environment_are_refused():
    agent = make_agent("ppo", PPOConfig(**SMALL, policies=KINDS), SPEC, seed=5)
    columns = {name: column[:, :4] for name, column in segment_of(agent, SPEC, 1).columns.items()}
    with pytest.raises(ConfigError, match="4 rows are not those of whole environments with 3 agents"):
        agent.learn(Batch(columns))


def test_names_that_begin_alike_are_kept_apart():
    config = PPOConfig(**SMALL, policies={"wolf_0": "a", "wolf_1": "a.b", "sheep_0": "c"})
    one, other = (make_agent("ppo", config, SPEC, seed=seed) for seed in (1, 2))
    other.load(one.weights())
    assert other.weights().sha256() == one.weights().sha256()


@pytest.mark.parametrize(
    ("config", "spec", "words"),
    [
        (PPOConfig(policies={"wolf_*": "wolves"}), SPEC, "policies says nothing of 'sheep_0'"),
        (PPOConfig(policies={"*": "all", "wolf_*": "wolves"}), SPEC, "policies['wolf_*'] fits none of the agents"),
        (PPOConfig(policies="own"), EnvSpec("lone", OBS, ACTION), "policies is for environments with several agents"),
        (
            PPOConfig(policies={"*": "all"}),
            UNLIKE,
            "the policy 'all' is for agents that are not alike: wolf_0 observes [2]",
        ),
        (
            DQNConfig(policies="own"),
            SPEC,
            "dqn learns one policy for all agents: leave policies out, or use an algorithm that learns from rollouts",
        ),
    ],
)
def test_policies_that_do_not_fit_are_refused(config, spec, words):
    algo = "ppo" if isinstance(config, PPOConfig) else "dqn"
    with pytest.raises(ConfigError) as caught:
        make_agent(algo, config, spec, seed=0)
    assert words in str(caught.value)


def test_unlike_agents_without_policies_are_refused_with_the_way_out():
    with pytest.raises(WorldError) as caught:
        make_agent("ppo", PPOConfig(), UNLIKE, seed=0)
    words = str(caught.value)
    assert "wolf_0 observes [2] and has discrete actions [2], sheep_0 observes [4]" in words
    assert "policies=own" in words


def test_policies_come_from_a_key_and_survive_the_record():
    given = resolve_config(("flag", {"env": "meadow", "policies": KINDS})).config
    assert given.agent.policies == KINDS
    assert unflatten(flatten(given)).agent.policies == KINDS
    with pytest.raises(ConfigError, match="policies"):
        resolve_config(("flag", {"env": "meadow", "policies": "mine"}))
    with pytest.raises(ConfigError, match="policies"):
        resolve_config(("flag", {"env": "meadow", "algo": "q-learning", "policies": "own"}))
    assert "policies" not in QLearningConfig.model_fields


def test_an_agent_with_other_weights_than_a_flat_module_cannot_be_one_of_several(monkeypatch):
    class Strange(PPO):
        def __getattribute__(self, name):
            if name == "flat":
                raise AttributeError(name)
            return super().__getattribute__(name)

        def __init__(self, *args, **kwargs):
            self.version = 0

    monkeypatch.setattr("steppe.algorithms.shared.multi_policy.agent_class", lambda algo: Strange)
    with pytest.raises(ConfigError, match="FlatModule"):
        MultiPolicyAgent("ppo", PPOConfig(policies="own"), SPEC, seed=0)

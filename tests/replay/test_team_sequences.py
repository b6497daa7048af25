"""Sequences of environments with several agents, against a script in plain Python: agents that are absent, that leave before
the others, and that are there when time runs out."""

from dataclasses import dataclass

import numpy as np
import pytest

from steppe.core.contracts.segment import Segment, SegmentHeader
from steppe.core.contracts.specs import FieldSpec, SegmentSpec
from steppe.core.io import codec
from steppe.replay import ReplayBufferPool, SequenceMemory, SequenceSamplingConfig, Windowing
from steppe.replay.sequence_windows import estimate_priorities, step_fields

pytestmark = pytest.mark.unit

AGENTS, WORLDS, GAMMA = 3, 2, 0.9
EXTRAS = (
    FieldSpec("hidden", (2,), "float32"),
    FieldSpec("q_val", (4,), "float32"),
    FieldSpec("comm_mask", (AGENTS,), "bool"),
    FieldSpec("final_comm_mask", (AGENTS,), "bool"),
    FieldSpec("lesson", (2,), "int32"),
)
SPEC = SegmentSpec(
    5, AGENTS * WORLDS, FieldSpec("obs", (3,), "float32"), FieldSpec("action", (), "int64"), EXTRAS, AGENTS
)
RULES = [
    Windowing(length=4, burn_in=2, stride=2, n_step=2, gamma=GAMMA),
    Windowing(length=5, burn_in=0, n_step=3, gamma=GAMMA),
]


@dataclass
class Step:
    """What happened to whom: by agent that was there."""

    action: dict
    reward: dict
    terminated: set
    mask: np.ndarray


class Team:
    """Episodes of one environment. Agent 0 is always there; agent 2 may leave early, by itself."""

    def __init__(self, number, stream):
        self.number, self.stream = number, stream
        self.episodes, self.ended = [], {}
        self.begin()

    def begin(self):
        self.there = set(range(self.stream.integers(1, AGENTS + 1)))
        self.episodes.append([])

    def mask(self):
        drawn = self.stream.random((AGENTS, AGENTS)) < 0.5
        present = np.isin(np.arange(AGENTS), list(self.there))
        return (drawn | np.eye(AGENTS, dtype=bool)) & present & present[:, None]

    def seen(self, episode, time):
        return np.array([self.number, episode, time], np.float32)


def write_step(team, segment, t):
    """One step of one environment into rows of a segment, and into its script."""
    rows = slice(team.number * AGENTS, (team.number + 1) * AGENTS)
    stream, episode = team.stream, len(team.episodes) - 1
    time = len(team.episodes[-1])
    mask = team.next_mask
    step = Step({}, {}, set(), mask)
    for name in ("reward", "q_val"):
        segment[name][t, rows] = np.nan
    segment["valid"][t, rows] = np.isin(np.arange(AGENTS), list(team.there))
    segment["obs"][t, rows] = team.seen(episode, time)
    segment["hidden"][t, rows] = [[time, agent] for agent in range(AGENTS)]
    segment["comm_mask"][t, rows] = mask
    over, out_of_time = stream.random() < 0.12, stream.random() < 0.08
    gone = set()
    for agent in sorted(team.there):
        row = team.number * AGENTS + agent
        step.action[agent], step.reward[agent] = int(stream.integers(4)), float(np.float32(stream.normal()))
        segment["action"][t, row], segment["reward"][t, row] = step.action[agent], step.reward[agent]
        segment["q_val"][t, row] = stream.normal(size=4)
        leaves = agent == 2 and len(team.there) > 1 and stream.random() < 0.1
        if over or leaves:
            step.terminated.add(agent)
            segment["terminated"][t, row] = True
        elif out_of_time:
            segment["truncated"][t, row] = True
        if over or leaves or out_of_time:
            segment["final_obs"][t, row] = team.seen(episode, time + 1)
            gone.add(agent)
    team.episodes[-1].append(step)
    if not team.there - gone:
        final = team.mask()
        segment["final_comm_mask"][t, rows] = final
        team.ended[episode] = (set(team.there), final)
        team.begin()
    else:
        team.there -= gone
    team.next_mask = team.mask()
    segment["obs"][t + 1, rows] = team.seen(len(team.episodes) - 1, len(team.episodes[-1]))
    segment["comm_mask"][t + 1, rows] = team.next_mask


class Script:
    def __init__(self, seed=0, actor=0):
        self.teams = [Team(number, np.random.default_rng([seed, number])) for number in range(WORLDS)]
        for team in self.teams:
            team.next_mask = team.mask()
        self.sequence, self.actor = 0, actor

    def segment(self):
        segment = Segment.blank(SPEC)
        for team in self.teams:
            for t in range(SPEC.num_steps):
                write_step(team, segment, t)
        segment.header = SegmentHeader("scripted", self.actor, 0, self.sequence, 0)
        self.sequence += 1
        return segment


def memory_of(rules, batch_size=12, seed=0):
    pool = ReplayBufferPool(1, 3000, use_prioritized=True, alpha=0.6)
    return SequenceMemory(SPEC, pool, SequenceSamplingConfig(batch_size, rules), stream=np.random.default_rng(seed))


def filled(rules, segments=60):
    memory, script = memory_of(rules), Script()
    for _ in range(segments):
        memory.add([script.segment()])
    return memory, script


def require_true(batch, column, rules, script):
    valid, learn = batch["valid"][:, column], batch["learn"][:, column]
    team = script.teams[int(batch["obs"][0, column, 0, 0])]
    for t in np.flatnonzero(valid):
        _, number, time = batch["obs"][t, column, 0].astype(int).tolist()
        episode = team.episodes[number]
        present = np.isin(
            np.arange(AGENTS), list(episode[time].action if time < len(episode) else team.ended[number][0])
        )
        np.testing.assert_array_equal(batch["live"][t, column], present)
        mask = episode[time].mask if time < len(episode) else team.ended[number][1]
        np.testing.assert_array_equal(batch["comm_mask"][t, column], mask)
    assert batch["hidden"][column, :, 0].tolist() == [batch["obs"][0, column, 0, 2]] * AGENTS
    for t in np.flatnonzero(learn):
        _, number, time = batch["obs"][t, column, 0].astype(int).tolist()
        steps = team.episodes[number][time : time + rules.n_step]
        assert batch["following"][t, column] == t + len(steps)
        assert batch["discount"][t, column] == pytest.approx(GAMMA ** len(steps))
        for agent in steps[0].action:
            total = sum(GAMMA**k * step.reward.get(agent, 0.0) for k, step in enumerate(steps))
            assert batch["action"][t, column, agent] == steps[0].action[agent]
            assert batch["reward"][t, column, agent] == pytest.approx(total, rel=1e-4, abs=1e-5)
            assert batch["terminated"][t, column, agent] == any(agent in step.terminated for step in steps)


@pytest.mark.parametrize("rules", RULES)
def test_windows_are_what_happened_to_everyone(rules):
    memory, script = filled(rules)
    left_early = sum(
        2 in step.terminated and len(step.terminated) == 1 for team in script.teams for e in team.episodes for step in e
    )
    assert left_early > 2, "the script has what the test is about"
    for _ in range(30):
        batch = memory.sample()
        assert batch["obs"].shape == (rules.rows, 12, AGENTS, 3)
        assert batch["reward"].shape == batch["terminated"].shape == batch["live"].shape == (rules.rows, 12, AGENTS)
        for column in range(12):
            require_true(batch, column, rules, script)


def test_columns_that_no_batch_needs_are_not_kept():
    names = [field.name for field in step_fields(SPEC)]
    assert "lesson" not in names
    assert "final_comm_mask" not in names
    assert {field.name: field.shape for field in step_fields(SPEC)}["comm_mask"] == (AGENTS, AGENTS)


def test_steps_are_counted_by_environment():
    memory, script = memory_of(RULES[0]), Script()
    memory.add([script.segment()])
    assert memory.limiter.inserted == WORLDS * SPEC.num_steps


def episode(values, rewards, live, *, terminated):
    """A whole episode of two agents in the form of a piece; the last row has only an observation."""
    rows = len(values) + 1
    ends = np.zeros((rows, 2), bool)
    ends[rows - 2] = terminated
    return {
        "q_val": np.concatenate([values, np.zeros((1, 2, 2))]),
        "action": np.zeros((rows, 2), np.int64),
        "reward": np.concatenate([rewards, np.zeros((1, 2))]).astype(np.float32),
        "terminated": ends,
        "live": np.concatenate([live, live[-1:]]),
    }


def test_new_sequences_enter_with_the_error_of_those_who_were_there():
    """One step per sequence, n_step 1: |r + γ max q(next) − q(now)|, no bootstrap after an end, no say at a time limit."""
    rules = Windowing(length=1, n_step=1, gamma=GAMMA)
    values = np.array([[[1.0, 2.0], [9.0, 9.0]], [[3.0, 0.0], [9.0, 9.0]], [[4.0, 5.0], [9.0, 9.0]]])
    rewards = np.array([[0.5, np.nan], [0.25, np.nan], [1.0, np.nan]])
    rewards = np.nan_to_num(rewards, nan=77.0)
    live = np.array([[True, False]] * 3)
    starts = np.arange(3)
    known = [abs(0.5 + GAMMA * 3.0 - 1.0), abs(0.25 + GAMMA * 5.0 - 3.0)]
    found = estimate_priorities(episode(values, rewards, live, terminated=True), starts, rules, complete=True)
    np.testing.assert_allclose(found, [*known, abs(1.0 - 4.0)])
    found = estimate_priorities(episode(values, rewards, live, terminated=False), starts, rules, complete=True)
    np.testing.assert_allclose(found, [*known, np.nan])


def test_errors_of_several_agents_count_by_their_mean():
    rules = Windowing(length=1, n_step=1, gamma=GAMMA)
    values = np.array([[[1.0, 0.0], [2.0, 0.0]]])
    rewards, live = np.array([[3.0, -3.0]]), np.ones((1, 2), bool)
    found = estimate_priorities(episode(values, rewards, live, terminated=True), np.arange(1), rules, complete=True)
    np.testing.assert_allclose(found, [(2.0 + 5.0) / 2])


@pytest.mark.parametrize("rules", RULES)
def test_a_restored_memory_goes_on_the_same(rules):
    one, script = filled(rules, 20)
    other = memory_of(rules)
    other.restore(codec.unpack(codec.pack(one.state())))
    for _ in range(10):
        segment = script.segment()
        for memory in (one, other):
            memory.add([segment])
        first, second = one.sample(), other.sample()
        for name, column in first.columns.items():
            np.testing.assert_array_equal(column, second[name], err_msg=name)


def test_an_actor_that_begins_anew_ends_its_episodes():
    """A gap in the numbers of segments: what was open is closed with what was seen last, and is no end."""
    memory, script = memory_of(RULES[0]), Script(seed=4)
    for _ in range(30):
        memory.add([script.segment()])
    script.segment()
    memory.add([script.segment()])
    for _ in range(10):
        batch = memory.sample()
        rows = batch["obs"][..., 0, 2].astype(int)
        for column in range(12):
            times = rows[batch["valid"][:, column], column]
            np.testing.assert_array_equal(np.diff(times), 1)

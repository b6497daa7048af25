"""Conformance suite for SegmentEnv, to inherit for your own environment (pytest collects the tests from your subclass).

class TestMyWorld(WorldConformance):
    def make_world(self, num_envs, seed):
        return MyWorld(num_envs, seed)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from steppe.core.contracts.algorithm import Tree
from steppe.core.contracts.env import SegmentEnv, get_agent_returns, num_rows
from steppe.core.contracts.errors import CannotResume
from steppe.core.contracts.segment import Segment, find_episode_ends
from steppe.core.contracts.specs import ActionSpec, SegmentSpec
from steppe.core.io import codec


@dataclass
class Journal:
    """Everything an environment wrote, concatenated over segments: `[T, B, …]`, `obs` with one extra row."""

    columns: dict[str, np.ndarray]
    starts: np.ndarray  # [T + 1, B]: whether the observation in that row is the first of an episode
    finished: list[tuple[float, int]]
    unfinished: list[tuple[float, int]]
    num_agents: int = 1
    shares: np.ndarray | None = None  # with several agents: the part of each agent in the returns of `finished`

    @property
    def ended(self) -> np.ndarray:
        """Where the episodes of environments ended [T, N]."""
        return find_episode_ends(self["valid"], self["terminated"] | self["truncated"], self.num_agents)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]


class WorldConformance:
    """Inherit and implement `make_world`; also `references`, if plain Gymnasium environments can be compared."""

    num_envs = 3
    num_rows = 60  # total steps over all segments; enough for every environment to end an episode
    seed_matters = True  # False for a deterministic environment

    def make_world(self, num_envs: int, seed: int) -> SegmentEnv:
        """Return a new environment that neither clips nor scales rewards."""
        raise NotImplementedError

    def references(self, num_envs: int, seed: int) -> list[tuple[gym.Env[Any, Any], int]] | None:
        """Return an equivalent plain environment and its seed for each environment; None if there is none."""
        return None

    def row_of(self, space: gym.Space[Any], raw: Any) -> np.ndarray:
        """Return a raw observation as it should be in a segment, by Gymnasium's own flattening; override for images."""
        return np.asarray(gym.spaces.utils.flatten(space, raw), np.float32)

    def test_it_writes_what_its_spec_says(self) -> None:
        world = self.make_world(self.num_envs, 0)
        journal = collect(world, self.num_rows, 7)
        rows = self.num_envs * world.spec.num_agents
        assert world.num_envs == self.num_envs
        assert world.starts.shape == (rows,)
        assert world.starts.dtype == np.bool_
        assert journal["obs"].shape == (self.num_rows + 1, rows, *world.spec.obs.shape)
        assert np.isfinite(journal["obs"]).all(), "some rows of obs were never written"
        assert np.isfinite(journal["reward"]).all(), "some rows of reward were never written"
        cut = journal["terminated"] | journal["truncated"]
        assert journal.ended.any(axis=0).all(), "no episode ended in some environment: raise num_rows"
        assert np.isfinite(journal["final_obs"][cut]).all(), "an episode was cut without its last observation"

    def test_the_same_seed_gives_the_same_trajectory(self) -> None:
        one, other = (collect(self.make_world(self.num_envs, 3), self.num_rows, 7) for _ in range(2))
        _require_same(one, other)

    def test_another_seed_gives_another_trajectory(self) -> None:
        if not self.seed_matters:
            return
        one, other = (collect(self.make_world(self.num_envs, seed), self.num_rows, 7) for seed in (3, 4))
        assert not np.array_equal(one["obs"], other["obs"])

    def test_copies_differ_from_each_other(self) -> None:
        if not self.seed_matters:
            return
        obs = collect(self.make_world(2, 3), self.num_rows, 7)["obs"]
        half = obs.shape[1] // 2
        assert not np.array_equal(obs[:, :half], obs[:, half:])

    def test_where_a_segment_ends_does_not_matter(self) -> None:
        one = collect(self.make_world(self.num_envs, 5), self.num_rows, 4)
        other = collect(self.make_world(self.num_envs, 5), self.num_rows, self.num_rows)
        _require_same(one, other)

    def test_reset_rows_are_no_experience(self) -> None:
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        cut = journal["terminated"] | journal["truncated"]
        resets = ~journal["valid"]
        assert not (resets & cut).any(), "a reset row ended an episode"
        assert not journal["reward"][resets].any(), "a reset row paid a reward"
        assert not resets[0].any(), "the first row after reset() was no experience"
        assert cut[:-1][resets[1:]].all(), "a reset row does not follow an end"

    def test_every_end_leads_to_one_start(self) -> None:
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        cut = journal["terminated"] | journal["truncated"]
        assert journal.starts[0].all()
        same_step = cut & journal.starts[1:]
        after_reset_row = ~journal["valid"]
        np.testing.assert_array_equal(journal.starts[1:], same_step | after_reset_row)
        missed = cut & ~journal.starts[1:]
        np.testing.assert_array_equal(missed[:-1], after_reset_row[1:])

    def test_returns_and_lengths_add_up(self) -> None:
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        finished, unfinished = account(journal)
        assert [length for _, length in journal.finished] == [length for _, length in finished]
        np.testing.assert_allclose(
            [total for total, _ in journal.finished], [total for total, _ in finished], rtol=1e-5
        )
        assert [length for _, length in journal.unfinished] == [length for _, length in unfinished]
        np.testing.assert_allclose([total for total, _ in journal.unfinished], [t for t, _ in unfinished], rtol=1e-5)

    def test_reset_begins_new_episodes(self) -> None:
        world = self.make_world(self.num_envs, 0)
        collect(world, 2, 2)
        obs = _blank(world, 1)["obs"][0]
        world.reset(obs)
        assert world.starts.all()
        assert np.isfinite(obs).all()
        assert world.unfinished() == [(0.0, 0)] * self.num_envs

    def test_it_leaves_the_actions_alone(self) -> None:
        world = self.make_world(self.num_envs, 0)
        segment = _blank(world, 1)
        actions = sample(world.spec.action, num_rows(world), np.random.default_rng(0))
        given = actions.copy()
        world.reset(segment["obs"][0])
        world.step(actions, segment, 0)
        world.close()
        np.testing.assert_array_equal(actions, given)

    def test_rows_are_what_plain_environments_give(self) -> None:
        references = self.references(self.num_envs, 9)
        if references is None:
            return
        journal = collect(self.make_world(self.num_envs, 9), self.num_rows, 7)
        for index, (env, seed) in enumerate(references):
            self._replay_in_reference(journal, index, env, seed)
            env.close()

    def test_a_restored_world_goes_on_like_the_one_it_was_taken_from(self) -> None:
        taken = self._snapshots([5, self.num_rows // 2])
        if taken is None:
            return
        whole = collect(self.make_world(self.num_envs, 3), self.num_rows, 7)
        for row, state in taken.items():
            world = self.make_world(self.num_envs, 4)
            world.restore(codec.unpack(codec.pack(state)))
            generator = np.random.default_rng(1)
            for _ in range(row):
                sample(world.spec.action, num_rows(world), generator)
            rest = advance(world, whole["obs"][row], self.num_rows - row, 7, generator)
            world.close()
            _require_same(_slice_after(whole, row), rest)

    def test_a_snapshot_disturbs_nothing(self) -> None:
        world = self.make_world(self.num_envs, 3)
        obs = _blank(world, 1)["obs"][0]
        world.reset(obs)
        generator = np.random.default_rng(1)
        journals = []
        for _ in range(self.num_rows):
            world.snapshot()
            journals.append(advance(world, obs, 1, 1, generator))
            obs = journals[-1]["obs"][-1]
        world.close()
        whole = collect(self.make_world(self.num_envs, 3), self.num_rows, 7)
        np.testing.assert_array_equal(np.concatenate([journal["obs"][1:] for journal in journals]), whole["obs"][1:])
        assert journals[-1].unfinished == whole.unfinished

    def test_a_snapshot_of_another_world_is_refused(self) -> None:
        taken = self._snapshots([5])
        world = self.make_world(self.num_envs + 1, 3)
        for state in (taken or {}).values():
            assert _refuses(world, state), "it took the snapshot of a world with fewer environments"
        assert _refuses(world, {"nothing": "of a world"})
        obs = _blank(world, 1)["obs"][0]
        world.reset(obs)
        assert np.isfinite(obs).all()
        world.close()

    def _snapshots(self, rows: list[int]) -> dict[int, Tree] | None:
        """Return snapshots after these numbers of steps with seed 3; None if it resumes only at episode boundaries."""
        world = self.make_world(self.num_envs, 3)
        obs = _blank(world, 1)["obs"][0]
        world.reset(obs)
        generator = np.random.default_rng(1)
        states, done = {}, 0
        for row in rows:
            obs = advance(world, obs, row - done, 7, generator)["obs"][-1]
            states[row], done = world.snapshot(), row
        kind = world.resume_kind
        world.close()
        assert (None in states.values()) == (kind == "episode-boundary")
        return {row: state for row, state in states.items() if state is not None} or None

    def _replay_in_reference(self, journal: Journal, index: int, env: gym.Env[Any, Any], seed: int) -> None:
        """Step `env` with the recorded actions of one environment and compare all results."""
        seen = self.row_of(env.observation_space, env.reset(seed=seed)[0])
        for t in range(self.num_rows):
            where = f"environment {index}, row {t}"
            np.testing.assert_array_equal(journal["obs"][t, index], seen, err_msg=where)
            if journal["valid"][t, index]:
                raw, reward, terminated, truncated, _ = env.step(env_action(env, journal["action"][t, index]))
                seen = self.row_of(env.observation_space, raw)
                assert journal["reward"][t, index] == np.float32(reward), where
                assert journal["terminated"][t, index] == terminated, where
                assert journal["truncated"][t, index] == truncated, where
                if terminated or truncated:
                    np.testing.assert_array_equal(journal["final_obs"][t, index], seen, err_msg=where)
            if journal.starts[t + 1, index]:
                seen = self.row_of(env.observation_space, env.reset()[0])
        np.testing.assert_array_equal(journal["obs"][self.num_rows, index], seen)


def collect(world: SegmentEnv, num_rows: int, segment_steps: int, action_seed: int = 1) -> Journal:
    """Reset an environment, step it at random in poisoned segments of at most `segment_steps`, then close it."""
    first = _blank(world, 1)["obs"][0]
    world.reset(first)
    journal = advance(world, first, num_rows, segment_steps, np.random.default_rng(action_seed))
    world.close()
    return journal


def advance(
    world: SegmentEnv, obs: np.ndarray, num_steps: int, segment_steps: int, generator: np.random.Generator
) -> Journal:
    """Step an environment with random actions, starting from its last observations `obs`."""
    segments: list[Segment] = []
    starts = [world.starts.copy()]
    finished: list[tuple[float, int]] = []
    shares: list[np.ndarray] = []
    while (left := num_steps - sum(segment.spec.num_steps for segment in segments)) > 0:
        segment = _blank(world, min(left, segment_steps))
        segment["obs"][0] = segments[-1]["obs"][-1] if segments else obs
        for t in range(segment.spec.num_steps):
            segment["action"][t] = sample(world.spec.action, num_rows(world), generator)
            world.step(segment["action"][t], segment, t)
            starts.append(world.starts.copy())
        by_agent = get_agent_returns(world)
        shares += [] if by_agent is None else [by_agent]
        finished += world.take_finished()
        segments.append(segment)
    names = segments[0].columns
    columns = {name: np.concatenate([s[name][: s.spec.num_steps] for s in segments]) for name in names}
    columns["obs"] = np.concatenate([columns["obs"], segments[-1]["obs"][-1:]])
    parts = np.concatenate(shares) if shares else None
    return Journal(columns, np.stack(starts), finished, world.unfinished(), world.spec.num_agents, parts)


def account(journal: Journal) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Return (return, length) of finished and of running episodes, computed from the rows alone."""
    num_envs = journal["reward"].shape[1] // journal.num_agents
    finished: list[tuple[float, int]] = []
    running = [(0.0, 0)] * num_envs
    for t, index in np.ndindex(len(journal["reward"]), num_envs):
        rows = [index * journal.num_agents + agent for agent in range(journal.num_agents)]
        present = [row for row in rows if journal["valid"][t, row]]
        if not present:
            continue
        total, length = running[index]
        running[index] = (total + sum(float(journal["reward"][t, row]) for row in present), length + 1)
        if all(journal["terminated"][t, row] or journal["truncated"][t, row] for row in present):
            finished.append(running[index])
            running[index] = (0.0, 0)
    return finished, running


def sample(action: ActionSpec, num_envs: int, generator: np.random.Generator) -> np.ndarray:
    """Return random actions `[B, …]`; in a box from a normal distribution, so that some exceed the bounds."""
    if action.kind == "box":
        return generator.normal(size=(num_envs, *action.sizes)).astype(np.float32)
    choices = generator.integers(0, action.sizes, (num_envs, len(action.sizes)))
    return choices[:, 0] if action.kind == "discrete" else choices


def env_action(env: gym.Env[Any, Any], action: np.ndarray) -> Any:
    """Convert an agent's action to the format of a plain environment."""
    space = env.action_space
    if isinstance(space, gym.spaces.Discrete):
        return int(action) + int(space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return action.reshape(space.nvec.shape) + space.start
    if isinstance(space, gym.spaces.Box):
        return np.clip(action, space.low, space.high)
    return action.reshape(space.shape or ()).astype(space.dtype)


def _blank(world: SegmentEnv, num_steps: int) -> Segment:
    """Return a segment with poisoned memory, so that missing writes are detected."""
    segment = Segment.blank(SegmentSpec(num_steps, num_rows(world), world.spec.obs, world.spec.action.field))
    for column in segment.columns.values():
        column[...] = np.nan if column.dtype == np.float32 else 1
    segment["valid"][...] = False
    return segment


def _refuses(world: SegmentEnv, state: Tree) -> bool:
    try:
        world.restore(state)
    except CannotResume:
        return True
    return False


def _slice_after(journal: Journal, row: int) -> Journal:
    """Return the rows from `row` on, with the episodes that ended in them."""
    columns = {name: column[row:] for name, column in journal.columns.items()}
    before = np.count_nonzero(journal.ended[:row])
    return Journal(columns, journal.starts[row:], journal.finished[before:], journal.unfinished, journal.num_agents)


def _require_same(one: Journal, other: Journal) -> None:
    cut = one["terminated"] | one["truncated"]
    for name in ("obs", "action", "reward", "terminated", "truncated", "valid"):
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    np.testing.assert_array_equal(one["final_obs"][cut], other["final_obs"][cut], err_msg="final_obs")
    np.testing.assert_array_equal(one.starts, other.starts, err_msg="starts")
    assert one.finished == other.finished
    assert one.unfinished == other.unfinished

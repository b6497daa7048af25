"""Conformance suite for a multi-agent SegmentEnv, to inherit; it includes the tests for every SegmentEnv.

class TestMyTeamWorld(TeamConformance):
    def make_world(self, num_envs, seed):
        return MyTeamWorld(num_envs, seed)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steppe.core.contracts.env import get_comm_mask, num_rows
from steppe.testing.env import Journal, WorldConformance, collect


class TeamConformance(WorldConformance):
    """Inherit and implement `make_world`; also `team_references`, if plain PettingZoo environments can be compared."""

    def team_references(self, num_envs: int, seed: int) -> list[tuple[Any, Any]] | None:
        """Return a PettingZoo parallel environment for each environment, and a function from episode to seed."""
        return None

    def team_row(self, agent: str, raw: Any) -> np.ndarray:
        """Return a raw observation as it should be in a segment, without padding."""
        return np.asarray(raw, np.float32).ravel()

    def team_action(self, agent: str, action: np.ndarray) -> Any:
        """Convert an agent's action to the format of the PettingZoo environment."""
        return action.item() if action.ndim == 0 else action

    def test_reset_rows_are_no_experience(self) -> None:
        """Rows of absent agents are empty, and follow an episode end or another such row."""
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        cut, absent = journal["terminated"] | journal["truncated"], ~journal["valid"]
        assert not (absent & cut).any(), "an absent agent ended an episode"
        assert not journal["reward"][absent].any(), "an absent agent got a reward"
        assert not journal["obs"][:-1][absent].any(), "an absent agent got an observation"
        assert (cut[:-1] | absent[:-1])[absent[1:]].all(), "an agent left without an end"
        present = journal["valid"].reshape(self.num_rows, self.num_envs, -1)
        assert present.any(axis=2).all(), "a step in which no agent was present"

    def test_every_end_leads_to_one_start(self) -> None:
        """An agent starts exactly when it is present and was absent, or had ended, before."""
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        cut, valid = journal["terminated"] | journal["truncated"], journal["valid"]
        np.testing.assert_array_equal(journal.starts[0], valid[0])
        begins = valid[1:] & (cut[:-1] | ~valid[:-1])
        np.testing.assert_array_equal(journal.starts[1:-1], begins)

    def test_reset_begins_new_episodes(self) -> None:
        world = self.make_world(self.num_envs, 0)
        obs = np.zeros((num_rows(world), *world.spec.obs.shape), world.spec.obs.dtype)
        world.reset(obs)
        assert world.starts.reshape(self.num_envs, -1).any(axis=1).all()
        assert world.unfinished() == [(0.0, 0)] * self.num_envs
        world.close()

    def test_agents_have_names(self) -> None:
        world = self.make_world(1, 0)
        assert len(set(world.spec.agents)) == world.spec.num_agents
        world.close()

    def test_the_agents_returns_add_up_to_the_teams(self) -> None:
        journal = collect(self.make_world(self.num_envs, 0), self.num_rows, 7)
        assert journal.shares is not None
        assert journal.shares.shape == (len(journal.finished), journal.num_agents)
        totals = np.where(np.isnan(journal.shares), 0.0, journal.shares).sum(axis=1)
        np.testing.assert_allclose(totals, [total for total, _ in journal.finished], atol=1e-9)

    def test_absent_agents_receive_and_send_no_messages(self) -> None:
        world = self.make_world(self.num_envs, 0)
        obs = np.zeros((num_rows(world), *world.spec.obs.shape), world.spec.obs.dtype)
        world.reset(obs)
        mask = get_comm_mask(world).reshape(self.num_envs, world.spec.num_agents, -1)
        assert mask.shape[2] == world.spec.num_agents
        assert mask.dtype == np.bool_
        present = world.starts.reshape(self.num_envs, -1)
        assert not mask[~present].any()
        assert not mask.transpose(0, 2, 1)[~present].any()
        world.close()

    def test_rows_are_what_plain_environments_give(self) -> None:
        references = self.team_references(self.num_envs, 9)
        if references is None:
            return
        journal = collect(self.make_world(self.num_envs, 9), self.num_rows, 7)
        for index, (env, seed_of) in enumerate(references):
            _ReferenceEnv(self, journal, index, env, seed_of).follow(self.num_rows)
            env.close()


class _ReferenceEnv:
    """A PettingZoo environment, stepped with the recorded actions of one environment to compare all results."""

    def __init__(self, suite: TeamConformance, journal: Journal, index: int, env: Any, seed_of: Any) -> None:
        self.suite, self.journal, self.env, self.seed_of = suite, journal, env, seed_of
        self.index, self.episode = index, 0
        self.rows = {agent: index * journal.num_agents + a for a, agent in enumerate(env.possible_agents)}
        self.seen: dict[Any, Any] = {}

    def follow(self, num_steps: int) -> None:
        self._begin()
        for t in range(num_steps):
            self._record(t)
            live = list(self.env.agents)
            actions = {a: self.suite.team_action(str(a), self.journal["action"][t, self.rows[a]]) for a in live}
            self.seen, rewards, terminated, truncated, _ = self.env.step(actions)
            for agent in live:
                self._compare(t, agent, float(rewards[agent]), bool(terminated[agent]), bool(truncated[agent]))
            if not self.env.agents:
                self._begin()
        self._record(num_steps)

    def _begin(self) -> None:
        self.seen, _ = self.env.reset(seed=self.seed_of(self.episode))
        self.episode += 1

    def _record(self, t: int) -> None:
        for agent, row in self.rows.items():
            present = agent in self.env.agents
            where = f"environment {self.index}, {agent}, row {t}"
            if t < len(self.journal["valid"]):
                assert self.journal["valid"][t, row] == present, where
            self._same(self.journal["obs"][t, row], self.seen[agent] if present else None, agent, where)

    def _compare(self, t: int, agent: Any, reward: float, terminated: bool, truncated: bool) -> None:
        row, where = self.rows[agent], f"environment {self.index}, {agent}, row {t}"
        assert self.journal["reward"][t, row] == np.float32(reward), where
        assert self.journal["terminated"][t, row] == terminated, where
        assert self.journal["truncated"][t, row] == truncated, where
        if terminated or truncated:
            self._same(self.journal["final_obs"][t, row], self.seen[agent], agent, where)

    def _same(self, row: np.ndarray, raw: Any, agent: Any, where: str) -> None:
        expected = np.zeros(0) if raw is None else self.suite.team_row(str(agent), raw)
        flat = row.ravel()
        np.testing.assert_array_equal(flat[: expected.size], expected.ravel(), err_msg=where)
        assert not flat[expected.size :].any(), where

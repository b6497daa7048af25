"""Conformance suites for the five components of a MainLoop, to inherit for your own components.

class TestMine(AgentPartConformance):
    def make_agent(self): return MyAgent()
    def experiences(self, agent): return [{"obs": …, "action": …, "reward": …, …}, …]
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from steppe.core.contracts.components import (
    AgentComponent,
    EnvironmentComponent,
    Experiences,
    MainLoopComponent,
    ParameterServerComponent,
    ReplayComponent,
)

KEYS = {"obs", "action", "reward", "next_obs", "terminated", "truncated"}
PATIENCE_S = 60.0


class EnvironmentPartConformance:
    """Inherit and implement `make_environment` and `make_policy`, the policy of the environment's workers."""

    def make_environment(self) -> EnvironmentComponent:
        raise NotImplementedError

    def make_policy(self, environment: EnvironmentComponent) -> Any:
        raise NotImplementedError

    def test_is_an_environment_part(self) -> None:
        environment = self.make_environment()
        assert isinstance(environment, EnvironmentComponent)
        environment.shutdown()

    def test_episodes_are_whole_and_as_many_as_asked_for(self) -> None:
        environment = self.make_environment()
        policy = self.make_policy(environment)
        steps = environment.generate_experiences(policy, 3, 20)
        assert all(set(step) >= KEYS for step in steps)
        ends = [bool(step["terminated"] or step["truncated"]) for step in steps]
        assert sum(ends) == 3
        assert ends[-1]
        assert len(steps) <= 60
        environment.shutdown()

    def test_batches_have_as_many_rows_as_asked_for(self) -> None:
        environment = self.make_environment()
        batch = environment.generate_batch_experiences(self.make_policy(environment), 17)
        assert set(batch) >= KEYS
        assert {len(column) for column in batch.values()} == {17}
        environment.shutdown()

    def test_it_goes_on_after_a_reset_and_ends_twice(self) -> None:
        environment = self.make_environment()
        policy = self.make_policy(environment)
        environment.generate_batch_experiences(policy, 5)
        environment.reset_environments()
        assert len(environment.generate_experiences(policy, 1, 20)) > 0
        assert isinstance(environment.get_environment_stats(), dict)
        environment.shutdown()
        environment.shutdown()


class ReplayPartConformance:
    """Inherit and implement `make_pool`: it holds at least 100 experiences; `experiences` if the format differs."""

    def make_pool(self) -> ReplayComponent:
        raise NotImplementedError

    def experiences(self, count: int) -> list[dict[str, Any]]:
        """Return experiences with distinct rewards."""
        rows = np.zeros((count, 3), np.float32)
        return [
            {
                "obs": rows[number],
                "action": np.int64(0),
                "reward": np.float32(number),
                "next_obs": rows[number],
                "terminated": np.bool_(False),
            }
            for number in range(count)
        ]

    def test_is_a_replay_part(self) -> None:
        assert isinstance(self.make_pool(), ReplayComponent)

    def test_it_remembers_what_it_was_given(self) -> None:
        pool = self.make_pool()
        assert pool.get_total_experiences() == 0
        pool.add_experiences(self.experiences(40))
        assert pool.get_total_experiences() == 40
        batch = pool.sample_batch(30)
        assert len(batch["reward"]) == 30
        assert set(batch["reward"].tolist()) <= set(range(40))
        assert len(batch["obs"]) == 30

    def test_draws_reach_everything(self) -> None:
        pool = self.make_pool()
        pool.add_experiences(self.experiences(8))
        seen: set[float] = set()
        for _ in range(200):
            seen |= set(pool.sample_batch(4)["reward"].tolist())
        assert seen == set(range(8))

    def test_clearing_and_balancing(self) -> None:
        pool = self.make_pool()
        pool.add_experiences(self.experiences(20))
        pool.balance_buffers()
        assert pool.get_total_experiences() == 20
        pool.get_buffer_stats()
        pool.clear_all_buffers()
        assert pool.get_total_experiences() == 0

    def test_what_is_saved_comes_back(self, tmp_path: Path) -> None:
        pool, other = self.make_pool(), self.make_pool()
        pool.add_experiences(self.experiences(20))
        pool.save_buffers(tmp_path / "pool")
        other.load_buffers(tmp_path / "pool")
        assert other.get_total_experiences() == 20
        assert set(other.sample_batch(10)["reward"].tolist()) <= set(range(20))


class AgentPartConformance:
    """Inherit and implement `make_agent` and `experiences`: consecutive steps that the agent can learn from."""

    def make_agent(self) -> AgentComponent:
        raise NotImplementedError

    def experiences(self, agent: AgentComponent) -> Experiences:
        raise NotImplementedError

    def batch(self, agent: AgentComponent) -> dict[str, np.ndarray]:
        """Return the experiences as one array per key."""
        steps = self.experiences(agent)
        return {key: np.stack([np.asarray(step[key]) for step in steps]) for key in steps[0]}

    def test_is_an_agent_part(self) -> None:
        assert isinstance(self.make_agent(), AgentComponent)

    def test_parameters_are_copies_and_come_back(self) -> None:
        agent, other = self.make_agent(), self.make_agent()
        agent.update_policy(self.experiences(agent))
        parameters = agent.get_policy_parameters()
        other.set_policy_parameters(parameters)
        assert same(other.get_policy_parameters(), parameters)
        for array in parameters.values():
            array[...] = 0
        assert not same(agent.get_policy_parameters(), parameters)

    def test_gradients_change_nothing_until_they_are_applied(self) -> None:
        agent = self.make_agent()
        before = agent.get_policy_parameters()
        gradients = agent.compute_gradients(self.batch(agent))
        assert same(agent.get_policy_parameters(), before)
        assert set(gradients) <= set(before)
        assert all(np.shape(gradients[name]) == before[name].shape for name in gradients)
        agent.apply_gradients(gradients)
        assert not same(agent.get_policy_parameters(), before)

    def test_learning_changes_the_parameters_and_is_counted(self) -> None:
        for learn in ("batch", "order"):
            agent = self.make_agent()
            before = agent.get_policy_parameters()
            metrics = (
                agent.learn_from_batch(self.batch(agent))
                if learn == "batch"
                else agent.update_policy(self.experiences(agent))
            )
            assert isinstance(metrics, dict)
            assert not same(agent.get_policy_parameters(), before), learn
            assert isinstance(agent.get_training_stats(), dict)
            agent.reset_training_stats()

    def test_a_checkpoint_brings_it_back(self, tmp_path: Path) -> None:
        agent, other = self.make_agent(), self.make_agent()
        agent.update_policy(self.experiences(agent))
        agent.save_checkpoint(tmp_path / "agent")
        other.load_checkpoint(tmp_path / "agent")
        assert same(other.get_policy_parameters(), agent.get_policy_parameters())

    def test_it_can_be_judged(self) -> None:
        assert np.isfinite(self.make_agent().evaluate_policy(2)["return_mean"])


class ParameterPartConformance:
    """Inherit and implement `make_server`: a server that applies updates only in `update_parameters`."""

    initial: ClassVar[dict[str, np.ndarray]] = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(3, np.float32)}

    def make_server(self, initial: dict[str, np.ndarray]) -> ParameterServerComponent:
        raise NotImplementedError

    def test_is_a_parameter_part(self) -> None:
        assert isinstance(self.make_server(self.initial), ParameterServerComponent)

    def test_workers_come_once_and_go_once(self) -> None:
        server = self.make_server(self.initial)
        assert server.register_worker("a") is True
        assert server.register_worker("a") is False
        assert server.unregister_worker("a") is True
        assert server.unregister_worker("a") is False

    def test_parameters_are_copies_of_what_it_began_with(self) -> None:
        server = self.make_server(self.initial)
        server.register_worker("a")
        found = server.get_parameters("a")
        assert same(found, self.initial)
        found["weight"][...] = 9.0
        assert same(server.get_parameters("a"), self.initial)

    def test_gradients_move_parameters_the_other_way(self) -> None:
        server = self.make_server(self.initial)
        for worker in ("a", "b"):
            server.register_worker(worker)
            server.push_gradients(worker, {name: np.ones_like(array) for name, array in self.initial.items()})
        assert set(server.aggregate_gradients()) == set(self.initial)
        server.update_parameters(0.25)
        server.broadcast_parameters()
        after = server.get_parameters("a")
        assert all((after[name] < self.initial[name]).all() for name in self.initial)
        assert isinstance(server.get_server_stats(), dict)

    def test_strangers_do_not_count(self) -> None:
        server = self.make_server(self.initial)
        server.register_worker("a")
        try:
            taken = bool(server.push_gradients("stranger", self.initial))
        except Exception:  # noqa: BLE001 - any kind of refusal is accepted
            taken = False
        assert not taken
        assert same(server.get_parameters("a"), self.initial)


class LoopPartConformance:
    """Inherit and implement `make_loop`: a loop with short episodes."""

    def make_loop(self) -> MainLoopComponent:
        raise NotImplementedError

    def test_is_a_loop_part(self) -> None:
        assert isinstance(self.make_loop(), MainLoopComponent)

    def test_single_episodes_are_counted(self) -> None:
        loop = self.make_loop()
        assert [loop.run_single_episode()["episode"] for _ in range(2)] == [1, 2]
        assert loop.get_training_progress()["episode"] == 2

    def test_training_takes_as_many_episodes_as_asked_for(self) -> None:
        loop = self.make_loop()
        metrics = loop.run_training(4, 10, 2, 2)
        assert isinstance(metrics, dict)
        assert loop.get_training_progress()["episode"] >= 4
        assert np.isfinite(loop.evaluate_policy(1)["return_mean"])

    def test_a_checkpoint_brings_its_episode_back(self, tmp_path: Path) -> None:
        loop, other = self.make_loop(), self.make_loop()
        loop.run_single_episode()
        loop.save_checkpoint(1, tmp_path / "loop")
        assert other.load_checkpoint(tmp_path / "loop") == 1

    def test_another_thread_ends_it(self) -> None:
        loop = self.make_loop()
        training = threading.Thread(target=loop.run_training, args=(10**9, 10))
        training.start()
        while loop.get_training_progress()["episode"] < 1 and training.is_alive():
            training.join(0.01)
        loop.pause_training()
        loop.resume_training()
        loop.stop_training()
        training.join(PATIENCE_S)
        assert not training.is_alive(), "stop_training ended nothing"


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Return whether two sets of parameters are equal."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

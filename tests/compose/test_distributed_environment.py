"""Experience from several workers: whole, ordered, never mixed, reproducible, and nothing is left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import steppe
from steppe import DistributedAgent, DistributedEnvironment
from steppe.core.contracts.errors import ConfigError, EnvironmentFault, FactoryError, UsageError
from steppe.core.system.shared_dir import owned_dirs
from steppe.envs.toy.builtin import CountingEnv

pytestmark = pytest.mark.integration

COUNTING = "steppe/Counting-v0"


class Endless(CountingEnv):
    """Counts and never ends."""

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


def workers() -> list[str]:
    return [child.name for child in multiprocessing.active_children() if child.name.startswith("steppe-actor")]


def rooms() -> set[Path]:
    """Of this process alone: other tests may have such workers at the same time."""
    return {*owned_dirs, *Path(tempfile.gettempdir()).glob("steppe-workers-*")}


def by_episode(steps: list[dict]) -> list[list[dict]]:
    numbers = [step["episode"] for step in steps]
    assert numbers == sorted(numbers), "the steps of an episode follow each other"
    return [[step for step in steps if step["episode"] == number] for number in range(max(numbers) + 1)]


def identity_of(step: dict) -> tuple[int, int, int]:
    return tuple(int(number) for number in step["obs"])


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_trajectories_of_workers_are_never_mixed(runtime: str) -> None:
    with DistributedEnvironment(COUNTING, 3, runtime=runtime) as environment:
        agent = DistributedAgent("ppo").bind(environment)
        episodes = by_episode(environment.generate_experiences(agent, 61))  # several rounds of segments
        assert environment.get_environment_stats()["runtime"] == runtime
        again = by_episode(environment.generate_experiences(agent, 4))
    assert len(episodes) == 61
    assert len({identity_of(steps[0])[0] for steps in episodes}) == 3
    for steps in episodes + again:
        identity, episode, _ = identity_of(steps[0])
        length = CountingEnv.length_of(identity, episode)
        assert [identity_of(step) for step in steps] == [(identity, episode, t) for t in range(length)]
        assert [int(step["next_obs"][2]) for step in steps] == list(range(1, length + 1))
        assert [float(step["reward"]) for step in steps] == list(range(1, length + 1))
        assert not any(step["terminated"] or step["truncated"] for step in steps[:-1])
        assert (bool(steps[-1]["terminated"]), bool(steps[-1]["truncated"])) == (episode % 2 == 0, episode % 2 == 1)
    shares = [
        sum(identity_of(steps[0])[0] == one for steps in episodes) for one in {identity_of(s[0])[0] for s in episodes}
    ]
    assert sorted(shares) == [20, 20, 21], "every worker plays an equal share"
    newest = {identity_of(steps[0])[0]: identity_of(steps[0])[1] for steps in episodes}
    for steps in again[:3]:
        identity, episode, _ = identity_of(steps[0])
        assert episode > newest[identity], "a new call begins new episodes"


def test_experience_is_the_same_on_every_runtime() -> None:
    runs = []
    for runtime in ("inline", "processes"):
        with DistributedEnvironment("CartPole-v1", 2, runtime=runtime, seed=5) as environment:
            agent = DistributedAgent("ppo", seed=3)
            steps = environment.generate_experiences(agent, 3)
            batch = environment.generate_batch_experiences(agent, 70)
        runs.append((steps, batch))
    (steps, batch), (others, other_batch) = runs
    assert len(steps) == len(others)
    for step, other in zip(steps, others, strict=True):
        assert step.keys() == other.keys()
        assert all(np.array_equal(step[key], other[key]) for key in step)
    assert all(np.array_equal(batch[key], other_batch[key]) for key in batch)
    keys = {"obs", "action", "reward", "next_obs", "terminated", "truncated", "logp", "value"}
    assert set(steps[0]) == keys | {"episode"}
    assert {key: len(column) for key, column in batch.items()} == dict.fromkeys(keys, 70)


def test_batches_go_on_where_they_were_until_a_reset() -> None:
    with DistributedEnvironment(COUNTING, 1, runtime="inline") as environment:
        agent = DistributedAgent("dqn")
        first = environment.generate_batch_experiences(agent, 32)["obs"]
        second = environment.generate_batch_experiences(agent, 32)["obs"]
        environment.reset_environments()
        third = environment.generate_batch_experiences(agent, 1)["obs"]
    for before, after in pairwise(np.concatenate([first, second])):
        length = CountingEnv.length_of(int(before[0]), int(before[1]))
        follows = (before[1], before[2] + 1) if before[2] + 1 < length else (before[1] + 1, 0)
        assert tuple(after[1:]) == follows
    assert third[0, 2] == 0
    identity, episode, step = second[-1].astype(int).tolist()
    ended = step + 1 == CountingEnv.length_of(identity, episode)  # then the next episode had already begun
    assert third[0, 1] == episode + 1 + ended


def test_long_episodes_are_cut_as_truncated() -> None:
    with DistributedEnvironment(Endless, 2, runtime="inline") as environment:
        episodes = by_episode(environment.generate_experiences(DistributedAgent("ppo"), 5, max_steps_per_episode=40))
    assert [len(steps) for steps in episodes] == [40] * 5
    for steps in episodes:
        assert [identity_of(step)[2] for step in steps] == list(range(40)), "each begins with a first step"
        assert bool(steps[-1]["truncated"])
        assert not steps[-1]["terminated"]


def test_parameters_given_to_the_workers_take_the_place_of_the_policy_s() -> None:
    with DistributedEnvironment("steppe/Identity-v0", 1, runtime="inline", seed=2) as environment:
        agent, other = (
            DistributedAgent("ppo", seed=1).bind(environment),
            DistributedAgent("ppo", seed=2).bind(environment),
        )
        environment.update_policy(other.get_policy_parameters())
        replaced = environment.generate_batch_experiences(agent, 20)["value"]
    with DistributedEnvironment("steppe/Identity-v0", 1, runtime="inline", seed=2) as environment:
        own = environment.generate_batch_experiences(other, 20)["value"]
        environment.update_policy(agent.get_policy_parameters())
        environment.update_policy({})
        environment.reset_environments()
        assert environment.generate_batch_experiences(other, 20)["value"].shape == (20,)
    np.testing.assert_array_equal(replaced, own)
    name, value = next(iter(agent.get_policy_parameters().items()))
    environment.update_policy({name: value})
    with environment, pytest.raises(ConfigError, match="the parameters lack"):
        environment.generate_batch_experiences(agent, 1)


def test_an_agent_of_the_house_is_a_policy() -> None:
    from steppe.algorithms.dqn.dqn import DQN

    with DistributedEnvironment("CartPole-v1", 1, runtime="inline") as environment:
        steps = environment.generate_experiences(DQN(steppe.DQNConfig(), environment.spec), 1)
    assert {int(step["action"]) for step in steps} <= {0, 1}


def test_lambdas_work_here_and_get_a_sentence_where_they_cannot() -> None:
    make = lambda: gym.make("CartPole-v1")  # noqa: E731
    with DistributedEnvironment(make, 2) as environment:
        environment.generate_experiences(DistributedAgent("ppo"), 2)
        assert environment.get_environment_stats()["runtime"] == "inline"
    with pytest.raises(FactoryError, match="another process cannot import"):
        DistributedEnvironment(make, 2, runtime="processes").generate_experiences(DistributedAgent("ppo"), 1)


def test_stats_count_what_was_played() -> None:
    environment = DistributedEnvironment(COUNTING, 2, runtime="inline")
    assert environment.get_environment_stats()["running"] is False
    with environment:
        steps = environment.generate_experiences(DistributedAgent("ppo"), 6)
        stats = environment.get_environment_stats()
    returns = [sum(float(step["reward"]) for step in episode) for episode in by_episode(steps)]
    assert (stats["steps"], stats["episodes"], stats["running"]) == (len(steps), 6, True)
    assert stats["return_mean"] == pytest.approx(sum(returns) / 6)
    assert stats["length_mean"] == pytest.approx(len(steps) / 6)
    assert environment.get_environment_stats()["running"] is False


def test_a_failing_environment_is_told_with_its_traceback_and_leaves_nothing() -> None:
    config = steppe.EnvConfig(kwargs={"at_step": 5})
    environment = DistributedEnvironment("steppe/Failing-v0", 2, config=config, runtime="processes")
    with pytest.raises(EnvironmentFault, match="this environment was made to fail") as caught:
        environment.generate_experiences(DistributedAgent("ppo"), 4)
    assert caught.value.details["step"] >= 1
    assert environment.get_environment_stats()["running"] is False


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DistributedEnvironment(COUNTING, 0), "at least one worker"),
        (lambda: DistributedEnvironment(COUNTING, device="gpu"), "must be auto, cpu, cuda"),
        (lambda: DistributedEnvironment(COUNTING, use_gpu=True, device="cpu"), "contradict"),
        (lambda: DistributedAgent("ppo", use_gpu=True, device="cpu"), "contradict"),
    ],
)
def test_mistakes_get_one_sentence(make, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_a_gpu_that_is_not_there_is_an_error_and_auto_is_not() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for make in (lambda: DistributedEnvironment(COUNTING, use_gpu=True), lambda: DistributedAgent("ppo", use_gpu=True)):
        with pytest.raises(ConfigError, match="no GPU was found: use device=auto or device=cpu"):
            make()
    with DistributedEnvironment(COUNTING, 1, device="auto", runtime="inline") as environment:
        assert environment.generate_experiences(DistributedAgent("ppo", device="auto"), 1)


def test_a_forgotten_environment_takes_its_workers_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = DistributedEnvironment(COUNTING, 2, runtime="processes")
    before = rooms()
    environment.generate_experiences(DistributedAgent("ppo"), 2)
    assert len(workers()) == 2
    assert len(rooms() - before) == 2, "shared memory, and a directory for logs"
    del environment
    gc.collect()
    assert workers() == []
    assert rooms() <= before


@pytest.mark.slow
def test_the_end_of_the_program_ends_forgotten_workers(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing
        import gymnasium as gym
        from steppe import DistributedAgent, DistributedEnvironment

        def make_env():
            return gym.make("CartPole-v1")

        environment = DistributedEnvironment(make_env, 2)
        print(len(environment.generate_experiences(DistributedAgent("ppo"), 2)))
        print(environment.get_environment_stats()["runtime"])
        print(*[child.pid for child in multiprocessing.active_children()])
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    _, runtime, pids = done.stdout.split("\n")[:3]
    assert runtime == "processes"
    assert len(pids.split()) == 2
    for pid in pids.split():
        assert not os.path.exists(f"/proc/{pid}")
    assert "Traceback" not in done.stderr


def test_unbound_agents_say_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"call bind\(environment\) first"):
        DistributedAgent("ppo").get_policy_parameters()

"""Workers that push gradients and the learner that takes them, here in one process: counts, gates, replays, coming again."""

from __future__ import annotations

import numpy as np
import pytest

from steppe.algorithms import make_agent
from steppe.core.config.run import EnvConfig, resolve_config
from steppe.core.contracts.specs import PushSpec
from steppe.core.contracts.transport import ACTORS, EVENTS, TRAINING
from steppe.core.system.timing import RunClock
from steppe.envs import make_segment_env, probe
from steppe.replay import make_memory
from steppe.roles.context import PAUSE, RUN, Context
from steppe.roles.gradients.learner import GradientLearner, GradientMemory, make_server
from steppe.roles.gradients.worker import GradientSource, GradientWorker
from steppe.roles.learner import RunLimits
from steppe.roles.scheduling import FreeCollectPolicy, LockstepCollectPolicy, RoundBatchPolicy, WindowBatchPolicy
from steppe.runtimes.plan import segment_spec
from steppe.transport.local import LocalBoard, LocalChannel, LocalWeights

pytestmark = pytest.mark.unit

IDENTITY = "steppe/Identity-v0"
DQN = {"algo": "dqn", "batch_size": 16, "learning_starts": 64, "samples_per_insert": 4.0, "n_step": 1}


class House:
    """A learner and workers that take turns."""

    def __init__(self, *, actors=2, steps=640, envs=4, **settings):
        layer = {"env": IDENTITY, "algo": "a3c", "mode": "workers", "actors": actors, "hidden": (16,), **settings}
        config = resolve_config(("test", layer)).config
        self.spec = probe(IDENTITY, EnvConfig())
        agent_config = config.agent.resolve_defaults(self.spec, actors, envs)[0]
        self.config, self.envs = config.model_copy(update={"agent": agent_config}), envs
        self.segment = segment_spec(agent_config, self.spec, envs)
        self.asked, self.board, self.weights, self.saved = RUN, LocalBoard(), LocalWeights(), []
        agent = self.agent()
        self.channel = LocalChannel(PushSpec.of(-(-agent.weights().layout.nbytes // 4)), actors)
        in_rounds = self.config.params.in_rounds
        store = GradientMemory(
            agent, make_server(self.config, agent), actors, pushes_per_update=None if in_rounds else 1
        )
        clock = RunClock()
        intake = (
            RoundBatchPolicy(self.channel, actors)
            if in_rounds
            else WindowBatchPolicy(self.channel, actors, 0.0, 2**62, clock)
        )
        limits, context = RunLimits(steps=steps), self.context("learner")
        self.learner = GradientLearner(store, intake, limits, self._save, context, segment=self.segment)
        self.workers = [self.worker(number) for number in range(actors)]

    def agent(self):
        return make_agent(self.config.algo, self.config.agent, self.spec, seed=0)

    def worker(self, number, epoch=0):
        agent, seeds = self.agent(), np.random.SeedSequence(number)
        agent.begin(self.envs, np.random.default_rng(number))
        memory = make_memory(self.config.agent, self.segment, stream=np.random.default_rng(number), total_steps=None)
        making = GradientSource(agent, memory, self.segment, 640, on_policy=self.config.agent.memory == "rollout")
        gate = LockstepCollectPolicy() if self.config.params.in_rounds else FreeCollectPolicy()
        world = make_segment_env(IDENTITY, EnvConfig(), self.envs, seeds)
        return GradientWorker(number, world, making, gate, self.context(f"worker-{number}", epoch))

    def context(self, name, epoch=0):
        return Context(
            "run", name, self.channel if hasattr(self, "channel") else None, self.weights, self.board,
            lambda: self.asked, RunClock(), epoch=epoch,
        )  # fmt: skip

    def _save(self, weights, state, counters):
        self.saved.append((weights.copy(), state, counters))

    def run(self):
        for _ in range(100_000):
            if self.learner.done:
                break
            for role in (*self.workers, self.learner):
                role.step()
        for role in (*self.workers, self.learner):
            role.close()
        return self


@pytest.mark.parametrize("algo", ["a2c", "a3c", "ppo"])
def test_counts_add_up_and_every_push_is_accounted_for(algo):
    house = House(algo=algo, segment_steps=8).run()
    learner, server = house.learner, house.learner.memory.server
    chunk = 8 * house.envs
    assert learner.env_steps == 640
    assert server.get_server_stats()["accepted_pushes"] == 640 // chunk
    assert learner.updates == server.updates == (640 // chunk // 2 if algo == "a2c" else 640 // chunk)
    assert learner.episodes == 640 // 16, "episodes of Identity have 16 steps"
    training = house.board.read(TRAINING)[-1][1]
    assert training["memory"]["pushes"] == 640 // chunk
    assert training["weights_sha256"] == house.saved[-1][0].sha256()
    taken = {record["actor"]: record["env_steps"] for _, record in house.board.read(ACTORS)}
    assert sum(taken.values()) >= 640


def test_workers_wait_for_each_other_only_in_rounds():
    pushes_per_update, free = House(algo="a2c", segment_steps=8), House(algo="a3c", segment_steps=8)
    for house in (pushes_per_update, free):
        house.learner.step()
        for _ in range(6):
            house.workers[0].step()
            house.learner.step()
    assert (pushes_per_update.workers[0].sequence, pushes_per_update.learner.updates) == (1, 0)
    assert free.workers[0].sequence >= 5
    assert free.learner.updates >= 5
    pushes_per_update.workers[1].step()
    pushes_per_update.learner.step()
    assert pushes_per_update.learner.updates == 1


def test_a_replay_is_filled_first_and_then_pays_for_pushes():
    house = House(**DQN, segment_steps=4).run()
    server = house.learner.memory.server.get_server_stats()
    per_worker = 640 / 2
    paid = 2 * (per_worker - 64) * 4.0 / 16
    assert server["accepted_pushes"] == pytest.approx(paid, abs=20)
    assert house.learner.updates == server["updates"]
    assert 0.0 < float(house.agent().network.epsilon) > float(house.learner.agent.network.epsilon)


def test_a_push_weighs_what_the_steps_do_that_it_is_learned_from():
    """Steps of the burn-in only bring the state up to date."""
    settings = {"algo": "r2d2", "batch_size": 4, "sequence_length": 3, "burn_in": 2, "n_step": 1, "prioritized": False}
    house = House(learning_starts=64, samples_per_insert=2.0, **settings)
    worker, pushes, learned = house.workers[0], [], []
    draw = worker.gradient_source.memory.sample

    def watched():
        batch = draw()
        learned.append(int(batch["learn"].sum()))
        assert batch["valid"].sum() > batch["learn"].sum()
        return batch

    worker.gradient_source.memory.sample = watched
    house.learner.step()
    while len(pushes) < 3:
        worker.step()
        while (push := house.channel.poll()) is not None:
            if push["counts"][0, 0, PushSpec.ROWS]:
                pushes.append(int(push["counts"][0, 0, PushSpec.ROWS]))
            house.channel.release(push)
    assert pushes == learned[:3]


def test_a_worker_that_comes_again_goes_on_with_its_next_push():
    house = House(algo="a2c", segment_steps=8)
    house.learner.step()
    for _ in range(3):
        for role in (*house.workers, house.learner):
            role.step()
    sequence, known = house.workers[0].sequence, house.channel.recall(0)
    assert known[0] == sequence - 1
    again = house.worker(0, epoch=1)
    assert again.resume(*known, np.random.SeedSequence(9)) == "exact"
    house.workers[0] = again
    house.run()
    assert house.learner.batch_policy.tracker.dropped == {}
    assert house.learner.env_steps == 640
    replay = House(**DQN, segment_steps=4)
    assert replay.workers[0].resume(3, None, np.random.SeedSequence(1)) == "episode-boundary"
    assert "begins with an empty replay" in replay.board.read(EVENTS)[-1][1]["details"]["message"]


def test_resting_workers_push_nothing():
    house = House(algo="a3c", segment_steps=8)
    house.learner.step()
    house.asked = PAUSE
    assert not house.workers[0].step()
    house.asked = RUN
    assert house.workers[0].step()
    assert house.workers[0].phases.seconds["learn"] > 0.0

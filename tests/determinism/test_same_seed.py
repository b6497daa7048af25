"""The same seed gives the same weights, bit for bit: twice over, and in one process as in many."""

from __future__ import annotations

import pytest

from steppe.core.config.run import resolve_config
from steppe.records.profiling.timeline import read_spans
from steppe.records.run_directory import RunDirectory
from steppe.training.train import run_experiment
from tests.support.cases import rest_slow

pytestmark = pytest.mark.integration

SMALL = {"steps": 1500, "envs": 4, "hidden": (16, 16), "evaluation.episodes": 5, "evaluation.every_steps": 400}
PPO = {"algo": "ppo", "segment_steps": 32, "minibatch_size": 64, "epochs": 2}
DQN = {"algo": "dqn", "segment_steps": 16, "batch_size": 32, "learning_starts": 200, "samples_per_insert": 8.0}
R2D2 = {
    "algo": "r2d2", "segment_steps": 12, "hidden": (8,), "cell_size": 8, "batch_size": 8, "sequence_length": 6,
    "burn_in": 3, "learning_starts": 200, "samples_per_insert": 4.0, "buffer_size": 3_000,
}  # fmt: skip
CASES = {
    "ppo, native vectors": {**PPO, "env": "CartPole-v1"},
    "ppo, our loop": {**PPO, "env": "CartPole-v1", "environment.vector": "loop"},
    "ppo, continuous": {**PPO, "env": "Pendulum-v1", "normalize_obs": True, "normalize_reward": True},
    "dqn, native vectors": {**DQN, "env": "CartPole-v1"},
    "dqn, our loop, everything": {
        **DQN, "env": "steppe/Identity-v0", "prioritized": True, "n_step": 3, "dueling": True, "normalize_obs": True,
    },
    "ppo, recurrent": {**PPO, "env": "steppe/Recall-v0", "recurrent": True, "hidden": (8,), "cell_size": 8},
    "r2d2": {**R2D2, "env": "steppe/Recall-v0"},
    "r2d2, our loop": {**R2D2, "env": "steppe/Counting-v0", "normalize_obs": True, "cell": "gru"},
}  # fmt: skip


def run(runtime, tmp_path, name, **settings):
    layer = {**SMALL, "seed": 7, "runtime": runtime, "run_dir": tmp_path / name, **settings}
    result = run_experiment(resolve_config(("call", layer)))
    assert result.state == "SUCCEEDED", result.message
    assert result.env_steps >= layer["steps"]
    assert result.updates > 0
    return result


def figures(result):
    names = (
        "weights_sha256",
        "env_steps",
        "updates",
        "version",
        "eval_return_mean",
        "eval_return_std",
        "eval_episodes",
    )
    return {name: result.summary[name] for name in names}


NOT_AHEAD = ("ppo, our loop", "dqn, our loop, everything", "ppo, recurrent", "r2d2")  # environments do not know of it


@pytest.mark.parametrize(
    ("case", "ahead"),
    [(case, 1) for case in CASES] + [pytest.param(case, 0, marks=pytest.mark.slow) for case in NOT_AHEAD],
)
def test_sync_is_the_same_on_every_runtime(case, ahead, tmp_path):
    settings = {"mode": "sync", "actors": 2, "flow.ahead": ahead, **CASES[case]}
    one, two = run("inline", tmp_path, "one", **settings), run("inline", tmp_path, "two", **settings)
    beside = run("processes", tmp_path, "beside", **settings)
    assert figures(one) == figures(two) == figures(beside)


@pytest.mark.parametrize("case", rest_slow("ppo, continuous", "dqn, our loop, everything"))
def test_every_segment_is_collected_with_the_version_before_its_own(case, tmp_path):
    """As the actors themselves say, on both runtimes; with rounds that are learned from faster and slower than collected."""
    settings = {"mode": "sync", "actors": 2, "flow.trace_spans": 1000, **CASES[case]}
    for ahead in (0, 1):
        for runtime in ("inline", "processes"):
            result = run(runtime, tmp_path, f"{runtime}-{ahead}", **settings | {"flow.ahead": ahead})
            spans = [span for span in read_spans(RunDirectory.open(result.path).store) if span.phase == "collect"]
            assert {span.role for span in spans} == {"actor-0", "actor-1"}
            assert all(span.version == max(0, span.sequence - ahead) for span in spans)
            rounds = result.version
            assert max(span.sequence for span in spans) in (rounds - 1, rounds), "of a round after the end at most"
            assert result.lag_max == ahead
            assert result.lag_mean == pytest.approx(ahead * (rounds - 1) / rounds)
            assert 0 <= result.dropped_segments <= 2 * ahead


def test_one_round_ahead_is_another_experiment(tmp_path):
    """Otherwise nothing was ahead."""
    settings = {"mode": "sync", "actors": 2, **CASES["ppo, our loop"]}
    strict = run("inline", tmp_path, "strict", **settings | {"flow.ahead": 0})
    assert figures(run("inline", tmp_path, "ahead", **settings)) != figures(strict)


@pytest.mark.parametrize("case", ["ppo, native vectors", "dqn, our loop, everything", "ppo, recurrent", "r2d2"])
def test_single_is_sync_with_one_actor_that_is_not_ahead(case, tmp_path):
    alone = run("inline", tmp_path, "alone", **{"mode": "single", **CASES[case]})
    beside = run("processes", tmp_path, "beside", **{"mode": "sync", "flow.ahead": 0, **CASES[case]})
    assert figures(alone) == figures(beside)


def test_larger_buffers_than_needed_change_nothing(tmp_path):
    settings = {"mode": "sync", "actors": 2, **CASES["dqn, our loop, everything"]}
    one = run("inline", tmp_path, "one", **settings)
    for runtime in ("inline", "processes"):
        roomy = run(runtime, tmp_path, runtime, **settings | {"flow.slots_per_actor": 3})
        assert figures(roomy) == figures(one)


@pytest.mark.parametrize("algo", ["ppo, native vectors", "dqn, our loop, everything"])
def test_single_is_the_same_on_every_runtime(algo, tmp_path):
    settings = {"mode": "single", **CASES[algo]}
    assert figures(run("inline", tmp_path, "one", **settings)) == figures(run("processes", tmp_path, "two", **settings))


@pytest.mark.parametrize("case", ["ppo, continuous", "dqn, our loop, everything"])
def test_another_seed_gives_other_weights(case, tmp_path):
    settings = {"mode": "sync", "actors": 2, **CASES[case]}
    one = run("inline", tmp_path, "one", **settings)
    other = run("inline", tmp_path, "other", **settings | {"seed": 8})
    assert one.weights_sha256 != other.weights_sha256
    assert one.eval_return_mean != other.eval_return_mean


@pytest.mark.parametrize("case", ["ppo, our loop", "ppo, recurrent", "r2d2"])
def test_the_frequency_of_evaluations_changes_nothing(case, tmp_path):
    """Evaluation has random numbers and, where an agent remembers, a memory of its own."""
    settings = {"mode": "sync", "actors": 2, **CASES[case]}
    often = run("inline", tmp_path, "often", **settings | {"evaluation.every_steps": 100})
    never = run("inline", tmp_path, "never", **settings | {"evaluation.every_steps": 10**9})
    assert figures(often) == figures(never)


def test_watching_changes_nothing(tmp_path):
    settings = {"mode": "sync", "actors": 2, **CASES["ppo, native vectors"]}
    plain = run("inline", tmp_path, "plain", **settings)
    watched = run("inline", tmp_path, "watched", **settings | {"flow.trace_spans": 50, "checkpoint.every_s": 0.01})
    assert figures(plain) == figures(watched)

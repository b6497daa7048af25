"""Reference experiments: seeds in processes of their own, continued where they were interrupted."""

import json

import pytest

from steppe.core.contracts.errors import RunFailed
from steppe.records.results.reference_results import ReferenceExperiment, read_seed_result
from steppe.records.run_directory import RunDirectory
from steppe.training.reference_experiments import measurement
from steppe.training.reference_experiments.measurement import directory_name, measure, thin

BANDIT = ReferenceExperiment(
    "bandit", "steppe/TwoArmedBandit-v0", "q-learning", 400, [1, 2], {"evaluation.every_steps": 200}
)


@pytest.mark.integration
def test_a_finished_seed_is_not_measured_again(tmp_path):
    lines = []
    [one] = measure(BANDIT, seeds=[1], work=tmp_path, say=lines.append)
    assert one.env_steps >= 400
    assert one.final.episodes == 100
    assert one.cpu_s > 0
    assert one.config["agent.learning_rate"] > 0
    path = tmp_path / directory_name(BANDIT) / "seed-1.json"
    before = path.stat().st_mtime_ns
    again, other = measure(BANDIT, seeds=[1, 2], work=tmp_path, say=lines.append)
    assert (again, path.stat().st_mtime_ns) == (one, before)
    assert (again.seed, other.seed) == (1, 2)
    assert read_seed_result(path) == one


@pytest.mark.integration
def test_a_seed_that_fails_is_named_and_the_others_finish(tmp_path):
    damaged = tmp_path / directory_name(BANDIT) / "seed-2"
    damaged.mkdir(parents=True)
    (damaged / "run.json").write_text("no record")
    with pytest.raises(RunFailed, match="seeds 2 failed"):
        measure(BANDIT, seeds=[2, 1], work=tmp_path, jobs=2)
    assert (damaged.parent / "seed-1.json").exists()


@pytest.mark.unit
def test_other_settings_are_measured_elsewhere():
    other = ReferenceExperiment("bandit", BANDIT.env, BANDIT.algo, 400, [1, 2], {"learning_rate": 0.5})
    assert directory_name(other) != directory_name(BANDIT)


@pytest.mark.integration
def test_an_interrupted_seed_continues(tmp_path):
    """The run's directory is kept, and the times of both attempts are added."""
    run = tmp_path / directory_name(BANDIT) / "seed-1"
    resolved = measurement.resolve_experiment(BANDIT, 1)
    RunDirectory.create(resolved.config.model_copy(update={"run_dir": run}), resolved.sources).release()
    (run / measurement.ATTEMPTS).write_text(json.dumps([[1000.0, 500.0]]))
    [found] = measure(BANDIT, seeds=[1], work=tmp_path)
    assert found.wall_s > 1000.0
    assert found.cpu_s > 500.0


@pytest.mark.unit
def test_long_curves_are_thinned_to_their_shape():
    thinned = thin([(step, float(step)) for step in range(1000)])
    assert len(thinned) == 200
    assert (thinned[0], thinned[-1]) == ((0, 0.0), (999, 999.0))

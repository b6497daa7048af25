"""RUN@best, RUN@latest, RUN@12, RUN@step=400000: which weights they mean, and what is said when there are none."""

from __future__ import annotations

import pytest

from steppe.core.config.run import resolve_config
from steppe.core.contracts.errors import RunNotFound, UsageError
from steppe.records.checkpoints import Checkpoints, save_weights
from steppe.records.run_directory import RunDirectory
from steppe.records.selectors import CheckpointSelector, open_run, select_checkpoint, select_weights
from tests.support.role_fakes import weights_of

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Checkpoints 2, 3 and 4 at 200, 300 and 400 steps; the best weights are of 100 steps; final ones of 500."""
    monkeypatch.setenv("STEPPE_RUNS", str(tmp_path))
    resolved = resolve_config(("call", {"env": "CartPole-v1", "name": "one"}))
    directory = RunDirectory.create(resolved.config, resolved.sources)
    checkpoints = Checkpoints(directory.checkpoints, 3, directory.key)
    for version in range(1, 5):
        weights = weights_of(version, env_steps=100 * version)
        checkpoints.save(weights, {"k": version}, {"env_steps": 100 * version})
    checkpoints.save_best(weights_of(1, env_steps=100), 7.0)
    save_weights(directory.result, weights_of(5, env_steps=500))
    directory.release()
    return directory


@pytest.mark.parametrize(
    ("address", "version"),
    [
        ("one", 5), ("one@best", 1), ("one@latest", 4), ("one@3", 3), ("one@step=300", 3), ("one@step=399", 3),
        ("one@step=1_000", 4), ("one@step=199", 1),
    ],
)  # fmt: skip
def test_each_form_means_one_version(run, address, version):
    assert select_weights(*open_run(address)).version == version


def test_it_can_be_given_apart_from_the_run(run):
    assert [select_weights(*open_run("one", word)).version for word in ("best", 3, "step=250")] == [1, 3, 2]
    assert select_weights(*open_run(run.path, "latest")).version == 4
    assert select_weights(*open_run(f"{run.path}@latest")).version == 4
    with pytest.raises(UsageError, match=r"one@best names a checkpoint, and checkpoint='latest' another: give one"):
        open_run("one@best", "latest")


def test_a_directory_with_the_sign_in_its_path_is_a_run(run, tmp_path):
    moved = run.path.rename(tmp_path / "one@best")
    assert select_weights(*open_run(moved)).version == 5
    assert select_weights(*open_run(f"{moved}@latest")).version == 4


@pytest.mark.parametrize("word", ["", "bset", "-1", "1.5", "step=", "step=x", "step=1e5", "0x1", "12 "])
def test_what_selects_nothing_is_refused(run, word):
    with pytest.raises(UsageError, match="selects no checkpoint: use best, latest, a checkpoint's number, or step=N"):
        open_run(f"one@{word}")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("one@9", r"one has no checkpoint 9. There are: best \(step 100\), 2 \(step 200\), 3 \(step 300\), 4 \(step 400\)$"),
        ("one@step=99", r"one has no checkpoint of 99 steps or fewer. There are: best \(step 100\), 2 "),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_with_what_is(run, address, sentence):
    with pytest.raises(RunNotFound, match=sentence):
        select_weights(*open_run(address))


def test_a_run_without_checkpoints(run):
    for path in sorted(run.checkpoints.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for word in ("best", "latest", "3", "step=5"):
        with pytest.raises(RunNotFound, match="one has no checkpoints yet"):
            select_weights(run, CheckpointSelector.parse(word))


def test_a_run_resumes_from_what_has_the_learners_state(run):
    numbers = [select_checkpoint(*open_run(f"one@{word}")) for word in ("latest", "2", "step=350")]
    assert numbers == [4, 2, 3]
    with pytest.raises(UsageError, match=r"start a new run with --init-from one@best, or resume.* There are: 2 \(step"):
        select_checkpoint(*open_run("one@best"))
    with pytest.raises(RunNotFound, match=r"no checkpoint of 150 steps or fewer. There are: 2 \(step 200\), 3"):
        select_checkpoint(*open_run("one@step=150"))


def test_an_older_checkpoint_becomes_the_newest(run):
    checkpoints = Checkpoints(run.checkpoints, run=run.key)
    assert checkpoints.restore_as_newest(4) == 4
    assert checkpoints.restore_as_newest(2) == 5
    newest = checkpoints.latest()
    assert (newest.number, newest.state, newest.weights.version) == (5, {"k": 2}, 2)
    assert checkpoints.load(4).weights.version == 4

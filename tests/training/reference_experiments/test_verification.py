"""Verification: which references are repeated, and what lies inside the band."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from steppe.core.contracts.errors import UsageError
from steppe.records.results.reference_results import (
    ReferenceExperiment,
    Score,
    SeedResult,
    make_reference,
    read_reference,
    write_record,
)
from steppe.training.reference_experiments.verification import (
    choose_by_commit,
    compare,
    find_references,
    to_builtins,
    verify,
)

ROOT = Path(__file__).parents[3]
REFERENCES = ROOT / "benchmarks" / "references"


def result(seed, mean, sha="a", **config):
    return SeedResult(
        seed, 100, Score(100, 10, mean, 0.0), None, {}, [], [], 1.0, 1.0, 1.0, sha, "c", {"agent.gamma": 0.9} | config
    )


def reference(name="one", env="Pole", algo="ppo", **more):
    experiment = ReferenceExperiment(name, env, algo, 100, [1, 2, 3], **more)
    return make_reference(
        experiment, [result(seed, mean) for seed, mean in ((1, 90.0), (2, 100.0), (3, 110.0))], {}, {}
    )


@pytest.mark.unit
def test_a_score_inside_and_outside_the_band():
    """The 99 % band of one more run is 100 ± 114.6, that of the mean of three 100 ± 81.0."""
    recorded = reference()
    inside = compare(recorded, [result(1, 210.0, "a")])
    assert inside.inside
    assert inside.same_weights == [1]
    outside = compare(recorded, [result(seed, 210.0, "b") for seed in (1, 2, 3)])
    assert not outside.inside
    assert outside.same_weights == []
    assert to_builtins(outside)["score"] == 210.0


@pytest.mark.unit
def test_changed_defaults_are_shown():
    found = compare(reference(), [result(1, 100.0, **{"agent.gamma": 0.99})])
    assert found.changed_settings == {"agent.gamma": (0.9, 0.99)}


@pytest.mark.unit
def test_references_are_found_by_algorithm_environment_and_name(tmp_path):
    for one in (reference("one"), reference("two", "Car"), reference("three", "Car", "dqn")):
        write_record(tmp_path / f"{one.experiment.name}.json", one)
    names = [
        {found.experiment.name for found in find_references(tmp_path, *words)}
        for words in ((), ("ppo",), ("ppo", "Car"), ("three",))
    ]
    assert names == [{"one", "two", "three"}, {"one", "two"}, {"two"}, {"three"}]
    with pytest.raises(UsageError, match="recorded are: one, three, two"):
        find_references(tmp_path, "sac")


@pytest.mark.unit
def test_every_short_reference_gets_its_turn():
    references = [reference(f"r{index}", short=True) for index in range(4)] + [reference("long")]
    commits = [hashlib.sha1(str(number).encode()).hexdigest() for number in range(64)]
    chosen = [{one.experiment.name for one in choose_by_commit(references, commit)} for commit in commits]
    assert all(len(names) == 2 for names in chosen)
    assert set().union(*chosen) == {"r0", "r1", "r2", "r3"}


@pytest.mark.integration
def test_the_command_lists_and_verifies(steppe, tmp_path):
    experiment = ReferenceExperiment(
        "bandit", "steppe/TwoArmedBandit-v0", "q-learning", 300, [1], {"evaluation.every_steps": 10**6}, episodes=5
    )
    recorded = make_reference(experiment, [result(1, 5.0), result(2, 6.0), result(3, 7.0)], {}, {})
    write_record(tmp_path / "references" / "bandit.json", recorded)
    words = ["--references", tmp_path / "references", "--json"]
    [listed] = json.loads(steppe("verify", *words).stdout)
    assert (listed["name"], listed["steps"]) == ("bandit", 300)
    done = steppe("verify", "q-learning", *words)
    [found] = json.loads(done.stdout)
    assert done.returncode == (0 if found["inside"] else 1), done.stderr
    assert found["seeds"] == [1]
    far = msgspec.structs.replace(recorded, band=msgspec.structs.replace(recorded.band, low=1e6, high=2e6))
    write_record(tmp_path / "references" / "bandit.json", far)
    done = steppe("verify", "bandit", "steppe/TwoArmedBandit-v0", "--references", tmp_path / "references")
    assert done.returncode == 1
    assert "is OUTSIDE the 99% band" in done.stdout


@pytest.mark.slow
@pytest.mark.integration
def test_two_short_references_that_the_commit_chooses():
    """About 10 s of CPU in all; the band holds a repetition with other random numbers with 99 %."""
    commit = os.environ.get("STEPPE_COMMIT") or subprocess.check_output(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, text=True
    )
    chosen = choose_by_commit(map(read_reference, sorted(REFERENCES.glob("*.json"))), commit.strip())
    assert len(chosen) == 2
    for found in map(verify, chosen):
        assert found.inside, found

"""Differences between two run directories; the tests make them by hand in their records."""

from __future__ import annotations

import json

import pytest

from steppe.core.config.run import resolve_config
from steppe.records.compare import compare_runs
from steppe.records.run_directory import RunDirectory

pytestmark = pytest.mark.unit


def run(tmp_path, name, changes=None, summary=None, **settings):
    resolved = resolve_config(("flag", {"env": "CartPole-v1", "run_dir": tmp_path / name, **settings}))
    directory = RunDirectory.create(resolved.config, resolved.sources)
    directory.release()
    path = directory.path / "run.json"
    record = json.loads(path.read_text())
    for section, values in (changes or {}).items():
        record[section] = values if not isinstance(values, dict) else {**(record[section] or {}), **values}
    path.write_text(json.dumps(record))
    if summary is not None:
        directory.write_summary(summary)
    return RunDirectory(directory.path)


def test_a_run_does_not_differ_from_itself(tmp_path):
    one = run(tmp_path, "one", summary={"env_steps": 5, "time_shares": {"actor": {"env": 0.5}}})
    found = compare_runs(one, one)
    assert found.pop("runs") == ("one", "one")
    assert not any(found.values())


def test_every_section_shows_both_runs(tmp_path):
    one = run(
        tmp_path, "one", summary={"run": "one", "env_steps": 5, "time_shares": {"actor": {"env": 0.5, "policy": 0.5}}}
    )
    changes = {"versions": {"torch": "9.9"}, "hardware": {"cores": 512}, "git": {"commit": "f" * 40}, "rerun_of": "one"}
    summary = {"run": "two", "env_steps": 6, "time_shares": {"actor": {"env": 0.25, "policy": 0.5}}, "matched": True}
    two = run(tmp_path, "two", changes, summary, seed=3, **{"flow.max_lag": 2})
    found = compare_runs(one, two)
    assert found["runs"] == ("one", "two")
    assert found["config"] == {
        "seed": ({"value": 0, "source": "default"}, {"value": 3, "source": "flag"}),
        "flow.max_lag": ({"value": 8, "source": "default"}, {"value": 2, "source": "flag"}),
    }
    assert found["versions"] == {"torch": (one.record["versions"]["torch"], "9.9")}
    assert found["hardware"] == {"cores": (one.record["hardware"]["cores"], 512)}
    assert found["project"]["git.commit"][1] == "f" * 40
    assert found["project"]["rerun_of"] == (None, "one")
    assert found["results"] == {"env_steps": (5, 6), "time_shares.actor.env": (0.5, 0.25), "matched": (None, True)}


def test_different_algorithms_have_different_keys(tmp_path):
    found = compare_runs(run(tmp_path, "one"), run(tmp_path, "two", algo="dqn"))["config"]
    assert found["algo"][1] == {"value": "dqn", "source": "flag"}
    assert found["agent.clip"][1] is None
    assert found["agent.buffer_size"][0] is None

"""Differences between two runs: configuration with its sources, versions, machine, project, results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steppe.records.run_directory import RunDirectory

RUN_IDENTITY_KEYS = ("name", "run_dir")  # differ between any two runs
REPEATED = ("env", "algo", "runtime", "mode", "actors", "envs", "seed", "rerun_of")  # in summaries, but no results

Pair = tuple[Any, Any]


def compare_runs(one: RunDirectory, other: RunDirectory) -> dict[str, Any]:
    """Return section → key → both values, None if absent; in `config`, each value is a dictionary with its source."""
    records = one.record, other.record
    return {
        "runs": (one.id, other.id),
        "config": _settings(one, other),
        "versions": differences(*(record.get("versions") or {} for record in records)),
        "hardware": differences(*(record.get("hardware") or {} for record in records)),
        "project": differences(*(_project(record) for record in records)),
        "results": differences(*(_results(run) for run in (one, other))),
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the keys whose values differ, in the order of the first mapping."""
    return {key: (one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)}


def _settings(*runs: RunDirectory) -> dict[str, Pair]:
    sourced = []
    for run in runs:
        config, sources = run.record["config"], run.sources
        sourced.append({key: {"value": value, "source": sources.get(key)} for key, value in config.items()})
    changed = differences(*({key: entry["value"] for key, entry in settings.items()} for settings in sourced))
    return {key: (sourced[0].get(key), sourced[1].get(key)) for key in changed if key not in RUN_IDENTITY_KEYS}


def _project(record: Mapping[str, Any]) -> dict[str, Any]:
    """The user's commit, the thread settings, and what the run was created from."""
    origin = {key: record[key] for key in ("rerun_of", "init_from", "cwd") if key in record}
    return {**_flatten("git", record.get("git")), **_flatten("threads", record.get("threads")), **origin}


def _results(run: RunDirectory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in (run.summary() or {}).items():
        if key not in ("run", "message", *REPEATED):
            found.update(_flatten(key, value))
    return found


def _flatten(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {} if value is None else {key: value}
    return {name: leaf for inner, part in value.items() for name, leaf in _flatten(f"{key}.{inner}", part).items()}

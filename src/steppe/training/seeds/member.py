"""The process of one member of a group of seeds: start its run, or resume it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from steppe.core.config import references
from steppe.core.config.run import ResolvedConfig, RunConfig, unflatten
from steppe.core.contracts.errors import SteppeError
from steppe.records.run_directory import RunDirectory, runs_root
from steppe.records.store import FAILED
from steppe.training.result import RunResult
from steppe.training.seeds.group import SeedGroup


def main() -> None:
    """Run the member that standard input names; exit code 0 if it succeeded or was stopped, 1 if it failed."""
    told = json.loads(sys.stdin.buffer.read())
    sys.path.append(os.getcwd())  # the user's modules
    try:
        result = run_member(SeedGroup.open(told["group"]), told["seed"], told["steps"])
    except SteppeError as error:
        print(f"steppe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{result.summary['run']} ended {result.summary['state']} ({result.summary.get('reason')})", flush=True)
    sys.exit(1 if result.summary["state"] == FAILED else 0)


def run_member(group: SeedGroup, seed: int, steps: int | None = None) -> RunResult:
    """Start the group's run with this seed, or resume it, and run it to its end."""
    from steppe.training.resume import resume_directory
    from steppe.training.train import run_experiment

    references.set_main_script(group.manifest.script)
    config = member_config(group, seed)
    path = config.run_dir or runs_root() / str(config.name)
    if (path / "run.json").exists():
        return resume_directory(RunDirectory(path), steps=steps)
    if steps is not None:
        config = config.model_copy(update={"steps": steps})
    sources = group.manifest.sources | {"seed": "group", "name": "group", "run_dir": "group"}
    return run_experiment(ResolvedConfig(config, sources))


def member_config(group: SeedGroup, seed: int) -> RunConfig:
    """Return the configuration of the group's run with this seed."""
    [member] = [member for member in group.manifest.members if member.seed == seed]
    path: Path = group.member_path(member)
    return unflatten(group.manifest.config | {"seed": seed, "name": member.name, "run_dir": str(path)})

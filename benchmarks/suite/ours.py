"""Steppe's side of a benchmark: runs of `steppe train`, or of a small script in benchmarks/workloads."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from steppe.core.contracts.transport import EVALUATIONS, TRAINING
from steppe.records.profiling.timeline import Span, read_spans
from steppe.records.provenance import versions
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from suite.measuring import Case, Done, Reading, RunError

STEPPE = Path(sys.executable).with_name("steppe")
WORKLOADS = Path(__file__).resolve().parents[1] / "workloads"
SOURCE = Path(__file__).resolve().parents[2] / "src"  # of this checkout, whichever one is installed
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Finished:
    """A finished run of Steppe: its summary, its directory and its measured resources."""

    summary: Mapping[str, Any]
    view: RunView
    account: Mapping[str, Any]

    def spans(self) -> list[Span]:
        """Recorded spans (up to `flow.trace_spans`), in seconds of the machine's monotonic clock."""
        return read_spans(self.view.directory.store)


def steps_per_s(run: Finished) -> Figures:
    """Environment steps over training time: the first environment step to the last update."""
    return {"value": run.summary["env_steps"] / run.summary["train_s"]}


def learning_steps_per_s(run: Finished) -> Figures:
    """The same from the first report after learning began: steps that only fill the replay memory are cheap and not counted."""
    reports = [report for _, report in run.view.directory.store.read(TRAINING) if report["updates"] > 0]
    if len(reports) < 2 or reports[-1]["train_s"] <= reports[0]["train_s"]:
        raise RunError("the run was too short to see how fast it learns")
    steps = reports[-1]["env_steps"] - reports[0]["env_steps"]
    rate = steps / (reports[-1]["train_s"] - reports[0]["train_s"])
    return {"value": rate, "whole_steps_per_s": run.summary["env_steps"] / run.summary["train_s"]}


def time_to_target(run: Finished) -> Figures:
    """Training time at which the weights were published that first reached the target in an evaluation."""
    reached = run.summary["time_to_target_s"]
    return {"value": float("inf") if reached is None else reached, "reached": reached is not None}


def train(
    label: str,
    *words: str,
    figures: Callable[[Finished], Figures] = steps_per_s,
    seeded: bool = True,
    sample_s: float = 0.0,
    python_path: Path | None = None,
) -> Case:
    """`steppe train WORDS…` as a case, with the round as its seed. `figures` reads the value and any further figures."""

    def command(number: int) -> list[str]:
        seed = ["--seed", str(number)] if seeded else []
        return [str(STEPPE), "train", *words, *seed, "--json"]

    def read(done: Done) -> Reading:
        summary = done.last_json()
        if summary.get("state") != "SUCCEEDED" and summary.get("reason") != "target_not_reached":
            raise RunError(f"the run ended {summary.get('state')}: {summary.get('reason')}")
        view = RunView(RunDirectory.open(done.directory / "runs" / summary["run"]))
        view.refresh()
        run = Finished(summary, view, done.account)
        found = {"env_steps": summary["env_steps"], "train_s": summary["train_s"]}
        found |= {"lag_mean": summary["lag_mean"], "return_mean": summary["eval_return_mean"], **figures(run)}
        value = found.pop("value")
        return Reading(value, settings(view), versions(), shares(run), found)

    paths = (SOURCE, *([python_path] if python_path else []))
    return Case(label, command, read, sample_s=sample_s, python_paths=paths, codes=(0, 1))


def workload(label: str, name: str, *words: str, sample_s: float = 0.0) -> Case:
    """A script of benchmarks/workloads that prints `value`, `settings` and further figures as JSON on its last line."""

    def command(_: int) -> list[str]:
        return [sys.executable, str(WORKLOADS / f"{name}.py"), *words]

    def read(done: Done) -> Reading:
        found = done.last_json()
        value, used = found.pop("value"), found.pop("settings")
        return Reading(value, used, versions(), extra=found)

    return Case(label, command, read, sample_s=sample_s, python_paths=(SOURCE,))


def settings(view: RunView) -> dict[str, Any]:
    """Settings printed with a figure of Steppe, from the resolved configuration."""
    config, agent = view.config, view.config.agent.model_dump()
    judged = config.evaluation
    found = {
        "envs": config.envs,
        "rollout": agent["segment_steps"],
        "epochs": agent.get("epochs"),
        "minibatch": agent.get("minibatch_size") or agent.get("batch_size"),
        "network": network(view),
        "actors": config.actors,
        "mode": config.mode,
        "runtime": config.runtime,
        "threads": config.flow.threads,
        "vector": config.environment.vector,
        "learning_rate": agent["learning_rate"],
        "evaluation": f"{judged.episodes} episodes every {judged.every_steps:,} steps, beside the training",
    }
    return found | ({"samples_per_insert": agent["samples_per_insert"]} if "samples_per_insert" in agent else {})


def network(view: RunView) -> str:
    """Describe the network, from the configuration and the shapes of the run's weights."""
    agent = view.config.agent.model_dump()
    with safe_open(view.directory.path / "weights.safetensors", "np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    pictures = any(len(shape) == 4 for shape in shapes)
    layers = "-".join(map(str, agent["hidden"] or ())) or agent["network"]
    heads = "" if view.config.algo != "ppo" else ", shared" if pictures else ", policy and value apart"
    count = sum(math.prod(shape) for shape in shapes)
    return f"{'convolutions-' * pictures}{layers}{heads} ({count:,} numbers)"


def shares(run: Finished) -> dict[str, dict[str, float]]:
    """Role → phase → share of its time; for the manager, the share of training time used for evaluations."""
    found = {role: dict(phases) for role, phases in (run.summary["time_shares"] or {}).items()}
    if run.view.training and run.summary["train_s"] > 0:
        during = [
            report["duration_s"] for _, report in run.view.directory.store.read(EVALUATIONS) if not report["final"]
        ]
        evaluating = min(1.0, sum(during) / run.summary["train_s"])
        found["manager"] = {"evaluate": evaluating, "rest": 1.0 - evaluating}
    return found

"""Scaling: cost by number of actors, environments per actor, size of weights and of observations.

Each part sweeps one quantity. The last one takes the constants that the others measured to a thousand actors, on paper.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from suite.charts import number
from suite.measuring import Case, Row
from suite.ours import WORKLOADS, Figures, Finished, train, workload
from suite.report import Part, middle
from suite.running import REPORTS, Effort, benchmark

ACTORS = (1, 2, 4, 8, 16, 32, 64)
ENVS = (1, 4, 16, 64, 256, 1024, 4096)
WEIGHTS = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
OBSERVATIONS = (4, 64, 1024, 7_056, 28_224)  # the last is 4 × 84 × 84
PAPER = (1, 16, 64, 256, 1000)
SEGMENT, IDEAL_PER_ACTOR = 64, 100.0
SAMPLE_S = 0.5
NO_EVALUATION = ("-s", "evaluation.every_steps=1000000000", "-s", "evaluation.episodes=1")


def costs(run: Finished) -> Figures:
    """Steps per second, and the learner's time per step and per segment without waiting."""
    training = run.view.training
    assert training is not None
    busy = {phase: seconds for phase, seconds in training.phases.items() if phase != "wait"}
    steps = max(1, run.summary["env_steps"])
    return {
        "value": run.summary["env_steps"] / run.summary["train_s"],
        "learner_us_per_step": 1e6 * sum(busy.values()) / steps,
        "lag_mean": run.summary["lag_mean"],
    }


def sweep(effort: Effort, sizes: Sequence[int], case: Callable[[int], Case]) -> dict[int, Row]:
    """Map size to row."""
    chosen = sizes if not effort.quick else sizes[:: max(1, len(sizes) - 1)][:2]
    cases = {size: case(size) for size in chosen}
    rows = effort.measure(list(cases.values()))
    return {size: rows[one.label] for size, one in cases.items()}


def plot(
    title: str, x: str, y: str, rows: Mapping[int, Row], series: Mapping[str, str], *, log_y: bool = False
) -> dict:
    """A chart with one line per figure: its label → "value" or a key of `extra`."""
    lines = []
    for label, key in series.items():
        points = [(size, row.median if key == "value" else middle(row.record(), key)) for size, row in rows.items()]
        lines.append({"label": label, "points": [[size, at] for size, at in points if at is not None]})
    return {"title": title, "x": x, "y": y, "log_y": log_y, "series": lines}


def actors(effort: Effort) -> Part:
    def case(count: int) -> Case:
        steps = effort.of(8, 3) * SEGMENT * count
        words = ("--mode", "async", "--actors", str(count), "--envs", "1", "--steps", str(steps))
        kept = ("-s", f"segment_steps={SEGMENT}", *NO_EVALUATION)
        return train(f"Steppe, {count} actors", "steppe/Sleep-v0", *words, *kept, figures=costs, sample_s=SAMPLE_S)

    rows = sweep(effort, ACTORS, case)
    ideal = {"label": "ideal", "points": [[count, IDEAL_PER_ACTOR * count] for count in rows]}
    speed = plot(
        "Steps per second of a 10 ms environment", "actors", "steps/s", rows, {"measured": "value"}, log_y=True
    )
    speed["series"].append(ideal)
    return Part(
        "Actors",
        "PPO on an environment that sleeps 10 ms, async, one environment per actor. Memory is that of the whole process "
        "family, shared pages counted once. Training time includes the segments that were under way at the end.",
        "steps/s",
        {row.label: row for row in rows.values()},
        columns={"peak_mib": "memory, MiB", "lag_mean": "lag, versions", "learner_us_per_step": "learner, µs/step"},
        plots=[
            speed,
            plot("Memory", "actors", "MiB", rows, {"whole family": "peak_mib"}),
            plot("Lag", "actors", "versions", rows, {"mean lag": "lag_mean"}),
        ],
    )


def envs(effort: Effort) -> Part:
    def case(count: int) -> Case:
        steps = effort.of(min(2_000_000, 100_000 + 20_000 * count), min(120_000, 6_000 * count))
        words = ("--mode", "async", "--envs", str(count), "--steps", str(steps), *NO_EVALUATION)
        return train(f"Steppe, {count} envs", "CartPole-v1", *words, figures=costs, sample_s=SAMPLE_S)

    rows = sweep(effort, ENVS, case)
    return Part(
        "Environments per actor",
        "PPO on Gymnasium's vector CartPole, async, one actor; rollout and minibatch as they are chosen for that many.",
        "steps/s",
        {row.label: row for row in rows.values()},
        columns={"peak_mib": "memory, MiB", "lag_mean": "lag, versions", "learner_us_per_step": "learner, µs/step"},
        plots=[plot("Steps per second", "environments per actor", "steps/s", rows, {"measured": "value"}, log_y=True)],
    )


def weights(effort: Effort) -> Part:
    def case(nbytes: int) -> Case:
        times = str(effort.of(max(20, min(200, 400_000_000 // nbytes)), 5))
        words = ("--nbytes", str(nbytes), "--readers", "2", "--times", times)
        return workload(f"Steppe, {number(nbytes / 1e6)} MB", "publishing", *words, sample_s=SAMPLE_S)

    rows = sweep(effort, WEIGHTS, case)
    series = {"publish itself": "publish_ms", "one reader": "single_ms", "both readers": "value"}
    return Part(
        "Size of the weights",
        "Publish → visible to `newer_than` in both of two other processes, over shared memory.",
        "ms",
        {row.label: row for row in rows.values()},
        columns={"publish_ms": "publish itself, ms", "single_ms": "one reader, ms", "peak_mib": "memory, MiB"},
        plots=[plot("Publish → visible", "bytes of weights", "ms", rows, series, log_y=True)],
    )


def observations(effort: Effort) -> Part:
    def case(size: int) -> Case:
        steps = effort.of(max(8_192, 400_000 // (1 + size // 256)), 2_048)
        words = ("--mode", "async", "--envs", "8", "--steps", str(steps), "-s", f"environment.kwargs={{size = {size}}}")
        label = f"Steppe, {size:,} floats"
        return train(
            label, "worlds:Wide", *words, *NO_EVALUATION, figures=costs, sample_s=SAMPLE_S, python_path=WORKLOADS
        )

    rows = sweep(effort, OBSERVATIONS, case)
    return Part(
        "Size of observations",
        "PPO, two layers of 64, async, one actor with 8 plain environments whose step costs nothing; the last size is "
        "4 × 84 × 84 as float32. The first layer grows with the observation, in the actor and in the learner.",
        "steps/s",
        {row.label: row for row in rows.values()},
        columns={"peak_mib": "memory, MiB", "lag_mean": "lag, versions", "learner_us_per_step": "learner, µs/step"},
        plots=[plot("Steps per second", "float32 per observation", "steps/s", rows, {"measured": "value"}, log_y=True)],
    )


def paper(effort: Effort) -> Part:
    """Calculated from the results of the other parts, without a run."""
    path = (REPORTS / "quick" if effort.quick else REPORTS) / "scaling.json"
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    notes = ["Measure the part `actors` first."]
    if "actors" in parts:
        measured = {row["settings"]["actors"]: row["median"] for row in parts["actors"]["rows"] if not row["error"]}
        notes = on_paper(constants(parts), measured)
    return Part(
        "On paper, to a thousand actors",
        "A 10 ms environment per actor, async PPO, one learner: what the constants measured above come to.",
        "",
        {},
        notes=notes,
    )


def constants(parts: Mapping[str, Any]) -> dict[str, float]:
    """Cost of one actor, one step and one segment, from the first and last row of the sweep over actors."""
    measured = [row for row in parts["actors"]["rows"] if not row["error"]]
    few, many = measured[0], measured[-1]
    further = many["settings"]["actors"] - few["settings"]["actors"]
    memory = [middle(row, "peak_mib") or 0.0 for row in (few, many)]
    spent = few["shares"]["actor"]
    return {
        "a": few["median"],
        "p": 1e6 * (spent["policy"] + spent["other"]) / few["median"],
        "c": middle(many, "learner_us_per_step") or 0.0,
        "m0": memory[0],
        "m": (memory[1] - memory[0]) / further,
        "T": float(many["settings"]["rollout"]),
        "cores": float(parts["actors"]["machine"]["cores"]),
    }


def on_paper(known: Mapping[str, float], measured: Mapping[int, float | None]) -> list[str]:
    """The constants, the formula, and a table of predicted and measured values."""
    lines = [
        f"- a = {number(known['a'])} steps/s of one actor",
        f"- p = {number(known['p'])} µs of an actor's own work per step (policy and the rest, not the environment)",
        f"- c = {number(known['c'])} µs of the learner's work per step, waiting left out, with {max(measured)} actors",
        f"- m₀ = {number(known['m0'])} MiB with one actor, m = {number(known['m'])} MiB for each further one",
        f"- T = {number(known['T'])} steps in a segment; k = {number(known['cores'])} cores of this machine",
        "",
        "With cores enough: steps/s = min(a n, 1 / c), on a n (p + c) cores. On this machine: min(a n, 1 / c, k / (p + c)). "
        "Segments/s = steps/s / T; memory = m₀ + (n − 1) m; the learner's load is a n c.",
        "",
        "| actors n | steps/s, cores enough | cores | learner's load | segments/s | memory, GiB | here, by the formula | here, measured |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return lines + ["| " + " | ".join(paper_cells(count, known, measured.get(count))) + " |" for count in PAPER]


def paper_cells(count: int, known: Mapping[str, float], measured: float | None) -> list[str]:
    """One line of that table."""
    offered, capacity = known["a"] * count, 1e6 / known["c"]
    steps, work_us = min(offered, capacity), known["p"] + known["c"]
    here = min(steps, 1e6 * known["cores"] / work_us)
    memory = (known["m0"] + (count - 1) * known["m"]) / 1024
    load = f"{100 * offered / capacity:.1f} %"
    cells = [number(steps), number(steps * work_us / 1e6), load, number(steps / known["T"]), number(memory)]
    return [f"{count:,}", *cells, number(here), number(measured)]


PARTS = {"actors": actors, "envs": envs, "weights": weights, "observations": observations, "paper": paper}

if __name__ == "__main__":
    raise SystemExit(benchmark(__file__, PARTS))

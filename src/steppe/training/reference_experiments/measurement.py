"""Measure a reference experiment: train each seed in a separate process, evaluate it, and store its result as a JSON file.

`measure` runs the seeds that have no result yet, several at once. An interrupted seed continues from its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from steppe.core.config.run import ResolvedConfig, flatten, resolve_config
from steppe.core.contracts.errors import RunFailed
from steppe.core.io.atomic_files import read_json, write_json
from steppe.core.system import seeding
from steppe.envs.factory import probe
from steppe.records.checkpoints import Checkpoints
from steppe.records.provenance import git
from steppe.records.results.reference_results import (
    Curve,
    ReferenceExperiment,
    Score,
    SeedResult,
    read_seed_result,
    write_record,
)
from steppe.records.run_directory import RunDirectory
from steppe.records.view import RunView
from steppe.runtimes.plan import make_plan

IDENTITY_KEYS = ("seed", "name", "run_dir", "init_from")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MAX_POINTS = 200  # of a curve
STOP_S = 15.0
POLL_S = 0.2
ATTEMPTS = "attempts.json"
Say = Callable[[str], None]


def resolve_experiment(experiment: ReferenceExperiment, seed: int) -> ResolvedConfig:
    """Return the configuration of one seed. By default everything is in one process, which repeats exactly."""
    settings = {"runtime": "inline", **experiment.settings}
    layer = {"env": experiment.env, "algo": experiment.algo, "steps": experiment.steps, "seed": seed, **settings}
    return resolve_config(("reference", layer))


def directory_name(experiment: ReferenceExperiment) -> str:
    """Return the experiment's name with a key of its resolved settings: with other defaults it is measured elsewhere."""
    config = resolve_experiment(experiment, 0).config
    resolved = make_plan(config, probe(config.env, config.environment)).config
    measured = {"config": flatten(resolved), "episodes": experiment.episodes}
    digest = hashlib.sha256(msgspec.json.encode(measured, order="sorted")).hexdigest()
    return f"{experiment.name}-{digest[:8]}"


def measure(
    experiment: ReferenceExperiment, *, seeds: Sequence[int], work: Path, jobs: int = 1, say: Say = print
) -> list[SeedResult]:
    """Return the results of these seeds, measuring those that are not in `work` yet, `jobs` at once.

    RunFailed, after the others have finished, if a seed fails.
    """
    directory = work / directory_name(experiment)
    directory.mkdir(parents=True, exist_ok=True)
    description = directory / "experiment.json"
    description.write_bytes(msgspec.json.encode(experiment))
    waiting = [seed for seed in seeds if not _result_path(directory, seed).exists()]
    for seed in (seed for seed in seeds if seed not in waiting):
        commit = read_seed_result(_result_path(directory, seed)).commit
        say(
            f"{experiment.name}: seed {seed} was measured before, at commit {str(commit)[:12]} (delete {directory} to repeat)"
        )
    failed: list[int] = []
    for seed, code in _run_processes(description, waiting, jobs):
        say(f"{experiment.name}: seed {seed} {'finished' if code == 0 else f'failed (exit code {code})'}")
        failed += [seed] if code else []
    if failed:
        logs = ", ".join(str(directory / f"seed-{seed}.log") for seed in failed)
        raise RunFailed(f"{experiment.name}: seeds {', '.join(map(str, failed))} failed, see {logs}")
    return [read_seed_result(_result_path(directory, seed)) for seed in seeds]


def _run_processes(description: Path, seeds: list[int], jobs: int) -> Iterator[tuple[int, int]]:
    """Run one process per seed and yield (seed, exit code) as they end. On an exception all are stopped within seconds."""
    waiting, running = list(seeds), dict[int, subprocess.Popen[bytes]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                seed = waiting.pop(0)
                running[seed] = _start(description, seed)
            for seed, process in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[seed]
                    yield seed, code
            time.sleep(POLL_S)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(description: Path, seed: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "steppe.training.reference_experiments.measurement", str(description), str(seed)]
    with (description.parent / f"seed-{seed}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **THREADS},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the parent only, which stops the children in order
        )


def measure_seed(experiment: ReferenceExperiment, seed: int, directory: Path) -> SeedResult:
    """Train and evaluate one seed in this process, continuing an interrupted attempt."""
    run = directory / f"seed-{seed}"
    _train(experiment, seed, run)
    opened = RunDirectory.open(run)
    view = RunView(opened)
    view.refresh()
    final, best = _evaluate(opened, experiment.episodes)
    wall_s, cpu_s = map(sum, zip(*read_json(run / ATTEMPTS), strict=True))
    config = {key: value for key, value in flatten(opened.config()).items() if key not in IDENTITY_KEYS}
    commit = git(Path(__file__).parent)
    return SeedResult(
        seed=seed,
        env_steps=view.env_steps,
        final=final,
        best=best,
        exact=_exact(opened),
        evaluations=thin(view.evaluations),
        training=thin(view.history),
        wall_s=round(wall_s, 3),
        train_s=round(view.train_s, 3),
        cpu_s=round(cpu_s, 3),
        weights_sha256=str(view.summary()["weights_sha256"]),
        commit=None if commit is None else commit["commit"] + ("+" if commit["dirty"] else ""),
        config=config,
    )


def _train(experiment: ReferenceExperiment, seed: int, run: Path) -> None:
    """Train until the run is complete. RunFailed if it was stopped or failed."""
    from steppe.training.resume import COMPLETE_REASONS, resume_directory
    from steppe.training.train import run_experiment

    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    existing = RunDirectory(run) if (run / "run.json").exists() else None
    if existing is not None and existing.store.status().reason in COMPLETE_REASONS:
        return
    try:
        if existing is not None:
            result = resume_directory(existing)
        else:
            shutil.rmtree(run, ignore_errors=True)
            resolved = resolve_experiment(experiment, seed)
            config = resolved.config.model_copy(update={"run_dir": run})
            result = run_experiment(ResolvedConfig(config, resolved.sources, resolved.auto))
    finally:
        attempts = read_json(run / ATTEMPTS) if (run / ATTEMPTS).exists() else []
        if run.exists():
            write_json(run / ATTEMPTS, [*attempts, (time.perf_counter() - began_s, _cpu_s() - began_cpu_s)])
    result.raise_for_fault()
    if result.summary["state"] != "SUCCEEDED":
        raise RunFailed(f"seed {seed} ended {result.summary['state']}: {result.message}")


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _evaluate(run: RunDirectory, episodes: int) -> tuple[Score, Score | None]:
    """Evaluate the final weights and those of the best checkpoint with episodes that training did not see."""
    from steppe.training.evaluate import evaluate_weights, result_weights

    config = run.config()
    judged = config.model_copy(update={"seed": seeding.integer_seed(config.seed, "reference")})
    spec = probe(config.env, config.environment)

    def score(weights: Any) -> Score:
        explore = config.evaluation.explore
        found = evaluate_weights(judged, spec, weights, episodes=episodes, explore=explore)
        return Score(weights.env_steps, len(found.returns), found.mean, found.std)

    final = result_weights(run)
    best = Checkpoints(run.checkpoints, run=run.key).best()
    return score(final), None if best is None else score(best.weights)


def _exact(run: RunDirectory) -> dict[str, float]:
    from steppe.training.reference_experiments.exact_evaluation import evaluate_exactly

    found = evaluate_exactly(run)
    return {} if found is None else {"return": found.value, "optimum": found.optimum}


def thin(points: Curve) -> Curve:
    """Return at most MAX_POINTS points of a curve, evenly spaced, with the first and the last."""
    if len(points) <= MAX_POINTS:
        return [(int(step), float(value)) for step, value in points]
    stride = (len(points) - 1) / (MAX_POINTS - 1)
    return [(int(step), float(value)) for step, value in (points[round(i * stride)] for i in range(MAX_POINTS))]


def _result_path(directory: Path, seed: int) -> Path:
    return directory / f"seed-{seed}.json"


def main(arguments: Sequence[str]) -> None:
    """Measure one seed: the path of the experiment's description, and the seed."""
    description, seed = Path(arguments[0]), int(arguments[1])
    experiment = msgspec.json.decode(description.read_bytes(), type=ReferenceExperiment)
    with contextlib.suppress(KeyboardInterrupt):
        write_record(_result_path(description.parent, seed), measure_seed(experiment, seed, description.parent))
        return
    sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])

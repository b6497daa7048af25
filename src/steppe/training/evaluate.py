"""Evaluate finished runs and their weights: `steppe eval`, `steppe.evaluate`, `DistributedAgent.evaluate_policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import ConfigError, DamagedFile, RunNotFound, UsageError, WorldError
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding
from steppe.core.system.typecheck import typechecked
from steppe.envs import probe
from steppe.records.checkpoints import Checkpoints, load_weights
from steppe.records.run_directory import RunDirectory
from steppe.records.video import save_gif
from steppe.roles.evaluation import Evaluation
from steppe.runtimes.handle import temporary_torch_settings
from steppe.runtimes.plan import make_plan


@typechecked
def evaluate(
    run: str | Path,
    *,
    episodes: int = 20,
    seed: int | None = None,
    render_dir: Path | None = None,
    explore: bool = False,
) -> dict[str, Any]:
    """Play episodes with a run's weights and report their returns; the same seed plays the same episodes.

    `render_dir` receives a GIF of the first episode. A run without final weights (stopped, or still running) is
    evaluated by its newest checkpoint.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: must be at least 1")
    directory = RunDirectory.open(run)
    config, weights = directory.config(), result_weights(directory)
    seed = config.seed if seed is None else seed
    # Gymnasium's vector environments cannot render and draw other random numbers: rendering would change the result.
    environment = config.environment
    if environment.vector == "auto":
        environment = environment.model_copy(update={"vector": "loop"})
    config = config.model_copy(update={"environment": environment, "seed": seed})
    spec = probe(config.env, config.environment)
    evaluation = evaluate_weights(
        config, spec, weights, episodes=episodes, explore=explore, record=render_dir is not None
    )
    recording = None
    if render_dir is not None:
        if not evaluation.frames:
            raise WorldError(f"{config.env} gives no images to record: it needs the render mode 'rgb_array'")
        recording = render_dir / f"{directory.path.resolve().name}-seed-{seed}.gif"
        try:
            save_gif(recording, evaluation.frames)
        except OSError as error:
            raise UsageError(f"cannot write the recording {recording}: {error.strerror}") from None
    run_info = {"run": directory.id, "env": config.env, "algo": config.algo, "seed": seed, "explore": explore}
    weights_info = {"version": weights.version, "env_steps": weights.env_steps, "weights_sha256": weights.sha256()}
    return (
        run_info
        | evaluation_summary(evaluation)
        | weights_info
        | {"recording": None if recording is None else str(recording)}
    )


def result_weights(run: RunDirectory) -> Weights:
    """Return a run's final weights, or else those of its newest checkpoint, or else of its best one."""
    if run.result.exists():
        return load_weights(run.result)
    checkpoints = Checkpoints(run.checkpoints, run=run.key)
    try:
        found = checkpoints.latest(check_rows=False) or checkpoints.best()
    except DamagedFile as error:
        found = checkpoints.best()
        if found is None:
            raise error from None
    if found is None:
        raise RunNotFound(f"{run.id} has no weights yet: its first checkpoint is still to come")
    return found.weights


def evaluate_weights(
    config: RunConfig, spec: EnvSpec, weights: Weights, *, episodes: int, explore: bool = False, record: bool = False
) -> Evaluation:
    """Play whole episodes with these weights in this process, with the configuration's threads and seed."""
    from steppe.algorithms import make_agent
    from steppe.runtimes.builder import make_evaluator

    evaluation_config = config.evaluation.model_copy(update={"episodes": episodes})
    plan = make_plan(config.model_copy(update={"evaluation": evaluation_config, "runtime": "inline"}), spec)
    with temporary_torch_settings(config.flow.threads, config.agent):
        policy = make_agent(config.algo, plan.config.agent, spec, seed=seeding.integer_seed(config.seed, "agent"))
        policy.load(weights)
        evaluator = make_evaluator(plan, policy, render=record)
        try:
            evaluation = evaluator.evaluate(episodes, lambda: False, explore=explore, record=record)
        finally:
            evaluator.env.close()
    assert evaluation is not None, "the evaluation was not stopped"
    return evaluation


def evaluation_summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as plain values."""
    return {
        "episodes": len(evaluation.returns),
        "return_mean": evaluation.mean,
        "return_std": evaluation.std,
        "return_min": float(np.min(evaluation.returns)),
        "return_max": float(np.max(evaluation.returns)),
        "length_mean": float(np.mean(evaluation.lengths)),
        "terminated_share": evaluation.terminated_share,
        "agent_returns": evaluation.agent_returns or None,
    }

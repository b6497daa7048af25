"""Evaluate finished runs and their weights: `steppe eval`, `steppe.evaluate`, `DistributedAgent.evaluate_policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from steppe.core.config.run import RunConfig
from steppe.core.contracts.errors import ConfigError, UsageError, WorldError
from steppe.core.contracts.specs import EnvSpec
from steppe.core.contracts.weights import Weights
from steppe.core.system import seeding
from steppe.core.system.typecheck import typechecked
from steppe.envs import probe
from steppe.records.selectors import open_run, select_weights
from steppe.records.video import require_mp4, save_video
from steppe.roles.evaluation import Evaluation
from steppe.runtimes.handle import temporary_torch_settings
from steppe.runtimes.plan import make_plan


@typechecked
def evaluate(
    run: str | Path,
    checkpoint: str | int | None = None,
    *,
    episodes: int = 20,
    seed: int | None = None,
    render_dir: Path | None = None,
    videos: int = 1,
    video_format: Literal["gif", "mp4"] = "gif",
    explore: bool = False,
) -> dict[str, Any]:
    """Play episodes with a run's weights and report their returns; the same seed plays the same episodes.

    `render_dir` receives videos of the first `videos` episodes of one environment; `explore` samples actions. A run without
    final weights (stopped, or still running) is evaluated by its newest checkpoint; `checkpoint` (or RUN@best, RUN@12,
    RUN@step=400000) chooses another one.
    """
    if min(episodes, videos) < 1:
        raise ConfigError(f"episodes={episodes}, videos={videos}: must be at least 1")
    if render_dir is not None and video_format == "mp4":
        require_mp4()
    directory, selector = open_run(run, checkpoint)
    config, weights = directory.config(), select_weights(directory, selector)
    seed = config.seed if seed is None else seed
    # Gymnasium's vector environments cannot render and draw other random numbers: rendering would change the result.
    environment = config.environment
    if environment.vector == "auto":
        environment = environment.model_copy(update={"vector": "loop"})
    config = config.model_copy(update={"environment": environment, "seed": seed})
    spec = probe(config.env, config.environment)
    evaluation = evaluate_weights(
        config, spec, weights, episodes=episodes, explore=explore, record=0 if render_dir is None else videos
    )
    recordings: list[str] = []
    if render_dir is not None:
        if not evaluation.frames:
            raise WorldError(f"{config.env} gives no images to record: it needs the render mode 'rgb_array'")
        name = f"{directory.path.resolve().name}-seed-{seed}"
        for number, frames in enumerate([evaluation.frames, *evaluation.more_videos], 1):
            path = render_dir / f"{name}{f'-{number}' if videos > 1 else ''}.{video_format}"
            try:
                save_video(path, frames)
            except OSError as error:
                raise UsageError(f"cannot write the recording {path}: {error.strerror}") from None
            recordings.append(str(path))
    run_info = {"run": directory.id, "env": config.env, "algo": config.algo, "seed": seed, "explore": explore}
    weights_info = {"version": weights.version, "env_steps": weights.env_steps, "weights_sha256": weights.sha256()}
    return (
        run_info
        | evaluation_summary(evaluation)
        | weights_info
        | {"recording": recordings[0] if recordings else None, "recordings": recordings or None}
    )


def evaluate_weights(
    config: RunConfig, spec: EnvSpec, weights: Weights, *, episodes: int, explore: bool = False, record: int = 0
) -> Evaluation:
    """Play whole episodes with these weights in this process, with the configuration's threads and seed."""
    from steppe.algorithms import make_agent
    from steppe.runtimes.builder import make_evaluator

    evaluation_config = config.evaluation.model_copy(update={"episodes": episodes})
    plan = make_plan(config.model_copy(update={"evaluation": evaluation_config, "runtime": "inline"}), spec)
    with temporary_torch_settings(config.flow.threads, config.agent):
        policy = make_agent(config.algo, plan.config.agent, spec, seed=seeding.integer_seed(config.seed, "agent"))
        policy.load(weights)
        evaluator = make_evaluator(plan, policy, render=bool(record))
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

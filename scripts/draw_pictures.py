"""Draw the pictures in docs/img from real runs: timelines, the live view, a flame graph, a video. Run by `make pictures`."""

from __future__ import annotations

import shutil
import tempfile
from io import StringIO
from pathlib import Path

import numpy as np
from rich.console import Console

import steppe
from steppe.cli.live_view import render
from steppe.envs.pathfinding.parallel import parallel_env
from steppe.envs.pathfinding.worlds import greedy_walk
from steppe.records.profiling.timeline import Span, read_spans, timeline_svg
from steppe.records.run_directory import RunDirectory
from steppe.records.video import save_gif
from steppe.records.view import RunView

IMAGES = Path(__file__).parent.parent / "docs" / "img"
WINDOW_S = 0.25
MODES = {
    "sync": {"actors": 3},
    "single": {"actors": 1},
    "async": {"actors": 3},
}

TITLES = {"sync": "sync, learning from one round while the next is collected"}


def timeline(mode: str, root: Path) -> None:
    """Record a short run and draw a quarter of a second from its middle."""
    settings = {
        "environment.vector": "loop",
        "flow.trace_spans": 400,
        "evaluation.every_steps": 1500,
        "evaluation.episodes": 4,
        "evaluation.max_episode_steps": 30,
    }
    result = steppe.train(
        "CartPole-v1", mode=mode, envs=4, steps=12_000, segment_steps=32, run_dir=root / mode, **MODES[mode], **settings
    )
    spans = read_spans(RunDirectory.open(result.path).store)
    title = f"{TITLES.get(mode, mode)}: a quarter of a second of a recorded run"
    (IMAGES / f"timeline-{mode}.svg").write_text(timeline_svg(window(spans), title=title, window_s=WINDOW_S))


def window(spans: list[Span]) -> list[Span]:
    """Return the spans around the second evaluation, after the warm-up."""
    evaluations = [span for span in spans if span.phase == "evaluate"]
    start = evaluations[min(1, len(evaluations) - 1)].start_s - WINDOW_S / 4
    return [span for span in spans if span.start_s >= start and span.start_s < start + WINDOW_S]


def live_view(root: Path) -> None:
    """Train for some seconds and draw the last live view before the end."""
    seen: list[str] = []

    def draw(view: RunView) -> None:
        if view.state == "RUNNING" and view.env_steps:
            console = Console(record=True, width=100, file=StringIO(), force_terminal=True)
            console.print(render(view))
            seen.append(console.export_svg(title="steppe train CartPole-v1 --mode async --actors 2"))

    steppe.train("CartPole-v1", mode="async", actors=2, steps=400_000, run_dir=root / "cartpole", callbacks=[draw])
    (IMAGES / "live-view.svg").write_text(seen[-1])


def flame(root: Path) -> None:
    """Profile a few seconds of training with compiled kernels, and copy the learner's flame graph."""
    for name, steps in (("warm", 20_000), ("profiled", 1_000_000)):
        result = steppe.train("CartPole-v1", steps=steps, run_dir=root / name, **{"flow.profile": True})
    shutil.copy(result.path / "profile" / "learner.svg", IMAGES / "flame-learner.svg")


def pathfinding(seed: int = 55, num_agents: int = 16, size: int = 20) -> None:
    """Record the greedy policy, with one random action in ten, until all agents have reached their goals."""
    env = parallel_env(num_agents=num_agents, size=size, density=0.3, render_mode="rgb_array")
    observations, _ = env.reset(seed=seed)
    stream, frames = np.random.default_rng(seed), [env.render()]
    while env.agents:
        actions = greedy_walk(np.array(list(observations.values())), stream)
        observations, *_ = env.step(dict(zip(env.agents, actions.tolist(), strict=True)))
        frames.append(env.render())
    save_gif(IMAGES / "pathfinding.gif", frames + frames[-1:] * 8, fps=env.metadata["render_fps"])


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        for mode in MODES:
            timeline(mode, Path(directory))
        live_view(Path(directory))
        flame(Path(directory))
    pathfinding()

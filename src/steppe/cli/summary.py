"""The summary of a run as text. `--json` prints the same summary as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from steppe.cli.text_charts import count, decimal, duration, format_shares, mean_and_std

MAX_LISTED_AGENTS = 8


def summary_text(summary: Mapping[str, Any], directory: Path) -> str:
    """Format state and reason, returns, speed, time shares and the paths of the run's files."""
    rows = list(_rows(summary, directory))
    width = max(len(label) for label, _ in rows)
    return "\n".join([_headline(summary), *(f"  {label:<{width}}  {text}" for label, text in rows)])


def _headline(summary: Mapping[str, Any]) -> str:
    reason = f" ({summary['reason']})" if summary.get("reason") else ""
    return (
        f"{summary['state']}{reason}: {summary['env']} with {summary['algo']}, {summary['runtime']}/{summary['mode']}, "
        f"actors {summary['actors']}, envs {summary['envs']}, seed {summary['seed']}"
    )


def _rows(summary: Mapping[str, Any], directory: Path) -> Iterator[tuple[str, str]]:
    if summary.get("eval_return_mean") is not None:
        returns = mean_and_std(summary["eval_return_mean"], summary["eval_return_std"])
        yield "evaluation", f"return {returns} over {count(summary['eval_episodes'])} episodes"
    if summary.get("eval_agent_returns"):
        yield "by agent", _by_agent(summary["eval_agent_returns"])
    yield "training", f"mean return {decimal(summary['train_return_mean'])} at the end"
    if summary.get("time_to_target_s") is not None:
        yield "target", f"reached after {duration(summary['time_to_target_s'])}"
    by_agents = f" ({count(summary['agent_steps'])} agent steps)" if summary.get("agent_steps") else ""
    yield (
        "progress",
        f"{count(summary['env_steps'])} steps{by_agents}, {count(summary['updates'])} updates, version {count(summary['version'])}",
    )
    times = f"{duration(summary['train_s'])} of training, {duration(summary['wall_s'])} in total"
    yield "speed", f"{count(summary['steps_per_s'])} steps/s; {times}"
    if summary.get("lag_max") is not None:
        lag = f"mean {decimal(summary['lag_mean'])}, max {count(summary['lag_max'])}"
        refused = f" ({count(summary['refused_segments'])} refused)" if summary.get("refused_segments") else ""
        dropped = f"{count(summary['dropped_segments'])} dropped{refused}"
        yield "lag", f"{lag}; {dropped}, {count(summary['actor_restarts'])} restarts"
    if summary.get("resume") is not None:
        yield "recovery", f"resume: {summary['resume']}"
    if "rerun_of" in summary:
        yield "rerun", _comparison(summary)
    for role, shares in (summary.get("time_shares") or {}).items():
        yield role, format_shares(shares)
    yield "run", str(directory)
    yield from _file_rows(directory)
    if summary["state"] in ("STOPPED", "FAILED") and any((directory / "checkpoints").glob("[0-9]*")):
        yield "to resume", f"steppe resume {directory}"


def _by_agent(returns: Mapping[str, float]) -> str:
    named = [f"{agent} {decimal(value)}" for agent, value in returns.items()]
    return ", ".join(named[:MAX_LISTED_AGENTS]) + (
        f" and {len(named) - MAX_LISTED_AGENTS} more" if len(named) > MAX_LISTED_AGENTS else ""
    )


def _comparison(summary: Mapping[str, Any]) -> str:
    verdict = {True: "matched", False: "NOT matched", None: "not finished"}[summary["matched"]]
    expected = f"expected {summary['expected_sha256'][:12]} from {summary['rerun_of']}"
    return f"{verdict}: weights hash {str(summary['weights_sha256'])[:12]}, {expected}"


def _file_rows(directory: Path) -> Iterator[tuple[str, str]]:
    if (directory / "tb").is_dir():
        yield "curves", f"tensorboard --logdir {directory / 'tb'}"
    numbered = sorted((directory / "checkpoints").glob("[0-9]*"))
    if numbered:
        yield "checkpoint", str(numbered[-1])
    if (directory / "profile" / "phases.md").exists():
        yield (
            "profile",
            f"{directory / 'profile'}: phases.md and one flame graph per role (open ROLE.svg in a browser)",
        )
    if any((directory / "recordings").glob("*")):
        yield "recordings", str(directory / "recordings")

"""`train`: an experiment from keyword arguments, or from a resolved configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from steppe import runtimes
from steppe.core.config import references
from steppe.core.config.run import ResolvedConfig, resolve_config
from steppe.core.system.typecheck import typechecked
from steppe.records.view import RunView
from steppe.training.experiment import Experiment
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer

Callback = Callable[[RunView], object]


@typechecked
def train(
    env: str | Callable[..., Any], *, algo: str | type = "ppo", callbacks: Sequence[Callback] = (), **settings: Any
) -> RunResult:
    """Train an agent and return the run's result. Raises the fault of a run that failed.

    `settings` are the configuration's keys: `steps=200_000, actors=2, mode="async"`, the algorithm's hyperparameters
    (`learning_rate=3e-4`), or dotted ones in a dictionary (`**{"flow.max_lag": 4}`). A callback is called about five
    times a second with the run's RunView; one that returns True ends the run, one that returns a dictionary of numbers
    adds them to the run's curves.
    """
    references.stop_if_loading_main()
    given = {name: _to_references(value) for name, value in settings.items()}
    layer = {"env": references.make_reference(env), "algo": references.make_reference(algo), **given}
    result = run_experiment(resolve_config(("call", layer)), observers=callbacks)
    result.raise_for_fault()
    return result


def _to_references(value: Any) -> Any:
    """Replace callables by references to them, in a single value or in a list."""
    if isinstance(value, list | tuple):
        return [_to_references(item) for item in value]
    return references.make_reference(value) if callable(value) else value


def run_experiment(resolved: ResolvedConfig, *, observers: Sequence[Observer] = ()) -> RunResult:
    """Run a resolved configuration to its end."""
    if resolved.auto:
        runtimes.join(resolved.config.runtime)
        from steppe.training.autotune import (
            resolve_auto_settings,  # imports torch, which this process does not need otherwise
        )

        resolved = resolve_auto_settings(resolved)
    return Experiment.of(resolved).run(observers)

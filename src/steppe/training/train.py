"""`train`: an experiment from keyword arguments, or from a resolved configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from steppe import runtimes
from steppe.core.config import references
from steppe.core.config.run import ResolvedConfig, resolve_config
from steppe.core.contracts.errors import UsageError
from steppe.core.system.typecheck import typechecked
from steppe.records.view import RunView
from steppe.training.experiment import Experiment
from steppe.training.result import RunResult
from steppe.training.supervisor import Observer

if TYPE_CHECKING:
    from steppe.training.seeds.group import GroupResult

Callback = Callable[[RunView], object]


@overload
def train(
    env: str | Callable[..., Any],
    *,
    algo: str | type = ...,
    callbacks: Sequence[Callback] = ...,
    seeds: None = ...,
    **settings: Any,
) -> RunResult: ...
@overload
def train(
    env: str | Callable[..., Any],
    *,
    algo: str | type = ...,
    callbacks: Sequence[Callback] = ...,
    seeds: int | Sequence[int],
    **settings: Any,
) -> GroupResult: ...
@typechecked
def train(
    env: str | Callable[..., Any],
    *,
    algo: str | type = "ppo",
    callbacks: Sequence[Callback] = (),
    seeds: int | Sequence[int] | None = None,
    **settings: Any,
) -> Any:
    """Train an agent and return the run's RunResult. Raises the fault of a run that failed.

    With `seeds`, a number or a list, train a group of runs in processes of their own, as many at once as the machine holds, and
    return its GroupResult; failed runs are in `result.failed`.

    `settings` are the configuration's keys: `steps=200_000, actors=2, mode="async"`, the algorithm's hyperparameters
    (`learning_rate=3e-4`), or dotted ones in a dictionary (`**{"flow.max_lag": 4}`). A callback is called about five
    times a second with the run's RunView; one that returns True ends the run, one that returns a dictionary of numbers
    adds them to the run's curves.
    """
    references.stop_if_loading_main()
    given = {name: _to_references(value) for name, value in settings.items()}
    layer = {"env": references.make_reference(env), "algo": references.make_reference(algo), **given}
    resolved = resolve_config(("call", layer))
    if seeds is not None:
        return _train_seeds(resolved, seeds, callbacks)
    result = run_experiment(resolved, observers=callbacks)
    result.raise_for_fault()
    return result


def _train_seeds(resolved: ResolvedConfig, seeds: int | Sequence[int], callbacks: Sequence[Callback]) -> GroupResult:
    from steppe.training.seeds.group import parse_seeds, train_group

    if callbacks:
        raise UsageError("callbacks are for one run: leave them out, or train one seed at a time")
    return train_group(resolved, parse_seeds(seeds, resolved.config.seed))


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

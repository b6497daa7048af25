"""Runtimes: `launch(plan, directory)` returns a Handle. Topology is data; every runtime builds the same roles.

The table of the built-in ones is in core/config/runtime_table.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from steppe.core.config import references
from steppe.core.config.runtime_table import RUNTIMES, capabilities_of


def runtime_module(runtime: str) -> ModuleType:
    """Return the module with `launch` and `require` of a built-in runtime."""
    return importlib.import_module(f"{RUNTIMES[runtime]}.launch")


def find_launcher(runtime: str) -> Callable[..., Any]:
    """Return a runtime's launch function: of a built-in one by name, or of the user's by `module:function`."""
    if runtime in RUNTIMES:
        launch: Callable[..., Any] = runtime_module(runtime).launch
        return launch
    return references.resolve_reference(runtime)  # type: ignore[no-any-return]


def prepare(runtime: str, *, torch: bool) -> None:
    """Start the runtime's processes that need no plan: the fork server imports meanwhile, including torch if needed."""
    if capabilities_of(runtime).fork_server:
        from steppe.runtimes.processes.supervisor import start_fork_server

        start_fork_server(torch=torch)


def require(runtime: str, plan: Any) -> None:
    """Raise, before anything is written, if a built-in runtime cannot run this plan here."""
    if runtime in RUNTIMES:
        runtime_module(runtime).require(plan)


def join(runtime: object) -> None:
    """If an MPI launcher started this program for such a runtime, let every rank but the first serve the first."""
    if isinstance(runtime, str) and runtime in RUNTIMES and capabilities_of(runtime).joins_ranks:
        runtime_module(runtime).join()

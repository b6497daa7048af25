"""Runtimes: `launch(plan, directory)` returns a Handle. Topology is data; every runtime builds the same roles."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from steppe.core.config import references
from steppe.core.config.run import RUNTIMES

_HOMES = {
    "inline": "inline.launch",
    "kafka": "kafka.launch",
    "mpi": "mpi.launch",
    "processes": "processes.supervisor",
    "ray": "ray.launch",
}


def runtime_module(runtime: str) -> ModuleType:
    """Return the module with `launch` of a built-in runtime."""
    return importlib.import_module(f"{__name__}.{_HOMES[runtime]}")


def find_launcher(runtime: str) -> Callable[..., Any]:
    """Return a runtime's launch function: of a built-in one by name, or of the user's by `module:function`."""
    if runtime in RUNTIMES:
        launch: Callable[..., Any] = runtime_module(runtime).launch
        return launch
    return references.resolve_reference(runtime)  # type: ignore[no-any-return]

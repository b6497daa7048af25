"""The table of built-in runtimes, and the lookup of what a runtime can do.

A runtime is a package: its `__init__` declares CAPABILITIES and imports nothing else, and its module `launch` has
`launch(plan, directory)` and `require(plan)`. The table has names only, so that no runtime is imported before it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path

from steppe.core.config import references
from steppe.core.contracts.capabilities import Capabilities
from steppe.core.contracts.errors import ConfigError, FactoryError

RUNTIMES = {
    "inline": "steppe.runtimes.inline",
    "processes": "steppe.runtimes.processes",
    "mpi": "steppe.runtimes.mpi",
    "ray": "steppe.runtimes.ray",
    "kafka": "steppe.runtimes.kafka",
}


def capabilities_of(runtime: str) -> Capabilities:
    """Return what a runtime can do: a built-in one by name, or `module:function`.

    A function declares its abilities in the attribute `capabilities`; without it, or if this process cannot import the
    function, it has the defaults.
    """
    if runtime in RUNTIMES:
        builtin: Capabilities = importlib.import_module(RUNTIMES[runtime]).CAPABILITIES
        return builtin
    try:
        declared = getattr(references.resolve_reference(runtime), "capabilities", None)
    except FactoryError:
        return Capabilities()
    if not isinstance(declared, Capabilities | None):
        raise ConfigError(f"runtime {runtime!r} has the attribute `capabilities`, which must be a Capabilities")
    return declared or Capabilities()


def runtimes_with(ability: str) -> list[str]:
    """Return the names of the built-in runtimes that have an ability, by the name of its field."""
    return [runtime for runtime in RUNTIMES if getattr(capabilities_of(runtime), ability)]


def is_installed(runtime: str) -> bool:
    """Return whether the modules and programs that a built-in runtime needs are installed."""
    needed = capabilities_of(runtime)
    return all(importlib.util.find_spec(module) is not None for module in needed.modules) and all(
        find_program(program) is not None for program in needed.programs
    )


def find_program(name: str) -> str | None:
    """Return the program of that name in this Python's directory, or the first on PATH."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.exists() else shutil.which(name)

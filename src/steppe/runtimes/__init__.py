"""Where roles live: `launch(plan, directory)` gives a Handle. Topology is data; every runtime builds the same roles."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from steppe.core import factory
from steppe.core.config import RUNTIMES


def launcher(runtime: str) -> Callable[..., Any]:
    """The function that launches a plan: of a runtime of ours by name, or of the user's by `module:function`."""
    if runtime in RUNTIMES:
        launch: Callable[..., Any] = importlib.import_module(f"steppe.runtimes.{runtime}").launch
        return launch
    return factory.resolve(runtime)  # type: ignore[no-any-return]

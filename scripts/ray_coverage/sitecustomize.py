"""Coverage of Ray's own processes, for scripts/measure_coverage.py, which puts this directory on PYTHONPATH.

Ray runs the methods of actors in threads that Python did not start, so they are not traced, and it kills its processes
without a chance to save. Here each method begins with tracing switched on, and what ran is saved every half second.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

EVERY_S = 0.5


def trace_actor_methods() -> None:
    """Let the methods of Ray actors be traced in whichever thread they run."""
    from ray._private.function_manager import FunctionActorManager

    make_executor = FunctionActorManager._make_actor_method_executor

    def make_traced_executor(self: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        executor = make_executor(self, name, method)

        def traced(*args: Any, **kwargs: Any) -> Any:
            if sys.gettrace() is None:
                sys.settrace(threading.gettrace())
            return executor(*args, **kwargs)

        traced.name, traced.method = name, method  # type: ignore[attr-defined]
        return traced

    FunctionActorManager._make_actor_method_executor = make_traced_executor


def save_repeatedly() -> None:
    """Save what ran until the process is killed."""
    import coverage

    while True:
        time.sleep(EVERY_S)
        measured = coverage.Coverage.current()
        if measured is not None:
            measured.save()


if any(word.endswith("/default_worker.py") for word in sys.orig_argv):
    trace_actor_methods()
    threading.Thread(target=save_repeatedly, daemon=True).start()

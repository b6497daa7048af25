"""Background work of the service: a thread that repeats tasks at an interval."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from steppe.core.contracts.errors import SteppeError


class PeriodicTask:
    """Runs all `tasks` every `every_s` seconds, between `start` and `stop`."""

    required_for_readiness = False  # whether the service is not ready while this fails

    def __init__(self, name: str, every_s: float, *tasks: Callable[[], None]) -> None:
        self.failures = 0
        self.last_error: str | None = None  # of the tasks of the last round; None if none failed
        self._every_s, self._tasks = every_s, tasks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, also if it was never started."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _loop(self) -> None:
        while not self._ended.wait(self._every_s):
            errors = [self._try_task(task) for task in self._tasks]
            self.last_error = next((error for error in errors if error is not None), None)

    def _try_task(self, task: Callable[[], None]) -> str | None:
        """Run one task and return its error, if any. A failure must not stop the other tasks; it is retried."""
        try:
            task()
        except (SteppeError, OSError, ValueError, KeyError) as error:
            self.failures += 1
            return str(error) or type(error).__name__
        except Exception as error:
            self.failures += 1
            logging.getLogger("steppe.service").exception("%s failed; it will be retried", self._thread.name)
            return type(error).__name__
        return None

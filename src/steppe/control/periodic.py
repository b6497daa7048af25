"""Background work of the service: a thread that repeats tasks at an interval."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from steppe.core.contracts.errors import SteppeError


class PeriodicTask:
    """Runs all of `works` every `every_s` seconds, between `start` and `stop`."""

    required_for_readiness = False  # whether the service is not ready while this fails

    def __init__(self, name: str, every_s: float, *works: Callable[[], None]) -> None:
        self.failures = 0
        self.trouble: str | None = None  # why a task failed in the last round; None if none did
        self._every_s, self._tasks = every_s, works
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
            troubles = [self._try_task(work) for work in self._tasks]
            self.trouble = next((trouble for trouble in troubles if trouble is not None), None)

    def _try_task(self, work: Callable[[], None]) -> str | None:
        """Run one task and return its error, if any. A failure must not stop the other tasks; it is retried."""
        try:
            work()
        except (SteppeError, OSError, ValueError, KeyError) as error:
            self.failures += 1
            return str(error) or type(error).__name__
        except Exception as error:
            self.failures += 1
            logging.getLogger("steppe.service").exception("%s failed; it is tried again", self._thread.name)
            return type(error).__name__
        return None

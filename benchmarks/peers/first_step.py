"""Notes when the first of any number of environments, in any process, takes its first step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

NOTE = "PEER_FIRST_STEP_NOTE"  # inherited by every process that a peer starts


class FirstStep(gym.Wrapper):
    """Writes the time of the first step to the file that `NOTE` names; whoever comes later leaves it alone."""

    _noted = False

    def step(self, action: Any):
        if not self._noted:
            self._noted = True
            note = Path(os.environ[NOTE])
            if not note.exists():
                with note.with_suffix(f".{os.getpid()}").open("w") as mine:
                    mine.write(repr(time.clock_gettime(time.CLOCK_BOOTTIME)))
                Path(mine.name).rename(note)
        return self.env.step(action)


def read_note() -> float:
    """When the first step was taken, on the clock that counts from the machine's boot."""
    return float(Path(os.environ[NOTE]).read_text())

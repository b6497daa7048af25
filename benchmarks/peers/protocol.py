"""What every peer's script has in common: its command line, its overrides and the JSON object on its last line.

`NAME.py TASK [--steps N] [--seed S] [--set key=value …]`, run by the peer's own Python. Standard library only: each
peer lives in an environment of its own. How a task is run is left to the scripts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
if sys.path[0] == HERE:  # last, not first: tianshou.py and others have the name of the package that they import
    sys.path.append(sys.path.pop(0))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is first imported

import argparse  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import Any  # noqa: E402


@dataclass
class Request:
    """What the command line asked for; `steps` is None where the task's own length is to be used."""

    task: str
    steps: int | None
    seed: int
    overrides: dict[str, str]

    def settings(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The task's settings with `--set` applied, each value of its default's type; an unknown key ends the script."""
        unknown = sorted(set(self.overrides) - set(defaults))
        if unknown:
            sys.exit(f"{self.task} has no setting {', '.join(unknown)}: it takes {', '.join(sorted(defaults))}")
        return {key: _as(type(default), self.overrides.get(key), default) for key, default in defaults.items()}


@dataclass
class Result:
    """What a task measured: environment steps, and the seconds they took with learning and without set-up."""

    steps: int
    seconds: float
    settings: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


Task = Callable[[Request], Result]


def run(peer: str, packages: Mapping[str, str], tasks: Mapping[str, Task]) -> None:
    """Run the task that the command line names and print its result; `packages` maps printed names to distributions."""
    request = _parse(tasks)
    result = tasks[request.task](request)
    print(
        json.dumps(
            {
                "peer": peer,
                "task": request.task,
                "steps": result.steps,
                "seconds": result.seconds,
                "steps_per_s": result.steps / result.seconds,
                "settings": {"seed": request.seed, **result.settings},
                "versions": {"python": platform.python_version()}
                | {name: version(distribution) for name, distribution in packages.items()},
                "extra": result.extra,
            }
        ),
        flush=True,
    )


def process_start() -> float:
    """When the kernel started this process, on the clock that counts from boot: the interpreter and imports count."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def _parse(tasks: Mapping[str, Task]) -> Request:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=sorted(tasks))
    parser.add_argument("--steps", type=int, help="environment steps to measure; the task's own number unless given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="key=value")
    given = parser.parse_args()
    if not all("=" in pair for pair in given.overrides):
        parser.error("--set takes key=value pairs")
    return Request(given.task, given.steps, given.seed, dict(pair.split("=", 1) for pair in given.overrides))


def _as(kind: type, text: str | None, default: Any) -> Any:
    if text is None:
        return default
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind in (list, tuple):
        return [int(part) for part in text.split("x")]
    return kind(text)

"""Other libraries (peers) in virtual environments: `benchmarks/peers/NAME.lock` has the packages, `NAME.py` the script."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from suite.measuring import Case, Done, Reading, RunError, last_line

BENCHMARKS = Path(__file__).resolve().parents[1]
PEERS, VENVS = BENCHMARKS / "peers", BENCHMARKS / ".venvs"


def peer(
    label: str,
    name: str,
    task: str,
    *,
    steps: int | None = None,
    settings: Sequence[str] = (),
    value: str = "steps_per_s",
    peers: Path = PEERS,
    venvs: Path = VENVS,
) -> Case:
    """A peer's task as a case; `value` names the figure among those it prints, or one of its `extra` ones.

    Its environment is made when the case first runs. A peer that cannot be installed or run fails alone.
    """

    def command(number: int) -> list[str]:
        words = [str(python(name, peers, venvs)), str(peers / f"{name}.py"), task, "--seed", str(number + 1)]
        words += ["--steps", str(steps)] if steps is not None else []
        return words + (["--set", *settings] if settings else [])

    return Case(label, command, reader(value))


def reader(value: str) -> Callable[[Done], Reading]:
    """Reads a peer's last line."""

    def read(done: Done) -> Reading:
        found = done.last_json()
        extra = found.get("extra", {})
        figure = found.get(value, extra.get(value))
        if not isinstance(figure, int | float):
            raise RunError(f"printed no {value}")
        if extra.get("reached") is False:
            figure = float("inf")
        return Reading(
            float(figure),
            found["settings"],
            found["versions"],
            extra={"seconds": found["seconds"], "steps": found["steps"], **extra},
        )

    return read


def python(name: str, peers: Path = PEERS, venvs: Path = VENVS) -> Path:
    """Return the peer's interpreter, in a virtual environment with exactly the packages of its lock file."""
    lock, home = peers / f"{name}.lock", venvs / name
    if not lock.is_file() or not (peers / f"{name}.py").is_file():
        raise RunError(f"there is no {name}.lock and {name}.py in {peers.name}/")
    digest, ready = hashlib.sha256(lock.read_bytes()).hexdigest(), home / "ready"
    interpreter = home / "bin" / "python"
    if ready.is_file() and ready.read_text() == digest:
        return interpreter
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise RunError("uv is not installed: pip install uv")
    if not interpreter.exists():
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], name)
    sync = [uv, "pip", "sync", "--quiet", "--require-hashes", "--compile-bytecode", "--python", str(interpreter)]
    _run([*sync, str(lock)], name)
    ready.write_text(digest)
    return interpreter


def _run(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"the environment of {name} could not be made: {last_line(done.stderr)}")

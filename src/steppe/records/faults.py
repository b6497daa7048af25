"""faults/NNN.bin: how an environment came to raise an exception, for `steppe reproduce`. Written atomically."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from steppe.core.contracts.errors import DamagedFile, RunNotFound
from steppe.core.io import codec
from steppe.core.io.atomic_files import write_atomic
from steppe.records.run_directory import RunDirectory

SCHEMA = 1
_NAME = re.compile(r"(\d{3,})\.bin")


class Faults:
    """The recorded faults of one run. Any number of processes may add to them at once."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def save(self, circumstances: dict[str, Any]) -> dict[str, str]:
        """Write a fault under the next free number; return its path and the command that reproduces it."""
        directory = self._run.faults
        directory.mkdir(exist_ok=True)
        temporary = directory / f".{os.getpid()}.part"
        write_atomic(temporary, codec.pack({"schema": SCHEMA, **circumstances}))
        try:
            path = _link_next_free(temporary, directory, max(self.numbers(), default=0) + 1)
        finally:
            temporary.unlink()
        command = f"steppe reproduce {self._run.address} --fault {int(path.stem)}"  # others may fail at the same time
        return {"recording": str(path.relative_to(self._run.path)), "reproduce": command}

    def numbers(self) -> list[int]:
        """Return the numbers of the recorded faults, oldest first."""
        directory = self._run.faults
        names = [_NAME.fullmatch(path.name) for path in directory.iterdir()] if directory.is_dir() else []
        return sorted(int(name[1]) for name in names if name)

    def load(self, number: int | None = None) -> tuple[Path, dict[str, Any]]:
        """Read a fault, by default the newest. RunNotFound if there is none."""
        numbers = self.numbers()
        if not numbers:
            raise RunNotFound(f"{self._run.id} has no recorded fault: none of its environments raised an exception")
        if number is not None and number not in numbers:
            raise RunNotFound(f"{self._run.id} has no fault {number}; there are: {', '.join(map(str, numbers))}")
        path = self._run.faults / _name(numbers[-1] if number is None else number)
        try:
            found = codec.unpack(path.read_bytes())
        except DamagedFile as error:
            raise DamagedFile(f"{path} is damaged: {error}") from None
        if not isinstance(found, dict) or found.get("schema", 0) > SCHEMA:
            raise DamagedFile(f"{path} is not a fault that this version of Steppe can read")
        return path, found


def _link_next_free(temporary: Path, directory: Path, number: int) -> Path:
    """Link the file under the next free number; a rename would replace another process's file."""
    while True:
        path = directory / _name(number)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
            return path
        number += 1


def _name(number: int) -> str:
    return f"{number:03d}.bin"

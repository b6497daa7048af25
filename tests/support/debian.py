"""What tests need of Debian, installed where it is missing and we may."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", str, Path)


def from_debian(package: str, find: Callable[[], T | None]) -> T:
    """What `find` finds once the package is there."""
    if find() is None and os.getuid() == 0:
        patient = ["apt-get", "-o", "DPkg::Lock::Timeout=150"]  # tests beside this one may be installing too
        for command in (["update"], ["install", "-y", "--no-install-recommends", package]):
            subprocess.run([*patient, *command], check=False, stdout=subprocess.DEVNULL, timeout=600)
    found = find()
    assert found is not None, f"this test needs a package of Debian's: apt-get install {package}"
    return found

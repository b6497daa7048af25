"""Describes the machine, versions and commit of a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steppe.records.provenance import git, hardware, versions

ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """The hardware, our own versions, and the commit that was measured ("+" if the tree has uncommitted changes)."""
    found = git(ROOT)
    commit = found["commit"] + ("+" if found["dirty"] else "") if found else None
    return {**hardware(), "versions": versions(), "commit": commit}

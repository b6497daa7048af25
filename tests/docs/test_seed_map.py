"""Files and names that docs/seed-map.md mentions exist."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
ROWS = [
    line.strip("| \n").split(" | ")
    for line in (ROOT / "docs" / "seed-map.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| name |", "| **"))
]
IN_STEPPE = "\n".join(row[1] for row in ROWS)
PATHS = sorted(set(re.findall(r"`([\w/]+(?:/|\.py))", IN_STEPPE)))
NAMES = sorted(set(re.findall(r"`(steppe(?:\.\w+)+)", IN_STEPPE)))
# Names of a row that are in `steppe` itself: `steppe.*` stands for all of the first column.
PUBLIC = sorted({name for row in ROWS if "`steppe.*`" in row[1] for name in re.findall(r"`(\w+)`", row[0])})
# (path, `Class.method`) of rows like "the same in `path`".
METHODS = [
    (path, method)
    for row in ROWS
    for path in re.findall(r"the same in `([\w/]+\.py)`", row[1])
    for method in re.findall(r"\b((?:Learner|Actor)\.\w+)", " ".join(row))
]


def test_the_table_is_found() -> None:
    assert len(ROWS) == 30
    assert len(PATHS) > 30
    assert len(NAMES) > 8
    assert len(METHODS) == 8


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert (ROOT / "src" / "steppe" / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize("name", [*NAMES, *(f"steppe.{name}" for name in PUBLIC)])
def test_every_dotted_name_resolves(name: str) -> None:
    assert resolves(name)


def test_a_wrong_name_does_not_resolve() -> None:
    assert not resolves("steppe.replay.NoSuchBuffer")


@pytest.mark.parametrize(("path", "method"), METHODS)
def test_every_method_exists(path: str, method: str) -> None:
    module = importlib.import_module("steppe." + path.removesuffix(".py").replace("/", "."))
    assert callable(reduce(getattr, method.split("."), module))


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or an attribute."""
    package, *parts = name.split(".")
    found = importlib.import_module(package)
    for part in parts:
        package = f"{package}.{part}"
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(package)
        except ModuleNotFoundError:
            return False
    return True

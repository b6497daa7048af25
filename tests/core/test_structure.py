"""What lets a reader guess where something is: one class of a name, folders that fit on a screen, no families by prefix."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import steppe

pytestmark = pytest.mark.unit

ROOT = Path(steppe.__file__).parent
MAX_MODULES = 18
MAX_SAME_PREFIX = 2


def test_no_class_name_is_defined_twice() -> None:
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_folder_is_crowded() -> None:
    for folder in [ROOT, *(path for path in ROOT.rglob("*") if path.is_dir())]:
        modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(modules) <= MAX_MODULES, f"{folder.relative_to(ROOT)} wants subpackages"
        prefixes = Counter(name.split("_")[0] for name in modules if "_" in name)
        families = {prefix for prefix, count in prefixes.items() if count > MAX_SAME_PREFIX}
        assert not families, f"{folder.relative_to(ROOT)}: modules called {families} want a subpackage"

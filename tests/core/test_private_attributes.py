"""Tests use what is public: private attributes of other objects are read in a few places only, and in no more of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

TESTS = Path(__file__).parents[1]
NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}  # public, whatever they are called
ALLOWED = {  # file → how many, and why no public call shows the same; the numbers may only shrink
    "roles/test_tuning.py": 2,  # the roles of an inline run, stepped by hand: nobody else has them in one process
    "support/tuning.py": 1,  # the same
    "transport/kafka/test_patience.py": 1,  # how a supervisor scales a handle without processes
    "envs/test_snapshots.py": 1,  # gymnasium's: asking a space for its public np_random would make one
    "test_classic_names.py": 1,  # the table of lazy names may hold no name that `__all__` lacks
    "test_public_names.py": 1,  # the same
    "transport/ray/conformance_suite.py": 1,  # a reader of the suite's own counts what it takes in
}


def foreign_names(tree: ast.AST) -> set[str]:
    """Names that a file imports from the standard library and from other projects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            sources = [(alias.name, alias) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            sources = [(node.module or "", alias) for alias in node.names]
        else:
            continue
        for source, alias in sources:
            if source.partition(".")[0] not in ("steppe", "tests"):
                found.add(alias.asname or alias.name.partition(".")[0])
    return found


def root_of(node: ast.expr) -> str | None:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_reads(source: str) -> list[str]:
    """`line: expression` of every private attribute of an object that is not the reader itself."""
    tree = ast.parse(source)
    foreign = foreign_names(tree)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr in NAMED_TUPLES:
            continue
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if not own and not node.attr.startswith("__") and root_of(node.value) not in foreign:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_private_attributes_are_read_where_nothing_public_shows_the_same() -> None:
    found = {path.relative_to(TESTS).as_posix(): private_reads(path.read_text()) for path in TESTS.rglob("*.py")}
    more = {name: reads for name, reads in found.items() if len(reads) > ALLOWED.get(name, 0)}
    assert more == {}, "use a public call, or give what is tested a public name"
    fewer = {name for name, count in ALLOWED.items() if len(found.get(name, [])) < count}
    assert fewer == set(), "lower the numbers above"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("server._clock = None", 1),
        ("client._line._seat.words", 2),
        ("make()._part", 1),
        ("super()._take(1)", 1),
        ("from steppe.core.io import codec\ncodec._HEAD", 1),
        ("self.store._press", 1),
        ("self._store; cls._kind; thing.__class__", 0),
        ("row._replace(x=1); Row._fields", 0),
        ("import os\nos._exit(3)", 0),
        ("from multiprocessing import forkserver as server\nserver._forkserver._forkserver_pid", 0),
    ],
)
def test_what_counts_as_private(source: str, count: int) -> None:
    assert len(private_reads(source)) == count

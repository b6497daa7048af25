"""Mutation testing on a toy module: one mutant that a test detects, one that none does, and one that never ends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutate.py"
TOY = '''\
"""A decorated function, as kernels are."""
import functools


@functools.lru_cache
def larger(a: int | None, b: int) -> int:
    while a is not None and a < b:
        a = a + 1
    return a + 0
'''
TEST = """\
from toy import larger


def test_larger():
    assert larger(1, 3) == 3
    assert larger(4, 2) == 4
"""
# Mutants by hand: the operators of cosmic-ray are not needed to test them.
RUN = """
import sys
sys.path[:0] = [{scripts!r}, {home!r}]
import mutate

mutate.prepare()
source = mutate.path_of("toy").read_text()
changes = [("a < b", "a > b"), ("a + 0", "a - 0"), ("a + 1", "a + 0")]
mutants = [mutate.Mutant("toy", "by hand", 0, old, new, source.replace(old, new)) for old, new in changes]
[base] = mutate.run([mutate.Trial("toy", ["test_toy.py"])], 1)
assert base.verdict == "survived", base.log
assert "toy" in base.imported
mutate.preload(["json.tool", "toy"], without="toy")
assert "json.tool" in sys.modules
outcomes = mutate.run([mutate.Trial("toy", ["test_toy.py"], 1.0, mutant) for mutant in mutants], 2)
for line in sorted(f"{{outcome.trial.mutant.after}}: {{outcome.verdict}}" for outcome in outcomes):
    print(line)
assert mutate.path_of("toy").read_text() == source
"""


def load():
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


def test_mutants_of_a_decorated_function_are_told_apart(tmp_path):
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "test_toy.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    program = RUN.format(scripts=str(SCRIPT.parent), home=str(tmp_path))
    quiet = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=quiet,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.stdout.splitlines() == ["a + 0: timeout", "a - 0: survived", "a > b: killed"], done.stderr


def test_survivors_with_an_explanation_are_not_counted():
    mutate = load()
    mutants = [mutate.Mutant("toy", "op", line, f"old {line}", f"new {line}", "") for line in range(20)]
    verdicts = ["survived"] * 3 + ["timeout"] + ["killed"] * 16
    outcomes = [
        mutate.Outcome(mutate.Trial("toy", [], 1.0, mutant), verdict, 0.5, "")
        for mutant, verdict in zip(mutants, verdicts, strict=True)
    ]
    why = {"module": "toy", "line": "old 1", "becomes": "new 1", "why": "It is the same."}
    summary = mutate.summarize("toy", outcomes, [why, {**why, "module": "other", "line": "old 2"}], 9.0)
    assert [mutant.before for mutant in summary.survivors] == ["old 0", "old 2"]
    assert [(mutant.before, reason) for mutant, reason in summary.explained] == [("old 1", "It is the same.")]
    assert not summary.too_many, "2 of 20 are a tenth"
    assert mutate.summarize("toy", outcomes, [], 9.0).too_many
    page = mutate.report([summary], seed=19)
    assert "| toy | 20 | 16 | 1 | 2 | 1 | 10 |" in page
    assert "- old 0\n+ new 0" in page
    assert "toy, line 1: It is the same." in page


def test_mutants_are_drawn_by_seed_from_what_is_executed():
    mutate = load()
    drawn = mutate.draw("toy", TOY, 1000, seed=1)
    assert drawn == mutate.draw("toy", TOY, 1000, seed=1)
    assert drawn[:4] != mutate.draw("toy", TOY, 4, seed=2)
    assert mutate.draw("toy", TOY, 4, seed=1) == drawn[:4]
    changed = {mutant.before for mutant in drawn}
    assert changed == {"@functools.lru_cache", "while a is not None and a < b:", "a = a + 1", "return a + 0"}
    assert len({mutant.source for mutant in drawn}) == len(drawn)
    jit = TOY.replace("functools.lru_cache", "numba.njit(cache=True)")
    assert "@numba.njit(cache=True)" not in {mutant.before for mutant in mutate.draw("toy", jit, 1000, seed=1)}


def test_renamed_and_moved_code_has_the_same_mutants():
    mutate = load()
    renamed = TOY.replace("larger", "maximum").replace("a ", "first ").replace("(a:", "(first:")
    moved = renamed.replace("@functools", '\n\nNAMES = {"one", "two"}\n\n\n# A comment.\n@functools')
    drawn = mutate.draw("toy", TOY, 5, seed=1)
    again = mutate.draw("elsewhere.toy", moved, 5, seed=1)
    assert [mutant.operator for mutant in again] == [mutant.operator for mutant in drawn]
    assert [mutant.after.replace("first", "a") for mutant in again] == [mutant.after for mutant in drawn]
    assert again[0].line_number != drawn[0].line_number


def test_an_explanation_follows_new_names_where_only_one_line_can_be_meant():
    mutate = load()
    why = {"module": "toy", "line": "if end > start:  # why", "becomes": "if end >= start:", "why": "It is the same."}

    def explained(source, before="if stop > begin:", after="if stop >= begin:", entry=why):
        mutant = mutate.Mutant("toy", "op", 1, before, after, source.replace(before, after, 1))
        outcome = mutate.Outcome(mutate.Trial("toy", [], 1.0, mutant), "survived", 0.5, "")
        return bool(mutate.summarize("toy", [outcome], [entry], 1.0).explained)

    assert explained("if stop > begin:\n    pass\n")
    assert explained("if end > start:\n", "if end > start:", "if end >=  start:")
    assert not explained("if end > start:\n", "if end > start:", "if end < start:")
    assert not explained("if stop > begin:\n    pass\nif a > b:\n    pass\n"), "two lines have this form"
    assert not explained("if stop > begin:\n    pass\nif end > start:\n    pass\n"), "the quoted line is another"
    assert not explained("if stop > stop:\n", "if stop > stop:", "if stop >= stop:")
    any_change = {name: text for name, text in why.items() if name != "becomes"}
    assert explained("if end > start:\n", "if end > start:", "if end < start:", any_change)


def test_hints_and_options_of_the_compiler_are_left_out():
    mutate = load()
    source = "import numba\n\n\ndef f(i):\n    prefetch(i + 1)\n    return i + 2\n\n\ng = numba.njit(cache=True)(f)\n"
    assert {mutant.before for mutant in mutate.draw("toy", source, 1000, seed=1)} == {"return i + 2"}

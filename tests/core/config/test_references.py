"""Callables as text: what can be found again, where, and the user's script in another process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from steppe.core.config import references
from steppe.core.contracts.errors import FactoryError

pytestmark = pytest.mark.unit


def module_level():
    return "found"


class Home:
    class Inner:
        pass

    @staticmethod
    def build():
        return "built"


class TestReferences:
    @pytest.mark.parametrize(
        ("thing", "text"),
        [
            (module_level, "tests.core.config.test_references:module_level"),
            (Home, "tests.core.config.test_references:Home"),
            (Home.Inner, "tests.core.config.test_references:Home.Inner"),
            (Home.build, "tests.core.config.test_references:Home.build"),
            (os.path.join, "posixpath:join"),
            (Path, "pathlib:Path"),
            ("any:text", "any:text"),
        ],
    )
    def test_named_callables_are_referenced_by_name(self, thing, text):
        assert references.make_reference(thing) == text
        if not isinstance(thing, str):
            assert references.resolve_reference(text) is thing

    def test_unnamed_callables_are_local_references(self):
        def inner():
            return 1

        things = [lambda: 2, inner, functools.partial(module_level), Home().build.__call__]
        texts = [references.make_reference(thing) for thing in things]
        assert all(text.startswith("local:") for text in texts)
        assert len(set(texts)) == len(texts)
        assert [references.make_reference(thing) for thing in things] == texts
        assert all(references.resolve_reference(text) is thing for text, thing in zip(texts, things, strict=True))

    def test_a_name_that_resolves_to_another_object_is_not_used(self):
        def module_level():
            return "another"

        module_level.__qualname__ = "module_level"
        assert references.make_reference(module_level).startswith("local:")

    @pytest.mark.parametrize(
        ("text", "is_one"),
        [
            ("package.module:name", True), ("module:Class.method", True), ("local:3", True), ("CartPole-v1", False),
            ("ALE/Pong-v5", False), ("package:Env-v0", False), ("ppo", False), (":", False), ("a:", False), ("1a:b", False),
        ],
    )  # fmt: skip
    def test_what_looks_like_one(self, text, is_one):
        assert references.is_reference(text) is is_one

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("no_such_module_here:thing", "cannot import 'no_such_module_here'"),
            ("pathlib:Nothing", "'pathlib' has no 'Nothing'"),
            ("pathlib:Path.nothing.more", "has no 'Path.nothing.more'"),
            ("local:99999", "lambda or local function of another process"),
        ],
    )
    def test_unknown_references_are_refused(self, text, words):
        with pytest.raises(FactoryError, match=words):
            references.resolve_reference(text)


class TestPortability:
    def test_a_lambda_is_refused_with_advice(self):
        text = references.make_reference(lambda: None)
        with pytest.raises(FactoryError, match=r"the environment is '.*<lambda>'.*runtime='inline'"):
            references.require_portable(text, "the environment")

    def test_names_pass(self):
        for text in ("CartPole-v1", "pathlib:Path", "ppo"):
            references.require_portable(text, "it")

    def test_a_session_without_a_file_is_refused(self):
        words = _run(
            "-c",
            "from steppe.core.config import references; references.require_portable('__main__:f', 'the environment')",
        )
        assert "the environment is 'f' of a session without a file" in words.stderr


SCRIPT = """
import sys
sys.path.insert(0, {source!r})
from steppe.core.config import references
import {sibling}

def make():
    return {sibling}.VALUE

class Late:
    pass

def training_call():
    references.stop_if_loading_main()
    print("trained in", __name__, flush=True)

training_call()
unreachable_elsewhere = True
if __name__ == "__main__":
    import multiprocessing
    print(references.make_reference(make), references.resolve_reference("__main__:make")(), flush=True)
    print(repr(references.main_script()), flush=True)
"""
ELSEWHERE = """
import sys, ast
from steppe.core.config import references
references.set_main_script(ast.literal_eval(sys.argv[1]))
make = references.resolve_reference("__main__:make")
print(make(), references.make_reference(make), references.resolve_reference("__main__:make") is make)
print(hasattr(sys.modules[make.__module__], "unreachable_elsewhere"))
references.stop_if_loading_main()
"""


class TestTheUsersScript:
    """A script without a main guard: its functions are found in another process, and training does not start there."""

    def write(self, folder, **words):
        (folder / "script.py").write_text(SCRIPT.format(source=str(Path(references.__file__).parents[3]), **words))
        (folder / "sibling_module.py").write_text("VALUE = 'a sibling'\n")

    def test_run_by_its_path(self, tmp_path):
        self.write(tmp_path, sibling="sibling_module")
        own = _run(str(tmp_path / "script.py"), cwd=tmp_path).stdout.splitlines()
        assert own[:2] == ["trained in __main__", "__main__:make a sibling"]
        assert own[2] == repr((str(tmp_path / "script.py"), ""))
        other = _run("-c", ELSEWHERE, own[2], cwd="/").stdout.splitlines()
        assert other == ["a sibling __main__:make True", "False"]

    def test_run_as_part_of_a_package(self, tmp_path):
        package = tmp_path / "parcel"
        package.mkdir()
        (package / "__init__.py").write_text("")
        self.write(package, sibling="sibling_module")
        text = (package / "script.py").read_text().replace("import sibling_module", "from . import sibling_module")
        (package / "script.py").write_text(text)
        own = _run("-m", "parcel.script", cwd=tmp_path).stdout.splitlines()
        assert own[2] == repr((str(package / "script.py"), "parcel"))
        other = _run("-c", ELSEWHERE, own[2], cwd=tmp_path).stdout.splitlines()
        assert other == ["a sibling __main__:make True", "False"]

    def test_a_script_that_fails_fails_each_time(self, tmp_path, monkeypatch):
        (tmp_path / "broken.py").write_text("raise LookupError('in the script')\n")
        monkeypatch.setattr(references, "_script", (str(tmp_path / "broken.py"), ""))
        monkeypatch.setattr(sys, "path", list(sys.path))
        for _ in range(2):
            with pytest.raises(LookupError, match="in the script"):
                references.resolve_reference("__main__:anything")
        references.stop_if_loading_main()

    def test_a_training_call_stops_the_import_only(self):
        references.stop_if_loading_main()


def _run(*words, cwd=None):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, cwd=cwd)

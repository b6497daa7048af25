"""Runtimes declare their capabilities, and no code outside a runtime's own package compares its name."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import steppe
from steppe.core.config.run import RunConfig
from steppe.core.config.runtime_table import RUNTIMES, capabilities_of, is_installed, runtimes_with
from steppe.core.contracts.capabilities import Capabilities
from steppe.core.contracts.errors import ConfigError
from steppe.runtimes.inline import CAPABILITIES
from steppe.runtimes.inline import launch as inline

ROOT = Path(steppe.__file__).parent
SHORT = {"steps": 300, "envs": 2, "segment_steps": 16, "minibatch_size": 16, "hidden": (8,), "evaluation.episodes": 1}


def compared_names(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Return line and names of built-in runtimes of every comparison; `backend` is another setting with such names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts: list[ast.AST] = [node]
        elif isinstance(node, ast.Match):
            parts = [case.pattern for case in node.cases]
        else:
            continue
        constants = {inner.value for part in parts for inner in ast.walk(part) if isinstance(inner, ast.Constant)}
        names = {value for value in constants if isinstance(value, str)} & set(RUNTIMES)
        if names and "backend" not in ast.unparse(node):
            yield node.lineno, names


@pytest.mark.unit
def test_no_code_outside_a_runtime_compares_its_name() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT)
        own = {file.parts[1]} if file.parts[0] == "runtimes" and len(file.parts) > 2 else set()
        found += [f"{file}:{line}" for line, names in compared_names(ast.parse(path.read_text())) if names - own]
    assert found == []


@pytest.mark.unit
@pytest.mark.parametrize(
    "code", ["config.runtime == 'inline'", "x['runtime'] in ('ray', 'mpi')", "match r:\n  case 'kafka':\n    pass"]
)
def test_a_comparison_with_a_name_is_detected(code: str) -> None:
    assert list(compared_names(ast.parse(code)))


@pytest.mark.unit
def test_every_package_of_a_runtime_is_in_the_table() -> None:
    packages = {path.parent.name for path in (ROOT / "runtimes").glob("*/launch.py")}
    assert packages == set(RUNTIMES)


@pytest.mark.unit
def test_declared_capabilities_decide_which_settings_are_refused() -> None:
    assert runtimes_with("scales_actors") == ["processes", "kafka"]
    for runtime in RUNTIMES:
        settings = {"env": "CartPole-v1", "runtime": runtime, "mode": "async", "flow": {"max_actors": 3}}
        if capabilities_of(runtime).scales_actors:
            assert RunConfig(**settings).flow.max_actors == 3
        else:
            with pytest.raises(ConfigError, match="on runtime 'processes' or 'kafka'"):
                RunConfig(**settings)


@pytest.mark.unit
def test_a_runtime_is_installed_if_its_modules_and_programs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_installed("inline")
    for missing in ({"modules": ("no_such_module",)}, {"programs": ("no-such-program",)}):
        monkeypatch.setattr("steppe.runtimes.inline.CAPABILITIES", replace(CAPABILITIES, **missing))
        assert not is_installed("inline")


def plain(plan, directory):
    """A runtime of a user that declares nothing."""
    return inline.launch(plan, directory)


def scaling(plan, directory):
    """A runtime of a user that declares a capability."""
    return inline.launch(plan, directory)


scaling.capabilities = Capabilities(scales_actors=True)  # type: ignore[attr-defined]


@pytest.mark.unit
def test_a_custom_runtime_has_default_or_declared_capabilities() -> None:
    assert capabilities_of(f"{__name__}:plain") == Capabilities()
    assert capabilities_of("no_such_module:launch") == Capabilities()
    settings = {"env": "CartPole-v1", "mode": "async", "flow": {"max_actors": 3}}
    assert RunConfig(**settings, runtime=f"{__name__}:scaling").flow.max_actors == 3
    with pytest.raises(ConfigError, match="max_actors is for mode 'async'"):
        RunConfig(**settings, runtime=f"{__name__}:plain")


def test_a_new_builtin_runtime_is_a_package_and_a_line_of_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    required, launched = [], []

    def launch(plan, directory, parts=None):
        launched.append(plan.config.runtime)
        return inline.launch(plan, directory, parts)

    package, module = types.ModuleType("toy_runtime"), types.ModuleType("toy_runtime.launch")
    package.CAPABILITIES = CAPABILITIES  # type: ignore[attr-defined]
    module.launch, module.require = launch, required.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_runtime", package)
    monkeypatch.setitem(sys.modules, "toy_runtime.launch", module)
    with pytest.raises(ConfigError, match="there is no such runtime"):
        steppe.train("CartPole-v1", runtime="toy", run_dir=tmp_path / "refused", **SHORT)
    monkeypatch.setitem(RUNTIMES, "toy", "toy_runtime")
    result = steppe.train("CartPole-v1", runtime="toy", run_dir=tmp_path / "run", **SHORT)
    assert launched == ["toy"]
    assert [plan.config.runtime for plan in required] == ["toy"]
    assert result.summary["state"] == "SUCCEEDED"
    assert result.summary["runtime"] == "toy"
    assert is_installed("toy")
    assert "toy" in runtimes_with("hosts_learner")

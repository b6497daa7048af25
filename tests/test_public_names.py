"""The public names: what `__all__` says is what there is, each described and annotated, and importing costs nothing."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import steppe

pytestmark = pytest.mark.unit


def test_all_is_sorted_and_resolves() -> None:
    assert steppe.__all__ == sorted(steppe.__all__)
    for name in steppe.__all__:
        assert getattr(steppe, name) is not None
    assert set(steppe._HOMES) == set(steppe.__all__) - {"__version__"}
    assert set(steppe.__all__) <= set(dir(steppe))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        steppe.trian  # noqa: B018


def test_import_is_light() -> None:
    code = "import steppe, sys, json; print(json.dumps([steppe.__version__, sorted(sys.modules)]))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    version, modules = json.loads(output)
    assert version.count(".") == 2
    heavy = {"torch", "gymnasium", "numba", "pydantic", "numpy", "beartype", "msgspec"}
    assert not heavy & set(modules)


def test_loops_of_processes_need_neither_torch_nor_numba() -> None:
    code = "import sys; from steppe import MainLoop; assert not {'torch', 'numba'} & set(sys.modules), 'too much'"
    subprocess.run([sys.executable, "-c", code], check=True)


def functions() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name in steppe.__all__:
        thing = getattr(steppe, name)
        if inspect.isfunction(thing):
            found.append((name, thing))
        elif inspect.isclass(thing) and thing.__module__.startswith("steppe."):
            found += [(f"{name}.{key}", value) for key, value in _methods(thing)]
    return found


def _methods(kind: type) -> list[tuple[str, object]]:
    """Its own public methods and constructor, class methods and properties included."""
    found = []
    for key, value in vars(kind).items():
        if key.startswith("_") and key != "__init__":
            continue
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        inner = inner.fget if isinstance(inner, property) else getattr(inner, "func", inner)
        if inspect.isfunction(inner) and inner.__module__ == kind.__module__:
            found.append((key, inner))
    return found


def test_everything_public_has_a_docstring() -> None:
    names = [name for name in steppe.__all__ if name != "__version__"]
    assert [name for name in names if not inspect.getdoc(getattr(steppe, name))] == []


def test_every_public_function_is_annotated_and_described() -> None:
    found = functions()
    assert len(found) > 200
    assert [fault for name, function in found for fault in faults_of(name, function)] == []


def faults_of(name: str, function) -> list[str]:
    """What the signature and the docstring of a public function lack."""
    signature = inspect.signature(function)
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")]
    faults = [f"{name}: {argument} has no annotation" for argument in bare]
    if signature.return_annotation is signature.empty:
        faults.append(f"{name} has no return annotation")
    owner, _, method = name.partition(".")
    thing = inspect.getattr_static(getattr(steppe, owner), method) if method else function
    if isinstance(thing, property) or method == "__init__":  # a class describes its properties and its constructor
        return faults
    if not inspect.getdoc(getattr(getattr(steppe, owner), method) if method else function):
        faults.append(f"{name} has no docstring")
    return faults


# The words of hot paths, contracts that others fulfil, and configurations, which pydantic checks as they are made.
UNCHECKED = {
    "Agent",
    "Batch",
    "EnvSpec",
    "FieldSpec",
    "Learned",
    "Progress",
    "RunResult",
    "RunView",
    "Segment",
    "Weights",
}
INSIDE = {
    "LoadedPolicy.__init__",
    "ParameterClient.over",
    "ReplayBuffer.over",
    "ReplayBufferPool.follow_run",
    "ReplayBufferPool.route",
}  # not for callers
IN_WORDS = {
    "PrioritizedReplayBuffer.add_batch",
    "ReplayBuffer.add_batch",
}  # they say what an experience is: test_buffers.py


def test_every_public_signature_is_checked_at_the_call() -> None:
    taking = [
        (name, function)
        for name, function in functions()
        if set(inspect.signature(function).parameters) - {"self", "cls"}
        and name.partition(".")[0] not in UNCHECKED
        and not name.partition(".")[0].endswith("Config")
        and name not in INSIDE | IN_WORDS
    ]
    assert len(taking) > 70
    assert [name for name, function in taking if not hasattr(function, "__beartype_wrapper")] == []

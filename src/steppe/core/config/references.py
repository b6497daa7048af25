"""Callables as plain text: `module:name`, so that configuration stays data and nothing is pickled.

A lambda or a local function gets a `local:N` name that only this process understands; a runtime with other processes
refuses it in one sentence. A function of the user's script is `__main__:name`; another process finds it by importing the
script under another name and stopping at the first training call (`loading_main`), so no main guard is needed.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from steppe.core.config.moved_modules import MOVED
from steppe.core.contracts.errors import FactoryError

Script = tuple[str, str]  # path and package of the file that was run

_IMPORTED_MAIN = "__steppe_main__"
_local: dict[str, Any] = {}
_script: Script | None = None  # the user's, where this process is not the one that runs it
_loading_main = False


class TrainingCallReached(BaseException):
    """Raised by a training call while the user's script is only being imported for its definitions."""


def make_reference(thing: Callable[..., Any] | str) -> str:
    """Return the text by which `resolve_reference` finds `thing`."""
    if isinstance(thing, str):
        return thing
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if module and name and "<" not in name and _lookup(module, name) is thing:
        return f"{'__main__' if module.endswith(_IMPORTED_MAIN) else module}:{name}"
    for text, registered in _local.items():
        if registered is thing:
            return text
    text = f"local:{len(_local)}"
    _local[text] = thing
    return text


def is_reference(text: str) -> bool:
    """Whether `text` names a callable rather than an environment id or an algorithm."""
    module, colon, name = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (module + "." + name).split(".") if not part.isdigit())


def resolve_reference(text: str) -> Any:
    """The object that `reference` named."""
    module, _, name = text.partition(":")
    if module == "local":
        if text not in _local:
            raise FactoryError(f"{text} was a lambda or local function of another process: give it a module-level name")
        return _local[text]
    module = current_module(module)
    try:
        found = _lookup(module, name) if module != "__main__" else _find(_load_main(), name)
    except ImportError as error:
        raise FactoryError(f"cannot import {module!r} for {text!r}: {error}") from error
    if found is None:
        raise FactoryError(f"{module!r} has no {name!r}")
    return found


def current_module(module: str) -> str:
    """Return the current name of a module that an earlier version may have named otherwise."""
    return MOVED.get(module, module)


def require_portable(text: str, what: str) -> None:
    """Raise unless another process can resolve `text`."""
    if text.startswith("local:"):
        thing = getattr(_local.get(text), "__qualname__", text)
        raise FactoryError(
            f"{what} is {thing!r}, which another process cannot import: define it with `def` at the top level of a "
            "module (or of your script), or use runtime='inline'"
        )
    if text.startswith("__main__:") and main_script() is None:
        raise FactoryError(
            f"{what} is {text.removeprefix('__main__:')!r} of a session without a file, which another process cannot "
            "import: put it into a module, or use runtime='inline'"
        )


def main_script() -> Script | None:
    """Where the user's script is, for another process to `adopt_main`; None in a session without one."""
    if _script is not None:
        return _script
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    return (os.path.abspath(path), getattr(main, "__package__", None) or "") if path else None


def set_main_script(script: Script | None) -> None:
    """Look for `__main__:name` in the script of the process that started this one."""
    global _script
    _script = script


def stop_if_loading_main() -> None:
    """Every training call begins with this: see TrainingCallReached."""
    if _loading_main:
        raise TrainingCallReached


def _find(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _lookup(module: str, name: str) -> Any:
    if module not in sys.modules:
        importlib.import_module(module)
    return _find(sys.modules[module], name)


def _load_main() -> Any:
    """The user's script: this process's own, or imported for its definitions where this is another process."""
    if _script is None:
        return sys.modules["__main__"]
    path, package = _script
    name = f"{package}.{_IMPORTED_MAIN}" if package else _IMPORTED_MAIN  # so that its relative imports work
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise FactoryError(f"cannot import the script {path!r}: move the function into a module of its own")
        module = importlib.util.module_from_spec(spec)
        if not package:
            sys.path.insert(0, os.path.dirname(path))
        sys.modules[name] = module
        _run_definitions(module, spec.loader)
    return sys.modules[name]


def _run_definitions(module: types.ModuleType, loader: importlib.abc.Loader) -> None:
    """Run a script up to its first training call."""
    global _loading_main
    _loading_main = True
    try:
        loader.exec_module(module)
    except TrainingCallReached:
        pass
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        _loading_main = False

"""Parameters of tests of which `make test` runs only some."""

from __future__ import annotations

from typing import Any

import pytest


def rest_slow(first: Any, *others: Any) -> list[Any]:
    """The first case for `make test`, the others for `make test-all` alone; a tuple holds the values of several arguments."""
    return [
        first,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in others),
    ]

"""Pagination: every list has a limit, and a cursor that names the last item of the previous page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from steppe.core.contracts.errors import UsageError

Item = TypeVar("Item")
STALE_CURSOR = "what the cursor names is not in the list any more: begin again without one"


def paginate(
    items: Sequence[Item], name: Callable[[Item], str], limit: int | None, after: str | None
) -> tuple[list[Item], str | None]:
    """Return at most `limit` items after the item named `after`, and the cursor of the next page, or None at the end.

    Raises UsageError if there is no item of that name any more.
    """
    begin = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if name(item) == after]
        if not places:
            raise UsageError(STALE_CURSOR)
        begin = places[0] + 1
    page = list(items[begin:] if limit is None else items[begin : begin + limit])
    return page, name(page[-1]) if page and begin + len(page) < len(items) else None

"""Pagination: every list has a limit, and a cursor that names the last item of the previous page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from steppe.core.contracts.errors import UsageError

Item = TypeVar("Item")
STALE_CURSOR = "the item that the cursor names is no longer in the list: start again without a cursor"


def paginate(
    items: Sequence[Item], name: Callable[[Item], str], limit: int | None, after: str | None
) -> tuple[list[Item], str | None]:
    """Return at most `limit` items after the item named `after`, and the cursor of the next page, or None at the end.

    Raises UsageError if there is no item of that name any more.
    """
    begin = 0
    if after is not None:
        begin = 1 + next((index for index, item in enumerate(items) if name(item) == after), -1)
        if not begin:
            raise UsageError(STALE_CURSOR)
    page = list(items[begin:] if limit is None else items[begin : begin + limit])
    return page, name(page[-1]) if page and begin + len(page) < len(items) else None

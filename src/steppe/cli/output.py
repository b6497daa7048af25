"""Output of commands: results on stdout, as a table or as JSON; progress and errors on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def emit(value: Any, stream: IO[str] | None = None) -> None:
    """Print a value as one line of JSON; NaN and infinity become null, paths become strings."""
    import msgspec

    print(msgspec.json.encode(value, enc_hook=str).decode(), file=stream or sys.stdout, flush=True)


def console(stream: IO[str] | None = None) -> Console:
    """Return a console that wraps lines in a terminal, but not in a file or a pipe."""
    from rich.console import Console

    stream = stream or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 240, highlight=False, soft_wrap=not stream.isatty())


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print plain columns on stdout. Columns in `right` are right-aligned; cells are printed without interpreting markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console().print(table, soft_wrap=False)


@contextmanager
def reserved_stdout() -> Iterator[IO[str]]:
    """Redirect file descriptor 1 to stderr, child processes included, and yield a stream to the real stdout."""
    sys.stdout.flush()
    saved_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(saved_fd), "w", encoding="utf-8") as real:
            yield real
    finally:
        sys.stdout.flush()
        os.dup2(saved_fd, 1)
        os.close(saved_fd)

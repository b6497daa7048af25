"""The live view of a group of seeds: one line per run, as a panel in a terminal and as plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from steppe.cli.live_view import STATES
from steppe.cli.text_charts import count, decimal, percent, progress

if TYPE_CHECKING:
    from steppe.records.view import RunView
    from steppe.training.seeds.group import SeedGroup

PLAIN_EVERY_S = 5.0
BAR = 20
REFRESH_S = 0.5


def render_group(group: SeedGroup, views: dict[int, RunView]) -> Group:
    """Return the panel of a group, for any console."""
    config = group.manifest.config
    title = Text(f"{group.id}  {config['env']} · {config['algo']} · {len(group.manifest.members)} seeds", "bold")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("seed", "state", "progress", "steps", "return", "evaluation", "steps/s"):
        table.add_column(name, justify="left" if name in ("state", "progress") else "right")
    for member in group.manifest.members:
        view = views.get(member.seed)
        table.add_row(str(member.seed), *(_cells(view) if view is not None else [Text("○ PENDING", "yellow")]))
    return Group(title, table)


def _cells(view: RunView) -> list[Text]:
    symbol, style = STATES.get(view.state, ("?", "yellow"))
    reason = f" ({view.reason})" if view.reason and view.ended else ""
    share = min(1.0, view.env_steps / view.total_steps) if view.total_steps else None
    last = view.last_evaluation
    return [
        Text(f"{symbol} {view.state}{reason}", style),
        Text(f"{progress(share, BAR)} {percent(share)}" if share is not None else "", "cyan"),
        Text(count(view.env_steps)),
        Text(decimal(view.train_return_mean)),
        Text(decimal(last.return_mean if last else None)),
        Text(count(view.steps_per_s if view.ended else view.recent_steps_per_s)),
    ]


def plain_lines(group: SeedGroup, views: dict[int, RunView]) -> str:
    """Return the group's progress as one line per run, for logs."""
    states = Counter(view.state for view in views.values())
    states["PENDING"] += len(group.manifest.members) - len(views)
    lines = [f"{group.id}: " + ", ".join(f"{number} {state}" for state, number in sorted(states.items()) if number)]
    for seed, view in sorted(views.items()):
        last = view.last_evaluation
        lines.append(
            f"  seed {seed}  {view.state}  steps {count(view.env_steps)}  return {decimal(view.train_return_mean)}  "
            f"evaluation {decimal(last.return_mean if last else None)}"
        )
    return "\n".join(lines)


@contextmanager
def group_view(stream: IO[str] | None = None) -> Iterator[Callable[[SeedGroup, dict[int, RunView]], None]]:
    """Yield a function that shows a group."""
    stream = stream or sys.stderr
    due = 0.0
    shown: dict[int, str] = {}

    def show_plain(group: SeedGroup, views: dict[int, RunView]) -> None:
        nonlocal due, shown
        states = {seed: view.state for seed, view in views.items()}
        if time.monotonic() >= due or states != shown:
            due, shown = time.monotonic() + PLAIN_EVERY_S, states
            print(plain_lines(group, views), file=stream, flush=True)

    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield show_plain
        return
    from rich.live import Live

    with Live(console=Console(file=stream), auto_refresh=False) as live:

        def show(group: SeedGroup, views: dict[int, RunView]) -> None:
            nonlocal due
            if time.monotonic() >= due or all(view.ended for view in views.values()):
                due = time.monotonic() + REFRESH_S
                live.update(render_group(group, views), refresh=True)

        yield show

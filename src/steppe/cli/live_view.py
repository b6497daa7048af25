"""The live view: a run as a few lines of text that fit the terminal.

`render` is pure: the same view gives the same panel, in a terminal, a test or an SVG. `live_view` chooses between the
panel and plain lines, and restores the terminal on every exit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from steppe.cli.text_charts import bar, count, decimal, duration, fill, mean_and_std, percent, progress, sparkline

if TYPE_CHECKING:
    from types import FrameType

    from steppe.records.view import RunView

# A symbol and a color for each state. Color adds no information; it is from the terminal's own palette, dark or light.
STATES = {
    "PENDING": ("○", "yellow"),
    "STARTING": ("◔", "yellow"),
    "RUNNING": ("●", "cyan"),
    "PAUSED": ("‖", "yellow"),
    "STOPPING": ("◌", "yellow"),
    "SUCCEEDED": ("✔", "green"),
    "FAILED": ("✘", "red"),
    "STOPPED": ("■", "magenta"),
    "LOST": ("?", "red"),
}
PHASE_STYLES = ("cyan", "blue", "magenta", "yellow", "dim")
LABEL = 12  # columns before each value
PLAIN_EVERY_S = 5.0
SHORTEST_BAR = 5
MAX_ACTORS = 6
MAX_EVENTS = 5
UNLIMITED = 10_000


def render(view: RunView) -> LivePanel:
    """Return the panel of a run, for any console."""
    return LivePanel(view)


class LivePanel:
    """Panel that fits the console's width and height: the least important sections are left out first."""

    def __init__(self, view: RunView) -> None:
        self.view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        max_lines = (options.height or console.size.height) - 1 if console.is_terminal else UNLIMITED
        lines = [title(self.view), *warning_lines(self.view)]
        lines += [*progress_lines(self.view, width), *figure_lines(self.view, width)]
        for section in (time_lines, actor_lines, event_lines):
            section_lines = section(self.view, width)
            if section_lines and len(lines) + 1 + len(section_lines) <= max_lines:
                lines += [Text(""), *section_lines]
        for line in lines[: max(1, max_lines)]:
            line.truncate(width, overflow="ellipsis")
            yield line


def title(view: RunView) -> Text:
    """Return the first line: state, environment, algorithm, runtime, mode, actors and seed."""
    symbol, style = STATES.get(view.state, ("?", "yellow"))
    config = view.config
    line = Text.assemble((f"{symbol} {view.state}", f"bold {style}"))
    if view.reason:
        line.append(f" ({view.reason})")
    line.append(f"  {config.env} · {config.algo}", "bold")
    return line.append(
        f" · {config.runtime}/{config.mode} · {_actor_counts(config.actors, config.envs)} · seed {config.seed}"
    )


def warning_lines(view: RunView) -> list[Text]:
    """Return the warning that needs attention, shown right below the state."""
    return [Text(f"⚠ WARNING  {_one_line(view.warning)}", "bold yellow")] if view.warning else []


def _actor_counts(actors: int, envs: int | None) -> str:
    return f"{actors} actor{'s' if actors != 1 else ''}" + (f" × {envs} envs" if envs else "")


def progress_lines(view: RunView, width: int) -> list[Text]:
    """Return the number of steps, a progress bar and the time left."""
    total = view.total_steps
    words = f"{count(view.env_steps)} / {count(total)}" if total else count(view.env_steps)
    if not total:
        return [labelled("steps", Text(words))]
    fraction = min(1.0, view.env_steps / total)
    words += f"  {percent(fraction)}  {duration(view.train_s)}"
    if view.steps_per_s and fraction < 1 and not view.ended:
        words += f", {duration((total - view.env_steps) / view.steps_per_s)} left"
    bar_width = min(60, width - LABEL - len(words) - 2)
    if bar_width < SHORTEST_BAR:
        return [labelled("steps", Text(words))]
    return [labelled("steps", Text.assemble((progress(fraction, bar_width), "cyan"), "  ", words))]


def figure_lines(view: RunView, width: int) -> list[Text]:
    """Return training and evaluation returns with their curves, then the single figures."""
    train = f"{decimal(view.train_return_mean)}  over {count(view.episodes)} episodes"
    lines = [with_sparkline("return", train, [score for _, score in view.history], width)]
    lines.append(with_sparkline("evaluation", _evaluation_text(view), [score for _, score in view.evaluations], width))
    figures = [
        f"{count(view.steps_per_s if view.ended else view.recent_steps_per_s)} steps/s",
        f"version {count(view.version)}",
        f"updates {count(view.updates)}",
        f"lag {decimal(view.lag_mean)} (max {count(view.lag_max)})",
        f"dropped {count(view.dropped)}",
        f"restarts {count(view.actor_restarts)}",
    ]
    return lines + wrap_pieces("speed", [Text(figure) for figure in figures], width)


def _evaluation_text(view: RunView) -> str:
    last, best, target = view.last_evaluation, view.best_evaluation, view.config.target_return
    if last is None:
        return "not yet" + (f"  target {decimal(target)}" if target is not None else "")
    words = mean_and_std(last.return_mean, last.return_std)
    if best is not None:
        words += f"  best {decimal(best.return_mean)}"
    return words + (f"  target {decimal(target)}" if target is not None else "")


def time_lines(view: RunView, width: int) -> list[Text]:
    """Return one bar per role with the share of each phase; a phase has the same character in the bar and in the legend."""
    lines = [Text("where the time goes", "bold")] if view.time_shares else []
    legends = {role: _legend(shares) for role, shares in view.time_shares.items()}
    longest = max((sum(piece.cell_len + 2 for piece in legend) for legend in legends.values()), default=0)
    bar_width = min(40, width - LABEL - longest)  # the same for every role, so that bars can be compared
    for role, shares in view.time_shares.items():
        pieces = [_bar(shares, bar_width), *legends[role]] if bar_width >= SHORTEST_BAR else legends[role]
        lines += wrap_pieces(role, pieces, width)
    return lines


def _legend(shares: Mapping[str, float]) -> list[Text]:
    return [
        Text.assemble((fill(index), _phase_style(index)), f" {phase} {percent(share)}")
        for index, (phase, share) in enumerate(shares.items())
    ]


def _bar(shares: Mapping[str, float], width: int) -> Text:
    columns = enumerate(bar(list(shares.values()), width))
    return Text.assemble(*((fill(index) * size, _phase_style(index)) for index, size in columns))


def _phase_style(index: int) -> str:
    return PHASE_STYLES[min(index, len(PHASE_STYLES) - 1)]


def actor_lines(view: RunView, width: int) -> list[Text]:
    """Return one line for each of the first actors, and the number of the others."""
    lines = [Text("actors", "bold")] if view.actors else []
    for report in list(view.actors.values())[:MAX_ACTORS]:
        pieces = [report.state, f"version {report.version}", f"{count(report.env_steps)} steps"]
        pieces += [f"restarts {report.epoch}"] if report.epoch else []
        lines.append(labelled(f"actor {report.actor}", Text("  ".join(pieces))))
    if len(view.actors) > MAX_ACTORS:
        lines.append(labelled("", Text(f"and {len(view.actors) - MAX_ACTORS} more")))
    return lines


def event_lines(view: RunView, width: int) -> list[Text]:
    """Return the last events, the newest at the bottom."""
    lines = [Text("events", "bold")] if view.events else []
    for event in list(view.events)[-MAX_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        details = "  ".join(f"{key} {_short(value)}" for key, value in event.details.items())
        lines.append(labelled(at, Text("  ".join(word for word in (event.kind, event.role, details) if word))))
    return lines


def _short(value: Any) -> str:
    """Format a detail on one line of at most 80 characters, without control characters."""
    return _one_line(decimal(value) if isinstance(value, float) else str(value))[:80]


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def labelled(label: str, value: Text) -> Text:
    """Return a line with a label and a value; all values start at the same column."""
    return Text.assemble((f"{label:<{LABEL - 1}} ", "dim")).append_text(value)


def with_sparkline(label: str, words: str, history: list[float], width: int) -> Text:
    """Return a labelled value, followed by a sparkline of its history if the width allows one."""
    line = labelled(label, Text(words))
    free = min(40, width - line.cell_len - 2)
    if free >= SHORTEST_BAR and len(history) > 1:
        line.append("  ").append(sparkline(history, free), "cyan")
    return line


def wrap_pieces(label: str, pieces: Sequence[Text], width: int) -> list[Text]:
    """Place pieces side by side and wrap to the next line at the width."""
    lines = [labelled(label, Text())]
    for piece in pieces:
        gap = 0 if lines[-1].cell_len <= LABEL else 2
        if gap and lines[-1].cell_len + gap + piece.cell_len > width:
            lines.append(labelled("", Text()))
            gap = 0
        lines[-1].append(" " * gap).append_text(piece)
    return lines


def plain_line(view: RunView) -> str:
    """Return a run's progress in one line, for logs."""
    of_total = (
        f"/{count(view.total_steps)} ({percent(min(1.0, view.env_steps / view.total_steps))})"
        if view.total_steps
        else ""
    )
    return (
        f"{view.state}  {duration(view.train_s)}  steps {count(view.env_steps)}{of_total}  "
        f"return {decimal(view.train_return_mean)}  evaluation {_evaluation_text(view)}  {count(view.steps_per_s)} steps/s  "
        f"version {count(view.version)}  lag {decimal(view.lag_mean)}"
    )


class PlainLines:
    """Prints a run as one line every few seconds, and whenever its state changes."""

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._due, self._state = 0.0, ""

    def __call__(self, view: RunView) -> None:
        now = self._clock()
        if now >= self._due or view.state != self._state:
            self._due, self._state = now + PLAIN_EVERY_S, view.state
            warning = f"WARNING: {_one_line(view.warning)}\n" if view.warning else ""
            print(warning + plain_line(view), file=self._stream, flush=True)


@contextmanager
def live_view(stream: IO[str] | None = None) -> Iterator[Callable[[RunView], None]]:
    """Yield a function that shows a view: as a panel in a terminal, as plain lines without escape codes elsewhere."""
    stream = stream or sys.stderr
    with _sigterm_as_interrupt():
        if not stream.isatty() or os.environ.get("TERM") == "dumb":
            yield PlainLines(stream)
            return
        from rich.live import Live

        with Live(console=Console(file=stream), auto_refresh=False) as live:
            yield lambda view: live.update(render(view), refresh=True)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, so that the cursor is restored. A running run handles both signals itself."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

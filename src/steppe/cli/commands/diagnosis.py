"""`steppe doctor RUN`: the bottleneck of a run, and the time shares that show it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steppe.cli.output import emit, print_table
from steppe.cli.text_charts import duration, format_shares

if TYPE_CHECKING:
    from steppe.records.view import RunView

MAX_LISTED_ACTORS = 8  # with more actors, one line shows their mean


def diagnose_run(run: str, *, as_json: bool) -> None:
    """Print the diagnosis of a run in any state."""
    from steppe.records.profiling.diagnosis import diagnose, measure_time_shares
    from steppe.records.run_directory import RunDirectory
    from steppe.records.view import RunView

    view = RunView(RunDirectory.open(run))
    view.refresh()
    measured = measure_time_shares(view)
    found = diagnose(measured)
    if as_json:
        about = {"run": view.directory.id, "state": view.state, "reason": view.reason}
        return emit({**about, **asdict(found), "measured": asdict(measured), "phases": view.phases})
    print(f"{view.directory.id}: {found.sentence}\n")
    print_table(["role", "time", "shares"], _rows(view), right=("time",))
    reason = f" ({view.reason})" if view.reason else ""
    return print(f"\n{view.state}{reason}, {duration(measured.seconds)} measured")


def _rows(view: RunView) -> list[list[Any]]:
    from steppe.records.view import shares_of

    phases = view.phases
    actors = [role for role in phases if role.startswith("actor-")]
    rows = [[role, duration(sum(phases[role].values())), format_shares(shares_of(phases[role]))] for role in phases]
    if len(actors) <= MAX_LISTED_ACTORS:
        return rows
    mean_s = sum(sum(phases[role].values()) for role in actors) / len(actors)
    mean = [f"{len(actors)} actors", duration(mean_s), format_shares(view.time_shares["actor"])]
    return [mean, *(row for row in rows if row[0] not in actors)]

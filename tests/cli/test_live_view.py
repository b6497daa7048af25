"""The live view of a real run directory at several sizes. Expected figures follow from the reports in conftest."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from steppe.cli.commands.train import exit_code
from steppe.cli.live_view import STATES, PlainLines, live_view, plain_line, render
from steppe.cli.summary import summary_text
from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS
from steppe.records import view as view_module
from steppe.records.store import STATES as ALL_STATES
from steppe.records.view import RunView

pytestmark = pytest.mark.unit


@pytest.fixture
def view(live_run) -> RunView:
    view = RunView(live_run)
    view.refresh()
    return view


def drawn(view: RunView, width: int, height: int = 50, color: str | None = None) -> str:
    console = Console(width=width, height=height, force_terminal=True, color_system=color, file=io.StringIO())
    console.print(render(view))
    return console.file.getvalue()


def test_panel_shows_the_reports(view):
    text = drawn(view, 120)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "● RUNNING" in text
    assert "CartPole-v1 · ppo · processes/async · 2 actors × 64 envs · seed 0" in text
    assert "500,000 / 1,000,000  50 %" in lines["steps"]
    assert lines["steps"].count("━") == lines["steps"].count("─") > 10
    assert "10 s left" in lines["steps"]  # half of the steps took 10 s
    assert "55.0  over 60 episodes" in lines["return"]  # the mean of 10, 20, …, 100
    assert "▁" in lines["return"]
    assert "█" in lines["return"]
    assert "100.0 ± 10.0  best 100.0  target 475.0" in lines["evaluation"]
    assert "50,000 steps/s" in text
    assert "version 40" in text
    assert "updates 1,280" in text
    assert "lag 1.50 (max 2)" in text  # (0 · 1 + 2 · 3) / 4
    assert "dropped 5" in text
    assert "restarts 1" in text


def test_bar_length_matches_share(view):
    lines = drawn(view, 120).splitlines()
    at = lines.index("where the time goes")
    bars = [line.split()[1] for line in lines[at + 1 : at + 3]]
    assert [bars[0].count(sign) / len(bars[0]) for sign in "█▓▒"] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    assert [bars[1].count(sign) / len(bars[1]) for sign in "█▒"] == pytest.approx([0.25, 0.75], abs=0.03)
    assert "█ env 50 %  ▓ policy 30 %  ▒ blocked 20 %" in lines[at + 1]


def test_actors_and_events_are_listed_without_control_codes(view):
    text = drawn(view, 120)
    assert "actor 0     running  version 40  250,000 steps\n" in text
    assert "actor 1     running  version 40  250,000 steps  restarts 1" in text
    assert "restart  actor-1  signal 9  note two lines" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("height", [3, 10, 16, 24, 50])
def test_panel_fits_any_terminal(view, width, height):
    lines = drawn(view, width, height).splitlines()
    assert 1 <= len(lines) < height
    assert all(len(line) <= width for line in lines)
    assert "RUNNING" in lines[0]
    whole = {"where the time goes": "learner", "actors": "actor 1", "events": "restart"}
    for heading, last in whole.items():  # a section is shown completely or not at all
        assert heading not in lines or any(last in line for line in lines[lines.index(heading) :])
    assert height < 50 or whole.keys() <= set(lines)


def test_narrow_terminal_omits_bars(view):
    text = drawn(view, 40)
    assert "━" not in text
    assert "50,000 steps/s" in text
    assert "learn 75 %" in text


def test_low_terminal_omits_sections(view):
    text = drawn(view, 100, height=9)
    assert "500,000 / 1,000,000" in text
    assert "actor 0" not in text


def test_every_state_has_its_own_symbol(live_run, view):
    assert set(STATES) == set(ALL_STATES)
    assert len({sign for sign, _ in STATES.values()}) == len(ALL_STATES)
    for state in ("SUCCEEDED", "FAILED", "STOPPED"):
        live_run.store.set_status(state, "because")
        view.refresh()
        assert f"{STATES[state][0]} {state} (because)" in drawn(view, 100)
        assert "left" not in drawn(view, 100).splitlines()[1]


def test_only_palette_colors_are_used(view):
    colours = {
        "30",
        "37",
        "40",
        "47",
        "90",
        "97",
        "38",
        "48",
    }  # black, white and fixed shades are invisible on some backgrounds
    codes = {
        part
        for code in drawn(view, 100, color="truecolor").split("\x1b[")[1:]
        for part in code.split("m")[0].split(";")
    }
    assert codes
    assert not codes & colours


def test_run_without_reports_can_be_drawn(tmp_path):
    from steppe.core.config.run import resolve_config
    from steppe.records.run_directory import RunDirectory

    resolved = resolve_config(("flag", {"env": "CartPole-v1", "episodes": 10, "run_dir": str(tmp_path / "new")}))
    view = RunView(RunDirectory.create(resolved.config, resolved.sources))
    view.refresh()
    assert "PENDING" in drawn(view, 80)
    assert "evaluation not yet" in plain_line(view)


def test_panel_exports_as_svg(view, tmp_path):
    console = Console(record=True, width=100, height=40, force_terminal=True, file=io.StringIO())
    console.print(render(view))
    assert "CartPole-v1" in console.export_svg(title="steppe train")


def test_plain_lines_are_printed_periodically_and_on_state_change(live_run, view):
    clock = iter([0.0, 0.2, 4.9, 5.1, 5.2])
    stream = io.StringIO()
    show = PlainLines(stream, clock=lambda: next(clock))
    for _ in range(4):
        show(view)
    assert stream.getvalue().count("\n") == 2
    live_run.store.set_status("SUCCEEDED", "steps_done")
    view.refresh()
    show(view)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("RUNNING  10 s  steps 500,000/1,000,000 (50 %)  return 55.0  evaluation 100.0 ± 10.0")
    assert lines[2].startswith("SUCCEEDED")


def test_no_escape_codes_without_a_terminal(view):
    stream = io.StringIO()
    with live_view(stream) as show:
        show(view)
    assert "\x1b" not in stream.getvalue()
    assert "RUNNING" in stream.getvalue()


def test_summary_text(live_run, view):
    (live_run.path / "tb").mkdir()
    (live_run.checkpoints / "00000002").mkdir()
    summary = view.summary() | {"state": "SUCCEEDED", "reason": "target_reached", "time_to_target_s": 3.0}
    summary |= {"eval_return_mean": 480.0, "eval_return_std": 12.5, "eval_episodes": 20}
    text = summary_text(summary, live_run.path)
    assert text.startswith(
        "SUCCEEDED (target_reached): CartPole-v1 with ppo, processes/async, actors 2, envs 64, seed 0"
    )
    for said in (
        "480.0 ± 12.5 over 20 episodes",
        "500,000 steps, 1,280 updates, version 40",
        "50,000 steps/s; 10 s of training",
        "reached after 3.0 s",
        "mean 1.50, max 2; 5 dropped, 1 restarts",
        "env 50 %  policy 30 %  blocked 20 %",
        f"tensorboard --logdir {live_run.path / 'tb'}",
        str(live_run.path / "checkpoints" / "00000002"),
    ):
        assert said in text


@pytest.mark.parametrize(("state", "resumable"), [("SUCCEEDED", False), ("STOPPED", True), ("FAILED", True)])
def test_the_summary_says_how_to_resume_a_run_with_a_checkpoint(live_run, view, state, resumable):
    summary = view.summary() | {"state": state}
    assert "steppe resume" not in summary_text(summary, live_run.path), "there is no checkpoint yet"
    (live_run.checkpoints / "00000002").mkdir()
    assert (f"to resume   steppe resume {live_run.path}" in summary_text(summary, live_run.path)) == resumable


def test_summary_of_a_run_that_failed_at_once(view):
    summary = dict.fromkeys(view.summary()) | {"state": "FAILED", "reason": "environment_fault"}
    text = summary_text(summary, Path("runs/pole"))
    assert text.startswith("FAILED (environment_fault)")
    assert "evaluation" not in text


@pytest.mark.parametrize(
    ("state", "reason", "code"),
    [
        ("SUCCEEDED", "steps_done", 0),
        ("SUCCEEDED", "target_reached", 0),
        ("STOPPED", "stop_requested", 0),
        ("STOPPED", "interrupted", 130),
        ("FAILED", "target_not_reached", 1),
        ("FAILED", "environment_fault", 1),
    ],
)
def test_exit_codes_of_training(state, reason, code):
    assert exit_code({"state": state, "reason": reason}) == code


class TestWarnings:
    """Warnings about a nearly full disk and skipped checkpoints are shown while they apply."""

    @pytest.fixture
    def low(self, monkeypatch):
        monkeypatch.setattr(view_module, "free_bytes", lambda path: 100 << 10)

    def test_no_warning_by_default(self, view):
        view.refresh()
        assert view.warning is None
        assert "WARNING" not in drawn(view, 100)

    @pytest.mark.parametrize("color", [None, "truecolor"])
    def test_warning_is_below_the_state(self, view, low, color):
        view.refresh()
        assert "⚠ WARNING  the disk is full: 100 KiB left" in drawn(view, 200, color=color).splitlines()[1]

    def test_plain_lines_repeat_the_warning(self, view, low):
        view.refresh()
        stream, times = io.StringIO(), iter([0.0, 1.0, 10.0, 20.0])
        show = PlainLines(stream, clock=lambda: next(times))
        for _ in range(4):
            show(view)
        assert stream.getvalue().count("WARNING: the disk is full") == 3

    def test_free_space_is_compared_with_checkpoint_size(self, view, monkeypatch):
        monkeypatch.setattr(view_module, "free_bytes", lambda path: 150 << 20)
        details = {"path": "checkpoints/00000001", "size_bytes": 100 << 20}
        event = EventReport(run="r", kind="checkpoint", role="learner", details=details)
        view.directory.store.post(EVENTS, event.record())
        view.refresh()
        assert "the disk is full" in view.warning

    def test_skipped_checkpoint_is_named(self, view):
        details = {"checkpoint": 3, "damaged": ["checkpoints/00000004/state.bin is missing"]}
        event = EventReport(run="r", kind="resume", role="supervisor", details=details)
        view.directory.store.post(EVENTS, event.record())
        view.refresh()
        assert "skipped a checkpoint: checkpoints/00000004/state.bin is missing" in drawn(view, 200)

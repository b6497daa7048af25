"""Timelines, read back as XML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from steppe.core.contracts.reports import EventReport
from steppe.core.contracts.transport import EVENTS
from steppe.records.profiling.timeline import PHASES, Span, read_spans, timeline_svg
from steppe.records.store import RunStore

pytestmark = pytest.mark.unit

SVG = "{http://www.w3.org/2000/svg}"
SPANS = [
    Span("actor-10", "collect", 5.0, 5.4, version=0, sequence=0),
    Span("actor-2", "collect", 5.0, 5.2, version=0, sequence=0),
    Span("learner", "learn", 5.4, 5.9, version=1),
    Span("manager", "evaluate", 5.5, 6.0, version=1),
    Span("actor-2", "a <new> & odd phase", 5.5, 5.6),
]


def parsed(**keys):
    return ElementTree.fromstring(timeline_svg(SPANS, **keys))


def bars(root):
    return [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


def test_spans_are_read_from_the_event_log_in_order(tmp_path):
    store = RunStore(tmp_path / "run.sqlite")
    for span in reversed(SPANS):
        times = {"phase": span.phase, "start_s": span.start_s, "end_s": span.end_s}
        more = {"version": span.version, "sequence": span.sequence, "unknown": 1}
        store.post(EVENTS, EventReport(run="r", kind="span", role=span.role, details=times | more).record())
        store.post(EVENTS, EventReport(run="r", kind="note", role=span.role).record())
    found = read_spans(store)
    store.close()
    assert found == sorted(SPANS, key=lambda span: (span.start_s, span.role))


def test_every_span_is_a_bar_at_its_time():
    found = bars(parsed(width=1130))  # 1,000 pixels for one second
    assert len(found) == len(SPANS)
    by_title = {bar.find(f"{SVG}title").text: bar for bar in found}
    learn = by_title["learner: learn v1, 500.0 ms"]
    assert float(learn.get("x")) == pytest.approx(110 + 400, abs=0.01)
    assert float(learn.get("width")) == pytest.approx(500, abs=0.01)
    assert learn.get("fill") == PHASES["learn"]
    evaluate = by_title["manager: evaluate v1, 500.0 ms"]
    assert float(evaluate.get("x")) + float(evaluate.get("width")) == pytest.approx(1110, abs=0.01)


def test_lanes_are_actors_by_number_then_learner_then_the_rest():
    words = texts(parsed())
    lanes = [word for word in words if word in {span.role for span in SPANS}]
    assert lanes == ["actor-2", "actor-10", "learner", "manager"]
    heights = {bar.find(f"{SVG}title").text.partition(":")[0]: float(bar.get("y")) for bar in bars(parsed())}
    assert sorted(heights, key=heights.get) == lanes


def test_the_legend_names_every_phase_and_bars_have_titles():
    words = texts(parsed(title="sync & PPO"))
    assert {"collect", "learn", "evaluate", "a <new> & odd phase", "sync & PPO"} <= set(words)
    assert "wait" not in words
    assert "learn v1" in words
    assert "collect 0·v0" in words


def test_colors_adapt_to_dark_mode():
    assert "prefers-color-scheme:dark" in timeline_svg(SPANS)


def test_a_window_excludes_later_spans():
    found = bars(parsed(width=1130, window_s=0.45))
    assert len(found) == 3
    assert max(float(bar.get("x")) + float(bar.get("width")) for bar in found) <= 1110.01


def test_without_spans_the_message_says_how_to_record_them():
    with pytest.raises(ValueError, match="trace_spans"):
        timeline_svg([])

"""Flame graphs, read back as XML: widths, positions and labels compared with sums calculated by hand."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from steppe.records.profiling.flamegraph import build_call_tree, flame_svg, top_functions
from steppe.records.profiling.sampler import WAITING

pytestmark = pytest.mark.unit

SVG = "{http://www.w3.org/2000/svg}"
STACKS = {
    ("m.A.step", "m.A.act"): 3.0,
    ("m.A.step", "torch.nn.f"): 4.0,
    ("m.A.step", "m.A.act", "numpy.g"): 1.0,
    ("m.B<T>.<locals>.h",): 2.0,
    (WAITING,): 30.0,
}


def frames(text):
    """Return full name → (title, rectangle)."""
    found = {}
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        title = group.find(f"{SVG}title").text
        box = {key: float(group.find(f"{SVG}rect").get(key)) for key in ("x", "y", "width")}
        found[title.split(": ")[0]] = (title, box)
    return found


def test_width_of_a_frame_is_its_time():
    found = frames(flame_svg("actor-0", STACKS))
    whole = found["actor-0"][1]["width"]
    shares = {"m.A.step": 0.8, "m.A.act": 0.4, "torch.nn.f": 0.4, "numpy.g": 0.1, "m.B<T>.<locals>.h": 0.2}
    assert found.keys() == {"actor-0", *shares}
    for name, share in shares.items():
        assert found[name][1]["width"] == pytest.approx(whole * share, abs=1.0)


def test_a_frame_lies_below_its_caller_and_beside_its_siblings():
    found = frames(flame_svg("actor-0", STACKS))
    step, act, other = (found[name][1] for name in ("m.A.step", "m.A.act", "m.B<T>.<locals>.h"))
    assert step["y"] < act["y"] < found["numpy.g"][1]["y"]
    assert step["x"] <= act["x"]
    assert act["x"] + act["width"] <= step["x"] + step["width"]
    assert other["x"] >= step["x"] + step["width"]


def test_titles_have_share_seconds_and_own_time():
    found = frames(flame_svg("actor-0", STACKS))
    assert found["m.A.act"][0] == "m.A.act: 40.0 %, 4.00 s, 3.00 s of its own"
    assert found["m.A.step"][0] == "m.A.step: 80.0 %, 8.00 s"


def test_waiting_is_mentioned_and_not_drawn():
    text = flame_svg("learner", STACKS)
    assert "learner: 10.0 s at work; 30.0 s of waiting are not drawn" in text
    assert WAITING not in frames(text)


def test_labels_fit_their_frames():
    for group in ElementTree.fromstring(flame_svg("actor-0", STACKS)).iter(f"{SVG}g"):
        text, width = group.find(f"{SVG}text"), float(group.find(f"{SVG}rect").get("width"))
        assert text is None or 6 * len(text.text) <= width


def test_an_empty_profile_can_be_drawn():
    assert frames(flame_svg("manager", {})) == {}
    assert "manager: 0.0 s at work" in flame_svg("manager", {})


def test_too_narrow_frames_are_omitted():
    found = frames(flame_svg("actor-0", {("m.long",): 10_000.0, ("m.short",): 1.0}))
    assert found.keys() == {"actor-0", "m.long"}


def test_times_of_a_function_with_two_callers_are_added():
    stacks = {("a", "x"): 1.0, ("b", "x"): 2.0, ("a",): 2.5, (WAITING,): 99.0}
    assert top_functions(stacks, 2) == [("x", 3.0), ("a", 2.5)]


def test_common_parts_of_stacks_are_merged():
    root = build_call_tree("role", {("a", "b"): 1.0, ("a", "c"): 2.0})
    assert (root.seconds, root.calls["a"].seconds, sorted(root.calls["a"].calls)) == (3.0, 3.0, ["b", "c"])
